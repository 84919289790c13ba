//! The shapes that are measured, their tensors and their settings.

use serde_json::{Value, json};

/// A model without weights.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// As on the command line.
    pub name: &'static str,
    /// `model_type` of `config.json`, and the architecture in GGUF.
    pub family: &'static str,
    architecture: &'static str,
    /// Sizes, as `config.json` has them.
    pub hidden: usize,
    /// Of the feed-forward part.
    pub ffn: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Tokens.
    pub vocab: usize,
    /// Longest context.
    pub context: usize,
    /// Base of the rotary embedding.
    pub rope_theta: f64,
    /// Of the norms.
    pub eps: f64,
    /// Queries, keys and values have biases.
    pub qkv_bias: bool,
    /// The embedding is the output layer too.
    pub tied: bool,
}

const SHAPES: [Shape; 5] = [
    // SmolLM2-135M.
    Shape {
        name: "m135",
        family: "llama",
        architecture: "LlamaForCausalLM",
        hidden: 576,
        ffn: 1536,
        layers: 30,
        heads: 9,
        kv_heads: 3,
        vocab: 49152,
        context: 8192,
        rope_theta: 100_000.0,
        eps: 1e-5,
        qkv_bias: false,
        tied: true,
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
    LLAMA_8B,
    // Some thousand weights, for what only has to run.
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

/// Llama 3 8B, for longer contexts than it was trained with.
const LLAMA_8B: Shape = Shape { name: "8b", hidden: 4096, ffn: 14336, layers: 32, tied: false, ..LLAMA_1B };

/// A tensor: its name in a checkpoint and in GGUF, and its extents, outermost first.
pub(super) struct Tensor {
    pub name: String,
    pub gguf: String,
    pub shape: Vec<usize>,
    /// Its rows are those of heads that GGUF's rotary embedding wants in another order.
    pub heads: Option<usize>,
}

impl Shape {
    /// The shape of that name.
    ///
    /// # Errors
    /// The names that there are.
    pub fn named(name: &str) -> Result<Shape, String> {
        let names = SHAPES.map(|shape| shape.name).join(" or ");
        SHAPES.into_iter().find(|shape| shape.name == name).ok_or_else(|| format!("found {name:?}, expected {names}"))
    }

    /// Elements of a head.
    pub fn head_dim(&self) -> usize {
        self.hidden / self.heads
    }

    /// Everything that is learned, in the order of the files.
    pub(super) fn tensors(&self) -> Vec<Tensor> {
        let tensor = |name: &str, gguf: &str, shape: &[usize], heads: Option<usize>| Tensor {
            name: name.to_owned(),
            gguf: gguf.to_owned(),
            shape: shape.to_vec(),
            // Llama's GGUF files turn neighbours by one angle, checkpoints the two halves of a head; Qwen's agree.
            heads: heads.filter(|_| self.family == "llama"),
        };
        let (hidden, kv) = (self.hidden, self.kv_heads * self.head_dim());
        let mut all = vec![tensor("model.embed_tokens.weight", "token_embd.weight", &[self.vocab, hidden], None)];
        for layer in 0..self.layers {
            let mut add = |name: &str, gguf: &str, shape: &[usize], heads: Option<usize>| {
                all.push(tensor(&format!("model.layers.{layer}.{name}"), &format!("blk.{layer}.{gguf}"), shape, heads));
            };
            add("input_layernorm.weight", "attn_norm.weight", &[hidden], None);
            for (name, gguf, rows, heads) in
                [("q", "q", hidden, Some(self.heads)), ("k", "k", kv, Some(self.kv_heads)), ("v", "v", kv, None)]
            {
                add(&format!("self_attn.{name}_proj.weight"), &format!("attn_{gguf}.weight"), &[rows, hidden], heads);
                if self.qkv_bias {
                    add(&format!("self_attn.{name}_proj.bias"), &format!("attn_{gguf}.bias"), &[rows], heads);
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

    /// `config.json`.
    pub(super) fn config(&self) -> Value {
        json!({
            "architectures": [self.architecture], "model_type": self.family, "torch_dtype": "bfloat16",
            "hidden_size": self.hidden, "intermediate_size": self.ffn, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "vocab_size": self.vocab,
            "max_position_embeddings": self.context, "rope_theta": self.rope_theta, "rms_norm_eps": self.eps,
            "hidden_act": "silu", "tie_word_embeddings": self.tied, "bos_token_id": 0, "eos_token_id": 0,
        })
    }

    /// The vocabulary: an end of text, the 256 bytes as byte-level tokenizers write them, pairs of small letters, and
    /// fillers. Also the merges that make the pairs.
    pub(super) fn vocabulary(&self) -> (Vec<String>, Vec<String>) {
        let plain = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        // Bytes that are no visible character are written as those from U+0100 on, in order.
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
