//! Falcon-H1: Mamba-2 beside attention in each layer, with factors everywhere.

use serde_json::json;

use super::Pass;
use super::case::{Case, skeleton, with};
use super::config::Config;
use super::math::{add, attend, silu, times, within, zip};
use super::states::{Mamba2, mamba2};

fn factors<const N: usize>(c: Config, key: &str) -> [f64; N] {
    c.get(key).map_or([1.0; N], |list| std::array::from_fn(|i| list[i].as_f64().unwrap()))
}

pub fn falcon_h1(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, hidden) = (p.config, p.w, p.eps(1e-5), p.config.heads(), p.config.n("hidden_size"));
    let (rope, bias, mlp_bias) = (p.rope(1e5, 1.0), c.on("attention_bias", false), c.on("mlp_bias", false));
    let inner = match c.0.get("mamba_d_ssm") {
        None => 1024,
        Some(stated) => stated.as_u64().map_or(c.n_if("mamba_expand").unwrap_or(2) * hidden, |inner| inner as usize),
    };
    let groups = c.n_if("mamba_n_groups").unwrap_or(1);
    let sizes = Mamba2 {
        heads: c.n("mamba_n_heads"),
        dim: inner / c.n("mamba_n_heads"),
        groups,
        state: c.n("mamba_d_state"),
        kernel: c.n_if("mamba_d_conv").unwrap_or(4),
        conv_bias: c.on("mamba_conv_bias", true),
        proj_bias: c.on("mamba_proj_bias", false),
        output_bias: c.on("projectors_bias", false),
        factors: factors(c, "ssm_multipliers"),
        norm_groups: if c.on("mamba_rms_norm", false) { groups } else { 0 },
        eps,
    };
    let [of_gate, of_down] = factors(c, "mlp_multipliers");
    let mut x = times(&p.embed(), c.f("embedding_multiplier", 1.0));
    for (_, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let mamba = mamba2(&p, &times(&n, c.f("ssm_in_multiplier", 1.0)), &format!("{at}mamba"), &sizes);
        let of_attention = times(&n, c.f("attention_in_multiplier", 1.0));
        let [q, k, v] = p.project(&of_attention, &at, heads, bias);
        let k = rope.rotate(&times(&k, c.f("key_multiplier", 1.0)), heads.dim);
        let q = rope.rotate(&q, heads.dim);
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(None), None);
        let a = times(&p.output(&a, &at, bias), c.f("attention_out_multiplier", 1.0));
        x = add(&x, &add(&times(&mamba, c.f("ssm_out_multiplier", 1.0)), &a));
        let n = w.rms(&x, &format!("{at}pre_ff_layernorm"), eps);
        let project =
            |name: &str| w.linear(&n, &format!("{at}feed_forward.{name}_proj"), c.n("intermediate_size"), mlp_bias);
        let y = zip(&project("gate"), &project("up"), |g, u| silu(g * of_gate) * u);
        x = add(&x, &times(&w.linear(&y, &format!("{at}feed_forward.down_proj"), hidden, mlp_bias), of_down));
    }
    let logits = p.head(&w.rms(&x, "model.final_layernorm", eps), false);
    logits.into_iter().map(|z| z * c.f("lm_head_multiplier", 1.0)).collect()
}

pub fn cases() -> Vec<Case> {
    let base = with(
        &skeleton("FalconH1ForCausalLM", "falcon_h1"),
        "",
        json!({"mamba_d_ssm": 72, "mamba_n_heads": 6, "mamba_d_head": "auto", "mamba_d_state": 20, "mamba_n_groups": 2,
            "num_hidden_layers": 3, "ssm_multipliers": [0.35, 0.6, 1.4, 0.5, 1.7], "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.4, "attention_in_multiplier": 0.8, "attention_out_multiplier": 0.9, "key_multiplier": 0.4,
            "mlp_multipliers": [0.88, 0.58], "embedding_multiplier": 3.5, "lm_head_multiplier": 0.6}),
    )
    .config;
    vec![
        with(
            &base,
            "falcon_h1, every factor",
            json!({"num_attention_heads": 3, "num_key_value_heads": 1, "mamba_conv_bias": false, "mamba_d_conv": 3}),
        ),
        with(
            &base,
            "falcon_h1, a norm of groups, every bias, tied",
            json!({"mamba_rms_norm": true, "mamba_norm_before_gate": false, "attention_bias": true, "mlp_bias": true,
                "projectors_bias": true, "mamba_proj_bias": true, "mlp_multipliers": [1.0, 0.7], "mamba_d_ssm": null,
                "mamba_d_head": 16, "mamba_n_heads": 3, "mamba_n_groups": 3, "mamba_expand": 1, "tie_word_embeddings": true,
                "ssm_in_multiplier": 1.0, "attention_in_multiplier": 1.0, "head_dim": 24}),
        ),
    ]
}
