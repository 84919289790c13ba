//! MiMo-V2-Flash: windows with sinks, values narrower than keys, other heads in layers with a window.

use serde_json::json;

use super::Pass;
use super::case::{Case, skeleton, with};
use super::config::{Config, Rope};
use super::latent::v3_experts;
use super::math::{Heads, add, attend, silu, times, within};

pub fn mimo_v2(p: Pass) -> Vec<f64> {
    let (c, w, eps) = (p.config, p.w, p.config.f("layernorm_epsilon", 1e-5));
    let bias = c.on("attention_bias", false);
    let flag = |i: usize, names: &str, name: &str, numbers: &str| match c.get(names) {
        Some(list) => list[i] == name,
        None => c.get(numbers).unwrap()[i] == 1,
    };
    let mut x = p.embed();
    for (i, at) in p.layers() {
        let slides = flag(i, "layer_types", "sliding_attention", "hybrid_layer_pattern");
        let prefix = if slides { "swa_" } else { "" };
        let size = |key: &str| c.n_if(&format!("{prefix}{key}"));
        let base = c.heads();
        let heads = Heads {
            q: size("num_attention_heads").unwrap_or(base.q),
            kv: size("num_key_value_heads").unwrap_or(if slides { 2 * base.kv } else { base.kv }),
            dim: size("head_dim").unwrap_or(base.dim),
        };
        let v_dim = size("v_head_dim").or(c.n_if("v_head_dim")).unwrap_or(heads.dim);
        let (kind, theta) = if slides { ("sliding_attention", 1e4) } else { ("full_attention", 5e6) };
        let dict = c.get("rope_parameters").and_then(|types| types.get(kind)).map(Config);
        let stated = c.f(if slides { "swa_rope_theta" } else { "rope_theta" }, theta);
        let theta = dict.map_or(stated, |dict| dict.f("rope_theta", stated));
        let share =
            dict.and_then(|dict| dict.f_if("partial_rotary_factor")).unwrap_or(c.f("partial_rotary_factor", 1.0));
        let rope = Rope::new((heads.dim as f64 * share) as usize, theta);
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let [q, k, v] = [("q", heads.q * heads.dim), ("k", heads.kv * heads.dim), ("v", heads.kv * v_dim)]
            .map(|(name, rows)| w.linear(&n, &format!("{at}self_attn.{name}_proj"), rows, bias));
        let v = times(&v, c.f("attention_value_scale", 1.0));
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let key = if slides { "add_swa_attention_sink_bias" } else { "add_full_attention_sink_bias" };
        let sinks = c.on(key, slides).then(|| w.vector(&format!("{at}self_attn.attention_sink_bias"), heads.q));
        let window = slides.then(|| c.n_if("sliding_window").or(c.n_if("sliding_window_size")).unwrap_or(128));
        let scale = (heads.dim as f64).powf(-0.5);
        let a = attend([&q, &k, &v], heads, scale, &within(window), sinks.as_ref().map(|sinks| &sinks[..]));
        x = add(&x, &p.output(&a, &at, false));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        let m = match flag(i, "mlp_layer_types", "sparse", "moe_layer_freq") {
            true => v3_experts(p, &n, &at),
            false => p.gated(&n, &format!("{at}mlp"), c.n("intermediate_size"), silu, false),
        };
        x = add(&x, &m);
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}

pub fn cases() -> Vec<Case> {
    let mut base = with(
        &skeleton("MiMoV2FlashForCausalLM", "mimo_v2_flash"),
        "",
        json!({"num_hidden_layers": 3, "head_dim": 24, "v_head_dim": 16, "num_key_value_heads": 1,
            "partial_rotary_factor": 0.334, "sliding_window": 9, "hybrid_layer_pattern": [0, 1, 1],
            "moe_layer_freq": [0, 1, 1], "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
            "attention_value_scale": 0.707, "layernorm_epsilon": 1e-5, "n_group": 1, "topk_group": 1,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": true}),
    )
    .config;
    base.as_object_mut().unwrap().shift_remove("rms_norm_eps");
    vec![
        with(
            &base,
            "mimo v2, twice the key heads",
            json!({"num_attention_heads": 6, "sliding_window": null, "sliding_window_size": 7}),
        ),
        with(
            &base,
            "mimo v2, other heads with a window, sinks in all layers, biased",
            json!({"swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 16, "swa_v_head_dim": 8,
                "add_full_attention_sink_bias": true, "attention_bias": true, "n_shared_experts": 1,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "hybrid_layer_pattern": null, "mlp_layer_types": ["sparse", "dense", "sparse"], "moe_layer_freq": null,
                "swa_rope_theta": 5000.0, "partial_rotary_factor": 0.5}),
        ),
        with(
            &base,
            "mimo v2, no sinks, whole values, ropes by type",
            json!({"add_swa_attention_sink_bias": false, "v_head_dim": 24, "tie_word_embeddings": true,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.25}}}),
        ),
    ]
}
