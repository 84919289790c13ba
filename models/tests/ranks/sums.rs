//! Sums over ranks instead of gathers: all ranks have the same bits, each row has its own, and both differ from those of one rank in
//! the last bits alone.

use std::sync::atomic::{AtomicU64, Ordering};

use collective::CollectiveError;
use models::ForwardBatch;

use super::*;

impl Rank {
    /// The logits of all rows of sequences that are computed in one step.
    fn logits(&mut self, seqs: &[&[u32]]) -> Vec<Vec<f32>> {
        let Rank { model, caches, block_size } = self;
        let (groups, mut batch, mut next) =
            (model.layout().groups.len(), ForwardBatch::default(), 0..NUM_BLOCKS as i32);
        batch.clear(groups);
        let mut rows = Vec::new();
        for seq in seqs {
            let blocks = seq.len().div_ceil(*block_size);
            let tables: Vec<Vec<i32>> = (0..groups).map(|_| next.by_ref().take(blocks).collect()).collect();
            let slot = |table: &[i32], p: usize| {
                i64::from(table[p / *block_size]) * *block_size as i64 + (p % *block_size) as i64
            };
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

/// A model, and what opens its device.
struct On<'a> {
    model: (&'a Decoder, &'a Weights),
    device: &'a (dyn Fn() -> Arc<dyn Device> + Sync),
    needs: Needs,
}

impl<'a> On<'a> {
    fn cpu(model: (&'a Decoder, &'a Weights)) -> On<'a> {
        On { model, device: &cpu, needs: needs(&*cpu(), model.0) }
    }

    /// What each rank of a group computes with sums, or gathers.
    fn ranks<T: Send>(
        &self,
        ranks: usize,
        reduce: Reduce,
        wrap: &(dyn Fn(Arc<dyn Collective>) -> Arc<dyn Collective> + Sync),
        work: impl Fn(Rank) -> T + Sync,
    ) -> Vec<T> {
        std::thread::scope(|scope| {
            let work = &work;
            let on = move || ((self.device)(), &self.needs);
            let load = move |world| load(self.model, on(), (world, (ranks, 1), reduce), wrap);
            let start = |world| scope.spawn(move || work(load(world)));
            let running: Vec<_> = threads(ranks).into_iter().map(start).collect();
            running.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// Compares a group with one rank, `one`: the greatest difference of the logits of sequences. All ranks must have equal bits, and each
    /// sequence those that it has alone.
    fn compare(&self, what: &str, ranks: usize, seqs: &[&[u32]], one: &[Vec<f32>]) -> f32 {
        let found = self.ranks(ranks, Reduce::Sum, &|group| group, |mut rank| {
            let alone: Vec<_> = seqs.iter().flat_map(|seq| rank.logits(&[seq])).collect();
            (rank.logits(seqs), alone)
        });
        for (rank, (together, alone)) in found.iter().enumerate() {
            assert!(bits_of(together) == bits_of(&found[0].0), "{what}: rank {rank} has other logits than rank 0");
            assert!(bits_of(together) == bits_of(alone), "{what}: rank {rank} has other logits of a sequence alone");
        }
        let difference = difference(&found[0].0, one);
        for (found, want) in found[0].0.iter().zip(one) {
            let ((token, _), (expected, distance)) = (best(found), best(want));
            assert!(token == expected || distance <= 2.0 * difference, "{what}: greedy token {token}, not {expected}");
        }
        difference
    }

    /// What one rank computes.
    fn one(&self, seqs: &[&[u32]]) -> Vec<Vec<f32>> {
        self.ranks(1, Reduce::Sum, &|group| group, |mut rank| rank.logits(seqs)).remove(0)
    }
}

fn bits_of(rows: &[Vec<f32>]) -> Vec<u32> {
    rows.iter().flatten().map(|logit| logit.to_bits()).collect()
}

fn greatest(row: &[f32]) -> f32 {
    row.iter().fold(0.0, |greatest, logit| greatest.max(logit.abs()))
}

/// The greatest difference of logits, as a share of the greatest logit of the row.
pub fn difference(found: &[Vec<f32>], want: &[Vec<f32>]) -> f32 {
    let of_row = |(found, want): (&Vec<f32>, &Vec<f32>)| {
        let difference: Vec<f32> = found.iter().zip(want).map(|(a, b)| a - b).collect();
        greatest(&difference) / greatest(want)
    };
    found.iter().zip(want).map(of_row).fold(0.0, f32::max)
}

/// The first of the best tokens of a row, and how far it is from the second as a share of the greatest logit.
fn best(row: &[f32]) -> (usize, f32) {
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
    (order[0], (row[order[0]] - row[order[1]]) / greatest(row))
}

/// Float32: a product of the k < 2^8 inputs of these models, added in any order, is off by at most k · 2^-24 = 2^-16 of the sum of
/// magnitudes. Measured over all cases: at most 2^-16.7 of the greatest logit.
pub const ROUNDING: f32 = 1.0 / (1 << 15) as f32;
/// Activations that are rounded to 8 bits: one near the middle between two integers may become the other, which is 1/127 of the greatest
/// of its block of 32. Measured: 2^-6.
const FLIPPED: f32 = 1.0 / 32.0;

/// Compares groups of these sizes with one rank. Returns the numbers of products that are summed and gathered, and the difference.
fn compare(name: &str, form: Form, counts: impl IntoIterator<Item = usize>) -> Vec<((usize, usize), f32)> {
    let (decoder, weights, prompt) = declared(&files(name), name, form);
    let (on, seqs) = (On::cpu((&decoder, &weights)), [&prompt[..], &prompt[..9], &prompt[4..11]]);
    let one = on.one(&seqs);
    let of_ranks = |ranks| {
        let joins = decoder.shard(0, ranks, Reduce::Sum).ok()?.joins();
        Some((joins, on.compare(&format!("{name} {form} on {ranks} ranks"), ranks, &seqs, &one)))
    };
    counts.into_iter().filter_map(of_ranks).collect()
}

#[test]
fn sums_over_ranks_have_the_logits_of_one_rank_but_for_rounding() {
    for name in CASES {
        for ((summed, gathered), difference) in compare(name, Form::Dense, 2..=4) {
            assert!(summed > 0 && gathered == 0, "{name}: {gathered} products are gathered");
            assert!(difference <= ROUNDING, "{name}: logits differ by {difference:e}");
        }
    }
}

#[test]
fn sums_of_quantised_products_have_the_logits_of_one_rank_where_blocks_are_whole_and_others_are_gathered() {
    let mut all = Vec::new();
    for name in CASES {
        let form = Form::Quantized(if all.len() % 2 == 0 { Quantization::Q8 } else { Quantization::Q4 });
        all.extend(compare(name, form, 2..=4));
    }
    assert!(all.iter().all(|(_, difference)| *difference <= FLIPPED), "{all:?}");
    // No other weights and no other rounding, but for few activations.
    let unrounded = all.iter().filter(|(_, difference)| *difference <= ROUNDING).count();
    assert!(unrounded * 4 >= all.len() * 3, "{unrounded} of {}", all.len());
    // Blocks of 32: parts of 24 inputs cut them.
    let fall_back = all.iter().filter(|((summed, gathered), _)| *summed > 0 && *gathered > 0).count();
    assert!(fall_back > 5 && fall_back < all.len() / 2, "{fall_back} of {}", all.len());
}

/// bfloat16 has 8 bits: both partial sums of a product and their sum are rounded by up to 2^-9, in 6 products. Measured: 2^-5.5.
const ROUNDING_OF_BF16: f32 = 1.0 / 16.0;

#[test]
fn sums_on_cuda_sim_are_those_of_one_rank_but_for_rounding() {
    if opened::kernels().is_none() {
        return;
    }
    let open = || opened::open(Options { deterministic: true, ..Options::default() }).unwrap();
    // Sums of 16 bits; experts with biases.
    for (name, dtype, most) in [("llama", Dtype::Bf16, ROUNDING_OF_BF16), ("gpt-oss", Dtype::F32, ROUNDING)] {
        let (decoder, weights, prompt) = declared(&files(name), name, Form::Dense);
        let needs = Needs { dtype, row_invariant: true, ..needs(&*open(), &decoder) };
        let on = On { model: (&decoder, &weights), device: &open, needs };
        let seqs = [&prompt[..9], &prompt[4..11]];
        let difference = on.compare(name, 2, &seqs, &on.one(&seqs));
        assert!(difference <= most, "{name}: logits differ by {difference:e}");
    }
}

/// A group that counts the bytes that its ranks get from others.
struct Counted(Arc<dyn Collective>, Arc<AtomicU64>);

impl Collective for Counted {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn size(&self) -> usize {
        self.0.size()
    }

    fn carrier(&self) -> &'static str {
        self.0.carrier()
    }

    fn split(&self, color: usize) -> Result<Arc<dyn Collective>, CollectiveError> {
        self.0.split(color)
    }

    fn broadcast(&self, root: usize, bytes: &mut Vec<u8>) -> Result<(), CollectiveError> {
        self.0.broadcast(root, bytes)
    }

    fn all_gather(&self, own: &[u8], rows: usize, widths: &[usize], all: &mut [u8]) -> Result<(), CollectiveError> {
        self.1.fetch_add((all.len() - own.len()) as u64, Ordering::Relaxed);
        self.0.all_gather(own, rows, widths, all)
    }

    fn send(&self, to: usize, bytes: &[u8]) -> Result<(), CollectiveError> {
        self.0.send(to, bytes)
    }

    fn receive(&self, from: usize, bytes: &mut [u8]) -> Result<(), CollectiveError> {
        self.1.fetch_add(bytes.len() as u64, Ordering::Relaxed);
        self.0.receive(from, bytes)
    }

    fn abort(&self, reason: &str) {
        self.0.abort(reason);
    }
}

#[test]
fn ranks_receive_as_many_bytes_as_the_page_of_ranks_says() {
    let (decoder, weights, _) = declared(&files("llama"), "llama", Form::Dense);
    // 3 layers, hidden states of 64, 4 heads of 32, networks of 128.
    let (layers, hidden, heads, network) = (3, 64, 4 * 32, 128);
    let tokens: Vec<u32> = (3..163).collect();
    for ranks in 2..=4 {
        for rows in [1, tokens.len()] {
            let received = |reduce| {
                let count = Arc::new(AtomicU64::new(0));
                let wrap = |group| Arc::new(Counted(group, count.clone())) as Arc<dyn Collective>;
                On::cpu((&decoder, &weights)).ranks(ranks, reduce, &wrap, |mut rank| {
                    forward(&mut rank.model, &mut rank.caches, (BLOCK_SIZE, NUM_BLOCKS), &tokens[..rows], rows);
                });
                count.load(Ordering::Relaxed) as usize
            };
            // Each number of a row is received by all ranks but the one that has it.
            let gathered = layers * (heads + hidden + network + hidden) * (ranks - 1);
            let summed = match ranks == 2 || rows * hidden <= 1 << 13 {
                true => layers * 2 * hidden * ranks * (ranks - 1),
                false => layers * 2 * hidden * 2 * (ranks - 1),
            };
            let what = format!("{rows} rows on {ranks} ranks");
            assert_eq!(received(Reduce::Gather), 4 * rows * gathered, "{what}");
            assert_eq!(received(Reduce::Sum), 4 * rows * summed, "{what}");
        }
    }
}
