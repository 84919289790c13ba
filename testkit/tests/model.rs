//! Models with random weights, and their GGUF files.

use half::f16;
use testkit::model::gguf::{ALIGNMENT, Entry, Format, Value, write_head, write_tensor};
use testkit::model::{self, Shape};

#[test]
fn blocks_hold_what_the_formats_say() {
    let mut block: [f32; 32] = std::array::from_fn(|i| i as f32 / 16.0 - 1.0);
    block[3] = 2.0;
    let q8 = Format::Q8_0.encode(&block);
    let scale = f16::from_le_bytes([q8[0], q8[1]]).to_f32();
    assert_eq!((q8.len(), q8[2 + 3] as i8), (34, 127));
    assert!(block.iter().zip(&q8[2..]).all(|(w, &q)| (w - scale * f32::from(q as i8)).abs() < 0.51 * 2.0 / 127.0));
    let q4 = Format::Q4_0.encode(&block);
    let scale = f16::from_le_bytes([q4[0], q4[1]]).to_f32();
    assert_eq!((q4.len(), scale, q4[2 + 3] & 15), (18, -0.25, 0));
    for (i, w) in block.iter().enumerate() {
        let integer = (q4[2 + i % 16] >> (i / 16 * 4)) & 15;
        assert!((w - scale * (f32::from(integer) - 8.0)).abs() <= 0.125, "{i}: {w} {integer}");
    }
    assert_eq!(Format::Q8_0.encode(&[0.0; 32]), [0; 34]);
}

#[test]
fn a_head_says_where_each_tensor_lies() {
    let entry = |name: &str, shape: &[usize], format| Entry { name: name.into(), shape: shape.to_vec(), format };
    let tensors = [entry("a", &[3], Format::F32), entry("b", &[2, 32], Format::Q4_0)];
    let settings = [("general.architecture".to_string(), Value::Text("llama".into()))];
    let mut file = Vec::new();
    let start = write_head(&mut file, &settings, &tensors).unwrap();
    write_tensor(&mut file, Format::F32, &[1.0, 2.0, 3.0]).unwrap();
    write_tensor(&mut file, Format::Q4_0, &[0.5; 64]).unwrap();
    assert_eq!(file[..4], *b"GGUF");
    assert_eq!(u64::from_le_bytes(file[8..16].try_into().unwrap()), 2);
    assert!(start.is_multiple_of(ALIGNMENT) && file.len().is_multiple_of(ALIGNMENT));
    let first = &file[start..];
    assert_eq!(first[..4], 1.0f32.to_le_bytes());
    // The second tensor is after the padding: its scale is 0.5 / −8.
    assert_eq!(f16::from_le_bytes([first[32], first[33]]).to_f32(), -0.0625);
    // Extents are innermost first: 32, then 2, format 2, offset 32.
    let mut second = 32u64.to_le_bytes().to_vec();
    second.extend(2u64.to_le_bytes());
    second.extend(2u32.to_le_bytes());
    second.extend(32u64.to_le_bytes());
    assert!(file.windows(second.len()).any(|window| window == second));
}

#[test]
fn weights_are_bfloat16_of_the_wanted_spread_and_the_same_every_time() {
    let tensors = Shape::named("m135").unwrap().tensors();
    let tensor = tensors.iter().find(|tensor| tensor.name.ends_with("layers.3.self_attn.k_proj.weight")).unwrap();
    let weights = tensor.weights(7, 5);
    assert_eq!(weights.len(), 192 * 576);
    assert!(weights.iter().all(|w| w.to_bits() & 0xffff == 0));
    let variance = weights.iter().map(|w| f64::from(w * w)).sum::<f64>() / weights.len() as f64;
    assert!((variance.sqrt() / 0.02 - 1.0).abs() < 0.01, "{}", variance.sqrt());
    assert_eq!(weights, tensor.weights(7, 5));
    assert_ne!(weights, tensor.weights(8, 5));
    // Rows 0, 32, 1, 33 … of each head of 64.
    let in_gguf = tensor.in_gguf_order(weights.clone());
    for (row, source) in [(0, 0), (1, 32), (2, 1), (63, 63), (64, 64), (65, 96)] {
        assert_eq!(in_gguf[row * 576..][..576], weights[source * 576..][..576], "row {row}");
    }
}

#[test]
fn shapes_have_the_parameters_of_their_models() {
    for (name, millions) in [("m135", 134.5), ("q05", 494.0)] {
        let shape = Shape::named(name).unwrap();
        let count: usize = shape.tensors().iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum();
        assert!((count as f64 / 1e6 - millions).abs() < 0.1, "{name}: {count}");
        let (tokens, merges) = shape.vocabulary();
        assert_eq!((tokens.len(), merges.len()), (shape.vocab, 676));
        let mut sorted = tokens.clone();
        sorted.sort();
        sorted.dedup();
        assert_eq!(sorted.len(), tokens.len(), "every token once");
    }
    assert!(Shape::named("m136").unwrap_err().contains("m135 or q05"));
}

#[test]
fn the_files_of_a_model_have_the_same_bytes_as_ever() {
    let folder = tempfile::tempdir().unwrap();
    model::write(&Shape::named("tiny").unwrap(), folder.path(), 3).unwrap();
    let names =
        ["config.json", "tokenizer.json", "model.safetensors", "tiny-bf16.gguf", "tiny-q8_0.gguf", "tiny-q4_0.gguf"];
    let fnv = |bytes: Vec<u8>| {
        bytes
            .iter()
            .fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3))
    };
    let found = names.map(|name| fnv(std::fs::read(folder.path().join(name)).unwrap()));
    let text: Vec<String> = found.iter().map(|hash| format!("{hash:#018x}")).collect();
    assert_eq!(text, HASHES);
}

/// FNV-1a of the files, in the order of the test.
const HASHES: [&str; 6] = [
    "0x20656aab945f567f",
    "0x7ee7254f0e6a911b",
    "0x91fde7cd20f1594d",
    "0x1248e497d1e8a061",
    "0x6b28254beddee362",
    "0xb4eaf86a4d9a5e25",
];
