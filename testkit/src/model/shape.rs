//! Shapes of models: their tensors, settings and vocabularies.

use half::bf16;
use serde_json::{Value, json};

/// A model without weights.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Name on the command line.
    pub name: &'static str,
    /// `model_type` in `config.json`, and the architecture in GGUF.
    pub family: &'static str,
    architecture: &'static str,
    /// Elements of a hidden state.
    pub hidden: usize,
    /// Elements of the feed-forward layer.
    pub ffn: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key/value heads.
    pub kv_heads: usize,
    /// Number of tokens in the vocabulary.
    pub vocab: usize,
    /// Longest context in tokens.
    pub context: usize,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// Epsilon of the norms.
    pub eps: f64,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the embedding is also the output layer.
    pub tied: bool,
}

const SHAPES: [Shape; 5] = [
    // SmolLM2-135M.
    Shape {
        name: "m135",
        hidden: 576,
        ffn: 1536,
        layers: 30,
        heads: 9,
        kv_heads: 3,
        vocab: 49152,
        context: 8192,
        rope_theta: 100_000.0,
        ..LLAMA_1B
    },
    // Qwen2.5-0.5B.
    Shape {
        name: "q05",
        family: "qwen2",
        architecture: "Qwen2ForCausalLM",
        hidden: 896,
        ffn: 4864,
        layers: 24,
        heads: 14,
        kv_heads: 2,
        vocab: 151_936,
        context: 32768,
        rope_theta: 1_000_000.0,
        eps: 1e-6,
        qkv_bias: true,
        tied: true,
    },
    LLAMA_1B,
    // Llama 3 8B, with a longer context than it was trained for.
    Shape { name: "8b", hidden: 4096, ffn: 14336, layers: 32, tied: false, ..LLAMA_1B },
    // Some thousand weights, for tests and for checks that a program runs.
    Shape {
        name: "tiny",
        hidden: 128,
        ffn: 256,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        vocab: 1024,
        context: 2048,
        ..LLAMA_1B
    },
];

/// Llama 3.2 1B, without its scaling of the rotary embedding.
const LLAMA_1B: Shape = Shape {
    name: "1b",
    family: "llama",
    architecture: "LlamaForCausalLM",
    hidden: 2048,
    ffn: 8192,
    layers: 16,
    heads: 32,
    kv_heads: 8,
    vocab: 128_256,
    context: 131_072,
    rope_theta: 500_000.0,
    eps: 1e-5,
    qkv_bias: false,
    tied: true,
};

/// Standard deviation of a random weight, as in the initialisation of real models.
const DEVIATION: f32 = 0.02;

/// A tensor without its weights.
pub struct Tensor {
    /// Name in a checkpoint.
    pub name: String,
    /// Name in a GGUF file.
    pub gguf: String,
    /// Extents, outermost first.
    pub shape: Vec<usize>,
    /// Number of heads whose rows GGUF's rotary embedding expects in another order, if it does.
    heads: Option<usize>,
}

impl Tensor {
    /// Returns random weights, each a bfloat16. Norms are 1, all others are about normally distributed. `index` is the tensor's place
    /// in [`Shape::tensors`].
    pub fn weights(&self, seed: u64, index: usize) -> Vec<f32> {
        let count = self.shape.iter().product();
        if self.name.contains("norm") {
            return vec![1.0; count];
        }
        let mut state = seed ^ (index as u64 + 1).wrapping_mul(0xD1B5_4A32_D192_ED03);
        // SplitMix64. The sum of four uniform numbers has a variance of a third.
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

    /// Returns the weights in the order of GGUF: row j of a head's first half and row j of its second half become neighbours.
    pub fn in_gguf_order(&self, weights: Vec<f32>) -> Vec<f32> {
        let Some(heads) = self.heads else { return weights };
        let rows = self.shape[0];
        let width = weights.len() / rows;
        let half = rows / heads / 2;
        let source = |row: usize| row / (2 * half) * 2 * half + row % (2 * half) / 2 + row % 2 * half;
        (0..rows).flat_map(|row| weights[source(row) * width..][..width].iter().copied()).collect()
    }
}

impl Shape {
    /// Returns the shape with this name.
    ///
    /// # Errors
    /// There is none; lists the names.
    pub fn named(name: &str) -> Result<Shape, String> {
        let names = SHAPES.map(|shape| shape.name).join(" or ");
        let found = SHAPES.into_iter().find(|shape| shape.name == name);
        found.ok_or_else(|| format!("found the shape {name:?}, expected {names}"))
    }

    /// Returns the number of elements of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }

    /// Returns all tensors in the order of the files.
    pub fn tensors(&self) -> Vec<Tensor> {
        let tensor = |name: &str, gguf: &str, shape: &[usize], heads: Option<usize>| Tensor {
            name: name.to_owned(),
            gguf: gguf.to_owned(),
            shape: shape.to_vec(),
            // GGUF files of Llama rotate neighbouring elements together, checkpoints the two halves of a head. For Qwen both rotate
            // the halves.
            heads: heads.filter(|_| self.family == "llama"),
        };
        let (hidden, kv) = (self.hidden, self.kv_heads * self.head_dim());
        let mut all = vec![tensor("model.embed_tokens.weight", "token_embd.weight", &[self.vocab, hidden], None)];
        for layer in 0..self.layers {
            let mut add = |name: &str, gguf: &str, shape: &[usize], heads: Option<usize>| {
                all.push(tensor(&format!("model.layers.{layer}.{name}"), &format!("blk.{layer}.{gguf}"), shape, heads));
            };
            add("input_layernorm.weight", "attn_norm.weight", &[hidden], None);
            for (name, rows, heads) in
                [("q", hidden, Some(self.heads)), ("k", kv, Some(self.kv_heads)), ("v", kv, None)]
            {
                add(&format!("self_attn.{name}_proj.weight"), &format!("attn_{name}.weight"), &[rows, hidden], heads);
                if self.qkv_bias {
                    add(&format!("self_attn.{name}_proj.bias"), &format!("attn_{name}.bias"), &[rows], heads);
                }
            }
            add("self_attn.o_proj.weight", "attn_output.weight", &[hidden, hidden], None);
            add("post_attention_layernorm.weight", "ffn_norm.weight", &[hidden], None);
            add("mlp.gate_proj.weight", "ffn_gate.weight", &[self.ffn, hidden], None);
            add("mlp.up_proj.weight", "ffn_up.weight", &[self.ffn, hidden], None);
            add("mlp.down_proj.weight", "ffn_down.weight", &[hidden, self.ffn], None);
        }
        all.push(tensor("model.norm.weight", "output_norm.weight", &[hidden], None));
        if !self.tied {
            all.push(tensor("lm_head.weight", "output.weight", &[self.vocab, hidden], None));
        }
        all
    }

    /// Returns `config.json`.
    pub(super) fn config(&self) -> Value {
        json!({
            "architectures": [self.architecture], "model_type": self.family, "torch_dtype": "bfloat16",
            "hidden_size": self.hidden, "intermediate_size": self.ffn, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "vocab_size": self.vocab,
            "max_position_embeddings": self.context, "rope_theta": self.rope_theta, "rms_norm_eps": self.eps,
            "hidden_act": "silu", "tie_word_embeddings": self.tied, "bos_token_id": 0, "eos_token_id": 0,
        })
    }

    /// Returns the vocabulary: an end of text, the 256 bytes as byte-level tokenizers write them, pairs of lower-case letters, and
    /// fillers. Also returns the merges that make the pairs.
    pub fn vocabulary(&self) -> (Vec<String>, Vec<String>) {
        let plain = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        // Bytes without a visible character are written as the characters from U+0100 on.
        let mut others = 0x100u32..;
        let byte = |byte| if plain(byte) { byte } else { others.next().unwrap_or_default() };
        let bytes = (0..256).map(byte).filter_map(char::from_u32).map(String::from);
        let mut tokens: Vec<String> = std::iter::once("<|endoftext|>".to_owned()).chain(bytes).collect();
        let letters = || (b'a'..=b'z').map(char::from);
        let pairs: Vec<(char, char)> = letters().flat_map(|a| letters().map(move |b| (a, b))).collect();
        tokens.extend(pairs.iter().map(|(a, b)| format!("{a}{b}")));
        tokens.extend((tokens.len()..self.vocab).map(|id| format!("<{id}>")));
        (tokens, pairs.iter().map(|(a, b)| format!("{a} {b}")).collect())
    }
}
