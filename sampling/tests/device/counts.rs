//! What a draw reads, counted by the simulator. Bytes are those of all lanes, so a load of one word by a warp counts 32 times.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use device::sim::{Counts, Tally};
use device::{Device, Dtype, Options};
use sampling::SamplingParams;
use testkit::kernels::host::counts_for_tests;

use super::problem::{OnDevice, Sequence, generated, limits, rows_of, sampler, step};

const VOCAB: usize = 128_256;
/// Chunks of such a row.
const SPLITS: u64 = 16;

/// Opens a device that counts.
fn counting() -> Option<(Arc<dyn Device>, Arc<Tally>)> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let kernels = FOLDER.get_or_init(|| counts_for_tests("sampling", "device", |_| true)).clone()?;
    let tally = Arc::<Tally>::default();
    let options =
        Options { threads: Some(1), kernels: Some(kernels), counts: Some(tally.clone()), ..Options::default() };
    Some((device::open_with("cuda-sim", &options).unwrap(), tally))
}

/// Counts a step in which each of these rows is drawn with the same parameters, by kernel. The tokens are the host's.
fn count(params: &SamplingParams, logits: &[Vec<f32>]) -> Option<BTreeMap<String, Counts>> {
    let (device, tally) = counting()?;
    let on_device = OnDevice::new(&*device, Dtype::F32, logits.iter().map(|row| &row[..]));
    let mut sampler = sampler(&device, limits(logits.len(), logits[0].len()));
    let slots = 0..logits.len() as u32;
    let sequences: Vec<_> = slots.clone().map(|seed| Sequence::new(params.clone(), seed.into())).collect();
    for (slot, sequence) in (0..).zip(&sequences) {
        sampler.set_row(slot, &sequence.params, &sequence.context()).unwrap();
    }
    sampler.stage(&rows_of(slots.clone()), logits.len()).unwrap();
    tally.take();
    for ((found, sequence), logits) in
        step(&mut sampler, &on_device, &rows_of(slots)).iter().zip(&sequences).zip(logits)
    {
        assert_eq!(*found, sequence.sampled(logits), "{params:?}");
    }
    let short = |kernel: String| kernel.trim_start_matches("sample_").trim_end_matches("_f32").to_owned();
    Some(tally.take().into_iter().map(|(kernel, (_, counts))| (short(kernel), counts)).collect())
}

fn read_bytes(kernels: &BTreeMap<String, Counts>) -> u64 {
    kernels.values().map(|counts| counts.read_bytes).sum()
}

fn top_p() -> SamplingParams {
    SamplingParams { top_p: 0.9, ..SamplingParams::default() }
}

#[test]
fn a_draw_reads_a_row_of_128k_logits_at_most_three_times() {
    let plain = SamplingParams::default;
    // Requests, and how often each kernel reads a row: adjust the logits, filter and draw the scaled logits.
    let requests = [
        (SamplingParams { temperature: 0.0, ..plain() }, [1, 0, 0]),
        (plain(), [1, 0, 1]),
        (SamplingParams { min_p: 0.05, ..plain() }, [1, 0, 1]),
        (SamplingParams { top_k: 50, ..plain() }, [1, 1, 1]),
        (top_p(), [1, 1, 1]),
        (SamplingParams { top_k: 50, ..top_p() }, [1, 1, 1]),
        // So flat that top_p and top_k cut through the bulk of the vocabulary.
        (SamplingParams { top_k: 50_000, top_p: 0.99, temperature: 20.0, ..plain() }, [1, 1, 1]),
    ];
    for (params, passes) in requests {
        let Some(kernels) = count(&params, &[generated(VOCAB, 0)]) else { return };
        let row = VOCAB as u64 * 4;
        // All else that a kernel reads: parameters, results of other kernels, the histogram.
        for (kernel, passes) in ["adjust", "filter", "draw"].iter().zip(passes) {
            let read = kernels[*kernel].read_bytes;
            assert!(read <= passes * row + row / 12, "{kernel} reads {read} bytes, {params:?}");
        }
        // Undecided tokens, and no row.
        assert!(kernels["finish"].read_bytes <= row / 8, "{kernels:?}");
        let read = read_bytes(&kernels);
        println!("{:.3} rows: {params:?}", read as f64 / row as f64);
        assert!(read <= passes.iter().sum::<u64>() * row + row / 5, "{read} bytes, {params:?}");
    }
}

#[test]
fn rows_are_loaded_16_bytes_at_a_time_wherever_they_begin() {
    // Rows of 4,100 tokens at four distances from a multiple of 16 bytes.
    let logits: Vec<Vec<f32>> = (0..4).map(|row| generated(4100, row)).collect();
    let Some(kernels) = count(&SamplingParams::default(), &logits) else { return };
    // 1,025 loads of 16 bytes, 9 rounds with 5 warps in the last; then parameters, chunks and the ends of a row.
    for kernel in ["adjust", "draw"] {
        let reads = kernels[kernel].requests - if kernel == "adjust" { 4 * 33 * 2 } else { 0 };
        assert!(reads <= 4 * (33 + 40), "{kernel}: {reads} requests");
    }
}

#[test]
fn the_blocks_of_a_row_depend_on_the_vocabulary_only() {
    for batch in [1, 3] {
        let logits: Vec<Vec<f32>> = (0..batch).map(|row| generated(VOCAB, row)).collect();
        let Some(kernels) = count(&top_p(), &logits) else { return };
        for kernel in ["adjust", "filter", "draw"] {
            let blocks = kernels[kernel].blocks;
            assert_eq!((blocks, kernels[kernel].busy_blocks), (u64::from(batch) * SPLITS, blocks), "{kernel}");
        }
    }
}

#[test]
fn tokens_without_mass_are_not_added_to_the_histogram() {
    let one_in_64 = |rest: f32| (0..8192).map(|token| if token % 64 == 0 { 0.0 } else { rest }).collect::<Vec<f32>>();
    let [without, with] = [-31.0, -29.0].map(|rest| count(&top_p(), &[one_in_64(rest)]));
    let (Some(without), Some(with)) = (without, with) else { return };
    // Each warp adds the masses of 32 tokens at a time. Of four such additions, one has a likely token.
    assert_eq!(with["filter"].shared_requests - without["filter"].shared_requests, 8192 / 32 * 3 / 4);
    // The bin of the likeliest tokens, and the cut.
    assert_eq!(without["filter"].written_bytes, 8 + 88 + 2 * 4);
}
