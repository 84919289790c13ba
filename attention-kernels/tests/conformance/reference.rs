//! The reference cases in `tests/reference/`, whose outputs were computed in float64 by another program.

use std::path::PathBuf;
use std::sync::Arc;

use attention_kernels::{
    AttentionBatch, CacheFormat, CacheWriteArgs, Dtype, KvCache, KvDtype, KvScales, KvShape, Layout, Operation,
};
use safetensors::SafeTensors;
use serde::Deserialize;
use serde_json::json;
use trial::numbers::{element, from_byte, from_bytes};
use trial::{Problem, cache_bytes, floats};

use super::caches::{loaded, write_workspace};
use super::devices::{self, buffer, bytes, variants_on};
use super::failures::Looks;

#[derive(Deserialize)]
struct Case {
    file: String,
    query_dtype: String,
    cache_dtype: String,
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

#[derive(Deserialize)]
struct Write {
    file: String,
    cache_dtype: String,
    num_kv_heads: usize,
    head_dim: usize,
    block_size: usize,
    num_blocks: usize,
}

fn folder() -> PathBuf {
    testkit::workspace::root().join("attention-kernels/tests/reference")
}

fn cases<T: serde::de::DeserializeOwned>(file: &str) -> Vec<T> {
    serde_json::from_slice(&std::fs::read(folder().join(file)).unwrap()).unwrap()
}

fn dtype(name: &str) -> Dtype {
    Dtype::ALL.into_iter().find(|dtype| dtype.name() == name).unwrap()
}

fn kv_dtype(name: &str, query: Dtype) -> KvDtype {
    let narrower = KvDtype::ALL.into_iter().find(|kv_dtype| kv_dtype.name() == name);
    narrower.filter(|_| name != query.name()).unwrap_or(KvDtype::Same)
}

fn tensor(tensors: &SafeTensors<'_>, name: &str, dtype: Dtype) -> Vec<f32> {
    from_bytes(dtype, tensors.tensor(name).unwrap().data())
}

fn optional(tensors: &SafeTensors<'_>, name: &str) -> Option<Vec<f32>> {
    tensors.tensor(name).ok().map(|tensor| from_bytes(Dtype::F32, tensor.data()))
}

fn ints(tensors: &SafeTensors<'_>, name: &str) -> Vec<i32> {
    tensors.tensor(name).unwrap().data().as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect()
}

/// Returns a cache of a file, `[blocks, block_size, heads, dim]`, as stored numbers in the order of [`KvShape::offset`].
fn stored(tensors: &SafeTensors<'_>, name: &str, format: CacheFormat, shape: &KvShape) -> Vec<f32> {
    let data = tensors.tensor(name).unwrap();
    let numbers = match element(format) {
        Some(dtype) => from_bytes(dtype, data.data()),
        None => data.data().iter().map(|byte| from_byte(format.kv_dtype, *byte)).collect(),
    };
    let mut out = vec![0.0; numbers.len()];
    for slot in 0..shape.num_blocks * shape.block_size {
        for head in 0..shape.num_kv_heads {
            let from = (slot * shape.num_kv_heads + head) * shape.head_dim;
            out[shape.offset(slot, head)..][..shape.head_dim].copy_from_slice(&numbers[from..from + shape.head_dim]);
        }
    }
    out
}

fn problem(case: &Case, tensors: &SafeTensors<'_>) -> Problem {
    let shape = KvShape {
        num_blocks: case.num_blocks,
        num_kv_heads: case.num_kv_heads,
        block_size: case.block_size,
        head_dim: case.head_dim,
    };
    let dtype = dtype(&case.query_dtype);
    let format = CacheFormat { dtype, kv_dtype: kv_dtype(&case.cache_dtype, dtype), layout: Layout::Hnd };
    let tables = ints(tensors, "block_tables");
    Problem {
        format,
        shape,
        num_heads: case.num_heads,
        query: tensor(tensors, "query", dtype),
        query_gap: 0,
        keys: stored(tensors, "key_cache", format, &shape),
        values: stored(tensors, "value_cache", format, &shape),
        latent: None,
        scales: optional(tensors, "k_scale").zip(optional(tensors, "v_scale")).map(|(keys, values)| [keys, values]),
        token_scales: Default::default(),
        batch: AttentionBatch {
            query_starts: ints(tensors, "cu_query_lens").iter().map(|&start| start as u32).collect(),
            context_lens: case.total_lens.clone(),
            block_tables: tables.chunks(tables.len() / case.total_lens.len()).collect(),
        },
        scale: case.scale,
        window: case.sliding_window,
        sparse: None,
        soft_cap: case.softcap,
        slopes: optional(tensors, "alibi_slopes"),
        sinks: None,
    }
}

#[test]
fn every_variant_equals_the_reference_cases() {
    let cases: Vec<Case> = cases("cases.json");
    assert_eq!(cases.len(), 14);
    let devices = devices::all();
    let (mut compared, mut failures) = (vec![0; devices.len()], Looks::default());
    for case in cases {
        let file = std::fs::read(folder().join(&case.file)).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let problem = problem(&case, &tensors);
        let mut truth = problem.truth();
        let file_says = [tensor(&tensors, "output", Dtype::F32), tensor(&tensors, "lse", Dtype::F32)];
        for (mine, said) in [&mut truth.output, &mut truth.lse].into_iter().zip(&file_says) {
            for (mine, said) in mine.iter_mut().zip(said) {
                let close = (*mine - f64::from(*said)).abs() <= 1e-6 * mine.abs().max(1.0);
                assert!(close, "{}: float64 here gives {mine}, the file has {said}", case.file);
                *mine = f64::from(*said);
            }
        }
        for (device, compared) in devices.iter().zip(&mut compared) {
            let on_device = problem.on(device).unwrap();
            for variant in variants_on(&**device, &[Operation::Decode, Operation::Prefill]) {
                let can = &variant.capabilities;
                let format = problem.format;
                if can.dtypes.contains(&format.dtype)
                    && can.kv_dtypes.contains(&format.kv_dtype)
                    && can.head_sizes.contain(case.head_dim)
                    && can.latent.misfit(case.head_dim, None).is_none()
                    && can.block_sizes.contain(case.block_size)
                {
                    failures.look(&**device, variant, &json!({ "case": case.file }), || {
                        let got = on_device.run(variant, 0..problem.batch.num_seqs(), can.lse)?;
                        Ok(got.check(variant, &problem, &truth)?)
                    });
                    *compared += 1;
                }
            }
        }
    }
    for (device, compared) in devices.iter().zip(compared) {
        println!("{}: {compared} comparisons", device.name());
        assert!(compared >= 9 * 2, "{}: a variant of each operation runs on every case of its types", device.name());
    }
}

#[test]
fn cache_writes_equal_the_reference_cases() {
    for case in cases::<Write>("writes.json") {
        let file = std::fs::read(folder().join(&case.file)).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let shape = KvShape {
            num_blocks: case.num_blocks,
            num_kv_heads: case.num_kv_heads,
            block_size: case.block_size,
            head_dim: case.head_dim,
        };
        let format =
            CacheFormat { dtype: Dtype::F16, kv_dtype: kv_dtype(&case.cache_dtype, Dtype::F16), layout: Layout::Hnd };
        let slots = tensors.tensor("slot_mapping").unwrap();
        let slots: Vec<i64> = slots.data().as_chunks::<8>().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect();
        let want = ["key_cache", "value_cache"]
            .map(|name| cache_bytes(format, &shape, 0, &stored(&tensors, name, format, &shape), &[]));
        let source = [tensors.tensor("key").unwrap().data(), tensors.tensor("value").unwrap().data()].concat();
        for device in devices::all() {
            let writers = variants_on(&*device, &[Operation::CacheWrite]);
            for variant in writers.into_iter().filter(|v| v.capabilities.dtypes.contains(&format.dtype)) {
                let mut cache = KvCache::with_format(&*device, shape, format).unwrap();
                cache.scales =
                    optional(&tensors, "k_scale").zip(optional(&tensors, "v_scale")).map(|(keys, values)| {
                        let [keys, values] = [keys, values].map(|scale| floats(&*device, &scale).unwrap());
                        Arc::new(KvScales { keys, values, per_head: false })
                    });
                let workspace = loaded(write_workspace(&*device, &shape, slots.len()), &*device, &slots);
                let args = CacheWriteArgs {
                    source: &buffer(&*device, &source),
                    key_offset: 0,
                    value_offset: source.len() / 4,
                    stride: shape.num_kv_heads * shape.head_dim,
                    slot_mapping: &slots,
                    cache: &mut cache,
                    workspace: Some(&workspace),
                };
                variant.cache_write(&*device, args).unwrap();
                for (cache, want) in cache.buffers().zip(&want) {
                    assert!(bytes(&*device, cache) == *want, "{}: {}", variant.name, case.file);
                }
            }
        }
    }
}
