//! Families with norms before attention and before the network, added one after the other.

use super::Pass;
use super::math::{Rows, activation, add, attend, clamp, scaled_by, silu, split, standardise, times, within};

pub fn llama(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-6), p.config.heads(), p.rope(1e4, 1.0));
    let (bias, mlp_bias) = (c.on("attention_bias", false), c.on("mlp_bias", false));
    let mut x = p.embed();
    for (_, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let [q, k, v] = p.project(&n, &at, heads, bias);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(None), None);
        x = add(&x, &p.output(&a, &at, bias));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        x = add(
            &x,
            &p.gated(
                &n,
                &format!("{at}mlp"),
                c.n("intermediate_size"),
                activation(c.text("hidden_act").unwrap_or("silu")),
                mlp_bias,
            ),
        );
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}

pub fn mistral(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-6), p.config.heads(), p.rope(1e4, 1.0));
    let mut x = p.embed();
    for (_, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let [q, k, v] = p.project(&n, &at, heads, false);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let window = within(c.n_if("sliding_window"));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &window, None);
        x = add(&x, &p.output(&a, &at, false));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        x = add(&x, &p.gated(&n, &format!("{at}mlp"), c.n("intermediate_size"), silu, false));
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}

/// Queries grow with the logarithm of their position.
pub fn ministral3(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-5), p.config.heads(), p.rope(1e6, 1.0));
    let beta = c.rope_value("llama_4_scaling_beta").unwrap();
    let original = c.rope_value("original_max_position_embeddings").unwrap();
    let mut x = p.embed();
    for (_, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let [q, k, v] = p.project(&n, &at, heads, false);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let grown = |(pos, row): (usize, &Vec<f64>)| {
            row.iter().map(|v| v * (1.0 + beta * (1.0 + (pos as f64 / original).floor()).ln())).collect()
        };
        let q: Rows = q.iter().enumerate().map(grown).collect();
        let window = within(c.n_if("sliding_window"));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &window, None);
        x = add(&x, &p.output(&a, &at, false));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        x = add(&x, &p.gated(&n, &format!("{at}mlp"), c.n("intermediate_size"), silu, false));
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}

pub fn qwen2(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-6), p.config.heads(), p.rope(1e4, 1.0));
    let mut x = p.embed();
    for (i, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let [q, k, v] = p.project(&n, &at, heads, true);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let slides = match c.get("layer_types") {
            Some(types) => types[i] == "sliding_attention",
            None => i >= c.n_if("max_window_layers").unwrap_or(28),
        };
        let window = c.n_if("sliding_window").filter(|_| c.on("use_sliding_window", false) && slides);
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(window), None);
        x = add(&x, &p.output(&a, &at, false));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        x = add(&x, &p.gated(&n, &format!("{at}mlp"), c.n("intermediate_size"), silu, false));
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}

/// Queries and keys are normed in each head before the rotation.
pub fn qwen3(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-6), p.config.heads(), p.rope(1e4, 1.0));
    let bias = c.on("attention_bias", false);
    let mut x = p.embed();
    for (i, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let [q, k, v] = p.project(&n, &at, heads, bias);
        let q = w.rms_heads(&q, &format!("{at}self_attn.q_norm"), heads.dim, eps);
        let k = w.rms_heads(&k, &format!("{at}self_attn.k_norm"), heads.dim, eps);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let slides = c.on("use_sliding_window", false) && i >= c.n_if("max_window_layers").unwrap_or(28);
        let window = c.n_if("sliding_window").filter(|_| slides);
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(window), None);
        x = add(&x, &p.output(&a, &at, bias));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        x = add(&x, &p.gated(&n, &format!("{at}mlp"), c.n("intermediate_size"), silu, false));
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}

/// Some layers do not rotate; with a window, they slide.
pub fn smollm3(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-6), p.config.heads(), p.rope(2e6, 1.0));
    let (bias, mlp_bias) = (c.on("attention_bias", false), c.on("mlp_bias", false));
    let mut x = p.embed();
    for (i, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let [mut q, mut k, v] = p.project(&n, &at, heads, bias);
        let rotates = match c.get("no_rope_layers") {
            Some(list) => list[i] == 1,
            None => !(i + 1).is_multiple_of(c.n_if("no_rope_layer_interval").unwrap_or(4)),
        };
        if rotates {
            (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        }
        let slides = match c.get("layer_types") {
            Some(types) => types[i] == "sliding_attention",
            None => !rotates,
        };
        let window = c.n_if("sliding_window").filter(|_| c.on("use_sliding_window", false) && slides);
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(window), None);
        x = add(&x, &p.output(&a, &at, bias));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        x = add(&x, &p.gated(&n, &format!("{at}mlp"), c.n("intermediate_size"), silu, mlp_bias));
    }
    p.head(&w.rms(&x, "model.norm", eps), true)
}

pub fn granite(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-6), p.config.heads(), p.rope(1e4, 1.0));
    let (bias, mlp_bias) = (c.on("attention_bias", false), c.on("mlp_bias", false));
    let branch = c.f("residual_multiplier", 1.0);
    let mut x = times(&p.embed(), c.f("embedding_multiplier", 1.0));
    for (_, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let [q, k, v] = p.project(&n, &at, heads, bias);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let a = attend([&q, &k, &v], heads, c.f("attention_multiplier", 1.0), &within(None), None);
        x = add(&x, &times(&p.output(&a, &at, bias), branch));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        x = add(&x, &times(&p.gated(&n, &format!("{at}mlp"), c.n("intermediate_size"), silu, mlp_bias), branch));
    }
    let logits = p.head(&w.rms(&x, "model.norm", eps), false);
    logits.iter().map(|v| v / c.f("logits_scaling", 1.0)).collect()
}

/// Packed projections.
pub fn phi3(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-5), p.config.heads(), p.rope(1e4, 1.0));
    let (q_dim, kv_dim) = (heads.q * heads.dim, heads.kv * heads.dim);
    let mut x = p.embed();
    for (_, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let qkv = w.linear(&n, &format!("{at}self_attn.qkv_proj"), q_dim + 2 * kv_dim, false);
        let [q, k, v] = split(&qkv, [q_dim, kv_dim, kv_dim]);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let window = within(c.n_if("sliding_window"));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &window, None);
        x = add(&x, &p.output(&a, &at, false));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        x = add(&x, &p.gated_packed(&n, &format!("{at}mlp"), c.n("intermediate_size")));
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}

/// OLMo 1: norms without parameters, clamped projections.
pub fn olmo(p: Pass) -> Vec<f64> {
    let (c, heads, rope) = (p.config, p.config.heads(), p.rope(1e4, 1.0));
    let (bias, clip) = (c.on("attention_bias", false), c.f_if("clip_qkv"));
    let norm = |x: &Rows| standardise(x, x[0].len(), 1e-5);
    let mut x = p.embed();
    for (_, at) in p.layers() {
        let [q, k, v] = p.project(&norm(&x), &at, heads, bias).map(|x| clamp(&x, clip));
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(None), None);
        x = add(&x, &p.output(&a, &at, bias));
        x = add(&x, &p.gated(&norm(&x), &format!("{at}mlp"), c.n("intermediate_size"), silu, false));
    }
    p.head(&norm(&x), false)
}

pub fn starcoder2(p: Pass) -> Vec<f64> {
    let (c, w, heads, rope) = (p.config, p.w, p.config.heads(), p.rope(1e4, 1.0));
    let (bias, eps) = (c.on("use_bias", true), c.f("norm_epsilon", 1e-5));
    let act = activation(c.text("hidden_act").unwrap_or("gelu_pytorch_tanh"));
    let mut x = p.embed();
    for (_, at) in p.layers() {
        let n = w.layer_norm(&x, &format!("{at}input_layernorm"), eps, true);
        let [q, k, v] = p.project(&n, &at, heads, bias);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let window = within(c.n_if("sliding_window"));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &window, None);
        x = add(&x, &p.output(&a, &at, bias));
        let n = w.layer_norm(&x, &format!("{at}post_attention_layernorm"), eps, true);
        let up = w.linear(&n, &format!("{at}mlp.c_fc"), c.n("intermediate_size"), bias);
        x = add(&x, &w.linear(&super::math::map(&up, act), &format!("{at}mlp.c_proj"), x[0].len(), bias));
    }
    p.head(&w.layer_norm(&x, "model.norm", eps, true), true)
}

/// Optional norms with one weight vector per head; optional parallel branches that read one norm.
pub fn stablelm(p: Pass) -> Vec<f64> {
    let (c, w, heads, rope) = (p.config, p.w, p.config.heads(), p.rope(1e4, 0.25));
    let (bias, eps) = (c.on("use_qkv_bias", false), c.f("layer_norm_eps", 1e-5));
    let per_head = |x: &Rows, name: &str, heads_of: usize| {
        let weight: Vec<f64> =
            (0..heads_of).flat_map(|h| w.scale(&format!("{name}.norms.{h}.weight"), heads.dim).to_vec()).collect();
        scaled_by(&standardise(x, heads.dim, eps), &weight)
    };
    let mut x = p.embed();
    for (_, at) in p.layers() {
        let n = w.layer_norm(&x, &format!("{at}input_layernorm"), eps, true);
        let [mut q, mut k, v] = p.project(&n, &at, heads, bias);
        if c.on("qk_layernorm", false) {
            q = per_head(&q, &format!("{at}self_attn.q_layernorm"), heads.q);
            k = per_head(&k, &format!("{at}self_attn.k_layernorm"), heads.kv);
        }
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(None), None);
        let a = p.output(&a, &at, false);
        let mlp = |n: &Rows| p.gated(n, &format!("{at}mlp"), c.n("intermediate_size"), silu, false);
        if c.on("use_parallel_residual", false) {
            x = add(&add(&x, &a), &mlp(&n));
        } else {
            x = add(&x, &a);
            x = add(&x, &mlp(&w.layer_norm(&x, &format!("{at}post_attention_layernorm"), eps, true)));
        }
    }
    p.head(&w.layer_norm(&x, "model.norm", eps, true), false)
}

/// GLM-4 of 2024: interleaved rope on a part of each head, packed network.
pub fn glm(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads) = (p.config, p.w, p.eps(1.5625e-7), p.config.heads());
    let (rope, bias) = (p.rope(1e4, 0.5).interleaved(), c.on("attention_bias", false));
    let mut x = p.embed();
    for (_, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let [q, k, v] = p.project(&n, &at, heads, bias);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(None), None);
        x = add(&x, &p.output(&a, &at, false));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        x = add(&x, &p.gated_packed(&n, &format!("{at}mlp"), c.n("intermediate_size")));
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}
