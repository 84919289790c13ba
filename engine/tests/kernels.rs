//! Kernels are data: a TOML table swaps each operation's variant, and the tokens stay the same.

#![allow(clippy::unwrap_used)]

mod common;

use common::{config, request, tokens};
use engine::{EngineConfig, KernelChoice, Llm};
use serde::Deserialize;

#[derive(Deserialize)]
struct File {
    kernels: KernelChoice,
}

fn choice(toml: &str) -> KernelChoice {
    toml::from_str::<File>(toml).unwrap().kernels
}

fn run(kernels: KernelChoice) -> Vec<Vec<Vec<u32>>> {
    let mut llm = Llm::new(EngineConfig { kernels, ..config(20) }).unwrap();
    tokens(&mut llm, (0..6).map(|i| request(i, 20 + i as usize, 16, 2)).collect())
}

#[test]
fn swapping_every_operation_gives_equal_tokens() {
    let want = run(KernelChoice::default());
    let mut swapped = 0;
    for operation in attention_kernels::Operation::ALL {
        for variant in attention_kernels::variants(operation).into_iter().filter(|v| v.capabilities.runs_on("cpu")) {
            let kernels = choice(&format!("[kernels]\n{operation} = \"{}\"", variant.name));
            assert_eq!(run(kernels), want, "{operation} = {}", variant.name);
            swapped += 1;
        }
    }
    assert!(swapped >= 10, "each operation has at least two variants on every machine");
}

#[test]
fn the_example_file_is_understood_and_obeyed() {
    let kernels = choice(include_str!("../../examples/kernels.toml"));
    assert_eq!(kernels.prefill, "cpu.reference");
    let table = engine::describe_kernels(&EngineConfig { kernels, ..config(20) }).unwrap();
    let by_name =
        |line: &&str| line.starts_with("prefill") && line.contains("cpu.reference") && line.contains("by name");
    assert_eq!(table.lines().filter(by_name).count(), 1, "{table}");
    assert_eq!(table.matches(" auto ").count(), 4, "{table}");
}

#[test]
fn a_variant_that_does_not_exist_or_can_not_serve_is_an_error_that_lists_what_could() {
    let start = |toml: &str| Llm::new(EngineConfig { kernels: choice(toml), ..config(20) }).err().unwrap().to_string();
    let error = start("[kernels]\ndecode = \"cuda.paged_v9\"");
    assert!(error.contains("decode") && error.contains("cuda.paged_v9") && error.contains("cpu.reference"), "{error}");
    assert!(toml::from_str::<File>("[kernels]\ndecod = \"auto\"").err().unwrap().to_string().contains("decod"));
}
