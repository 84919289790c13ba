//! The forward pass against the reference's last-position logits: in float32, through pages, in chunks of any size.

use std::sync::Arc;

use attention_kernels::{KernelChoice, KernelError, select};
use models::{ForwardBatch, Model, ModelConfig, PageLayout, Weights, check_weights};
use safetensors::SafeTensors;
use testkit::reference::{RECENT, context};

use crate::common::{CASES, expected, files, folder, forward, ids, last_logits, list, needs, text};

/// Greatest absolute difference of a float32 logit (the reference's README).
const TOLERANCE: f32 = 2e-3;

/// Tokens per block, or more where the states of recurrent layers need more.
const BLOCK_SIZE: usize = 8;
const NUM_BLOCKS: usize = 128;

struct Case {
    model: Model,
    block_size: usize,
    prompts: Vec<(Vec<u32>, Vec<f32>)>,
}

/// A model on the CPU with kernels of this name, for each context length that the case's prompts need.
fn cases(name: &str, variant: &str) -> Vec<Case> {
    let files = files(name);
    let config = ModelConfig::load(&files).unwrap();
    let device = device::open("cpu", Some(2)).unwrap();
    let choice =
        KernelChoice { decode: variant.into(), prefill: variant.into(), linear: variant.into(), ..Default::default() };
    let weights = Weights::open(&files).unwrap();
    check_weights(&config.decoder, &weights).unwrap();
    let bytes = std::fs::read(folder(name).join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let expected = expected(name);
    let mut cases: Vec<(Option<usize>, Case)> = Vec::new();
    for prompt in list(&expected["prompts"]) {
        let ids = ids(&prompt["ids"]);
        let logits = tensors.tensor(text(&prompt["logits"])).unwrap();
        assert_eq!(logits.shape(), [1, config.decoder.vocab_size()]);
        let logits = logits.data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let context = context(name, ids.len());
        if !cases.iter().any(|(known, _)| *known == context) {
            let decoder = config.decoder.clone().for_context(context.unwrap_or(config.max_position_embeddings));
            let kernels = select(&choice, &needs(&*device, &decoder)).unwrap();
            let model = Model::load(&decoder, &weights, Arc::clone(&device), kernels, 256, &|_, _| Ok(())).unwrap();
            let block_size = PageLayout::least_block_size(&decoder, &kernels.format).max(BLOCK_SIZE);
            cases.push((context, Case { model, block_size, prompts: Vec::new() }));
        }
        let case = cases.iter_mut().find(|(known, _)| *known == context).unwrap();
        case.1.prompts.push((ids, logits));
    }
    cases.into_iter().map(|(_, case)| case).collect()
}

fn case(name: &str, variant: &str) -> Case {
    cases(name, variant).remove(0)
}

fn check(name: &str) {
    for variant in ["cpu.reference", "auto"] {
        for Case { mut model, block_size, prompts } in cases(name, variant) {
            let mut caches = model.new_cache(NUM_BLOCKS, block_size).unwrap();
            for (prompt, want) in &prompts {
                let whole = last_logits(&mut model, &mut caches, (block_size, NUM_BLOCKS), prompt, prompt.len());
                assert_eq!(whole.len(), want.len(), "{name} {variant}");
                // The greatest of them is NaN if one is.
                let error = whole.iter().zip(want).map(|(a, b)| (a - b).abs()).max_by(f32::total_cmp).unwrap();
                println!("{name} {variant}: {} tokens, error {error}", prompt.len());
                assert!(error < TOLERANCE, "{name} {variant}: {} tokens, error {error}", prompt.len());
                // The reference kernels are slow, and the first cases show that chunks do not meet them.
                let chunks = if variant == "auto" { &[1, 7, 16, 64][..] } else { &[7] };
                for chunk in chunks {
                    let chunked = last_logits(&mut model, &mut caches, (block_size, NUM_BLOCKS), prompt, *chunk);
                    assert!(chunked == whole, "{name} {variant}: chunks of {chunk} change a bit");
                }
            }
        }
    }
}

/// Every `n`-th case from number `first` on: the test runner's threads share them.
fn check_each(first: usize, n: usize) {
    CASES.into_iter().skip(first).step_by(n).for_each(check);
}

#[test]
fn logits_are_the_reference_s_and_chunks_change_no_bit() {
    check_each(0, 2);
}

#[test]
fn logits_of_the_other_cases_are_the_reference_s_too() {
    check_each(1, 2);
}

/// The engine's tests do the same for the other cases, in every combination of settings.
#[test]
fn the_tokens_of_recent_cases_are_the_greedy_ones_of_the_reference() {
    for name in RECENT {
        let Case { mut model, block_size, .. } = case(name, "auto");
        let mut caches = model.new_cache(NUM_BLOCKS, block_size).unwrap();
        for prompt in list(&expected(name)["prompts"]) {
            let (prompt, greedy) = (ids(&prompt["ids"]), ids(&prompt["greedy"]["ids"]));
            let all = [&prompt[..], &greedy[..greedy.len() - 1]].concat();
            forward(&mut model, &mut caches, (block_size, NUM_BLOCKS), &all, all.len());
            let rows: Vec<u32> = (prompt.len() - 1..all.len()).map(|row| row as u32).collect();
            let logits = model.logits(&rows).unwrap();
            let best = |row: &[f32]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap() as u32;
            let found: Vec<u32> = logits.chunks_exact(logits.len() / rows.len()).map(best).collect();
            assert!(greedy.len() == 48 && found == greedy, "{name}: {} tokens", prompt.len());
        }
    }
}

#[test]
fn a_step_that_is_too_large_is_an_error_value() {
    let mut case = case("llama", "auto");
    let mut caches = case.model.new_cache(NUM_BLOCKS, BLOCK_SIZE).unwrap();
    let mut batch = ForwardBatch::default();
    batch.clear(1);
    let table: Vec<i32> = (0..38).collect();
    batch.push(0, &[1; 300], [(&[-1; 300][..], &table[..])]);
    let error = case.model.forward(&batch, &mut caches).unwrap_err();
    let expected = KernelError::Shape { what: "rows of a step", found: 300, expected: 256 };
    assert_eq!(error.to_string(), expected.to_string());
}

#[test]
fn dropping_unneeded_rows_changes_no_other_row() {
    ["qwen2", "gemma3n"].into_iter().for_each(drops_unneeded_rows);
}

fn drops_unneeded_rows(name: &str) {
    let mut case = case(name, "auto");
    let mut caches = case.model.new_cache(NUM_BLOCKS, BLOCK_SIZE).unwrap();
    let prompt = case.prompts[1].0.clone();
    let (blocks, groups) = (prompt.len().div_ceil(BLOCK_SIZE), case.model.layout().groups.len());
    let tables: Vec<Vec<i32>> =
        (0..groups).map(|group| (0..blocks).map(|b| (group * blocks + b) as i32).collect()).collect();
    let first = |group: usize| (group * blocks * BLOCK_SIZE) as i64;
    let slots: Vec<Vec<i64>> = (0..groups).map(|group| (first(group)..).take(prompt.len()).collect()).collect();
    let last = prompt.len() as u32 - 1;
    let mut batch = ForwardBatch::default();
    batch.clear(groups);
    batch.push(0, &prompt, slots.iter().zip(&tables).map(|(slots, table)| (&slots[..], &table[..])));
    case.model.forward(&batch, &mut caches).unwrap();
    let want = case.model.logits(&[last, 1]).unwrap().to_vec();
    for needed in [vec![1, last], vec![0, 1, 2, last - 1, last], (0..=last).collect()] {
        batch.needed = Some(needed);
        // Twice, as buffers change places.
        for _ in 0..2 {
            case.model.forward(&batch, &mut caches).unwrap();
            assert!(case.model.logits(&[last, 1]).unwrap() == want, "{:?}", batch.needed);
        }
    }
    batch.needed = Some(vec![last]);
    case.model.forward(&batch, &mut caches).unwrap();
    let error = case.model.logits(&[1]).unwrap_err();
    let expected =
        KernelError::Shape { what: "a row that was not among the needed rows of the step", found: 1, expected: 1 };
    assert_eq!(error.to_string(), expected.to_string());
    batch.needed = Some(Vec::new());
    case.model.forward(&batch, &mut caches).unwrap();
    batch.needed = None;
    case.model.forward(&batch, &mut caches).unwrap();
    assert!(case.model.logits(&[last, 1]).unwrap() == want);
}

#[test]
fn recurrences_and_experts_of_a_decode_step_allocate_nothing() {
    for name in ["llama", "qwen3-next", "lfm2-moe", "nemotron-h", "jamba"] {
        let config = ModelConfig::load(&files(name)).unwrap();
        let device = device::open("cpu", Some(1)).unwrap();
        let kernels = select(&KernelChoice::default(), &needs(&*device, &config.decoder)).unwrap();
        let block_size = PageLayout::least_block_size(&config.decoder, &kernels.format).max(BLOCK_SIZE);
        let weights = Weights::open(&files(name)).unwrap();
        let mut model = Model::load(&config.decoder, &weights, device, kernels, 64, &|_, _| Ok(())).unwrap();
        let mut caches = model.new_cache(NUM_BLOCKS, block_size).unwrap();
        let groups = model.layout().groups.len();
        let tables: Vec<Vec<i32>> = (0..groups as i32).map(|g| (0..6).map(|block| 6 * g + block).collect()).collect();
        // A prompt of two parts, then single tokens.
        for (i, (start, count)) in [(0, 20), (20, 20), (40, 1), (41, 1), (42, 1)].into_iter().enumerate() {
            let slot =
                |table: &[i32], p: usize| table[p / block_size] as i64 * block_size as i64 + (p % block_size) as i64;
            let slots: Vec<Vec<i64>> =
                tables.iter().map(|table| (start..start + count).map(|p| slot(table, p)).collect()).collect();
            let mut batch = ForwardBatch::default();
            batch.clear(groups);
            let tables = slots.iter().zip(&tables).map(|(slots, table)| (&slots[..], &table[..]));
            batch.push(start, &vec![5; count], tables);
            let before = crate::counter::allocations();
            model.forward(&batch, &mut caches).unwrap();
            let calls = crate::counter::allocations() - before;
            // Attention makes two lists in each of its layers.
            let most = 2 * config.decoder.attention().count();
            println!("{name}, step {i}: {calls} allocations");
            assert!(i < 3 || calls <= most, "{name}, step {i}: {calls} allocations, at most {most} of attention");
        }
    }
}
