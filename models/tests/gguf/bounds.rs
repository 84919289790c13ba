//! Files that would fill the memory: each is read with a small multiple of its size, or refused before that.

use std::sync::Arc;

use models::gguf::{Gguf, GgufModel};
use models::{LoadError, ModelFiles, Weights};

use super::made::{Made, array_value, string, text_value, u32_value};
use super::made_vocabulary::sized;
use crate::common::message;
use crate::counter::allocated_bytes;

/// Reads keys, vocabulary and the names of tensors, and checks the bytes allocated on the way, freed ones included.
fn open(made: &Made, most: usize) -> Result<(), LoadError> {
    let bytes: Arc<[u8]> = made.bytes().into();
    let (size, before) = (bytes.len(), allocated_bytes());
    let model = Gguf::from_bytes("m.gguf", bytes).and_then(GgufModel::new);
    let loaded = model.and_then(|model| {
        let files = ModelFiles::Gguf { path: "m.gguf".into(), model: Arc::new(model) };
        Weights::open(&files).map(drop)
    });
    let taken = allocated_bytes() - before;
    assert!(taken <= most * size, "{taken} bytes for a file of {size}");
    loaded
}

fn embedding(made: Made) -> Made {
    made.floats("token_embd.weight", &[64, 8], &[0.0; 512])
}

#[test]
fn factors_of_frequencies_are_counted_before_they_are_decoded() {
    // Q2_K: 84 bytes for 256 values.
    let factors = |name: &str, blocks: u64| {
        embedding(sized("llama")).tensor(name, &[256 * blocks], 10, &vec![0; 84 * blocks as usize])
    };
    for name in ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"] {
        message(open(&factors(name, 6000), 4), &["m.gguf", name, "1536000 values", "expected 8"]);
    }
    let wide = factors("rope_freqs.weight", 6000).key("llama.attention.key_length", u32_value(3_072_000));
    message(open(&wide, 4), &["m.gguf", "llama.attention.key_length", "3072000", "at most 4096"]);
    let fits = embedding(sized("llama")).floats("rope_freqs.weight", &[8], &[1.5; 8]);
    open(&fits, 100).unwrap();
}

#[test]
fn experts_have_names_only_as_far_as_the_keys_and_the_bytes_go() {
    let experts = |layers: u32, count: u64, stated: u32, values: u64| {
        let keys = [("expert_count", stated), ("expert_used_count", 1)];
        let made =
            keys.iter().fold(sized("llama"), |made, (key, value)| made.key(&format!("llama.{key}"), u32_value(*value)));
        (0..layers).fold(embedding(made), |made, layer| {
            let data = vec![0; (2 * count * values) as usize];
            made.tensor(&format!("blk.{layer}.ffn_gate_exps.weight"), &[values, 1, count], 30, &data)
        })
    };
    // Two bytes an expert; another count than the stated one; layers beyond the stated four.
    for made in [experts(64, 4096, 4096, 1), experts(64, 4096, 8, 64), experts(4, 4096, 4096, 64)] {
        open(&made, 12).unwrap();
    }
    let files = |made: &Made| {
        let model = GgufModel::new(Gguf::from_bytes("m.gguf", made.bytes().into()).unwrap()).unwrap();
        Weights::open(&ModelFiles::Gguf { path: "m.gguf".into(), model: Arc::new(model) }).unwrap()
    };
    let named = |made: &Made| files(made).names().filter(|name| name.contains("experts")).count();
    assert_eq!(named(&experts(6, 8, 8, 64)), 4 * 8, "the layers that there are");
    assert_eq!([named(&experts(6, 8, 4, 64)), named(&experts(6, 8, 8, 63))], [0, 0]);
}

#[test]
fn layers_and_heads_of_absurd_numbers_are_no_layers_and_heads() {
    let with = |architecture: &str, changes: &[(&str, Vec<u8>)]| {
        let mut made = sized(architecture);
        for (key, value) in changes {
            let key = format!("{architecture}.{key}");
            made.keys.retain(|(known, _)| *known != key);
            made = made.key(&key, value.clone());
        }
        embedding(made)
    };
    let layers = 100_000;
    let parameters = array_value(6, layers, &0.5_f32.to_le_bytes().repeat(layers as usize));
    let made = with("apertus", &[("block_count", u32_value(layers as u32))]).key("xielu.alpha_p", parameters);
    open(&made, 4).unwrap();
    // Products of these do not fit in 64 bits.
    let heads = [&10_u32.to_le_bytes()[..], &(1_u64 << 61).to_le_bytes()].concat();
    for architecture in ["bloom", "phi2", "internlm2"] {
        let keys = [("attention.head_count", heads.clone()), ("attention.key_length", u32_value(4096))];
        let made = with(architecture, &keys).floats("blk.0.attn_qkv.weight", &[8, 8], &[0.25; 64]);
        let model = GgufModel::new(Gguf::from_bytes("m.gguf", made.bytes().into()).unwrap()).unwrap();
        let weights = Weights::open(&ModelFiles::Gguf { path: "m.gguf".into(), model: Arc::new(model) }).unwrap();
        let name = weights.names().find(|name| name.contains("qkv") || name.contains("query_key_value")).unwrap();
        assert_eq!(weights.expect(name, &[8, 8]).unwrap().to_f32(), [0.25; 64], "{architecture}");
    }
}

#[test]
fn vocabularies_and_arrays_cost_a_multiple_of_their_size() {
    let tokens: Vec<u8> = (0..40_000).flat_map(|id: u32| string(format!("{id:x}"))).collect();
    let empty = string("").repeat(40_000);
    for (count, elements) in [(40_000, &tokens), (40_000, &empty)] {
        let made = sized("qwen2")
            .key("tokenizer.ggml.model", text_value("gpt2"))
            .key("tokenizer.ggml.pre", text_value("qwen2"))
            .key("tokenizer.ggml.tokens", array_value(8, count, elements))
            .key("tokenizer.ggml.merges", array_value(8, 0, &[]));
        open(&embedding(made), 40).unwrap();
    }
    // A number for each layer counts as one.
    let heads = array_value(4, 100_000, &4_u32.to_le_bytes().repeat(100_000));
    open(&embedding(sized("llama")).key("llama.attention.head_count_kv", heads), 4).unwrap();
}
