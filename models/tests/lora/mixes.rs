//! Rows of several adapters and of none in one batch: each has the bits that it has alone.

use attention_kernels::Dtype;
use collective::single;
use linear::Quantization;
use models::decoder::{Form, Reduce};
use models::{ModelConfig, ModelFiles};
use proptest::prelude::*;
use testkit::adapters::simple;

use super::{Loaded, MAX_ROWS, Seq, load_on, modules};
use crate::common::folder;

/// Forms of weights, and the type that products compute in.
pub const FORMS: [(Form, Dtype); 4] = [
    (Form::Dense, Dtype::F32),
    (Form::Dense, Dtype::Bf16),
    (Form::Quantized(Quantization::Q8), Dtype::F32),
    (Form::Quantized(Quantization::Q4), Dtype::F32),
];

/// The models of each form: without adapters, on one thread, on three.
fn loaded() -> Vec<[Loaded; 3]> {
    let case = folder("qwen3");
    let decoder = ModelConfig::load(&ModelFiles::open(&case).unwrap()).unwrap().decoder;
    let modules = modules(&decoder);
    let temporary = tempfile::TempDir::new().unwrap();
    let folders = ["a", "b", "c"].map(|name| temporary.path().join(name));
    simple(&folders[0], &modules, 3, 1);
    simple(&folders[1], &modules[2..5], 40, 2);
    simple(&folders[2], &modules, 16, 3);
    let load = |form, threads, adapters| load_on(&case, form, threads, adapters, (single(), Reduce::Gather));
    FORMS.map(|form| [load(form, 2, None), load(form, 1, Some(&folders)), load(form, 3, Some(&folders))]).into()
}

#[test]
fn each_row_has_the_bits_that_it_has_alone_and_without_an_adapter_those_without_lora() {
    let mut loaded = loaded();
    // Two long prompts are computed in blocks of rows.
    let tokens = prop_oneof![prop::collection::vec(0u32..500, 1..30), prop::collection::vec(0u32..500, 100..140)];
    let seq = (prop::option::of(0u32..3), tokens, prop_oneof![1usize..12, Just(140)]);
    let strategy = (0..FORMS.len(), prop::collection::vec(seq, 1..8));
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(24));
    let models = std::cell::RefCell::new(&mut loaded);
    runner
        .run(&strategy, |(form, seqs)| {
            let [plain, alone, together] = &mut models.borrow_mut()[form];
            let chunks: Vec<usize> = seqs.iter().map(|(.., chunk)| (*chunk).min(MAX_ROWS / seqs.len())).collect();
            let seqs: Vec<Seq> = seqs.iter().map(|(slot, tokens, _)| Seq::new(*slot, tokens)).collect();
            let found = together.logits(seqs.clone(), &chunks);
            for (i, (seq, found)) in seqs.into_iter().zip(found).enumerate() {
                let adapted = seq.slot.is_some();
                let without = plain.logits(vec![Seq { slot: None, ..seq.clone() }], &[64]).remove(0);
                let want = if adapted { alone.logits(vec![seq], &[64]).remove(0) } else { without.clone() };
                prop_assert!(found == want, "sequence {i} differs in {:?}", FORMS[form]);
                prop_assert!(!adapted || found != without, "the adapter of sequence {i} has no effect");
            }
            Ok(())
        })
        .unwrap();
}
