//! Rows of drafts of a model with recurrent layers: their logits are those of other rows, and they change no state.

use std::sync::Arc;

use attention_kernels::{Dtype, KernelChoice, KvCache, Needs, select};
use device::{Device, Options};
use models::{ForwardBatch, Model, ModelConfig, PageLayout, StepLimits, Weights};

use crate::common::{files, needs};
use crate::support::opened;

/// A gated delta net, short convolutions, Mamba-2 with a norm of all heads and of groups, and Mamba-1.
const CASES: [&str; 5] = ["qwen3-next", "lfm2-moe", "granite4-hybrid", "nemotron-h", "jamba"];
const LIMITS: StepLimits = StepLimits { max_rows: 80, max_seqs: 3, max_model_len: 384, block_size: 0, num_blocks: 64 };

struct Loaded {
    device: Arc<dyn Device>,
    model: Model,
    block_size: usize,
}

fn load(case: &str, device: Arc<dyn Device>, dtype: Dtype) -> Loaded {
    let config = ModelConfig::load(&files(case)).unwrap();
    let needs = Needs { dtype, row_invariant: true, ..needs(&*device, &config.decoder) };
    let (kernels, weights) = (select(&KernelChoice::default(), &needs).unwrap(), Weights::open(&files(case)).unwrap());
    let mut model =
        Model::load(&config.decoder, &weights, device.clone(), kernels, LIMITS.max_rows, &|_, _| Ok(())).unwrap();
    let block_size = PageLayout::least_block_size(&config.decoder, &kernels.format).max(16);
    model.reserve(&StepLimits { block_size, ..LIMITS }).unwrap();
    Loaded { device, model, block_size }
}

/// A sequence, the first position of its span, the tokens, and how many of them are drafts.
type Span<'a> = (usize, usize, &'a [u32], usize);

/// Blocks of sequence `seq` in a group.
fn table(seq: usize, group: usize) -> Vec<i32> {
    (0..3).map(|i| ((seq * 12 + group * 3 + i) * 5 % LIMITS.num_blocks) as i32).collect()
}

impl Loaded {
    /// Runs a step and returns the bits of the logits of each row.
    fn step(&mut self, caches: &mut [KvCache], spans: &[Span<'_>]) -> Vec<Vec<u32>> {
        let (groups, size) = (self.model.layout().groups.len(), self.block_size);
        let mut batch = ForwardBatch::default();
        batch.clear(groups);
        for (seq, start, tokens, drafts) in spans {
            let tables: Vec<Vec<i32>> = (0..groups).map(|group| table(*seq, group)).collect();
            let slot = |table: &[i32], p: usize| i64::from(table[p / size]) * size as i64 + (p % size) as i64;
            let slots = |table: &Vec<i32>| (*start..start + tokens.len()).map(|p| slot(table, p)).collect();
            let slots: Vec<Vec<i64>> = tables.iter().map(slots).collect();
            batch.push(*start, tokens, slots.iter().zip(&tables).map(|(slots, table)| (&slots[..], &table[..])));
            batch.set_drafts(*drafts);
        }
        self.model.forward(&batch, caches).unwrap();
        let (vocab, rows) = (self.model.decoder().vocab_size(), 0..batch.tokens.len() as u32);
        let logits = self.model.logits(&rows.collect::<Vec<_>>()).unwrap();
        logits.chunks(vocab).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
    }

    /// The pages of the states of sequence `seq`.
    fn states(&self, caches: &[KvCache], seq: usize) -> Vec<Vec<u8>> {
        let groups = self.model.layout().groups.iter().enumerate().filter(|(_, group)| group.state);
        let blocks: Vec<usize> = groups.flat_map(|(g, _)| table(seq, g)).map(|block| block as usize).collect();
        let mut pages = Vec::new();
        for buffer in caches.iter().flat_map(KvCache::buffers) {
            let mut bytes = vec![0; buffer.len_bytes()];
            self.device.download(buffer, 0, &mut bytes).unwrap();
            let page = bytes.len() / LIMITS.num_blocks;
            pages.extend(blocks.iter().map(|block| bytes[block * page..][..page].to_vec()));
        }
        pages
    }
}

/// Compares steps with drafts with steps without, for spans that end before, at and behind the borders of blocks.
fn check(mut loaded: Loaded) {
    let border = loaded.block_size;
    let tokens: Vec<u32> = (0..2 * border as u32).map(|i| 3 + (i * 17 + i * i) % 400).collect();
    let mut caches = loaded.model.new_cache(LIMITS.num_blocks, border).unwrap();
    let (groups, mut begun) = (loaded.model.layout().groups.len(), 0);
    for (start, certain, drafts) in
        [(5, 1, 3), (border - 6, 3, 3), (border - 4, 2, 6), (border - 2, 5, 2), (border - 1, 1, 4), (border, 1, 3)]
    {
        // Sequences 1 to 3 go on from the tokens of sequence 0.
        for at in (begun..start).step_by(64) {
            loaded.step(&mut caches, &[(0, at, &tokens[at..start.min(at + 64)], 0)]);
        }
        begun = start;
        let pairs = |seq: usize| {
            let blocks = |seq: usize| (0..groups).flat_map(move |group| table(seq, group)).map(|block| block as u32);
            blocks(0).zip(blocks(seq))
        };
        let copies: Vec<(u32, u32)> = (1..4).flat_map(pairs).collect();
        loaded.model.copy_blocks(&copies, &mut caches).unwrap();
        let what = format!("{certain} tokens from {start} on and {drafts} drafts");
        let known = start + certain;
        let mut want = loaded.step(&mut caches, &[(1, start, &tokens[start..known], 0)]);
        let states = loaded.states(&caches, 1);
        want.extend(loaded.step(&mut caches, &[(1, known, &tokens[known..known + drafts], 0)]));
        // The other sequence has no drafts.
        let right = (2, start, &tokens[start..known + drafts], drafts);
        let found = loaded.step(&mut caches, &[right, (4, 0, &tokens[..2], 0)]);
        assert!(found[..certain + drafts] == want, "{what}: another row");
        assert!(loaded.states(&caches, 2) == states, "{what}: another state");
        let wrong: Vec<u32> = tokens[start..known].iter().copied().chain((0..drafts as u32).map(|i| 7 + i)).collect();
        let found = loaded.step(&mut caches, &[(3, start, &wrong, drafts)]);
        assert!(found[..certain] == want[..certain], "{what}: another row before wrong drafts");
        assert!(loaded.states(&caches, 3) == states, "{what}: another state behind wrong drafts");
        let again = loaded.step(&mut caches, &[(3, known, &tokens[known..known + drafts], 0)]);
        assert!(again == want[certain..], "{what}: another row behind wrong drafts");
    }
}

#[test]
fn rows_of_drafts_have_the_bits_of_other_rows_and_change_no_state() {
    for case in CASES {
        check(load(case, device::open("cpu", Some(2)).unwrap(), Dtype::F32));
    }
}

#[test]
fn rows_of_drafts_in_a_kernel_have_the_bits_of_other_rows_and_change_no_state() {
    if opened::kernels().is_none() {
        return;
    }
    let types = if testkit::everything() { &[Dtype::F32, Dtype::Bf16][..] } else { &[Dtype::F32] };
    for (case, dtype) in CASES.into_iter().flat_map(|case| types.iter().map(move |dtype| (case, dtype))) {
        let options = Options { seed: 7, deterministic: true, ..Options::default() };
        check(load(case, opened::open(options).unwrap(), *dtype));
    }
}

#[test]
fn a_sequence_of_drafts_only_is_an_error_value() {
    let mut loaded = load(CASES[0], device::open("cpu", Some(1)).unwrap(), Dtype::F32);
    let mut caches = loaded.model.new_cache(LIMITS.num_blocks, loaded.block_size).unwrap();
    let mut batch = ForwardBatch::default();
    let groups = loaded.model.layout().groups.len();
    batch.clear(groups);
    let tables: Vec<Vec<i32>> = (0..groups).map(|group| table(0, group)).collect();
    batch.push(0, &[5, 6], tables.iter().map(|table| (&[0, 1][..], &table[..])));
    batch.set_drafts(2);
    let error = loaded.model.forward(&batch, &mut caches).unwrap_err().to_string();
    assert!(error.contains("drafts of a sequence") && error.contains('2') && error.contains('1'), "{error}");
}
