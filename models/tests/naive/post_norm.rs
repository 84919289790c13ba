//! Families that norm the output of a branch, and the parallel branches of Cohere.

use serde_json::Value;

use super::Pass;
use super::config::{Config, Rope};
use super::math::{Rows, add, attend, scaled_by, silu, standardise, within};

/// Four norms; `post_attention_layernorm` comes before the network.
pub fn glm4(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads) = (p.config, p.w, p.eps(1.5625e-7), p.config.heads());
    let (rope, bias) = (p.rope(1e4, 0.5).interleaved(), c.on("attention_bias", false));
    let mut x = p.embed();
    for (_, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let [q, k, v] = p.project(&n, &at, heads, bias);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(None), None);
        x = add(&x, &w.rms(&p.output(&a, &at, false), &format!("{at}post_self_attn_layernorm"), eps));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        let m = p.gated_packed(&n, &format!("{at}mlp"), c.n("intermediate_size"));
        x = add(&x, &w.rms(&m, &format!("{at}post_mlp_layernorm"), eps));
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}

/// Norms after the branches; queries and keys are normed as whole vectors.
pub fn olmo2(p: Pass) -> Vec<f64> {
    let rope = p.rope(1e4, 1.0);
    olmo_layers(p, &|_| (&rope, None))
}

/// As OLMo 2, with a window on most layers; the rope is scaled on full layers alone.
pub fn olmo3(p: Pass) -> Vec<f64> {
    let c = p.config;
    let plain = Config(&Value::Null);
    let (full, sliding) = (p.rope(1e4, 1.0), c.rope_by(plain, c.heads().dim, c.theta(1e4), p.context));
    let layer = |i| match c.slides(i, Some(4)) {
        true => (&sliding, c.n_if("sliding_window")),
        false => (&full, None),
    };
    olmo_layers(p, &layer)
}

fn olmo_layers<'a>(p: Pass, layer: &dyn Fn(usize) -> (&'a Rope, Option<usize>)) -> Vec<f64> {
    let (c, w, eps, heads) = (p.config, p.w, p.eps(1e-5), p.config.heads());
    let bias = c.on("attention_bias", false);
    let mut x = p.embed();
    for (i, at) in p.layers() {
        let (rope, window) = layer(i);
        let [q, k, v] = p.project(&x, &at, heads, bias);
        let q = w.rms(&q, &format!("{at}self_attn.q_norm"), eps);
        let k = w.rms(&k, &format!("{at}self_attn.k_norm"), eps);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(window), None);
        x = add(&x, &w.rms(&p.output(&a, &at, bias), &format!("{at}post_attention_layernorm"), eps));
        let m = p.gated(&x, &format!("{at}mlp"), c.n("intermediate_size"), silu, false);
        x = add(&x, &w.rms(&m, &format!("{at}post_feedforward_layernorm"), eps));
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}

/// Norms after the branches; queries and keys are normed in each head; with a window, full layers do not rotate.
pub fn exaone4(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-5), p.config.heads(), p.rope(1e4, 1.0));
    let window = c.n_if("sliding_window");
    let pattern = c.get("sliding_window_pattern").map(|pattern| match pattern.as_str() {
        Some(letters) => letters.len(),
        None => pattern.as_u64().unwrap() as usize,
    });
    let mut x = p.embed();
    for (i, at) in p.layers() {
        let slides = window.is_some() && c.slides(i, pattern);
        let [q, k, v] = p.project(&x, &at, heads, false);
        let mut q = w.rms_heads(&q, &format!("{at}self_attn.q_norm"), heads.dim, eps);
        let mut k = w.rms_heads(&k, &format!("{at}self_attn.k_norm"), heads.dim, eps);
        if window.is_none() || slides {
            (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        }
        let window = within(window.filter(|_| slides));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &window, None);
        x = add(&x, &w.rms(&p.output(&a, &at, false), &format!("{at}post_attention_layernorm"), eps));
        let m = p.gated(&x, &format!("{at}mlp"), c.n("intermediate_size"), silu, false);
        x = add(&x, &w.rms(&m, &format!("{at}post_feedforward_layernorm"), eps));
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}

/// One norm, two branches, interleaved rope, scaled logits.
pub fn cohere(p: Pass) -> Vec<f64> {
    let (c, w, heads) = (p.config, p.w, p.config.heads());
    let rope = p.rope(1e4, 1.0).interleaved();
    let (bias, eps) = (c.on("attention_bias", false), c.f("layer_norm_eps", 1e-5));
    let per_head = |x: &Rows, name: &str, n: usize| {
        let weight = w.get(&format!("{name}.weight"), &[n, heads.dim], 1.0, 0.4);
        scaled_by(&standardise(x, heads.dim, eps), &weight)
    };
    let mut x = p.embed();
    for (_, at) in p.layers() {
        let n = w.layer_norm(&x, &format!("{at}input_layernorm"), eps, false);
        let [mut q, mut k, v] = p.project(&n, &at, heads, bias);
        if c.on("use_qk_norm", false) {
            q = per_head(&q, &format!("{at}self_attn.q_norm"), heads.q);
            k = per_head(&k, &format!("{at}self_attn.k_norm"), heads.kv);
        }
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(None), None);
        let m = p.gated(&n, &format!("{at}mlp"), c.n("intermediate_size"), silu, false);
        x = add(&add(&x, &p.output(&a, &at, bias)), &m);
    }
    let logits = p.head(&w.layer_norm(&x, "model.norm", eps, false), true);
    logits.iter().map(|v| v * c.f("logit_scale", 0.0625)).collect()
}

/// As Cohere, without norms of heads; only sliding layers rotate.
pub fn cohere2(p: Pass) -> Vec<f64> {
    let (c, w, heads) = (p.config, p.w, p.config.heads());
    let rope = p.rope(1e4, 1.0).interleaved();
    let (bias, eps) = (c.on("attention_bias", false), c.f("layer_norm_eps", 1e-5));
    let mut x = p.embed();
    for (i, at) in p.layers() {
        let slides = c.slides(i, Some(c.n_if("sliding_window_pattern").unwrap_or(4)));
        let n = w.layer_norm(&x, &format!("{at}input_layernorm"), eps, false);
        let [mut q, mut k, v] = p.project(&n, &at, heads, bias);
        if slides {
            (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        }
        let window = within(c.n_if("sliding_window").filter(|_| slides));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &window, None);
        let m = p.gated(&n, &format!("{at}mlp"), c.n("intermediate_size"), silu, false);
        x = add(&add(&x, &p.output(&a, &at, bias)), &m);
    }
    let logits = p.head(&w.layer_norm(&x, "model.norm", eps, false), true);
    logits.iter().map(|v| v * c.f("logit_scale", 0.0625)).collect()
}
