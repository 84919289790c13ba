//! Attention to the tokens that an indexer chooses: the kernels choose what a CPU chooses, whatever the type, and attend to it but for
//! rounding.

use std::sync::Arc;

use attention_kernels::{
    AttentionArgs, AttentionBatch, CacheFormat, ChosenArgs, ChosenMemory, Dtype, IndexRows, KvCache, KvDtype, KvScales,
    KvShape, LaunchedChosen, Layout, Values, Workspace, WorkspaceLimits, attend_chosen, launch_chosen,
};
use device::Device;
use simd::Pool;
use trial::numbers::{Random, from_bytes, round, to_byte, to_bytes};

use super::devices::{self, buffer, bytes};

const BLOCK: usize = 16;

/// A model's sizes.
#[derive(Clone, Copy)]
struct Sizes {
    dtype: Dtype,
    heads: usize,
    rank: usize,
    rope: usize,
    index_heads: usize,
    index_dim: usize,
    most: usize,
    /// Scale of an fp8 cache. `None`: the cache holds elements of `dtype`.
    scale: Option<f32>,
}

impl Sizes {
    /// Elements of a key in the cache.
    fn key(&self) -> usize {
        self.rank + self.rope + self.index_dim
    }
}

/// Numbers of the type.
struct Inputs {
    sizes: Sizes,
    batch: AttentionBatch,
    shape: KvShape,
    query: Vec<f32>,
    index_queries: Vec<f32>,
    factors: Vec<f32>,
    keys: Vec<f32>,
}

impl Inputs {
    /// Numbers of an indexer are multiples of a half. That makes equal scores frequent.
    fn new(seed: u64, sizes: Sizes, lens: &[(usize, usize)]) -> Inputs {
        let mut random = Random::new(seed);
        let blocks: Vec<usize> = lens.iter().map(|(_, context)| context.div_ceil(BLOCK)).collect();
        let shape = KvShape {
            num_blocks: blocks.iter().sum::<usize>() + 1,
            num_kv_heads: 1,
            block_size: BLOCK,
            head_dim: sizes.key(),
        };
        let mut ids: Vec<i32> = (0..shape.num_blocks as i32).collect();
        random.shuffle(&mut ids);
        let mut batch = AttentionBatch { query_starts: vec![0], ..AttentionBatch::default() };
        for ((rows, context), blocks) in lens.iter().zip(blocks) {
            batch.query_starts.push(batch.query_starts.last().unwrap() + *rows as u32);
            batch.context_lens.push(*context as u32);
            let table: Vec<i32> = ids.drain(..blocks).collect();
            batch.block_tables.push(&table);
        }
        let rows = batch.num_rows();
        let halves = |random: &mut Random, n: usize| -> Vec<f32> {
            (0..n).map(|_| random.below(5) as f32 / 2.0 - 1.0).collect()
        };
        let mut index_queries = halves(&mut random, rows * sizes.index_heads * sizes.index_dim);
        let mut factors = halves(&mut random, rows * sizes.index_heads);
        if sizes.dtype != Dtype::F16 {
            // The third head takes back what the second adds, which is so much that the first is lost, but not those behind them.
            for query in index_queries.chunks_exact_mut(sizes.index_heads * sizes.index_dim) {
                query.copy_within(sizes.index_dim..2 * sizes.index_dim, 2 * sizes.index_dim);
            }
            for factors in factors.chunks_exact_mut(sizes.index_heads) {
                (factors[1], factors[2]) = (1e9, -1e9);
            }
        }
        let number = |random: &mut Random| round(sizes.dtype, random.unit());
        let width = (sizes.heads + 1) * sizes.key();
        let query = (0..rows * width).map(|_| number(&mut random)).collect();
        let mut keys = Vec::new();
        for _ in 0..shape.num_blocks * BLOCK {
            keys.extend((0..sizes.rank + sizes.rope).map(|_| number(&mut random)));
            keys.extend(halves(&mut random, sizes.index_dim));
        }
        Inputs { sizes, batch, shape, query, index_queries, factors, keys }
    }

    /// A cache that computes in `dtype`, and is stored in the type of the sizes.
    fn cache(&self, device: &dyn Device, dtype: Dtype) -> KvCache {
        let Sizes { dtype: stored, scale, rank, .. } = self.sizes;
        let kv_dtype = match (scale, stored) {
            (Some(_), _) => KvDtype::Fp8E4m3,
            (None, Dtype::F16) if dtype != stored => KvDtype::F16,
            (None, Dtype::Bf16) if dtype != stored => KvDtype::Bf16,
            _ => KvDtype::Same,
        };
        let keys = match scale {
            Some(_) => self.keys.iter().map(|x| to_byte(kv_dtype, *x)).collect(),
            None => to_bytes(stored, &self.keys),
        };
        let one = |scale: f32| buffer(device, &to_bytes(Dtype::F32, &[scale]));
        // Latents have no scale of values.
        let scales = scale.map(|scale| KvScales { keys: one(scale), values: one(f32::NAN), per_head: false });
        KvCache {
            shape: self.shape,
            format: CacheFormat { dtype, kv_dtype, layout: Layout::Hnd },
            keys: buffer(device, &keys),
            values: Values::InKeys { dim: rank },
            scales: scales.map(Arc::new),
        }
    }

    /// The choice and the output of a CPU in float32.
    fn on_cpu(&self) -> (Vec<u32>, Vec<f32>) {
        let Sizes { heads, rank, rope, index_heads, index_dim, most, .. } = self.sizes;
        let cpu = device::open("cpu", Some(1)).unwrap();
        let floats = |numbers: &[f32]| buffer(&*cpu, &to_bytes(Dtype::F32, numbers));
        let rows = self.batch.num_rows();
        let (mut chosen, mut output) = (vec![0; rows * most], floats(&vec![0.0; rows * heads * rank]));
        let args = ChosenArgs {
            query: &floats(&self.query),
            query_stride: (heads + 1) * self.sizes.key(),
            num_heads: heads,
            dim: rank + rope,
            scale: 0.2,
            cache: &self.cache(&*cpu, Dtype::F32),
            batch: &self.batch,
            output: &mut output,
            most,
            chosen: &mut chosen,
            index: Some(IndexRows {
                queries: &floats(&self.index_queries),
                weights: &floats(&self.factors),
                heads: index_heads,
                dim: index_dim,
                first: rank + rope,
            }),
        };
        attend_chosen(&Pool::new(Some(1)).unwrap(), args).unwrap();
        (chosen, from_bytes(Dtype::F32, &bytes(&*cpu, &output)))
    }

    /// The choice and the output of a device. `max_tokens` determines how many rows are scored at a time. The second output is that of
    /// a layer that uses the choice of the first.
    fn on_device(&self, device: &dyn Device, max_tokens: usize) -> (Vec<u32>, [Vec<u8>; 2]) {
        let Sizes { dtype, heads, rank, rope, index_heads, index_dim, most, .. } = self.sizes;
        let numbers = |numbers: &[f32]| buffer(device, &to_bytes(dtype, numbers));
        let rows = self.batch.num_rows();
        let limits = WorkspaceLimits {
            max_seqs: self.batch.num_seqs(),
            max_rows: rows,
            max_blocks: self.batch.block_tables.longest(),
            num_blocks: self.shape.num_blocks,
            block_size: BLOCK,
            num_heads: heads,
            head_dim: self.sizes.key(),
            max_partials: 0,
            items_at_once: 0,
            max_copies: 0,
        };
        let mut workspace = Workspace::new(device, limits).unwrap();
        workspace.load(device, &self.batch, &[], None).unwrap();
        let cache = self.cache(device, dtype);
        let (query, queries, weights) = (numbers(&self.query), numbers(&self.index_queries), numbers(&self.factors));
        let mut memory = ChosenMemory::new(device, most, rows, max_tokens).unwrap();
        let outputs = [true, false].map(|chooses| {
            let mut output = numbers(&vec![7.0; rows * heads * rank]);
            let attention = AttentionArgs {
                query: &query,
                query_stride: (heads + 1) * self.sizes.key(),
                num_heads: heads,
                output: &mut output,
                lse: None,
                cache: &cache,
                batch: &self.batch,
                seqs: 0..self.batch.num_seqs(),
                scale: 0.2,
                window: None,
                sparse: None,
                soft_cap: None,
                alibi_slopes: None,
                sinks: None,
                workspace: Some(&workspace),
            };
            let (heads, dim, first) = (index_heads, index_dim, rank + rope);
            let index = IndexRows { queries: &queries, weights: &weights, heads, dim, first };
            let index = chooses.then_some(index);
            let args = LaunchedChosen { attention, dim: rank + rope, memory: &mut memory, index };
            launch_chosen(device, args).unwrap();
            bytes(device, &output)
        });
        let words = bytes(device, memory.chosen());
        let words = words.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        (words, outputs)
    }

    /// The part of a choice that counts.
    fn counted<'a>(&self, chosen: &'a [u32]) -> Vec<&'a [u32]> {
        let (batch, most) = (&self.batch, self.sizes.most);
        let of_seq = |seq: usize| {
            let rows = batch.query_starts[seq] as usize..batch.query_starts[seq + 1] as usize;
            let (end, context) = (rows.end, batch.context_lens[seq] as usize);
            rows.map(move |row| &chosen[row * most..][..(context.saturating_sub(end - row - 1)).min(most)])
        };
        (0..batch.num_seqs()).flat_map(of_seq).collect()
    }
}

const SMALL: Sizes =
    Sizes { dtype: Dtype::F32, heads: 3, rank: 40, rope: 24, index_heads: 5, index_dim: 20, most: 37, scale: None };
/// As DeepSeek V3.2, but for the numbers of heads and of tokens.
const LARGE: Sizes =
    Sizes { dtype: Dtype::F16, heads: 35, rank: 512, rope: 64, index_heads: 3, index_dim: 32, most: 70, scale: None };

/// Launches every kernel for float32 or f16.
pub fn attend_all(device: &dyn Device) {
    for sizes in [SMALL, LARGE] {
        Inputs::new(1, sizes, &[(2, sizes.most + 40), (1, 9)]).on_device(device, 512);
    }
}

#[test]
fn devices_choose_the_tokens_of_the_cpu_and_attend_to_them() {
    for device in devices::gpus(5) {
        let sizes = [
            SMALL,
            Sizes { dtype: Dtype::Bf16, index_dim: 16, ..SMALL },
            LARGE,
            Sizes { dtype: Dtype::Bf16, heads: 8, ..LARGE },
            Sizes { scale: Some(0.75), ..SMALL },
            Sizes { heads: 8, scale: Some(0.75), ..LARGE },
        ];
        for (seed, sizes) in (0..).zip(sizes) {
            let most = sizes.most;
            // Rows that see fewer tokens, as many, and more; some of them in one pass over scores.
            let lens = [(3, most + 60), (1, 0), (9, 9), (1, most), (2, most + 1), (1, 300)];
            let inputs = Inputs::new(seed, sizes, &lens);
            let (want, attended) = inputs.on_cpu();
            let (chosen, [output, again]) = inputs.on_device(&*device, 4 << 20);
            assert_eq!(inputs.counted(&chosen), inputs.counted(&want), "{} on {}", sizes.dtype, device.name());
            // Half an ulp of the weights of numbers below 1, and of the result.
            let allowed = match sizes.dtype {
                Dtype::F32 => 1e-5,
                Dtype::F16 => 1.5 / 2048.0,
                Dtype::Bf16 => 1.5 / 256.0,
            };
            for (i, (got, want)) in from_bytes(sizes.dtype, &output).into_iter().zip(attended).enumerate() {
                let error = (got - want).abs();
                assert!(error < allowed, "{} on {}, element {i}: {got}, want {want}", sizes.dtype, device.name());
            }
            assert!(again == output, "{}: a layer that uses the choice of the one before", sizes.dtype);
        }
    }
}

#[test]
fn a_choice_and_its_attention_do_not_depend_on_the_batch_or_on_passes() {
    for device in devices::gpus(6) {
        for sizes in [SMALL, LARGE] {
            let whole = Inputs::new(3, sizes, &[(2, 50), (3, sizes.most + 40)]);
            let (chosen, [output, _]) = whole.on_device(&*device, 4 << 20);
            let at_once = whole.on_device(&*device, 512);
            assert!(at_once.0 == chosen && at_once.1[0] == output, "rows in one pass");
            // The last sequence alone, with its blocks.
            let (width, row) = ((sizes.heads + 1) * sizes.key(), 2);
            let mut alone = Inputs { keys: whole.keys.clone(), ..Inputs::new(3, sizes, &[(3, sizes.most + 40)]) };
            (alone.shape, alone.query) = (whole.shape, whole.query[row * width..].to_vec());
            alone.batch.block_tables.clear();
            alone.batch.block_tables.push(whole.batch.table(1));
            alone.index_queries = whole.index_queries[row * sizes.index_heads * sizes.index_dim..].to_vec();
            alone.factors = whole.factors[row * sizes.index_heads..].to_vec();
            let (of_alone, [alone_output, _]) = alone.on_device(&*device, 512);
            assert_eq!(alone.counted(&of_alone), whole.counted(&chosen)[row..]);
            assert!(alone_output == output[row * sizes.heads * sizes.rank * sizes.dtype.bytes()..]);
        }
    }
}
