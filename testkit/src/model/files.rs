//! The files of a model with random weights: a checkpoint folder, and GGUF files with the same weights.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use half::bf16;
use serde_json::{Map, Value, json};

use super::gguf::{self, Entry, Format};
use super::shape::{Shape, Tensor};
use crate::at;

/// Formats of the GGUF files, and the ends of their names.
const FILES: [(Format, &str); 3] = [(Format::Bf16, "bf16"), (Format::Q8_0, "q8_0"), (Format::Q4_0, "q4_0")];

/// Writes `config.json`, `tokenizer.json`, `model.safetensors`, and `NAME-FORMAT.gguf` for each format.
///
/// Weights are bfloat16. Every file holds them as its format stores them. The same seed gives the same bytes on every machine.
///
/// # Errors
/// One line: a file that cannot be written.
pub fn write(shape: &Shape, folder: &Path, seed: u64) -> Result<(), String> {
    let failed = at(folder);
    let (tokens, merges) = write_all_but_weights(shape, folder)?;
    let tensors = shape.tensors();
    let create = |name: &str| File::create(folder.join(name)).map(BufWriter::new);
    let weights = || -> io::Result<()> {
        let mut safetensors = create("model.safetensors")?;
        safetensors.write_all(&safetensors_head(&tensors))?;
        let mut files = Vec::new();
        for (format, suffix) in FILES {
            let mut file = create(&format!("{}-{suffix}.gguf", shape.name))?;
            let entries: Vec<Entry> = tensors.iter().map(|tensor| entry(tensor, format)).collect();
            gguf::write_head(&mut file, &settings(shape, format, &tokens, &merges), &entries)?;
            files.push((file, entries));
        }
        for (index, tensor) in tensors.iter().enumerate() {
            let weights = tensor.weights(seed, index);
            let data: Vec<u8> = weights.iter().flat_map(|&w| bf16::from_f32(w).to_le_bytes()).collect();
            safetensors.write_all(&data)?;
            let weights = tensor.in_gguf_order(weights);
            for (file, entries) in &mut files {
                gguf::write_tensor(file, entries[index].format, &weights)?;
            }
        }
        safetensors.flush()?;
        files.iter_mut().try_for_each(|(file, _)| file.flush())
    };
    weights().map_err(failed)
}

/// Writes what [`write()`] does without weights: `head.safetensors` has the bytes before the tensors of `model.safetensors`. Appending
/// the tensors makes a checkpoint.
///
/// # Errors
/// One line: a file that cannot be written.
pub fn write_head(shape: &Shape, folder: &Path) -> Result<(), String> {
    write_all_but_weights(shape, folder)?;
    std::fs::write(folder.join("head.safetensors"), safetensors_head(&shape.tensors())).map_err(at(folder))
}

/// Returns the tokens and merges of the tokenizer.
fn write_all_but_weights(shape: &Shape, folder: &Path) -> Result<(Vec<String>, Vec<String>), String> {
    std::fs::create_dir_all(folder).map_err(at(folder))?;
    let (tokens, merges) = shape.vocabulary();
    for (name, value) in [
        ("config.json", shape.config()),
        ("tokenizer.json", tokenizer(&tokens, &merges)),
        ("tokenizer_config.json", json!({ "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens[0] })),
    ] {
        std::fs::write(folder.join(name), value.to_string()).map_err(at(&folder.join(name)))?;
    }
    Ok((tokens, merges))
}

fn entry(tensor: &Tensor, format: Format) -> Entry {
    let format = if tensor.shape.len() == 1 { Format::F32 } else { format };
    Entry { name: tensor.gguf.clone(), shape: tensor.shape.clone(), format }
}

/// Returns a length, and JSON with the place of each tensor.
fn safetensors_head(tensors: &[Tensor]) -> Vec<u8> {
    let (mut list, mut at) = (Map::new(), 0);
    for Tensor { name, shape, .. } in tensors {
        let end = at + 2 * shape.iter().product::<usize>();
        list.insert(name.clone(), json!({ "dtype": "BF16", "shape": shape, "data_offsets": [at, end] }));
        at = end;
    }
    let mut json = Value::Object(list).to_string();
    // The data begins at a multiple of 8.
    json.extend(std::iter::repeat_n(' ', json.len().next_multiple_of(8) - json.len()));
    [&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat()
}

/// Returns a byte-level BPE tokenizer in the format of the `tokenizers` library.
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

/// Returns the settings of a GGUF file.
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
