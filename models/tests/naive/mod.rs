//! An independent oracle: the forward pass of every family in float64, one plain function each.
//!
//! A pass computes a whole sequence at once, without a cache, and reads `config.json` and the tensors by the names on disk. It shares
//! nothing with the crate but the reading of files. Families share only the mathematics of `math.rs` and a few blocks below.

mod case;
pub mod cases;
mod classic;
mod config;
pub mod encoders;
mod experts;
mod falcon_h1;
mod first_difference;
mod gemma;
mod gemma3n;
mod gemma4;
mod gemma4_cases;
pub mod kimi;
mod latent;
mod llama;
mod math;
mod mimo;
mod minicpm;
mod mistakes;
mod phi3_small;
mod post_norm;
mod recent;
mod recent_cases;
mod recurrent;
pub mod states;
mod tensors;
pub mod tests;
mod variants;
mod wrappers;

use config::{Config, Rope};
use math::{Heads, Rows};
use serde_json::Value;
use tensors::Tensors;

/// What a family's pass reads.
#[derive(Clone, Copy)]
struct Pass<'a> {
    config: Config<'a>,
    w: &'a Tensors,
    tokens: &'a [usize],
    /// Greatest length that is served.
    context: usize,
}

/// Logits of the last position.
fn last_logits(config: &Value, w: &Tensors, tokens: &[u32], context: Option<usize>) -> Vec<f64> {
    let tokens: Vec<usize> = tokens.iter().map(|id| *id as usize).collect();
    let class = config["architectures"][0].as_str().unwrap();
    let config = Config(config.get("text_config").unwrap_or(config));
    let context = context.or(config.n_if("max_position_embeddings")).unwrap_or(tokens.len());
    let pass = Pass { config, w, tokens: &tokens, context };
    let family = match class {
        "LlamaForCausalLM" => llama::llama,
        "MistralForCausalLM" => llama::mistral,
        "Ministral3ForCausalLM" => llama::ministral3,
        "Qwen2ForCausalLM" => llama::qwen2,
        "Qwen3ForCausalLM" => llama::qwen3,
        "SmolLM3ForCausalLM" => llama::smollm3,
        "GraniteForCausalLM" => llama::granite,
        "Phi3ForCausalLM" => llama::phi3,
        "Phi3SmallForCausalLM" => phi3_small::phi3_small,
        "OlmoForCausalLM" => llama::olmo,
        "Starcoder2ForCausalLM" => llama::starcoder2,
        "StableLmForCausalLM" => llama::stablelm,
        "GlmForCausalLM" => llama::glm,
        "Glm4ForCausalLM" => post_norm::glm4,
        "Olmo2ForCausalLM" => post_norm::olmo2,
        "Olmo3ForCausalLM" => post_norm::olmo3,
        "Exaone4ForCausalLM" => post_norm::exaone4,
        "CohereForCausalLM" => post_norm::cohere,
        "Cohere2ForCausalLM" => post_norm::cohere2,
        "GemmaForCausalLM" => gemma::gemma,
        "Gemma2ForCausalLM" => gemma::gemma2,
        "Gemma3ForCausalLM" => gemma::gemma3,
        "Gemma3nForCausalLM" | "Gemma3nForConditionalGeneration" => gemma3n::gemma3n,
        "Gemma4ForCausalLM" => gemma4::gemma4,
        "MixtralForCausalLM" => experts::mixtral,
        "Qwen2MoeForCausalLM" => experts::qwen2_moe,
        "Qwen3MoeForCausalLM" => experts::qwen3_moe,
        "OlmoeForCausalLM" => experts::olmoe,
        "GraniteMoeForCausalLM" => experts::granite_moe,
        "GraniteMoeSharedForCausalLM" => experts::granite_moe,
        "Qwen3NextForCausalLM" => recurrent::qwen3_next,
        "Qwen3_5ForCausalLM" => recurrent::qwen3_5,
        "Qwen3_5MoeForCausalLM" => recurrent::qwen3_5_moe,
        "GptOssForCausalLM" => experts::gpt_oss,
        "Glm4MoeForCausalLM" => latent::glm4_moe,
        "DeepseekV2ForCausalLM" => latent::deepseek_v2,
        "DeepseekV32ForCausalLM" | "GlmMoeDsaForCausalLM" => latent::indexed,
        "DeepseekV3ForCausalLM" => latent::deepseek_v3,
        "GPT2LMHeadModel" => classic::gpt2,
        "GPTBigCodeForCausalLM" => classic::gpt_bigcode,
        "OPTForCausalLM" => classic::opt,
        "GPTNeoXForCausalLM" => classic::gpt_neox,
        "FalconForCausalLM" => classic::falcon,
        "BloomForCausalLM" => classic::bloom,
        "MptForCausalLM" => classic::mpt,
        "InternLM2ForCausalLM" => variants::internlm2,
        "PhiForCausalLM" => variants::phi,
        "NemotronForCausalLM" => variants::nemotron,
        "SeedOssForCausalLM" => variants::seed_oss,
        "ArceeForCausalLM" => variants::arcee,
        "Ernie4_5ForCausalLM" => variants::ernie,
        "HunYuanDenseV1ForCausalLM" => variants::hunyuan,
        "GraniteMoeHybridForCausalLM" => experts::granite_moe,
        "Lfm2ForCausalLM" | "Lfm2MoeForCausalLM" => states::lfm2,
        "FalconH1ForCausalLM" => falcon_h1::falcon_h1,
        "JambaForCausalLM" => states::jamba,
        "KimiLinearForCausalLM" => kimi::kimi_linear,
        "NemotronHForCausalLM" => states::nemotron_h,
        "MiniMaxM2ForCausalLM" => recent::minimax_m2,
        "Glm4MoeLiteForCausalLM" => latent::deepseek_v3,
        "Ernie4_5_MoeForCausalLM" => recent::ernie_moe,
        "Llama4ForCausalLM" | "Llama4ForConditionalGeneration" => recent::llama4,
        "Qwen3VLMoeForConditionalGeneration" => recent::qwen3_vl_moe,
        "HunYuanMoEV1ForCausalLM" => recent::hunyuan_moe,
        "BailingMoeV2ForCausalLM" => recent::bailing,
        "AfmoeForCausalLM" => recent::afmoe,
        "ApertusForCausalLM" => recent::apertus,
        "PhimoeForCausalLM" => recent::phimoe,
        "MiMoV2FlashForCausalLM" => mimo::mimo_v2,
        "MiniCPMForCausalLM" => minicpm::minicpm,
        "MiniCPM3ForCausalLM" => minicpm::minicpm3,
        "GPTJForCausalLM" => variants::gptj,
        "CodeGenForCausalLM" => variants::gptj,
        "GPTNeoForCausalLM" => variants::gpt_neo,
        "Dots1ForCausalLM" => variants::dots1,
        "PersimmonForCausalLM" => variants::persimmon,
        other => panic!("no pass for {other}"),
    };
    family(pass)
}

impl Pass<'_> {
    fn layers(&self) -> impl Iterator<Item = (usize, String)> + use<> {
        (0..self.config.n("num_hidden_layers")).map(|i| (i, format!("model.layers.{i}.")))
    }

    fn embed(&self) -> Rows {
        let shape = [self.config.n("vocab_size"), self.config.n("hidden_size")];
        self.w.embed("model.embed_tokens.weight", shape, self.tokens.iter().copied())
    }

    /// Logits by the embedding if tied, else by `lm_head`.
    fn head(&self, x: &Rows, tied: bool) -> Vec<f64> {
        let name = if self.config.on("tie_word_embeddings", tied) { "model.embed_tokens" } else { "lm_head" };
        self.w.head(x.last().unwrap(), name, self.config.n("vocab_size"), false)
    }

    fn eps(&self, default: f64) -> f64 {
        self.config.f("rms_norm_eps", default)
    }

    fn rope(&self, theta: f64, partial: f64) -> Rope {
        let dims = (self.config.heads().dim as f64 * self.config.partial(partial)) as usize;
        self.config.rope(dims, theta, self.context)
    }

    /// Separate projections of queries, keys and values.
    fn project(&self, x: &Rows, layer: &str, Heads { q, kv, dim }: Heads, bias: bool) -> [Rows; 3] {
        [("q", q), ("k", kv), ("v", kv)]
            .map(|(name, heads)| self.w.linear(x, &format!("{layer}self_attn.{name}_proj"), heads * dim, bias))
    }

    fn output(&self, x: &Rows, layer: &str, bias: bool) -> Rows {
        self.w.linear(x, &format!("{layer}self_attn.o_proj"), self.config.n("hidden_size"), bias)
    }

    /// `down(act(gate x) ∘ up x)` of separate matrices.
    fn gated(&self, x: &Rows, mlp: &str, inner: usize, act: fn(f64) -> f64, bias: bool) -> Rows {
        let gate = self.w.linear(x, &format!("{mlp}.gate_proj"), inner, bias);
        let up = self.w.linear(x, &format!("{mlp}.up_proj"), inner, bias);
        self.w.linear(&math::zip(&gate, &up, |g, u| act(g) * u), &format!("{mlp}.down_proj"), x[0].len(), bias)
    }

    /// `down(silu(gate x) ∘ up x)` of one matrix `[gate | up]`.
    fn gated_packed(&self, x: &Rows, mlp: &str, inner: usize) -> Rows {
        let both = self.w.linear(x, &format!("{mlp}.gate_up_proj"), 2 * inner, false);
        let [gate, up] = math::split(&both, [inner, inner]);
        self.w.linear(&math::zip(&gate, &up, |g, u| math::silu(g) * u), &format!("{mlp}.down_proj"), x[0].len(), false)
    }
}
