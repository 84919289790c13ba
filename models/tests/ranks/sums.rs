//! Sums over ranks instead of gathers: all ranks have the same bits, each row has its own, and both differ from those of one rank in
//! the last bits alone.

use std::sync::atomic::{AtomicU64, Ordering};

use device::CollectiveError;
use models::ForwardBatch;

use super::*;

impl Rank {
    /// The logits of all rows of sequences that are computed in one step.
    fn logits(&mut self, seqs: &[&[u32]]) -> Vec<Vec<f32>> {
        let Rank { model, caches, block_size } = self;
        let (groups, mut batch, mut next) = (model.layout().groups.len(), ForwardBatch::default(), 0..NUM_BLOCKS as i32);
        batch.clear(groups);
        let mut rows = Vec::new();
        for seq in seqs {
            let blocks = seq.len().div_ceil(*block_size);
            let tables: Vec<Vec<i32>> = (0..groups).map(|_| next.by_ref().take(blocks).collect()).collect();
            let slot = |table: &[i32], p: usize| i64::from(table[p / *block_size]) * *block_size as i64 + (p % *block_size) as i64;
            let slots = |table: &Vec<i32>| (0..seq.len()).map(|p| slot(table, p)).collect();
            let slots: Vec<Vec<i64>> = tables.iter().map(slots).collect();
            let last = batch.push(0, seq, slots.iter().zip(&tables).map(|(slots, table)| (&slots[..], &table[..])));
            rows.extend(last + 1 - seq.len() as u32..=last);
        }
        model.forward(&batch, caches).unwrap();
        let width = model.decoder().num_logits();
        model.logits(&rows).unwrap().chunks(width).map(<[f32]>::to_vec).collect()
    }
}

/// What each rank of a group computes with sums.
fn on_ranks<T: Send>(whole: &Decoder, weights: &Weights, ranks: usize, work: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let needs = needs(&*cpu(), whole);
    std::thread::scope(|scope| {
        let (work, needs) = (&work, &needs);
        let load = move |world| load((whole, weights), (cpu(), needs), (world, (ranks, 1), Reduce::Sum), &|group| group);
        let running: Vec<_> = threads(ranks).into_iter().map(|world| scope.spawn(move || work(load(world)))).collect();
        running.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn bits_of(rows: &[Vec<f32>]) -> Vec<u32> {
    rows.iter().flatten().map(|logit| logit.to_bits()).collect()
}

/// The greatest difference of logits, as a share of the greatest logit of the row.
fn difference(found: &[Vec<f32>], want: &[Vec<f32>]) -> f32 {
    let of_row = |(found, want): (&Vec<f32>, &Vec<f32>)| {
        let greatest = want.iter().fold(0.0f32, |greatest, logit| greatest.max(logit.abs()));
        found.iter().zip(want).fold(0.0f32, |most, (a, b)| most.max((a - b).abs())) / greatest
    };
    found.iter().zip(want).map(of_row).fold(0.0, f32::max)
}

/// Compares groups of these sizes with one rank. Returns the numbers of products that are summed and gathered.
fn compare(name: &str, form: Form, counts: impl IntoIterator<Item = usize>, tolerance: f32) -> Vec<(usize, usize)> {
    let files = files(name);
    let (decoder, weights, prompt) = declared(&files, name, form);
    let seqs = [&prompt[..], &prompt[..9], &prompt[4..11]];
    let one = on_ranks(&decoder, &weights, 1, |mut rank| rank.logits(&seqs)).remove(0);
    let mut joins = Vec::new();
    for ranks in counts.into_iter().filter(|ranks| decoder.shard(0, *ranks, Reduce::Sum).is_ok()) {
        joins.push(decoder.shard(0, ranks, Reduce::Sum).unwrap().joins());
        let found = on_ranks(&decoder, &weights, ranks, |mut rank| {
            let alone = seqs.map(|seq| rank.logits(&[seq])).concat();
            (rank.logits(&seqs), alone)
        });
        let what = format!("{name} {form} on {ranks} ranks");
        for (rank, (together, alone)) in found.iter().enumerate() {
            assert!(bits_of(together) == bits_of(&found[0].0), "{what}: rank {rank} has other logits than rank 0");
            assert!(bits_of(together) == bits_of(alone), "{what}: rank {rank} has other logits of a sequence alone");
        }
        let difference = difference(&found[0].0, &one);
        println!("DIFF {what}: {difference:e} {:?}", joins.last());
        assert!(difference <= tolerance, "{what}: logits differ by {difference:e} of the greatest, at most {tolerance:e}");
    }
    joins
}

#[test]
fn sums_over_ranks_have_the_logits_of_one_rank_but_for_rounding() {
    for name in CASES {
        compare(name, Form::Dense, 2..=4, 1.0);
        for form in [Form::Quantized(Quantization::Q8), Form::Quantized(Quantization::Q4)] {
            compare(name, form, 2..=4, 1.0);
        }
    }
}
