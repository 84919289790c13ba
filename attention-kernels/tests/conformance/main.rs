//! Every attention variant against exact results in float64: the reference cases of the tree and generated ones.
//! Slots past a context hold NaN here, so a kernel that reads one fails loudly.

#![allow(clippy::unwrap_used)]

use attention_kernels::{
    AttentionArgs, AttentionBatch, BlockCopyArgs, CacheWriteArgs, Kernel, KvCache, KvShape, Operation, PARTITION,
    variants,
};
use device::{Buffer, Device};
use proptest::prelude::*;
use serde::Deserialize;
use std::path::PathBuf;
use std::sync::Arc;

/// Greatest absolute error of a float32 output (the reference's own figure for plain float32 is below 7e-7).
const TOLERANCE: f32 = 2e-5;

fn device(threads: usize) -> Arc<dyn Device> {
    device::open("cpu", Some(threads)).unwrap()
}

fn buffer(device: &dyn Device, values: &[f32]) -> Buffer {
    let mut buffer = device.alloc(values.len() * 4).unwrap();
    buffer.host_mut::<f32>().unwrap().copy_from_slice(values);
    buffer
}

/// The attention variants that this machine can run, as (name, operation, function).
fn attention_variants() -> Vec<(&'static str, Operation, Kernel)> {
    let all = [Operation::Decode, Operation::Prefill].into_iter().flat_map(|operation| variants(operation));
    all.filter(|v| v.capabilities.isa.is_available()).map(|v| (v.name, v.operation, v.kernel)).collect()
}

/// One call's inputs, with the float64 truth computed by [`Problem::truth`].
struct Problem {
    num_heads: usize,
    shape: KvShape,
    query: Vec<f32>,
    cache: KvCache,
    batch: AttentionBatch,
    scale: f32,
    window: Option<usize>,
    soft_cap: Option<f32>,
    slopes: Option<Vec<f32>>,
}

impl Problem {
    fn run(&self, device: &dyn Device, kernel: Kernel, seqs: std::ops::Range<usize>) -> Vec<f32> {
        let Kernel::Attention(kernel) = kernel else { panic!("not an attention kernel") };
        let query = buffer(device, &self.query);
        let mut output = buffer(device, &vec![7.0; self.query.len()]);
        let args = AttentionArgs {
            query: &query,
            query_stride: self.num_heads * self.shape.head_dim,
            num_heads: self.num_heads,
            output: &mut output,
            cache: &self.cache,
            batch: &self.batch,
            seqs,
            scale: self.scale,
            window: self.window,
            soft_cap: self.soft_cap,
            alibi_slopes: self.slopes.as_deref(),
        };
        kernel(device, args).unwrap();
        output.host::<f32>().unwrap().to_vec()
    }

    fn one_row_each(&self) -> bool {
        self.batch.query_starts.windows(2).all(|w| w[1] - w[0] == 1)
    }

    fn truth(&self) -> Vec<f32> {
        let (keys, values) = (self.cache.keys.host::<f32>().unwrap(), self.cache.values.host::<f32>().unwrap());
        let (dim, heads) = (self.shape.head_dim, self.num_heads);
        let mut out = vec![0.0; self.query.len()];
        for seq in 0..self.batch.num_seqs() {
            let (start, end) = (self.batch.query_starts[seq] as usize, self.batch.query_starts[seq + 1] as usize);
            let context = self.batch.context_lens[seq] as usize;
            for row in start..end {
                if context == 0 {
                    continue;
                }
                let position = context - (end - row);
                for head in 0..heads {
                    let q = &self.query[(row * heads + head) * dim..][..dim];
                    let first = self.window.map_or(0, |w| (position + 1).saturating_sub(w));
                    let at = |token: usize| {
                        let block = self.batch.table(seq)[token / self.shape.block_size] as usize;
                        self.shape.offset(
                            block * self.shape.block_size + token % self.shape.block_size,
                            head * self.shape.num_kv_heads / heads,
                        )
                    };
                    let scores: Vec<f64> = (first..=position)
                        .map(|token| {
                            let dot: f64 = (0..dim).map(|d| f64::from(q[d]) * f64::from(keys[at(token) + d])).sum();
                            let mut s = f64::from(self.scale) * dot;
                            if let Some(cap) = self.soft_cap {
                                s = f64::from(cap) * (s / f64::from(cap)).tanh();
                            }
                            s + self.slopes.as_ref().map_or(0.0, |v| f64::from(v[head]))
                                * (token as f64 - position as f64)
                        })
                        .collect();
                    let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let total: f64 = scores.iter().map(|s| (s - greatest).exp()).sum();
                    for d in 0..dim {
                        let sum: f64 = scores
                            .iter()
                            .enumerate()
                            .map(|(j, s)| (s - greatest).exp() * f64::from(values[at(first + j) + d]))
                            .sum();
                        out[(row * heads + head) * dim + d] = (sum / total) as f32;
                    }
                }
            }
        }
        out
    }
}

fn assert_close(what: &str, got: &[f32], want: &[f32]) {
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((g - w).abs() <= TOLERANCE, "{what}: element {i} is {g}, want {w}");
    }
}

#[derive(Deserialize)]
struct Case {
    file: String,
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    block_size: usize,
    num_blocks: usize,
    total_lens: Vec<u32>,
    scale: f32,
    sliding_window: Option<usize>,
    softcap: Option<f32>,
}

fn floats(tensors: &safetensors::SafeTensors<'_>, name: &str) -> Vec<f32> {
    tensors.tensor(name).unwrap().data().chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn ints(tensors: &safetensors::SafeTensors<'_>, name: &str) -> Vec<i32> {
    tensors.tensor(name).unwrap().data().chunks_exact(4).map(|b| i32::from_le_bytes(b.try_into().unwrap())).collect()
}

#[test]
fn every_variant_equals_the_reference_cases() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/reference");
    let cases: Vec<Case> = serde_json::from_slice(&std::fs::read(folder.join("cases.json")).unwrap()).unwrap();
    assert_eq!(cases.len(), 9);
    let device = device(2);
    let mut compared = 0;
    for case in cases {
        let bytes = std::fs::read(folder.join(&case.file)).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let shape = KvShape {
            num_blocks: case.num_blocks,
            num_kv_heads: case.num_kv_heads,
            block_size: case.block_size,
            head_dim: case.head_dim,
        };
        // The files hold [blocks, block_size, heads, dim]; the tree's layout has heads before tokens.
        let transpose = |source: Vec<f32>| {
            let mut out = vec![0.0; source.len()];
            for slot in 0..case.num_blocks * case.block_size {
                for head in 0..case.num_kv_heads {
                    let from = (slot * case.num_kv_heads + head) * case.head_dim;
                    out[shape.offset(slot, head)..][..case.head_dim]
                        .copy_from_slice(&source[from..from + case.head_dim]);
                }
            }
            buffer(&*device, &out)
        };
        let cache = KvCache {
            shape,
            keys: transpose(floats(&tensors, "key_cache")),
            values: transpose(floats(&tensors, "value_cache")),
        };
        let tables = ints(&tensors, "block_tables");
        let problem = Problem {
            num_heads: case.num_heads,
            shape,
            query: floats(&tensors, "query"),
            cache,
            batch: AttentionBatch {
                query_starts: ints(&tensors, "cu_query_lens").iter().map(|&x| x as u32).collect(),
                max_blocks: tables.len() / case.total_lens.len(),
                context_lens: case.total_lens,
                block_tables: tables,
            },
            scale: case.scale,
            window: case.sliding_window,
            soft_cap: case.softcap,
            slopes: tensors.tensor("alibi_slopes").ok().map(|_| floats(&tensors, "alibi_slopes")),
        };
        let want = floats(&tensors, "output");
        assert_close(&format!("float64 truth of this test, {}", case.file), &problem.truth(), &want);
        for (name, operation, kernel) in attention_variants() {
            if operation == Operation::Decode && !problem.one_row_each() {
                continue;
            }
            let got = problem.run(&*device, kernel, 0..problem.batch.num_seqs());
            assert_close(&format!("{name} {operation}, {}", case.file), &got, &want);
            compared += 1;
        }
    }
    assert!(compared >= 9 * 2, "at least the reference and the portable variant run on every case");
}

fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    }
}

/// What a generated problem looks like.
struct Look {
    /// Query heads, key/value heads.
    heads: (usize, usize),
    dim: usize,
    block_size: usize,
    window: Option<usize>,
    /// With a soft cap and ALiBi slopes.
    extras: bool,
}

/// A problem with the given (rows, context) of each sequence; everything that must not be read holds NaN.
fn problem(device: &dyn Device, seed: u64, look: &Look, lens: &[(usize, usize)]) -> Problem {
    let &Look { heads, dim, block_size, window, extras } = look;
    let mut next = random(seed);
    let mut value = move || (next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
    let mut next = random(seed ^ 77);
    let max_blocks = lens.iter().map(|&(_, context)| context.div_ceil(block_size)).max().unwrap() + 2;
    let num_blocks = lens.len() * max_blocks + 1;
    let shape = KvShape { num_blocks, num_kv_heads: heads.1, block_size, head_dim: dim };
    let mut free: Vec<i32> = (0..num_blocks as i32).collect();
    for i in (1..free.len()).rev() {
        free.swap(i, (next() % (i as u64 + 1)) as usize);
    }
    let mut keys = vec![f32::NAN; num_blocks * shape.block_elements()];
    let mut values = keys.clone();
    let (mut starts, mut contexts, mut tables) = (vec![0u32], Vec::new(), Vec::new());
    for &(rows, context) in lens {
        starts.push(starts.last().unwrap() + rows as u32);
        contexts.push(context as u32);
        let mut table = vec![-1; max_blocks];
        for entry in table.iter_mut().take(context.div_ceil(block_size)) {
            *entry = free.pop().unwrap();
        }
        for token in 0..context {
            let slot = table[token / block_size] as usize * block_size + token % block_size;
            for head in 0..heads.1 {
                for d in 0..dim {
                    keys[shape.offset(slot, head) + d] = value();
                    values[shape.offset(slot, head) + d] = value();
                }
            }
        }
        tables.extend(table);
    }
    let rows = *starts.last().unwrap() as usize;
    Problem {
        num_heads: heads.0,
        shape,
        query: (0..rows * heads.0 * dim).map(|_| value() * 3.0).collect(),
        cache: KvCache { shape, keys: buffer(device, &keys), values: buffer(device, &values) },
        batch: AttentionBatch { query_starts: starts, context_lens: contexts, block_tables: tables, max_blocks },
        scale: 1.0 / (dim as f32).sqrt(),
        window,
        soft_cap: extras.then_some(3.0),
        slopes: extras.then(|| (0..heads.0).map(|h| 0.5f32.powi(h as i32 + 1)).collect()),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn every_variant_equals_float64_and_a_sequence_alone(
        seed: u64,
        kv_heads in 1usize..4,
        group in 1usize..7,
        dim in prop::sample::select(vec![8usize, 20, 32, 64, 80, 96, 112, 128]),
        block_size in prop::sample::select(vec![8usize, 16, 32, 64]),
        lens in prop::collection::vec((1usize..6, 0usize..90), 1..5),
        window in prop::option::of(1usize..40),
        extras: bool,
        threads in 1usize..3,
    ) {
        // A context of 0 is padding and legal; else it includes the rows themselves.
        let lens: Vec<(usize, usize)> = lens.into_iter().map(|(rows, before)| (rows, if before == 0 { 0 } else { before + rows })).collect();
        let device = device(threads);
        let look = Look { heads: (kv_heads * group, kv_heads), dim, block_size, window, extras };
        let problem = problem(&*device, seed, &look, &lens);
        let want = problem.truth();
        for (name, operation, kernel) in attention_variants() {
            if operation == Operation::Decode && !problem.one_row_each() {
                continue;
            }
            let got = problem.run(&*device, kernel, 0..lens.len());
            assert_close(&format!("{name} {operation}"), &got, &want);
            let width = problem.num_heads * dim;
            for seq in 0..lens.len() {
                let alone = problem.run(&*device, kernel, seq..seq + 1);
                let rows = problem.batch.query_starts[seq] as usize * width..problem.batch.query_starts[seq + 1] as usize * width;
                prop_assert_eq!(&alone[rows.clone()], &got[rows.clone()], "{} {}: sequence {} alone", name, operation, seq);
                prop_assert!(alone[..rows.start].iter().chain(&alone[rows.end..]).all(|&v| v == 7.0), "{} wrote rows of others", name);
            }
        }
    }
}

#[test]
fn partition_borders_are_exact_and_chunks_do_not_change_a_bit() {
    let device = device(2);
    for context in [PARTITION - 1, PARTITION, PARTITION + 1, 2 * PARTITION - 1, 2 * PARTITION, 2 * PARTITION + 1] {
        let rows = 5;
        let look = Look { heads: (4, 2), dim: 64, block_size: 16, window: None, extras: false };
        let whole = problem(&*device, 3, &look, &[(rows, context)]);
        let want = whole.truth();
        for (name, operation, kernel) in attention_variants() {
            if operation == Operation::Decode {
                continue;
            }
            let got = whole.run(&*device, kernel, 0..1);
            assert_close(&format!("{name}, context {context}"), &got, &want);
            // The same rows, one step each (decode), read the same cache with a shorter context.
            let decode = variants(Operation::Decode).into_iter().find(|v| v.name == name).unwrap().kernel;
            for row in 0..rows {
                let width = whole.num_heads * 64;
                let step = Problem {
                    query: whole.query[row * width..(row + 1) * width].to_vec(),
                    batch: AttentionBatch {
                        query_starts: vec![0, 1],
                        context_lens: vec![(context - rows + row + 1) as u32],
                        ..whole.batch.clone()
                    },
                    cache: KvCache {
                        shape: whole.shape,
                        keys: buffer(&*device, whole.cache.keys.host().unwrap()),
                        values: buffer(&*device, whole.cache.values.host().unwrap()),
                    },
                    slopes: None,
                    ..whole
                };
                assert_eq!(
                    step.run(&*device, decode, 0..1),
                    got[row * width..(row + 1) * width],
                    "{name}, context {context}, row {row}"
                );
            }
        }
    }
}

#[test]
fn cache_writes_touch_their_slots_alone_and_skip_minus_one() {
    let device = device(1);
    let shape = KvShape { num_blocks: 6, num_kv_heads: 2, block_size: 8, head_dim: 20 };
    let (stride, width) = (100, 40);
    let mut next = random(5);
    let source: Vec<f32> = (0..4 * stride).map(|_| (next() % 1000) as f32).collect();
    let slot_mapping = [9i64, -1, 47, 0];
    for variant in variants(Operation::CacheWrite) {
        let Kernel::CacheWrite(kernel) = variant.kernel else { panic!("{}", variant.name) };
        let mut cache = KvCache::new(&*device, shape).unwrap();
        let source = buffer(&*device, &source);
        kernel(
            &*device,
            CacheWriteArgs {
                source: &source,
                key_offset: 10,
                value_offset: 60,
                stride,
                slot_mapping: &slot_mapping,
                cache: &mut cache,
            },
        )
        .unwrap();
        let source = source.host::<f32>().unwrap();
        for (cache, offset) in [(&cache.keys, 10), (&cache.values, 60)] {
            let mut want = vec![0.0; shape.num_blocks * shape.block_elements()];
            for (row, &slot) in slot_mapping.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
                for head in 0..2 {
                    want[shape.offset(slot as usize, head)..][..20]
                        .copy_from_slice(&source[offset + row * stride + head * 20..][..20]);
                }
            }
            assert_eq!(cache.host::<f32>().unwrap(), want, "{}", variant.name);
        }
        assert_eq!(width, shape.num_kv_heads * shape.head_dim);
        let bad = CacheWriteArgs {
            source: &buffer(&*device, source),
            key_offset: 0,
            value_offset: 40,
            stride,
            slot_mapping: &[48],
            cache: &mut cache,
        };
        let error = kernel(&*device, bad).unwrap_err().to_string();
        assert!(error.contains("slot") && error.contains("48"), "{error}");
    }
}

#[test]
fn block_copies_run_in_order_with_repeated_sources() {
    let device = device(1);
    let shape = KvShape { num_blocks: 5, num_kv_heads: 1, block_size: 8, head_dim: 4 };
    for variant in variants(Operation::BlockCopy) {
        let Kernel::BlockCopy(kernel) = variant.kernel else { panic!("{}", variant.name) };
        let filled: Vec<f32> = (0..5 * shape.block_elements()).map(|i| (i / shape.block_elements()) as f32).collect();
        let mut cache = KvCache { shape, keys: buffer(&*device, &filled), values: buffer(&*device, &filled) };
        kernel(&*device, BlockCopyArgs { copies: &[(0, 3), (0, 4), (3, 1)], cache: &mut cache }).unwrap();
        for cache in [&cache.keys, &cache.values] {
            let blocks: Vec<f32> = cache.host::<f32>().unwrap().chunks(shape.block_elements()).map(|b| b[0]).collect();
            assert_eq!(blocks, [0.0, 0.0, 2.0, 0.0, 0.0], "{}", variant.name);
        }
        let error = kernel(&*device, BlockCopyArgs { copies: &[(0, 5)], cache: &mut cache }).unwrap_err().to_string();
        assert!(error.contains("block id") && error.contains('5'), "{error}");
    }
}
