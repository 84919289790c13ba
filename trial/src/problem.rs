//! A generated call of an attention kernel, and its result in float64.
//!
//! Uses 8 bytes of host memory per element of the cache, or of its first blocks if all others repeat them ([`Look::repeats`]). The
//! expected result takes `rows × num_heads × context × head_dim`
//! multiply-adds in float64 on one thread; [`Problem::truth_of`] computes only some rows.

use std::ops::Range;

use crate::numbers::{Random, element, from_byte, round, to_byte};
use attention_kernels::AttentionBatch;
use attention_kernels::BlockSparse;
use attention_kernels::KvShape;
use attention_kernels::{CacheFormat, Dtype, KvDtype};

/// The inputs of a call, not yet on a device.
#[derive(Clone)]
pub struct Problem {
    /// Types and layout of the cache.
    pub format: CacheFormat,
    /// Shape of keys and values.
    pub shape: KvShape,
    /// Number of query heads.
    pub num_heads: usize,
    /// Queries `[rows, num_heads, head_dim]`, rounded to the type.
    pub query: Vec<f32>,
    /// Elements between the end of a query row and the start of the next.
    pub query_gap: usize,
    /// Keys before scaling, in the order of [`KvShape::offset`]: those of all blocks, or of the first, which the others repeat.
    pub keys: Vec<f32>,
    /// Values before scaling, in the same order; in a latent cache the keys.
    pub values: Vec<f32>,
    /// Elements of a value in a latent cache.
    pub latent: Option<usize>,
    /// Scales of keys and values: none, one, or one per KV head.
    pub scales: Option<[Vec<f32>; 2]>,
    /// Scales of keys and values for each slot and KV head, `[slots, num_kv_heads]`; empty if the type has none.
    pub token_scales: [Vec<f32>; 2],
    /// Query rows, contexts and block tables.
    pub batch: AttentionBatch,
    /// Scale of the scores.
    pub scale: f32,
    /// As in [`AttentionArgs`](attention_kernels::AttentionArgs).
    pub window: Option<usize>,
    /// As in [`AttentionArgs`](attention_kernels::AttentionArgs).
    pub sparse: Option<BlockSparse>,
    /// As in [`AttentionArgs`](attention_kernels::AttentionArgs).
    pub soft_cap: Option<f32>,
    /// ALiBi slope of each query head.
    pub slopes: Option<Vec<f32>>,
    /// Sink of each query head.
    pub sinks: Option<Vec<f32>>,
}

/// Properties of a generated problem.
#[derive(Clone, Debug)]
pub struct Look {
    /// Types and layout of the cache.
    pub format: CacheFormat,
    /// Numbers of query heads and of KV heads.
    pub heads: (usize, usize),
    /// Elements per head.
    pub dim: usize,
    /// Elements of a value that is a part of the key (a latent cache); `None`: keys and values are separate.
    pub latent: Option<usize>,
    /// Tokens per block.
    pub block_size: usize,
    /// Scales: none, one (`false`), or one per KV head (`true`).
    pub scales: Option<bool>,
    /// Sliding window: number of tokens that a row sees.
    pub window: Option<usize>,
    /// Block-sparse attention: the blocks that each head sees.
    pub sparse: Option<BlockSparse>,
    /// Whether scores are capped, at 3.
    pub soft_cap: bool,
    /// Whether there are ALiBi slopes.
    pub alibi: bool,
    /// Whether there are sinks: some below the scores, some among them and some above.
    pub sinks: bool,
    /// Number of blocks that all others repeat, so that a large cache can be filled on the device; `None`: each has its own numbers,
    /// and memory that must not change a result is poisoned.
    pub repeats: Option<usize>,
    /// Query rows and context length of each sequence.
    pub lens: Vec<(usize, usize)>,
}

/// Expected result in float64. Rows that were not requested are 0.
pub struct Truth {
    /// Requested rows.
    pub rows: Vec<usize>,
    /// Output `[rows, num_heads, value_dim]`.
    pub output: Vec<f64>,
    /// Means of |v| under the same weights, `[rows, num_heads, value_dim]`.
    pub magnitude: Vec<f64>,
    /// Log of the sum of exp(score) and of exp(sink), `[rows, num_heads]`.
    pub lse: Vec<f64>,
}

impl Look {
    /// Returns a look without options: 4 query heads on 2 KV heads of 64 elements, in blocks of 16 tokens.
    pub fn plain(format: CacheFormat, lens: Vec<(usize, usize)>) -> Look {
        Look {
            format,
            heads: (4, 2),
            dim: 64,
            latent: None,
            block_size: 16,
            scales: None,
            window: None,
            sparse: None,
            soft_cap: false,
            alibi: false,
            sinks: false,
            repeats: None,
            lens,
        }
    }
}

impl Problem {
    /// Generates a problem. Memory that must not change a result holds NaN (in int8 −128, which no writer stores; scales too) or
    /// invalid block ids. This includes the tokens before the windows of all rows of a sequence and, in a block-sparse problem, for
    /// each KV head the blocks that none of its heads sees.
    pub fn new(seed: u64, look: &Look) -> Problem {
        let &Look { format, heads, dim, block_size, window, sparse, .. } = look;
        let mut random = Random::new(seed);
        let contexts = look.lens.iter().map(|&(_, context)| context);
        let max_blocks = contexts.map(|context| context.div_ceil(block_size)).max().unwrap_or(0) + 2;
        let used: usize = look.lens.iter().map(|&(_, context)| context.div_ceil(block_size)).sum();
        let shape = KvShape { num_blocks: used + 3, num_kv_heads: heads.1, block_size, head_dim: dim };
        let own_blocks = look.repeats.map_or(shape.num_blocks, |blocks| blocks.min(shape.num_blocks));
        let mut free: Vec<i32> = (0..shape.num_blocks as i32).collect();
        random.shuffle(&mut free);
        let per_token = format.kv_dtype == KvDtype::Int8PerToken;
        let poison = if per_token || format.kv_dtype == KvDtype::Int8 { -128.0 } else { f32::NAN };
        let mut token_scales: [Vec<f32>; 2] = match per_token {
            true => std::array::from_fn(|_| vec![f32::NAN; own_blocks * block_size * heads.1]),
            false => Default::default(),
        };
        let mut keys = vec![poison; own_blocks * shape.block_elements()];
        let mut values = keys.clone();
        // Approximate magnitude of stored numbers; scales bring them back to about 1.
        let spread = match format.kv_dtype {
            KvDtype::Same | KvDtype::F16 | KvDtype::Bf16 => 1.0,
            KvDtype::Int8 | KvDtype::Int8PerToken => 100.0,
            KvDtype::Fp8E4m3 | KvDtype::Fp8E5m2 => 12.0,
        };
        // Values of fewer than 32 bits are drawn from this list, because a lookup is faster than rounding each.
        let kv_dtype = format.kv_dtype;
        let stored = match element(format) {
            Some(Dtype::F32) => Vec::new(),
            Some(dtype) => (0..4096).map(|_| round(dtype, random.unit())).collect(),
            None => (0..1024).map(|_| from_byte(kv_dtype, to_byte(kv_dtype, random.unit() * spread))).collect(),
        };
        let stored =
            |random: &mut Random| if stored.is_empty() { random.unit() } else { stored[random.below(stored.len())] };
        let mut fill = |slot: usize, random: &mut Random| {
            for head in 0..heads.1 {
                for scales in token_scales.iter_mut().filter(|_| per_token) {
                    scales[slot * heads.1 + head] = (1.5 + random.unit()) / spread;
                }
                for at in shape.offset(slot, head)..shape.offset(slot, head) + dim {
                    keys[at] = stored(random);
                    values[at] = stored(random);
                }
            }
        };
        let mut batch = AttentionBatch { query_starts: vec![0], ..AttentionBatch::default() };
        for &(rows, context) in &look.lens {
            batch.query_starts.push(batch.num_rows() as u32 + rows as u32);
            batch.context_lens.push(context as u32);
            let blocks = context.div_ceil(block_size);
            let mut table: Vec<i32> = free.drain(free.len() - blocks..).collect();
            let slots = (0..context).map(|token| table[token / block_size] as usize * block_size + token % block_size);
            slots.filter(|_| look.repeats.is_none()).for_each(|slot| fill(slot, &mut random));
            let garbage = [-1, i32::MAX, i32::MIN, shape.num_blocks as i32];
            table.extend((blocks..max_blocks).map(|_| garbage[random.below(4)]));
            batch.block_tables.push(&table);
        }
        if look.repeats.is_some() {
            (0..own_blocks * block_size).for_each(|slot| fill(slot, &mut random));
        }
        if look.latent.is_some() {
            values.clone_from(&keys);
            token_scales[1] = token_scales[0].clone();
        }
        let rows = batch.num_rows();
        // Beside a cache of bfloat16, variants may round the query too.
        let of_query = if format.kv_dtype == KvDtype::Bf16 { Dtype::Bf16 } else { format.dtype };
        let scale_of = |per_head: bool, seed: u64| -> Vec<f32> {
            let mut random = Random::new(seed);
            (0..if per_head { heads.1 } else { 1 }).map(|_| (1.5 + random.unit()) / spread).collect()
        };
        let mut problem = Problem {
            format,
            shape,
            num_heads: heads.0,
            query: (0..rows * heads.0 * dim).map(|_| round(of_query, random.unit() * 3.0)).collect(),
            query_gap: 8 * random.below(3),
            keys,
            values,
            latent: look.latent,
            scales: look.scales.map(|per_head| [scale_of(per_head, seed ^ 5), scale_of(per_head, seed ^ 9)]),
            token_scales,
            batch,
            scale: 1.0 / (dim as f32).sqrt() / if look.scales.is_none() && !per_token { spread } else { 1.0 },
            window,
            sparse,
            soft_cap: look.soft_cap.then_some(3.0),
            slopes: look.alibi.then(|| (0..heads.0).map(|h| 0.5f32.powi(h as i32 % 8 + 1)).collect()),
            sinks: look.sinks.then(|| (0..heads.0).map(|h| [1.5, -2.0, 9.0, 0.25, -40.0][h % 5]).collect()),
        };
        if look.repeats.is_none() {
            problem.poison_hidden(poison);
        }
        problem
    }

    /// Overwrites the tokens before the windows of all rows, and for each KV head the blocks that none of its heads sees.
    fn poison_hidden(&mut self, poison: f32) {
        let KvShape { num_kv_heads, block_size, head_dim, .. } = self.shape;
        for seq in 0..self.batch.num_seqs() {
            let context = self.batch.context_lens[seq] as usize;
            let before = context.saturating_sub(self.rows_of(seq).len());
            let behind = self.window.map_or(0, |window| (before + 1).saturating_sub(window));
            for start in (0..context).step_by(block_size) {
                let block = start..start + block_size;
                let first = self.batch.table(seq)[start / block_size] as usize * block_size;
                for kv_head in 0..num_kv_heads {
                    let in_part = self.sparse.is_none() || self.anyone_sees(kv_head, before..context, &block);
                    let hidden = if in_part { behind.saturating_sub(start).min(block_size) } else { block_size };
                    for slot in first..first + hidden {
                        let at = self.shape.offset(slot, kv_head);
                        self.keys[at..at + head_dim].fill(poison);
                        self.values[at..at + head_dim].fill(poison);
                        let scales = self.token_scales.iter_mut();
                        scales
                            .filter_map(|scales| scales.get_mut(slot * num_kv_heads + kv_head))
                            .for_each(|x| *x = f32::NAN);
                    }
                }
            }
        }
    }

    /// Whether a head with this KV head sees one of the keys from a query at one of the positions.
    fn anyone_sees(&self, kv_head: usize, positions: Range<usize>, keys: &Range<usize>) -> bool {
        let group = self.num_heads / self.shape.num_kv_heads;
        let mut heads = kv_head * group..(kv_head + 1) * group;
        heads.any(|head| positions.clone().any(|at| keys.clone().any(self.seen_by(head, at))))
    }

    /// Returns whether a head of the query at a position sees the key at another, by causality, window and sparse blocks.
    fn seen_by(&self, head: usize, position: usize) -> impl FnMut(usize) -> bool {
        let first = self.window.map_or(0, |w| (position + 1).saturating_sub(w));
        let kv_head = head / (self.num_heads / self.shape.num_kv_heads);
        let pattern = self.sparse.map(|sparse| sparse.heads(head..head + 1, kv_head));
        move |key| (first..=position).contains(&key) && pattern.is_none_or(|pattern| pattern.sees(position, key))
    }

    /// Returns the number of blocks whose numbers are kept; the others repeat them.
    pub fn own_blocks(&self) -> usize {
        self.keys.len() / self.shape.block_elements().max(1)
    }

    /// Returns the query rows of a sequence.
    pub fn rows_of(&self, seq: usize) -> Range<usize> {
        self.batch.query_starts[seq] as usize..self.batch.query_starts[seq + 1] as usize
    }

    /// Returns the elements of a value in one head.
    pub fn value_dim(&self) -> usize {
        self.latent.unwrap_or(self.shape.head_dim)
    }

    /// Returns the number of elements of an output row.
    pub fn out_width(&self) -> usize {
        self.num_heads * self.value_dim()
    }

    /// Returns the number of elements of a query row.
    pub fn width(&self) -> usize {
        self.num_heads * self.shape.head_dim
    }

    /// Computes the expected result in float64.
    pub fn truth(&self) -> Truth {
        self.truth_of((0..self.batch.num_rows()).collect())
    }

    /// Computes some rows of the expected result.
    pub fn truth_of(&self, rows: Vec<usize>) -> Truth {
        let (dim, heads) = (self.value_dim(), self.num_heads);
        let count = self.batch.num_rows();
        let (mut output, mut magnitude) = (vec![0.0; count * heads * dim], vec![0.0; count * heads * dim]);
        let mut lse = vec![f64::NEG_INFINITY; count * heads];
        for seq in 0..self.batch.num_seqs() {
            let context = self.batch.context_lens[seq] as usize;
            for &row in rows.iter().filter(|row| self.rows_of(seq).contains(*row) && context > 0) {
                for head in 0..heads {
                    let place = row * heads + head;
                    let sums = [&mut output, &mut magnitude].map(|sums| &mut sums[place * dim..][..dim]);
                    lse[place] = self.one_head(seq, row, head, sums);
                }
            }
        }
        Truth { rows, output, magnitude, lse }
    }

    /// Adds a head's output and means of |v| to zeros, and returns its log of the sum.
    fn one_head(&self, seq: usize, row: usize, head: usize, [output, magnitude]: [&mut [f64]; 2]) -> f64 {
        let (dim, heads) = (self.shape.head_dim, self.num_heads);
        let before = self.batch.context_lens[seq] as usize - self.rows_of(seq).len();
        let position = before + row - self.rows_of(seq).start;
        let mut is_seen = self.seen_by(head, position);
        let tokens: Vec<usize> = (0..=position).filter(|key| is_seen(*key)).collect();
        let table = self.batch.table(seq);
        let kv_head = head / (heads / self.shape.num_kv_heads);
        let scale_of = |which: usize| {
            let which = if self.latent.is_some() { 0 } else { which };
            self.scales.as_ref().map_or(1.0, |scales| f64::from(scales[which][kv_head.min(scales[which].len() - 1)]))
        };
        let q = &self.query[(row * heads + head) * dim..][..dim];
        let slot = |token: usize| {
            let block = table[token / self.shape.block_size] as usize % self.own_blocks();
            block * self.shape.block_size + token % self.shape.block_size
        };
        let at = |token: usize| self.shape.offset(slot(token), kv_head);
        let of_token = |which: usize, token: usize| {
            let scale = self.token_scales[which].get(slot(token) * self.shape.num_kv_heads + kv_head);
            scale.map_or(1.0, |scale| f64::from(*scale))
        };
        let score = |token: usize| {
            let k = &self.keys[at(token)..][..dim];
            let mut score = f64::from(self.scale) * dot(q, k) * scale_of(0) * of_token(0, token);
            if let Some(cap) = self.soft_cap.map(f64::from) {
                score = cap * (score / cap).tanh();
            }
            let slope = self.slopes.as_ref().map_or(0.0, |slopes| f64::from(slopes[head]));
            score + slope * (token as f64 - position as f64)
        };
        let scores: Vec<f64> = tokens.iter().map(|token| score(*token)).collect();
        let sink = self.sinks.as_ref().map(|sinks| f64::from(sinks[head]));
        let greatest = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().copied().chain(sink).map(|score| (score - greatest).exp()).sum();
        for (&token, score) in tokens.iter().zip(&scores) {
            let weight = (score - greatest).exp() / total * scale_of(1) * of_token(1, token);
            let values = &self.values[at(token)..][..self.value_dim()];
            for ((output, magnitude), value) in output.iter_mut().zip(&mut *magnitude).zip(values) {
                *output += weight * f64::from(*value);
                *magnitude += weight * f64::from(value.abs());
            }
        }
        greatest + total.ln()
    }
}

/// Returns the sum of products, in eight sums that do not wait for each other.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    let ((a, of_a), (b, of_b)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let mut sums = [0.0; 8];
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += f64::from(*a) * f64::from(*b);
        }
    }
    let rest = of_a.iter().zip(of_b).map(|(a, b)| f64::from(*a) * f64::from(*b));
    sums.into_iter().chain(rest).sum()
}
