//! One call of an attention kernel: generated inputs, the float64 truth, and runs on devices.

use std::ops::Range;
use std::sync::Arc;

use attention_kernels::{
    AttentionArgs, AttentionBatch, CacheFormat, Kernel, KvCache, KvDtype, KvScales, KvShape, Variant, Workspace,
    WorkspaceLimits,
};
use device::{Buffer, Device};

use crate::numbers::{Random, element, from_byte, from_bytes, round, to_byte, to_bytes, tolerance, ulp};

/// Everything about a call but the device.
#[derive(Clone)]
pub struct Problem {
    pub format: CacheFormat,
    pub shape: KvShape,
    pub num_heads: usize,
    /// `[rows, num_heads, head_dim]`, rounded to the type.
    pub query: Vec<f32>,
    /// Elements between the end of a row of the query and the start of the next.
    pub query_gap: usize,
    /// Stored numbers, before their scale, in the order of [`KvShape::offset`].
    pub keys: Vec<f32>,
    pub values: Vec<f32>,
    /// Of keys and values: none, one, or one per KV head.
    pub scales: Option<[Vec<f32>; 2]>,
    /// Of each slot and KV head, `[slots, num_kv_heads]`, where the type has such scales, else empty.
    pub token_scales: [Vec<f32>; 2],
    pub batch: AttentionBatch,
    pub scale: f32,
    pub window: Option<usize>,
    pub soft_cap: Option<f32>,
    pub slopes: Option<Vec<f32>>,
}

/// What a generated problem looks like.
#[derive(Clone, Debug)]
pub struct Look {
    pub format: CacheFormat,
    /// Query heads, key/value heads.
    pub heads: (usize, usize),
    pub dim: usize,
    pub block_size: usize,
    /// `None`, or whether there is one scale per head.
    pub scales: Option<bool>,
    pub window: Option<usize>,
    pub soft_cap: bool,
    pub alibi: bool,
    /// (rows, context) of each sequence.
    pub lens: Vec<(usize, usize)>,
}

/// The truth of one row and head.
pub struct Truth {
    /// `[rows, num_heads, head_dim]`.
    pub output: Vec<f64>,
    /// Means of |v| under the same weights.
    pub magnitude: Vec<f64>,
    /// `[rows, num_heads]`.
    pub lse: Vec<f64>,
}

impl Problem {
    /// Everything that must not be read holds NaN (−128 in int8, which nothing writes; scales too), or block ids that do not
    /// exist.
    pub fn new(seed: u64, look: &Look) -> Problem {
        let &Look { format, heads, dim, block_size, window, .. } = look;
        let mut random = Random::new(seed);
        let contexts = look.lens.iter().map(|&(_, context)| context);
        let max_blocks = contexts.map(|context| context.div_ceil(block_size)).max().unwrap() + 2;
        let used: usize = look.lens.iter().map(|&(_, context)| context.div_ceil(block_size)).sum();
        let shape = KvShape { num_blocks: used + 3, num_kv_heads: heads.1, block_size, head_dim: dim };
        let mut free: Vec<i32> = (0..shape.num_blocks as i32).collect();
        random.shuffle(&mut free);
        let per_token = format.kv_dtype == KvDtype::Int8PerToken;
        let poison = if per_token || format.kv_dtype == KvDtype::Int8 { -128.0 } else { f32::NAN };
        let mut token_scales: [Vec<f32>; 2] = match per_token {
            true => std::array::from_fn(|_| vec![f32::NAN; shape.num_blocks * block_size * heads.1]),
            false => Default::default(),
        };
        let mut keys = vec![poison; shape.num_blocks * shape.block_elements()];
        let mut values = keys.clone();
        // Stored numbers of about these magnitudes; scales bring them back to about 1.
        let spread = match format.kv_dtype {
            KvDtype::Same | KvDtype::F16 | KvDtype::Bf16 => 1.0,
            KvDtype::Int8 | KvDtype::Int8PerToken => 100.0,
            KvDtype::Fp8E4m3 | KvDtype::Fp8E5m2 => 12.0,
        };
        let stored = |value: f32| match element(format) {
            Some(dtype) => round(dtype, value),
            None => from_byte(format.kv_dtype, to_byte(format.kv_dtype, value * spread)),
        };
        let mut batch = AttentionBatch { query_starts: vec![0], max_blocks, ..AttentionBatch::default() };
        for &(rows, context) in &look.lens {
            batch.query_starts.push(batch.query_starts.last().unwrap() + rows as u32);
            batch.context_lens.push(context as u32);
            let blocks = context.div_ceil(block_size);
            let table: Vec<i32> = (0..blocks).map(|_| free.pop().unwrap()).collect();
            for token in 0..context {
                let slot = table[token / block_size] as usize * block_size + token % block_size;
                for head in 0..heads.1 {
                    for scales in token_scales.iter_mut().filter(|_| per_token) {
                        scales[slot * heads.1 + head] = (1.5 + random.unit()) / spread;
                    }
                    for at in shape.offset(slot, head)..shape.offset(slot, head) + dim {
                        keys[at] = stored(random.unit());
                        values[at] = stored(random.unit());
                    }
                }
            }
            let garbage = [-1, i32::MAX, i32::MIN, shape.num_blocks as i32];
            batch.block_tables.extend(table);
            batch.block_tables.extend((blocks..max_blocks).map(|_| garbage[random.below(4)]));
        }
        let rows = batch.num_rows();
        let scale_of = |per_head: bool, seed: u64| -> Vec<f32> {
            let mut random = Random::new(seed);
            (0..if per_head { heads.1 } else { 1 }).map(|_| (1.5 + random.unit()) / spread).collect()
        };
        Problem {
            format,
            shape,
            num_heads: heads.0,
            query: (0..rows * heads.0 * dim).map(|_| round(format.dtype, random.unit() * 3.0)).collect(),
            query_gap: 8 * random.below(3),
            keys,
            values,
            scales: look.scales.map(|per_head| [scale_of(per_head, seed ^ 5), scale_of(per_head, seed ^ 9)]),
            batch,
            token_scales,
            scale: 1.0 / (dim as f32).sqrt() / if look.scales.is_none() && !per_token { spread } else { 1.0 },
            window,
            soft_cap: look.soft_cap.then_some(3.0),
            slopes: look.alibi.then(|| (0..heads.0).map(|h| 0.5f32.powi(h as i32 % 8 + 1)).collect()),
        }
    }

    pub fn rows_of(&self, seq: usize) -> Range<usize> {
        self.batch.query_starts[seq] as usize..self.batch.query_starts[seq + 1] as usize
    }

    /// Elements of a row of the output.
    pub fn width(&self) -> usize {
        self.num_heads * self.shape.head_dim
    }

    /// The definition, in float64.
    pub fn truth(&self) -> Truth {
        let (dim, heads) = (self.shape.head_dim, self.num_heads);
        let rows = self.batch.num_rows();
        let (mut output, mut magnitude) = (vec![0.0; rows * heads * dim], vec![0.0; rows * heads * dim]);
        let mut lse = vec![f64::NEG_INFINITY; rows * heads];
        let scale_of = |which: usize, head: usize| {
            self.scales.as_ref().map_or(1.0, |scales| f64::from(scales[which][head.min(scales[which].len() - 1)]))
        };
        for seq in 0..self.batch.num_seqs() {
            let context = self.batch.context_lens[seq] as usize;
            let table = self.batch.table(seq);
            for row in self.rows_of(seq).filter(|_| context > 0) {
                let position = context - (self.rows_of(seq).end - row);
                let first = self.window.map_or(0, |w| (position + 1).saturating_sub(w));
                for head in 0..heads {
                    let kv_head = head / (heads / self.shape.num_kv_heads);
                    let (k_scale, v_scale) = (scale_of(0, kv_head), scale_of(1, kv_head));
                    let q = &self.query[(row * heads + head) * dim..][..dim];
                    let slot = |token: usize| {
                        let block = table[token / self.shape.block_size] as usize;
                        block * self.shape.block_size + token % self.shape.block_size
                    };
                    let at = |token: usize| self.shape.offset(slot(token), kv_head);
                    let of_token = |which: usize, token: usize| {
                        let scale = self.token_scales[which].get(slot(token) * self.shape.num_kv_heads + kv_head);
                        scale.map_or(1.0, |scale| f64::from(*scale))
                    };
                    let score = |token: usize| {
                        let k = &self.keys[at(token)..][..dim];
                        let dot: f64 = q.iter().zip(k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
                        let mut score = f64::from(self.scale) * dot * k_scale * of_token(0, token);
                        if let Some(cap) = self.soft_cap.map(f64::from) {
                            score = cap * (score / cap).tanh();
                        }
                        let slope = self.slopes.as_ref().map_or(0.0, |slopes| f64::from(slopes[head]));
                        score + slope * (token as f64 - position as f64)
                    };
                    let scores: Vec<f64> = (first..=position).map(score).collect();
                    let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let total: f64 = scores.iter().map(|score| (score - greatest).exp()).sum();
                    lse[row * heads + head] = greatest + total.ln();
                    let place = (row * heads + head) * dim;
                    for (token, score) in (first..).zip(&scores) {
                        let weight = (score - greatest).exp() / total * v_scale * of_token(1, token);
                        for (d, value) in self.values[at(token)..][..dim].iter().enumerate() {
                            output[place + d] += weight * f64::from(*value);
                            magnitude[place + d] += weight * f64::from(value.abs());
                        }
                    }
                }
            }
        }
        Truth { output, magnitude, lse }
    }

    /// The inputs on a device.
    pub fn on(&self, device: &Arc<dyn Device>) -> OnDevice<'_> {
        let cache = |numbers: &[f32], of_tokens: &[f32]| {
            buffer(&**device, &cache_bytes(self.format, &self.shape, numbers, of_tokens))
        };
        let scales = self.scales.as_ref().map(|[keys, values]| {
            Arc::new(KvScales {
                keys: floats(&**device, keys),
                values: floats(&**device, values),
                per_head: keys.len() > 1,
            })
        });
        let rows = self.batch.num_rows();
        let mut query = Vec::new();
        for row in self.query.chunks(self.width()) {
            query.extend_from_slice(row);
            query.resize(query.len() + self.query_gap, f32::NAN);
        }
        let limits = WorkspaceLimits {
            max_seqs: self.batch.num_seqs(),
            max_rows: rows,
            max_blocks: self.batch.max_blocks,
            num_blocks: self.shape.num_blocks,
            block_size: self.shape.block_size,
            num_heads: self.num_heads,
            head_dim: self.shape.head_dim,
            split_rows: rows,
            max_copies: 0,
        };
        let mut workspace = Workspace::new(&**device, limits).unwrap();
        // Partial results that nobody wrote must not be read.
        workspace.load(&**device, &self.batch, &[], self.window).unwrap();
        if let Some(slopes) = &self.slopes {
            workspace.load_alibi_slopes(&**device, slopes).unwrap();
        }
        OnDevice {
            problem: self,
            device: device.clone(),
            query: buffer(&**device, &to_bytes(self.format.dtype, &query)),
            cache: KvCache {
                shape: self.shape,
                format: self.format,
                keys: cache(&self.keys, &self.token_scales[0]),
                values: cache(&self.values, &self.token_scales[1]),
                scales,
            },
            workspace,
        }
    }
}

/// A problem whose inputs lie on a device.
pub struct OnDevice<'a> {
    problem: &'a Problem,
    device: Arc<dyn Device>,
    query: Buffer,
    pub cache: KvCache,
    workspace: Workspace,
}

/// What a kernel wrote.
#[derive(Clone, PartialEq, Debug)]
pub struct Results {
    /// As it is stored.
    pub output: Vec<u8>,
    pub lse: Option<Vec<u8>>,
}

/// What output and lse hold before a kernel runs: rows of others must keep it.
pub const UNTOUCHED: u8 = 0x55;

impl OnDevice<'_> {
    /// Runs a variant on some of the sequences.
    pub fn run(&self, variant: &Variant, seqs: Range<usize>, lse: bool) -> Results {
        let Kernel::Attention(kernel) = variant.kernel else { panic!("{}: not an attention kernel", variant.name) };
        let (problem, device) = (self.problem, &*self.device);
        let rows = problem.batch.num_rows();
        let mut output = buffer(device, &vec![UNTOUCHED; rows * problem.width() * problem.format.dtype.bytes()]);
        let mut sums = lse.then(|| buffer(device, &vec![UNTOUCHED; rows * problem.num_heads * 4]));
        let args = AttentionArgs {
            query: &self.query,
            query_stride: problem.width() + problem.query_gap,
            num_heads: problem.num_heads,
            output: &mut output,
            lse: sums.as_mut(),
            cache: &self.cache,
            batch: &problem.batch,
            seqs,
            scale: problem.scale,
            window: problem.window,
            soft_cap: problem.soft_cap,
            alibi_slopes: problem.slopes.as_deref(),
            workspace: Some(&self.workspace),
        };
        kernel(device, args).unwrap_or_else(|error| panic!("{}: {error}", variant.name));
        Results { output: bytes(device, &output), lse: sums.map(|sums| bytes(device, &sums)) }
    }
}

impl Results {
    /// The bytes of the rows of one sequence.
    pub fn rows(&self, problem: &Problem, rows: Range<usize>) -> (&[u8], &[u8]) {
        let (row, heads) = (problem.width() * problem.format.dtype.bytes(), problem.num_heads * 4);
        let lse = self.lse.as_ref().map_or(&[][..], |lse| &lse[rows.start * heads..rows.end * heads]);
        (&self.output[rows.start * row..rows.end * row], lse)
    }

    /// Fails, with `what`, where something is further from the truth than the one table of tolerances allows. Gives the
    /// greatest error of the output in ulps.
    pub fn check(&self, what: &str, variant: &Variant, problem: &Problem, truth: &Truth) -> f64 {
        let dtype = problem.format.dtype;
        let allowed = tolerance(&variant.capabilities, dtype);
        let mut greatest = 0.0f64;
        for (i, got) in from_bytes(dtype, &self.output).into_iter().enumerate() {
            let (want, unit) = (truth.output[i], ulp(dtype, truth.magnitude[i]));
            let ulps = (f64::from(got) - want).abs() / unit;
            let place =
                (i / problem.width(), i / problem.shape.head_dim % problem.num_heads, i % problem.shape.head_dim);
            assert!(
                ulps <= allowed.output,
                "{what}: (row, head, element) {place:?} is {got}, want {want}: {ulps:.2} ulps"
            );
            greatest = greatest.max(ulps);
        }
        for (i, got) in self.lse.iter().flat_map(|lse| from_bytes(attention_kernels::Dtype::F32, lse)).enumerate() {
            let want = truth.lse[i];
            let close = (f64::from(got) - want).abs() <= allowed.lse * want.abs().max(1.0);
            assert!(close || f64::from(got) == want, "{what}: lse {i} is {got}, want {want}");
        }
        greatest
    }
}

/// Stored numbers in the order of [`KvShape::offset`], and scales of tokens, as the bytes of a cache.
pub fn cache_bytes(format: CacheFormat, shape: &KvShape, numbers: &[f32], of_tokens: &[f32]) -> Vec<u8> {
    let (strides, dim) = (format.layout.strides(shape), shape.head_dim);
    let mut ordered = vec![0.0; numbers.len()];
    for slot in 0..shape.num_blocks * shape.block_size {
        for head in 0..shape.num_kv_heads {
            let (block, token) = (slot / shape.block_size, slot % shape.block_size);
            let to = block * strides.block + head * strides.head + token * strides.token;
            ordered[to..to + dim].copy_from_slice(&numbers[shape.offset(slot, head)..][..dim]);
        }
    }
    if let Some(dtype) = element(format) {
        return to_bytes(dtype, &ordered);
    }
    match format.kv_dtype {
        KvDtype::Int8PerToken => {
            // Behind the rows of each block and head.
            let mut bytes = Vec::new();
            for (unit, rows) in ordered.chunks(shape.block_size * dim).enumerate() {
                let (block, head) = (unit / shape.num_kv_heads, unit % shape.num_kv_heads);
                bytes.extend(rows.iter().map(|&v| v as i8 as u8));
                for slot in block * shape.block_size..(block + 1) * shape.block_size {
                    bytes.extend(of_tokens[slot * shape.num_kv_heads + head].to_le_bytes());
                }
            }
            bytes
        }
        // −128 is no number that a writer leaves: the poison of a format without NaN.
        KvDtype::Int8 => ordered.iter().map(|&v| v as i8 as u8).collect(),
        other => ordered.iter().map(|&v| to_byte(other, v)).collect(),
    }
}

pub fn buffer(device: &dyn Device, bytes: &[u8]) -> Buffer {
    let mut buffer = device.alloc(bytes.len()).unwrap();
    device.upload(&mut buffer, 0, bytes).unwrap();
    buffer
}

pub fn floats(device: &dyn Device, values: &[f32]) -> Buffer {
    buffer(device, &to_bytes(attention_kernels::Dtype::F32, values))
}

pub fn bytes(device: &dyn Device, buffer: &Buffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len_bytes()];
    device.download(buffer, 0, &mut bytes).unwrap();
    bytes
}
