//! Gemma 3n: several streams that layers mix, a narrow network beside attention, sparse gates, and inputs of each layer by token.

use serde_json::{Value, json};

use super::Pass;
use super::case::{Case, skeleton, with};
use super::config::{Config, Rope};
use super::math::{Rows, add, attend, gelu_tanh, map, rms, scaled_by, times, within, zip};
use super::tensors::product;

/// √n in float32, as the computation.
fn root(n: usize) -> f64 {
    f64::from((n as f64).sqrt() as f32)
}

/// Rows of `x` with the root mean squares of those of `like`.
fn as_large(x: &Rows, like: &Rows) -> Rows {
    let square = |row: &Vec<f64>| row.iter().map(|v| v * v).sum::<f64>() / row.len() as f64;
    let factor = |(x, like)| (square(like) / square(x).max(1e-5)).sqrt();
    x.iter().zip(like).map(|(x, like)| x.iter().map(|v| v * factor((x, like))).collect()).collect()
}

/// The value of layer `i`: that of a list, or of all layers.
fn of_layer(value: &Value, i: usize) -> f64 {
    value.get(i).unwrap_or(value).as_f64().unwrap()
}

/// x with Φ(x) = `share`, by Newton's method on the integral by Simpson's rule.
fn quantile(share: f64) -> f64 {
    let density = |x: f64| (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let below = |x: f64| {
        let (steps, h) = (2000, x / 2000.0);
        let weight = |i: usize| if i == 0 || i == steps { 1.0 } else { [2.0, 4.0][i % 2] };
        0.5 + h / 3.0 * (0..=steps).map(|i| weight(i) * density(i as f64 * h)).sum::<f64>()
    };
    (0..50).fold(0.0, |x, _| x - (below(x) - share) / density(x))
}

fn sparse(gates: &Rows, share: f64) -> Rows {
    if share == 0.0 {
        return gates.clone();
    }
    let one = |row: &Vec<f64>| -> Vec<f64> {
        let mean = row.iter().sum::<f64>() / row.len() as f64;
        let deviation = (row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / row.len() as f64).sqrt();
        row.iter().map(|v| (v - mean - quantile(share) * deviation).max(0.0)).collect()
    };
    gates.iter().map(one).collect()
}

fn rope(p: &Pass, dim: usize, kind: &str) -> Rope {
    let c = p.config;
    let by_type = c.get("rope_parameters").and_then(|types| types.get(kind)).map(Config);
    match (by_type, kind) {
        (Some(dict), _) => c.rope_by(dict, dim, dict.f_if("rope_theta").unwrap(), p.context),
        (None, "full_attention") => c.rope(dim, 1e6, p.context),
        (None, _) => Rope::new(dim, c.f("rope_local_base_freq", 1e4)),
    }
}

pub fn gemma3n(p: Pass) -> Vec<f64> {
    let (c, w, eps, hidden) = (p.config, p.w, p.eps(1e-6), p.config.n("hidden_size"));
    let (layers, n, bias) =
        (c.n("num_hidden_layers"), c.n_if("altup_num_inputs").unwrap_or(4), c.on("attention_bias", false));
    let heads = c.heads();
    let base = "model.";
    let norm = |x: &Rows, name: String| w.rms(x, &name, eps);
    let embed = |name: &str, rows: usize, width: usize, of: &dyn Fn(usize) -> usize| {
        w.embed(&format!("{base}{name}.weight"), [rows, width], p.tokens.iter().map(|token| of(*token)))
    };
    let first = times(&embed("embed_tokens", c.n("vocab_size"), hidden, &|token| token), root(hidden));
    let width = c.n_if("hidden_size_per_layer_input").unwrap_or(256);
    let known = c.n_if("vocab_size_per_layer_input").unwrap_or(262_144);
    let table = embed("embed_tokens_per_layer", known, layers * width, &|token| if token < known { token } else { 0 });
    let inputs = w.linear(&first, &format!("{base}per_layer_model_projection"), layers * width, false);
    let inputs = times(&inputs, (hidden as f64).powf(-0.5));
    let inputs = w.rms_heads(&inputs, &format!("{base}per_layer_projection_norm"), width, eps);
    let inputs = times(&add(&inputs, &times(&table, root(width))), 0.5f64.sqrt());
    let mut x = vec![first];
    for j in 1..n {
        let other = w.linear(&x[0], &format!("{base}altup_projections.{}", j - 1), hidden, false);
        x.push(as_large(&other, &x[0]));
    }
    let first_shared = layers - c.n_if("num_kv_shared_layers").unwrap_or(15);
    let mut kept: [Option<(Rows, Rows)>; 2] = [None, None];
    for i in 0..layers {
        let at = format!("{base}layers.{i}.");
        let route = |x: &Rows, name: &str, outputs: usize| {
            let normed = times(&norm(x, format!("{at}altup.router_norm")), 1.0 / hidden as f64);
            let scores = map(&w.linear(&normed, &format!("{at}altup.modality_router"), n, false), f64::tanh);
            product(&scores, &w.matrix(&format!("{at}altup.{name}.weight"), &[outputs, n], n), None)
        };
        let coefs = route(&x[0], "prediction_coefs", n * n);
        let mixed = |j: usize| -> Rows {
            let at = |t: usize, d: usize| x[j][t][d] + (0..n).map(|i| coefs[t][j * n + i] * x[i][t][d]).sum::<f64>();
            (0..p.tokens.len()).map(|t| (0..hidden).map(|d| at(t, d)).collect()).collect()
        };
        let mut predicted: Vec<Rows> = (0..n).map(mixed).collect();
        let active = predicted[0].clone();
        let h = norm(&active, format!("{at}input_layernorm"));
        let low = w.linear(&h, &format!("{at}laurel.linear_left"), c.n_if("laurel_rank").unwrap_or(64), false);
        let low = w.linear(&low, &format!("{at}laurel.linear_right"), hidden, false);
        let laurel = add(&h, &norm(&low, format!("{at}laurel.post_laurel_norm")));
        let slides = c.slides(i, Some(5));
        let rope = rope(&p, heads.dim, if slides { "sliding_attention" } else { "full_attention" });
        let window = slides.then(|| c.n_if("sliding_window").unwrap_or(512));
        // Made weights of query and key norms are near dim^-0.25, so that scores, whose scale is 1, are near 1.
        let centre = (heads.dim as f64).powf(-0.25);
        let head_norm = |x: &Rows, name: &str| {
            let weight = w.get(&format!("{at}self_attn.{name}.weight"), &[heads.dim], centre, 0.4 * centre);
            rms(x, &weight, eps)
        };
        let project =
            |name: &str, count: usize| w.linear(&h, &format!("{at}self_attn.{name}_proj"), count * heads.dim, bias);
        let q = rope.rotate(&head_norm(&project("q", heads.q), "q_norm"), heads.dim);
        let kept = &mut kept[usize::from(slides)];
        if i < first_shared {
            let keys = rope.rotate(&head_norm(&project("k", heads.kv), "k_norm"), heads.dim);
            *kept = Some((keys, rms(&project("v", heads.kv), &vec![1.0; heads.dim], eps)));
        }
        let (k, v) = kept.as_ref().unwrap();
        let a = p.output(&attend([&q, k, v], heads, 1.0, &within(window), None), &at, bias);
        let a = norm(&a, format!("{at}post_attention_layernorm"));
        let g = times(&add(&add(&active, &a), &laurel), 0.5f64.sqrt());
        let m = norm(&g, format!("{at}pre_feedforward_layernorm"));
        let inner = c.get("intermediate_size").map_or(16_384, |value| of_layer(value, i) as usize);
        let gate = w.linear(&m, &format!("{at}mlp.gate_proj"), inner, false);
        let default = if layers > 10 && i < 10 { 0.95 } else { 0.0 };
        let gate = sparse(&gate, c.get("activation_sparsity_pattern").map_or(default, |value| of_layer(value, i)));
        let up = w.linear(&m, &format!("{at}mlp.up_proj"), inner, false);
        let m = w.linear(&zip(&gate, &up, |g, u| gelu_tanh(g) * u), &format!("{at}mlp.down_proj"), hidden, false);
        let f = add(&g, &norm(&m, format!("{at}post_feedforward_layernorm")));
        let gains = route(&f, "correction_coefs", n);
        let change = zip(&f, &active, |f, active| f - active);
        for (j, stream) in predicted.iter_mut().enumerate() {
            for ((row, change), gains) in stream.iter_mut().zip(&change).zip(&gains) {
                row.iter_mut().zip(change).for_each(|(x, change)| *x += (1.0 + gains[j]) * change);
            }
        }
        let y = scaled_by(&predicted[0], &w.scale(&format!("{at}altup.correct_output_scale"), hidden));
        let gate = map(&w.linear(&y, &format!("{at}per_layer_input_gate"), width, false), gelu_tanh);
        let own: Rows = inputs.iter().map(|row| row[i * width..][..width].to_vec()).collect();
        let y = w.linear(&zip(&gate, &own, |a, b| a * b), &format!("{at}per_layer_projection"), hidden, false);
        let y = norm(&y, format!("{at}post_per_layer_input_norm"));
        predicted[1..].iter_mut().for_each(|stream| *stream = add(stream, &y));
        x = predicted;
    }
    let mut sum = x[0].clone();
    for (j, stream) in x[1..].iter().enumerate() {
        let other = w.linear(stream, &format!("{base}altup_unembed_projections.{j}"), hidden, false);
        sum = add(&sum, &as_large(&other, &x[0]));
    }
    let last = norm(&times(&sum, 1.0 / n as f64), format!("{base}norm"));
    let name = if c.on("tie_word_embeddings", true) { format!("{base}embed_tokens") } else { "lm_head".into() };
    let logits = w.head(last.last().unwrap(), &name, c.n("vocab_size"), false);
    let cap = match c.0.get("final_logit_softcapping") {
        None => Some(30.0),
        Some(stated) => stated.as_f64(),
    };
    logits.into_iter().map(|v| cap.map_or(v, |cap| cap * (v / cap).tanh())).collect()
}

pub fn cases() -> Vec<Case> {
    let mut base = with(
        &skeleton("Gemma3nForCausalLM", "gemma3n_text"),
        "",
        json!({"num_hidden_layers": 4, "intermediate_size": [56, 40, 56, 48], "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "sliding_window": 9, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 90, "laurel_rank": 10, "altup_num_inputs": 3,
            "activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0]}),
    )
    .config;
    for key in ["hidden_act", "tie_word_embeddings"] {
        base.as_object_mut().unwrap().shift_remove(key);
    }
    vec![
        with(&base, "gemma3n, odd heads", json!({"num_attention_heads": 3, "num_key_value_heads": 1})),
        with(
            &base,
            "gemma3n, five streams, one width, no cap, biased, untied, an own last layer",
            json!({"altup_num_inputs": 5, "intermediate_size": 56, "activation_sparsity_pattern": 0.3,
                "final_logit_softcapping": null, "attention_bias": true, "tie_word_embeddings": false,
                "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 100, "hidden_size": 40,
                "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}}),
        ),
    ]
}
