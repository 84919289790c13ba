//! Weights in the types, files and names that checkpoints come in.

use std::collections::HashMap;
use std::fs;

use crate::common::{Copy, Opened, files, message};
use crate::counter::allocated_bytes;
use half::{bf16, f16};
use models::Weights;
use safetensors::tensor::{SafeTensors, TensorView};
use serde_json::json;

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Rewrites the weights with other names or types: `change` gives a name, a type and bytes.
fn rewrite(copy: Copy, change: impl Fn(&str, &TensorView) -> (String, safetensors::Dtype, Vec<u8>)) -> Copy {
    let bytes = fs::read(copy.path(SINGLE)).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let changed: Vec<_> = tensors.iter().map(|(name, view)| (change(name, &view), view.shape().to_vec())).collect();
    let views = changed
        .iter()
        .map(|((name, dtype, data), shape)| (name.clone(), TensorView::new(*dtype, shape.clone(), data).unwrap()));
    copy.write(SINGLE, safetensors::serialize(views, None).unwrap())
}

fn halve(narrow: fn(f32) -> u16) -> impl Fn(&[u8]) -> Vec<u8> {
    move |data| {
        data.as_chunks::<4>().0.iter().flat_map(|&value| narrow(f32::from_le_bytes(value)).to_le_bytes()).collect()
    }
}

/// Deals the tensors out to `count` shards with an index.
fn shard(copy: Copy, count: usize) -> Copy {
    let bytes = fs::read(copy.path(SINGLE)).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut shards: Vec<HashMap<String, TensorView>> = vec![HashMap::new(); count];
    let mut weight_map = serde_json::Map::new();
    for (position, (name, view)) in tensors.tensors().into_iter().enumerate() {
        weight_map.insert(name.clone(), shard_name(position % count, count).into());
        shards[position % count].insert(name, view);
    }
    let mut copy = copy.remove(SINGLE).write(INDEX, json!({"metadata": {}, "weight_map": weight_map}).to_string());
    for (position, shard) in shards.into_iter().enumerate() {
        copy = copy.write(&shard_name(position, count), safetensors::serialize(shard, None).unwrap());
    }
    copy
}

fn shard_name(position: usize, count: usize) -> String {
    format!("model-{:05}-of-{count:05}.safetensors", position + 1)
}

#[test]
fn half_precision_is_widened_exactly() {
    let original = Weights::open(&files("llama")).unwrap();
    let narrow = [
        (device::Dtype::F16, safetensors::Dtype::F16, (|value| f16::from_f32(value).to_bits()) as fn(f32) -> u16),
        (device::Dtype::Bf16, safetensors::Dtype::BF16, |value| bf16::from_f32(value).to_bits()),
    ];
    for (dtype, stored, narrow) in narrow {
        let copy = rewrite(Copy::of("llama"), |name, view| (name.to_string(), stored, halve(narrow)(view.data())));
        let weights = Weights::open(&copy.files()).unwrap();
        assert_eq!(weights.total_bytes() * 2, original.total_bytes());
        for name in original.names() {
            let (view, wide) = (weights.get(name).unwrap(), original.get(name).unwrap().to_f32());
            assert_eq!(view.dtype, dtype);
            let rounded: Vec<f32> = wide
                .iter()
                .map(|value| match dtype {
                    device::Dtype::F16 => f16::from_f32(*value).to_f32(),
                    _ => bf16::from_f32(*value).to_f32(),
                })
                .collect();
            assert_eq!(view.to_f32(), rounded, "{name}");
        }
    }
}

#[test]
fn shards_hold_the_same_tensors_as_one_file() {
    let original = Weights::open(&files("qwen2")).unwrap();
    let copy = shard(Copy::of("qwen2"), 3);
    let sharded = Weights::open(&copy.files()).unwrap();
    assert_eq!(sharded.names().collect::<Vec<_>>(), original.names().collect::<Vec<_>>());
    assert_eq!(sharded.total_bytes(), original.total_bytes());
    for name in original.names() {
        assert_eq!(sharded.get(name).unwrap().data, original.get(name).unwrap().data, "{name}");
    }
}

#[test]
fn names_are_found_with_and_without_their_prefix() {
    let original = Weights::open(&files("llama")).unwrap();
    let strip = |name: &str| name.strip_prefix("model.").unwrap_or(name).to_string();
    let copy = rewrite(Copy::of("llama"), |name, view| (strip(name), view.dtype(), view.data().to_vec()));
    let bare = Weights::open(&copy.files()).unwrap();
    assert!(bare.names().all(|name| !name.starts_with("model.")));
    for name in original.names() {
        assert_eq!(bare.get(name).unwrap().data, original.get(name).unwrap().data, "{name}");
        assert_eq!(original.get(&strip(name)).unwrap().name, name);
    }
}

#[test]
fn unused_tensors_may_have_any_type() {
    let change = |name: &str, view: &TensorView| match name {
        "lm_head.weight" => (name.to_string(), safetensors::Dtype::I32, view.data().to_vec()),
        _ => (name.to_string(), view.dtype(), view.data().to_vec()),
    };
    let copy = rewrite(Copy::of("llama"), change);
    let weights = Weights::open(&copy.files()).unwrap();
    assert!(weights.get("model.norm.weight").is_some());
    assert!(weights.get("lm_head.weight").is_none());
    let parts = [SINGLE, "lm_head.weight", "I32", "F32, F16 or BF16"];
    message(weights.expect("lm_head.weight", &[560, 64]), &parts);
}

#[test]
fn a_tensor_that_is_missing_or_of_another_shape_is_named() {
    let weights = Weights::open(&files("llama")).unwrap();
    message(weights.expect("model.nope.weight", &[3, 4]), &[SINGLE, "model.nope.weight", "not found", "[3, 4]"]);
    message(weights.expect("model.norm.weight", &[65]), &[SINGLE, "model.norm.weight", "[64]", "[65]"]);
    // A name out of a stranger's file does not break the line.
    message(weights.expect("two\nlines", &[1]), &["two\\nlines"]);
}

#[test]
fn a_truncated_file_is_refused_wherever_it_ends() {
    let bytes = fs::read(crate::common::folder("llama").join(SINGLE)).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for end in
        [0, 1, 7, 8, 9, 8 + header / 2, 8 + header - 1, 8 + header, 8 + header + 1, bytes.len() / 2, bytes.len() - 1]
    {
        let copy = Copy::of("llama").write(SINGLE, &bytes[..end]);
        message(Weights::open(&copy.files()), &[SINGLE, &format!("found {end} bytes"), "expected", "truncated"]);
    }
    let mut longer = bytes.clone();
    longer.push(0);
    let copy = Copy::of("llama").write(SINGLE, &longer);
    let lengths = [format!("found {} bytes", longer.len()), format!("{} bytes according to its header", bytes.len())];
    message(Weights::open(&copy.files()), &[SINGLE, &lengths[0], &lengths[1]]);
}

#[test]
fn a_damaged_header_is_refused() {
    let with_header = |header: &str| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        let copy = Copy::of("llama").write(SINGLE, bytes);
        message(Weights::open(&copy.files()), &[SINGLE, "header"])
    };
    for header in [
        "not json",
        "[]",
        r#"{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}"#,
        r#"{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}"#,
        r#"{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}"#,
        r#"{"a": {"dtype": "F32", "shape": [18446744073709551615, 2], "data_offsets": [0, 4]}}"#,
        r#"{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}"#,
    ] {
        with_header(header);
    }
    for length in [100_000_001, u64::MAX] {
        let copy = Copy::of("llama").write(SINGLE, length.to_le_bytes());
        message(Weights::open(&copy.files()), &[SINGLE, &format!("a header of {length} bytes"), "at most 100000000"]);
    }
    let copy =
        Copy::of("llama").write(SINGLE, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4967215360\n");
    message(Weights::open(&copy.files()), &[SINGLE, "a pointer of Git LFS", "git lfs pull"]);
}

#[test]
fn a_header_costs_a_small_multiple_of_its_size() {
    let one = |shape: &str| format!(r#""a": {{"dtype": "F32", "shape": [{shape}], "data_offsets": [0, 0]}}"#);
    let many: Vec<String> =
        (0..20_000).map(|i| format!(r#""{i}": {{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}"#)).collect();
    let notes: Vec<String> = (0..100_000).map(|i| format!(r#""{i}":"""#)).collect();
    for header in [
        one(&vec!["0"; 500_000].join(",")),
        many.join(","),
        format!(r#""__metadata__": {{{}}}, {}"#, notes.join(","), one("0")),
    ] {
        let header = format!("{{{header}}}");
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        let files = Copy::of("llama").write(SINGLE, &bytes);
        let (files, before) = (files.files(), allocated_bytes());
        let opened = Weights::open(&files).map(|weights| weights.names().count());
        let taken = allocated_bytes() - before;
        assert!(taken <= 24 * bytes.len(), "{taken} bytes for a header of {}", bytes.len());
        assert!(opened.is_ok_and(|tensors| tensors == 1 || tensors == 20_000));
    }
}

#[test]
fn a_checkpoint_without_weights_is_refused() {
    let copy = Copy::of("llama").remove(SINGLE).write("pytorch_model.bin", "");
    message(Weights::open(&copy.files()), &[SINGLE, "not found", "safetensors.index.json"]);
}

#[test]
fn an_index_that_does_not_match_its_shards_is_refused() {
    let sharded = || shard(Copy::of("llama"), 2);
    let first = shard_name(0, 2);
    message(Weights::open(&sharded().remove(&first).files()), &[&first, "not found", INDEX]);
    message(Weights::open(&sharded().write(INDEX, "{").files()), &[INDEX, "JSON"]);
    message(Weights::open(&sharded().write(INDEX, "{}").files()), &[INDEX, "weight_map"]);

    let lists_more = sharded().edit(INDEX, |index| index["weight_map"]["model.extra.weight"] = json!(first));
    message(Weights::open(&lists_more.files()), &[&first, "model.extra.weight", "not found"]);
    for elsewhere in ["../model.safetensors", "/model.safetensors", "", ".", "a/b.safetensors"] {
        let copy = sharded().edit(INDEX, |index| index["weight_map"]["model.extra.weight"] = json!(elsewhere));
        message(Weights::open(&copy.files()), &[INDEX, &format!("{elsewhere:?}"), "in the folder of the index"]);
    }
    let copy = sharded();
    let bytes = fs::read(copy.path(&first)).unwrap();
    let truncated = copy.write(&first, &bytes[..bytes.len() - 4]);
    message(Weights::open(&truncated.files()), &[&first, "truncated"]);
}
