//! `config.json` as this engine understands it: one plain description of a decoder, whatever the spelling on disk.
//!
//! The types are here, the reading of the older and newer spellings in `config/load.rs`.

pub(crate) mod fields;
mod load;

/// The families of decoders that [`crate`] can run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Architecture {
    /// `LlamaForCausalLM`.
    Llama,
    /// `MistralForCausalLM`.
    Mistral,
    /// `Qwen2ForCausalLM`.
    Qwen2,
    /// `Qwen3ForCausalLM`.
    Qwen3,
}

/// Rotary position embedding: the base and how its frequencies are stretched.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the geometric series of wavelengths (`rope_theta`).
    pub theta: f64,
    /// Frequency scaling for contexts beyond the pre-training length.
    pub scaling: RopeScaling,
}

/// The frequency scalings of `rope_scaling` / `rope_parameters` that are understood.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Frequencies as they are.
    None,
    /// All frequencies divided by `factor`.
    Linear {
        /// Divisor, at least 1.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between them.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_position_embeddings / low_freq_factor` are stretched in full.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_position_embeddings / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of the pre-training.
        original_max_position_embeddings: f64,
    },
}

/// A decoder-only transformer, described once for every architecture.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Family; decides which optional parts exist.
    pub architecture: Architecture,
    /// Rows of the embedding and of the output projection; may exceed the tokenizer's vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward layer.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key/value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Longest context in tokens that the checkpoint states.
    pub max_position_embeddings: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Rotary embedding.
    pub rope: RopeConfig,
    /// The output projection is the embedding matrix.
    pub tie_word_embeddings: bool,
    /// The query, key and value projections have biases.
    pub qkv_bias: bool,
    /// The attention output projection has a bias.
    pub output_bias: bool,
    /// The feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Query and key heads are RMS-normalised before the rotary embedding (Qwen3).
    pub qk_norm: bool,
    /// Per layer: `Some(w)` when position i sees only i-w+1..=i.
    pub layer_windows: Vec<Option<usize>>,
    /// End-of-sequence ids of `config.json` (a number or a list there).
    pub eos_token_ids: Vec<u32>,
    /// Beginning-of-sequence id, if any.
    pub bos_token_id: Option<u32>,
}
