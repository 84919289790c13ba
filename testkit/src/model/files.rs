//! `cargo xtask bench-model`: a model of a known shape with random weights, as a checkpoint folder and as GGUF files.
//!
//! Weights are drawn once, in bfloat16; every file holds those, or what the file's format makes of them. A seed gives the
//! same bytes everywhere.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use half::bf16;
use serde_json::{Map, Value, json};

use super::gguf::{self, Entry, Format};
use super::shape::{Shape, Tensor};

/// Standard deviation of a weight, as models are initialised with.
const DEVIATION: f32 = 0.02;

/// Formats of the GGUF files, and what their names end in.
const FILES: [(Format, &str); 3] = [(Format::Bf16, "bf16"), (Format::Q8_0, "q8_0"), (Format::Q4_0, "q4_0")];

/// Writes the folder: `config.json`, `tokenizer.json`, `model.safetensors`, and `NAME-FORMAT.gguf` for each format.
///
/// # Errors
/// One line: a file that could not be written.
pub fn write(shape: &Shape, folder: &Path, seed: u64) -> Result<(), String> {
    let failed = |what: &str| {
        let path = folder.join(what).display().to_string();
        move |error: std::io::Error| format!("{path}: {error}")
    };
    let (tokens, merges) = write_all_but_weights(shape, folder)?;
    let tensors = shape.tensors();
    let create = |name: &str| File::create(folder.join(name)).map(BufWriter::new).map_err(failed(name));
    let mut safetensors = create("model.safetensors")?;
    safetensors.write_all(&safetensors_head(&tensors)).map_err(failed("model.safetensors"))?;
    let mut files = Vec::new();
    for (format, suffix) in FILES {
        let name = format!("{}-{suffix}.gguf", shape.name);
        let mut file = create(&name)?;
        let entries: Vec<Entry> = tensors.iter().map(|tensor| entry(tensor, format)).collect();
        gguf::write_head(&mut file, &settings(shape, format, &tokens, &merges), &entries).map_err(failed(&name))?;
        files.push((name, file, entries));
    }
    for (index, tensor) in tensors.iter().enumerate() {
        let numbers = draw(tensor, seed, index as u64);
        let data: Vec<u8> = numbers.iter().flat_map(|&w| bf16::from_f32(w).to_le_bytes()).collect();
        safetensors.write_all(&data).map_err(failed("model.safetensors"))?;
        let numbers = turned(tensor, numbers);
        for (name, file, entries) in &mut files {
            gguf::write_tensor(file, entries[index].format, &numbers).map_err(failed(name))?;
        }
    }
    safetensors.flush().map_err(failed("model.safetensors"))?;
    files.iter_mut().try_for_each(|(name, file, _)| file.flush().map_err(failed(name)))
}

/// Writes a folder without weights: what [`write()`] does, with `head.safetensors` in the place of the tensors, the bytes that stand
/// before them. Whoever appends them has a checkpoint.
///
/// # Errors
/// One line: a file that could not be written.
pub fn write_head(shape: &Shape, folder: &Path) -> Result<(), String> {
    write_all_but_weights(shape, folder)?;
    let file = folder.join("head.safetensors");
    std::fs::write(&file, safetensors_head(&shape.tensors())).map_err(|error| format!("{}: {error}", file.display()))
}

/// Returns the tokens and merges of the tokenizer.
fn write_all_but_weights(shape: &Shape, folder: &Path) -> Result<(Vec<String>, Vec<String>), String> {
    std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let (tokens, merges) = shape.vocabulary();
    for (name, value) in [
        ("config.json", shape.config()),
        ("tokenizer.json", tokenizer(&tokens, &merges)),
        ("tokenizer_config.json", json!({ "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens[0] })),
    ] {
        let file = folder.join(name);
        std::fs::write(&file, value.to_string()).map_err(|error| format!("{}: {error}", file.display()))?;
    }
    Ok((tokens, merges))
}

/// Numbers of a tensor, each a bfloat16: norms are 1, the rest is about normally distributed.
fn draw(tensor: &Tensor, seed: u64, index: u64) -> Vec<f32> {
    let count = tensor.shape.iter().product();
    if tensor.name.contains("norm") {
        return vec![1.0; count];
    }
    let mut state = seed ^ (index + 1).wrapping_mul(0xD1B5_4A32_D192_ED03);
    // The sum of four uniform numbers has a variance of a third.
    let next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let z = z ^ (z >> 31);
        let sum: i32 = (0..4).map(|part| (z >> (16 * part)) as u16 as i32 - 32768).sum();
        let normal = sum as f32 / 65536.0 * 3f32.sqrt();
        bf16::from_f32(normal * DEVIATION).to_f32()
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// The rows in the order of GGUF: row j of a head's first half and row j of its second become neighbours.
fn turned(tensor: &Tensor, numbers: Vec<f32>) -> Vec<f32> {
    let Some(heads) = tensor.heads else { return numbers };
    let rows = tensor.shape[0];
    let width = numbers.len() / rows;
    let half = rows / heads / 2;
    let source = |row: usize| row / (2 * half) * 2 * half + row % (2 * half) / 2 + row % 2 * half;
    (0..rows).flat_map(|row| numbers[source(row) * width..][..width].iter().copied()).collect()
}

fn entry(tensor: &Tensor, format: Format) -> Entry {
    let format = if tensor.shape.len() == 1 { Format::F32 } else { format };
    Entry { name: tensor.gguf.clone(), shape: tensor.shape.clone(), format }
}

/// The length, then JSON: where each tensor lies.
fn safetensors_head(tensors: &[Tensor]) -> Vec<u8> {
    let (mut list, mut at) = (Map::new(), 0);
    for Tensor { name, shape, .. } in tensors {
        let end = at + 2 * shape.iter().product::<usize>();
        list.insert(name.clone(), json!({ "dtype": "BF16", "shape": shape, "data_offsets": [at, end] }));
        at = end;
    }
    let mut json = Value::Object(list).to_string();
    // The data starts at a multiple of 8.
    json.extend(std::iter::repeat_n(' ', json.len().next_multiple_of(8) - json.len()));
    [&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat()
}

/// A byte-level BPE tokenizer in the `tokenizers` library's format.
fn tokenizer(tokens: &[String], merges: &[String]) -> Value {
    let vocab: Map<String, Value> =
        tokens.iter().zip(0..).map(|(token, id): (_, u32)| (token.clone(), id.into())).collect();
    let level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "post_processor": null,
        "added_tokens": [{
            "id": 0, "content": tokens[0], "special": true,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        }],
        "pre_tokenizer": level, "decoder": level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocab, "merges": merges,
        },
    })
}

/// What a GGUF file says about its model.
fn settings(shape: &Shape, format: Format, tokens: &[String], merges: &[String]) -> Vec<(String, gguf::Value)> {
    use gguf::Value::{F32, I32s, Text, Texts, U32};
    const NORMAL: i32 = 1;
    const CONTROL: i32 = 3;
    let own = |key: &str| format!("{}.{key}", shape.family);
    let number = |value: usize| U32(value as u32);
    let kinds = std::iter::once(CONTROL).chain(std::iter::repeat_n(NORMAL, tokens.len() - 1));
    vec![
        ("general.architecture".into(), Text(shape.family.into())),
        ("general.name".into(), Text(shape.name.into())),
        ("general.file_type".into(), U32(format.file_type())),
        (own("context_length"), number(shape.context)),
        (own("embedding_length"), number(shape.hidden)),
        (own("block_count"), number(shape.layers)),
        (own("feed_forward_length"), number(shape.ffn)),
        (own("attention.head_count"), number(shape.heads)),
        (own("attention.head_count_kv"), number(shape.kv_heads)),
        (own("attention.layer_norm_rms_epsilon"), F32(shape.eps as f32)),
        (own("rope.freq_base"), F32(shape.rope_theta as f32)),
        (own("rope.dimension_count"), number(shape.head_dim())),
        (own("vocab_size"), number(shape.vocab)),
        ("tokenizer.ggml.model".into(), Text("gpt2".into())),
        ("tokenizer.ggml.pre".into(), Text("gpt-2".into())),
        ("tokenizer.ggml.tokens".into(), Texts(tokens.to_vec())),
        ("tokenizer.ggml.token_type".into(), I32s(kinds.collect())),
        ("tokenizer.ggml.merges".into(), Texts(merges.to_vec())),
        ("tokenizer.ggml.bos_token_id".into(), U32(0)),
        ("tokenizer.ggml.eos_token_id".into(), U32(0)),
    ]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn weights_are_bfloat16_of_the_wanted_spread_and_the_same_every_time() {
        let shape = Shape::named("m135").unwrap();
        let tensors = shape.tensors();
        let tensor = tensors.iter().find(|tensor| tensor.name.ends_with("layers.3.self_attn.k_proj.weight")).unwrap();
        let numbers = draw(tensor, 7, 5);
        assert_eq!(numbers.len(), 192 * 576);
        assert!(numbers.iter().all(|w| w.to_bits() & 0xffff == 0));
        let variance = numbers.iter().map(|w| f64::from(w * w)).sum::<f64>() / numbers.len() as f64;
        assert!((variance.sqrt() / 0.02 - 1.0).abs() < 0.01, "{}", variance.sqrt());
        assert_eq!(numbers, draw(tensor, 7, 5));
        assert_ne!(numbers, draw(tensor, 8, 5));
        // Rows 0, 32, 1, 33 … of each head of 64.
        let turned = turned(tensor, numbers.clone());
        for (row, source) in [(0, 0), (1, 32), (2, 1), (63, 63), (64, 64), (65, 96)] {
            assert_eq!(turned[row * 576..][..576], numbers[source * 576..][..576], "row {row}");
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
}
