//! Kernels are data: a TOML table swaps each operation's variant, and the tokens stay the same.

use device::Device;
use simd::Isa;

use crate::common::{config, request, tokens};
use attention_kernels::{Capabilities, Kernel, KernelError, KvDtype, LinearArgs, Operation, Variant};
use engine::{EngineConfig, KernelChoice, Llm};
use serde::Deserialize;

/// That of other machines than the one that this is compiled for.
const FOREIGN: Isa = if cfg!(target_arch = "aarch64") { Isa::Avx2 } else { Isa::Neon };

/// The variant that would be chosen before all others, if this CPU could run it.
const CAPABILITIES: Capabilities =
    Capabilities { isa: FOREIGN, kv_dtypes: &KvDtype::ALL, rank: u32::MAX, ..Capabilities::CPU };

attention_kernels::inventory::submit! { Variant {
    name: "test.foreign", operation: Operation::Linear, capabilities: CAPABILITIES, kernel: Kernel::Linear(foreign),
} }

fn foreign(_: &dyn Device, _: LinearArgs<'_>) -> Result<(), KernelError> {
    Err(KernelError::Unsupported { variant: "test.foreign", found: "a CPU without it".into() })
}

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

/// Whether it is a variant of ours for the CPU that computes in float32; other tests of this program register some of their own.
fn runs_here(variant: &Variant) -> bool {
    let can = &variant.capabilities;
    can.runs_on("cpu") && !can.arithmetic.rounds() && !variant.name.starts_with("test.")
}

#[test]
fn swapping_every_operation_gives_equal_tokens() {
    let want = run(KernelChoice::default());
    let mut swapped = 0;
    for operation in attention_kernels::Operation::ALL {
        for variant in attention_kernels::variants(operation).into_iter().filter(|v| runs_here(v)) {
            let kernels = choice(&format!("[kernels]\n{operation} = \"{}\"", variant.name));
            assert_eq!(run(kernels), want, "{operation} = {}", variant.name);
            swapped += 1;
        }
    }
    assert!(swapped >= 10, "each operation has at least two variants on every machine");
}

#[test]
fn the_example_file_selects_the_kernels_it_names() {
    let kernels = choice(include_str!("../../examples/kernels.toml"));
    assert_eq!(kernels.prefill, "cpu.reference");
    let table = engine::describe_kernels(&EngineConfig { kernels, ..config(20) }).unwrap();
    let chosen = |by: &'static str| table.variants.iter().filter(move |it| it.chosen == Some(by));
    let by_name: Vec<_> = chosen("by name").map(|it| (it.operation, it.variant)).collect();
    assert_eq!(by_name, [("prefill", "cpu.reference")]);
    assert_eq!(chosen("auto").count(), 5);
    for text in [table.to_string(), table.verbose()] {
        assert!(text.contains("  cpu.reference            chosen (by name)\n"), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    }
    for word in ["row-invariant", "swap_blocks", "convert_fp8"] {
        assert!(table.verbose().contains(word) && !table.to_string().contains(word), "{word}");
    }
}

#[test]
fn a_variant_that_does_not_exist_or_can_not_serve_is_an_error_that_lists_what_could() {
    let start = |toml: &str| Llm::new(EngineConfig { kernels: choice(toml), ..config(20) }).err().unwrap().to_string();
    let error = start("[kernels]\ndecode = \"cuda.paged_v9\"");
    assert!(error.contains("decode") && error.contains("cuda.paged_v9") && error.contains("cpu.reference"), "{error}");
    assert!(toml::from_str::<File>("[kernels]\ndecod = \"auto\"").err().unwrap().to_string().contains("decod"));
}

#[test]
fn a_vector_unit_that_this_cpu_lacks_is_skipped_and_refused_in_one_line_by_name() {
    let table = engine::describe_kernels(&config(20)).unwrap();
    let foreign = table.variants.iter().find(|it| it.variant == "test.foreign").unwrap();
    assert!(foreign.unmet.as_ref().unwrap().contains(&FOREIGN.to_string()) && foreign.chosen.is_none(), "{table}");
    let linear = KernelChoice { linear: "test.foreign".into(), ..KernelChoice::default() };
    for quantization in [None, Some(engine::Quantization::Q8)] {
        let config = EngineConfig { kernels: linear.clone(), quantization, ..config(20) };
        let error = Llm::new(config).err().unwrap().to_string();
        assert!(error.contains(&format!("this CPU has no {FOREIGN}")) && error.contains("cpu.portable"), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
}
