//! Families with short convolutions, Mamba-1 and Mamba-2: LFM2, Granite 4, Nemotron-H and Jamba.

use serde_json::{Value, json};

use super::Pass;
use super::case::{Case, skeleton, with};
use super::experts::{Choice, mix, softmax_then_top};
use super::latent::v3_router;
use super::math::{Heads, Rows, add, attend, map, relu, rms, sigmoid, silu, split, times, top_k, within, zip};

/// A causal convolution of each channel with a weight `[channels, 1, kernel]`.
pub(super) fn convolved(p: &Pass, x: &Rows, name: &str, kernel: usize, bias: bool) -> Rows {
    let channels = x[0].len();
    let weight = p.w.matrix(&format!("{name}.weight"), &[channels, 1, kernel], kernel);
    let bias = bias.then(|| p.w.vector(&format!("{name}.bias"), channels));
    let one = |t: usize, c: usize| -> f64 {
        let input = |i: usize| (t + i).checked_sub(kernel - 1).map_or(0.0, |t| x[t][c]);
        let sum: f64 = (0..kernel).map(|i| weight[c * kernel + i] * input(i)).sum();
        sum + bias.as_ref().map_or(0.0, |bias| bias[c])
    };
    (0..x.len()).map(|t| (0..channels).map(|c| one(t, c)).collect()).collect()
}

fn softplus(x: f64) -> f64 {
    x.exp().ln_1p()
}

/// Sizes of a Mamba-2 layer.
pub struct Mamba2 {
    pub heads: usize,
    pub dim: usize,
    pub groups: usize,
    pub state: usize,
    pub kernel: usize,
    pub conv_bias: bool,
    pub proj_bias: bool,
    pub output_bias: bool,
    /// Factors of z, x, B, C and dt.
    pub factors: [f64; 5],
    /// Parts of the output that are normed for themselves; 0: no norm.
    pub norm_groups: usize,
    pub eps: f64,
}

/// The layer token by token, as the paper states it.
pub(super) fn mamba2(p: &Pass, n: &Rows, at: &str, sizes: &Mamba2) -> Rows {
    let &Mamba2 { heads, dim, groups, state, kernel, conv_bias, proj_bias, output_bias, factors, norm_groups, eps } =
        sizes;
    let (w, inner, keys) = (p.w, heads * dim, groups * state);
    let projected = w.linear(n, &format!("{at}.in_proj"), 2 * inner + 2 * keys + heads, proj_bias);
    let parts = split(&projected, [inner, inner, keys, keys, heads]);
    let mut factors = factors.into_iter();
    let [z, x, b, c, dt] = parts.map(|part| times(&part, factors.next().unwrap()));
    let joined = |t: usize| [&x[t][..], &b[t], &c[t]].concat();
    let xbc: Rows = (0..n.len()).map(joined).collect();
    let xbc = map(&convolved(p, &xbc, &format!("{at}.conv1d"), kernel, conv_bias), silu);
    let [x, b, c] = split(&xbc, [inner, keys, keys]);
    let [a_log, dt_bias, skip] = ["A_log", "dt_bias", "D"].map(|name| w.vector(&format!("{at}.{name}"), heads));
    let limit = |i: usize| p.config.get("time_step_limit").and_then(|limits| limits[i].as_f64());
    let (least, greatest) = (limit(0).unwrap_or(0.0), limit(1).unwrap_or(f64::INFINITY));
    let mut y = vec![vec![0.0; inner]; n.len()];
    for h in 0..heads {
        let group = h / (heads / groups) * state;
        let mut s = vec![vec![0.0; state]; dim];
        for (t, y) in y.iter_mut().enumerate() {
            let step = softplus(dt[t][h] + dt_bias[h]).clamp(least, greatest);
            let decay = (-a_log[h].exp() * step).exp();
            for (i, row) in s.iter_mut().enumerate() {
                let input = x[t][h * dim + i];
                for (j, s) in row.iter_mut().enumerate() {
                    *s = decay * *s + step * input * b[t][group + j];
                }
                let read: f64 = row.iter().zip(&c[t][group..]).map(|(s, c)| s * c).sum();
                y[h * dim + i] = read + skip[h] * input;
            }
        }
    }
    let gated = zip(&y, &map(&z, silu), |y, z| y * z);
    if norm_groups == 0 {
        return w.linear(&gated, &format!("{at}.out_proj"), n[0].len(), output_bias);
    }
    let weight = w.scale(&format!("{at}.norm.weight"), inner);
    let width = inner / norm_groups;
    let normed: Rows = gated
        .iter()
        .map(|row| {
            let parts = row.chunks_exact(width).zip(weight.chunks_exact(width));
            parts.flat_map(|(row, weight)| rms(&vec![row.to_vec()], weight, eps).remove(0)).collect()
        })
        .collect();
    w.linear(&normed, &format!("{at}.out_proj"), n[0].len(), output_bias)
}

/// Granite 4's sizes of a Mamba-2 layer.
pub(super) fn of_granite(p: &Pass, eps: f64) -> Mamba2 {
    let c = p.config;
    let heads = c.n("mamba_n_heads");
    let inner = c.n_if("mamba_expand").unwrap_or(2) * c.n("hidden_size");
    Mamba2 {
        heads,
        dim: c.get("mamba_d_head").and_then(Value::as_u64).map_or(inner / heads, |dim| dim as usize),
        groups: c.n_if("mamba_n_groups").unwrap_or(1),
        state: c.n("mamba_d_state"),
        kernel: c.n_if("mamba_d_conv").unwrap_or(4),
        conv_bias: c.on("mamba_conv_bias", true),
        proj_bias: c.on("mamba_proj_bias", false),
        output_bias: c.on("mamba_proj_bias", false),
        factors: [1.0; 5],
        norm_groups: 1,
        eps,
    }
}

/// One mixer in each layer.
pub(super) fn nemotron_h(p: Pass) -> Vec<f64> {
    let (c, w, eps, hidden) = (p.config, p.w, p.config.f("layer_norm_epsilon", 1e-5), p.config.n("hidden_size"));
    let dim = c.n_if("head_dim").or(c.n_if("attention_head_dim")).unwrap_or(128);
    let heads = Heads { q: c.n("num_attention_heads"), kv: c.n_if("num_key_value_heads").unwrap_or(8), dim };
    let groups = c.n_if("n_groups").unwrap_or(8);
    let sizes = Mamba2 {
        heads: c.n("mamba_num_heads"),
        dim: c.n("mamba_head_dim"),
        groups,
        state: c.n("ssm_state_size"),
        kernel: c.n_if("conv_kernel").unwrap_or(4),
        conv_bias: c.on("use_conv_bias", true),
        proj_bias: c.on("use_bias", false),
        output_bias: c.on("use_bias", false),
        factors: [1.0; 5],
        norm_groups: groups,
        eps,
    };
    let kinds: Vec<&str> = match c.get("layers_block_type") {
        Some(list) => list.as_array().unwrap().iter().map(|kind| kind.as_str().unwrap()).collect(),
        None => c.text("hybrid_override_pattern").unwrap().split("").filter(|kind| !kind.is_empty()).collect(),
    };
    let mlp_bias = c.on("mlp_bias", false);
    let network = |n: &Rows, at: &str, inner: usize| {
        let up = w.linear(n, &format!("{at}.up_proj"), inner, mlp_bias);
        w.linear(&map(&up, |x| relu(x) * relu(x)), &format!("{at}.down_proj"), n[0].len(), mlp_bias)
    };
    let mut x = w.embed("backbone.embeddings.weight", [c.n("vocab_size"), hidden], p.tokens.iter().copied());
    for (i, kind) in kinds.into_iter().enumerate() {
        let at = format!("backbone.layers.{i}.mixer");
        let n = w.rms(&x, &format!("backbone.layers.{i}.norm"), eps);
        let y = match kind {
            "M" | "mamba" => mamba2(&p, &n, &at, &sizes),
            "*" | "attention" => {
                let bias = c.on("attention_bias", false);
                let [q, k, v] = [("q", heads.q), ("k", heads.kv), ("v", heads.kv)]
                    .map(|(name, count)| w.linear(&n, &format!("{at}.{name}_proj"), count * dim, bias));
                let a = attend([&q, &k, &v], heads, (dim as f64).powf(-0.5), &within(None), None);
                w.linear(&a, &format!("{at}.o_proj"), hidden, bias)
            }
            "-" | "mlp" => network(&n, &at, c.n("intermediate_size")),
            "E" | "moe" => {
                let experts = c.n("n_routed_experts");
                let z = w.linear(&n, &format!("{at}.gate"), experts, false);
                let bias = w.vector(&format!("{at}.gate.e_score_correction_bias"), experts);
                let choices: Vec<Choice> = z.iter().map(|z| v3_router(p, z, &bias)).collect();
                let inner = c.n("moe_intermediate_size");
                let project = |x: &Rows, name: &str, rows: usize| w.linear(x, &format!("{at}.{name}"), rows, mlp_bias);
                let latent = c.n_if("moe_latent_size");
                let inputs = latent.map_or(n.clone(), |width| project(&n, "fc1_latent_proj", width));
                let mixed = mix(&inputs, &choices, experts, |e| network(&inputs, &format!("{at}.experts.{e}"), inner));
                let mixed = if latent.is_some() { project(&mixed, "fc2_latent_proj", hidden) } else { mixed };
                match c.n_if("moe_shared_expert_intermediate_size") {
                    Some(inner) => add(&mixed, &network(&n, &format!("{at}.shared_experts"), inner)),
                    None => mixed,
                }
            }
            other => panic!("mixer {other}"),
        };
        x = add(&x, &y);
    }
    p.head(&w.rms(&x, "backbone.norm_f", eps), false)
}

/// Mamba-1 between attention without positions; experts in some layers.
pub(super) fn jamba(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, hidden) = (p.config, p.w, p.eps(1e-6), p.config.heads(), p.config.n("hidden_size"));
    let size = |key: &str, default: usize| c.n_if(key).unwrap_or(default);
    let (inner, state) = (size("mamba_expand", 2) * hidden, size("mamba_d_state", 16));
    let rank = c.get("mamba_dt_rank").and_then(Value::as_u64).map_or(hidden.div_ceil(16), |rank| rank as usize);
    let mamba = |n: &Rows, at: &str| {
        let (at, bias) = (format!("{at}mamba"), c.on("mamba_proj_bias", false));
        let [x, z] = split(&w.linear(n, &format!("{at}.in_proj"), 2 * inner, bias), [inner; 2]);
        let kernel = size("mamba_d_conv", 4);
        let x = map(&convolved(&p, &x, &format!("{at}.conv1d"), kernel, c.on("mamba_conv_bias", true)), silu);
        let low = w.linear(&x, &format!("{at}.x_proj"), rank + 2 * state, false);
        let [dt, b, c] = split(&low, [rank, state, state]);
        let [dt, b, c] =
            [(dt, "dt"), (b, "b"), (c, "c")].map(|(x, name)| w.rms(&x, &format!("{at}.{name}_layernorm"), eps));
        let dt = map(&w.linear(&dt, &format!("{at}.dt_proj"), inner, true), softplus);
        let a_log = w.get(&format!("{at}.A_log"), &[inner, state], 0.0, 0.4);
        let skip = w.vector(&format!("{at}.D"), inner);
        let mut y = vec![vec![0.0; inner]; n.len()];
        for d in 0..inner {
            let mut s = vec![0.0; state];
            for (t, y) in y.iter_mut().enumerate() {
                for (i, s) in s.iter_mut().enumerate() {
                    let decay = (-a_log[d * state + i].exp() * dt[t][d]).exp();
                    *s = decay * *s + dt[t][d] * b[t][i] * x[t][d];
                }
                y[d] = s.iter().zip(&c[t]).map(|(s, c)| s * c).sum::<f64>() + skip[d] * x[t][d];
            }
        }
        w.linear(&zip(&y, &map(&z, silu), |y, z| y * z), &format!("{at}.out_proj"), hidden, bias)
    };
    let is = |i: usize, key: &str, [period, offset]: [usize; 2]| {
        i % size(&format!("{key}_layer_period"), period) == size(&format!("{key}_layer_offset"), offset)
    };
    let width = c.n("intermediate_size");
    let mut x = p.embed();
    for (i, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let mixed = if is(i, "attn", [8, 4]) {
            let [q, k, v] = p.project(&n, &at, heads, false);
            let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(None), None);
            p.output(&a, &at, false)
        } else {
            mamba(&n, &at)
        };
        x = add(&x, &mixed);
        let n = w.rms(&x, &format!("{at}pre_ff_layernorm"), eps);
        let (at, count) = (format!("{at}feed_forward"), c.n("num_experts"));
        let y = if count > 1 && is(i, "expert", [2, 1]) {
            let z = w.linear(&n, &format!("{at}.router"), count, false);
            let choices: Vec<_> = z.iter().map(|z| softmax_then_top(z, c.n("num_experts_per_tok"), false)).collect();
            mix(&n, &choices, count, |e| p.gated(&n, &format!("{at}.experts.{e}"), width, silu, false))
        } else {
            p.gated(&n, &at, width, silu, false)
        };
        x = add(&x, &y);
    }
    p.head(&w.rms(&x, "model.final_layernorm", eps), false)
}

/// Short convolutions between attention with norms of heads.
pub(super) fn lfm2(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, hidden) =
        (p.config, p.w, p.config.f("norm_eps", 1e-5), p.config.heads(), p.config.n("hidden_size"));
    let theta = c.f("theta", c.theta(1e6));
    let rope = c.rope_by(super::config::Config(&Value::Null), heads.dim, theta, p.context);
    let is_full = |i: usize| match (c.get("layer_types"), c.get("full_attn_idxs")) {
        (Some(types), _) => types[i] == "full_attention",
        (None, Some(list)) => list.as_array().unwrap().iter().any(|layer| layer.as_u64() == Some(i as u64)),
        (None, None) => true,
    };
    let mixer = |n: &Rows, i: usize, at: &str| {
        if !is_full(i) {
            let (at, bias) = (format!("{at}conv"), c.on("conv_bias", false));
            let [b, gate, x] = split(&w.linear(n, &format!("{at}.in_proj"), 3 * hidden, bias), [hidden; 3]);
            let kernel = c.n_if("conv_L_cache").unwrap_or(3);
            let y = convolved(&p, &zip(&b, &x, |b, x| b * x), &format!("{at}.conv"), kernel, bias);
            return w.linear(&zip(&gate, &y, |gate, y| gate * y), &format!("{at}.out_proj"), hidden, bias);
        }
        let [q, k, v] = p.project(n, at, heads, false);
        let [q, k] = [(q, "q"), (k, "k")].map(|(x, name)| {
            let normed = w.rms_heads(&x, &format!("{at}self_attn.{name}_layernorm"), heads.dim, eps);
            rope.rotate(&normed, heads.dim)
        });
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(None), None);
        w.linear(&a, &format!("{at}self_attn.out_proj"), hidden, false)
    };
    let gated = |n: &Rows, at: &str, inner: usize| {
        let [gate, up] = ["w1", "w3"].map(|name| w.linear(n, &format!("{at}.{name}"), inner, false));
        w.linear(&zip(&gate, &up, |g, u| silu(g) * u), &format!("{at}.w2"), hidden, false)
    };
    let has_experts = c.get("num_experts").is_some();
    let stated = c.n_if("block_ff_dim").unwrap_or_else(|| c.n("intermediate_size"));
    let inner = match (c.on("block_auto_adjust_ff_dim", true), c.0.get("block_ffn_dim_multiplier")) {
        _ if has_experts => stated,
        (false, _) => stated,
        (true, Some(Value::Null)) => 2 * stated / 3,
        (true, factor) => {
            let wide = factor.map_or(1.0, |factor| factor.as_f64().unwrap()) * (2 * stated / 3) as f64;
            let multiple = c.n_if("block_multiple_of").unwrap_or(256);
            (wide as usize).div_ceil(multiple) * multiple
        }
    };
    let network = |n: &Rows, i: usize, at: &str| {
        let at = format!("{at}feed_forward");
        if !has_experts || i < c.n_if("num_dense_layers").unwrap_or(2) {
            return gated(n, &at, inner);
        }
        let (experts, inner) = (c.n("num_experts"), c.n("moe_intermediate_size"));
        let z = w.linear(n, &format!("{at}.gate"), experts, false);
        let bias = c.on("use_expert_bias", true).then(|| w.vector(&format!("{at}.expert_bias"), experts));
        let choice = |z: &Vec<f64>| -> Choice {
            let scores: Vec<f64> = z.iter().map(|v| sigmoid(*v)).collect();
            let of = |e: usize| bias.as_ref().map_or(0.0, |bias| bias[e]);
            let ranked: Vec<f64> = scores.iter().enumerate().map(|(e, s)| s + of(e)).collect();
            let chosen = top_k(&ranked, c.n("num_experts_per_tok"));
            let sum: f64 = chosen.iter().map(|e| scores[*e]).sum::<f64>() + 1e-6;
            let divisor = if c.on("norm_topk_prob", true) { sum } else { 1.0 };
            let factor = c.f("routed_scaling_factor", 1.0) / divisor;
            chosen.into_iter().map(|e| (e, scores[e] * factor)).collect()
        };
        let choices: Vec<Choice> = z.iter().map(choice).collect();
        mix(n, &choices, experts, |e| gated(n, &format!("{at}.experts.{e}"), inner))
    };
    let mut x = p.embed();
    for (i, at) in p.layers() {
        x = add(&x, &mixer(&w.rms(&x, &format!("{at}operator_norm"), eps), i, &at));
        x = add(&x, &network(&w.rms(&x, &format!("{at}ffn_norm"), eps), i, &at));
    }
    let tied = c.on("tie_embedding", c.on("tie_word_embeddings", true));
    let name = if tied { "model.embed_tokens" } else { "lm_head" };
    w.head(w.rms(&x, "model.embedding_norm", eps).last().unwrap(), name, c.n("vocab_size"), false)
}

pub fn cases() -> Vec<Case> {
    let of = |class: &str, model_type: &str, changes: Value, gone: &[&str]| {
        let mut config = with(&skeleton(class, model_type), "", changes).config;
        gone.iter().for_each(|key| drop(config.as_object_mut().unwrap().shift_remove(*key)));
        config
    };
    let unread = ["hidden_act", "attention_bias", "rms_norm_eps", "head_dim"];
    let lfm2 = of(
        "Lfm2ForCausalLM",
        "lfm2",
        json!({"num_hidden_layers": 4, "block_multiple_of": 16, "full_attn_idxs": [1, 3]}),
        &[&unread[..], &["tie_word_embeddings"]].concat(),
    );
    let lfm2_moe = of(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        json!({"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "num_experts": 5,
            "num_experts_per_tok": 2, "moe_intermediate_size": 20, "num_dense_layers": 1}),
        &unread,
    );
    let granite = of(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        json!({"attention_multiplier": 0.2, "residual_multiplier": 0.6, "shared_intermediate_size": 28, "num_hidden_layers": 3,
            "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 6, "mamba_d_head": "auto", "mamba_d_state": 12}),
        &["head_dim"],
    );
    let nemotron = of(
        "NemotronHForCausalLM",
        "nemotron_h",
        json!({"mamba_num_heads": 6, "mamba_head_dim": 12, "ssm_state_size": 20, "n_groups": 2,
            "hybrid_override_pattern": "M-*M", "layer_norm_epsilon": 1e-5, "time_step_limit": [0.0, {"__float__": "Infinity"}]}),
        &["hidden_act", "rms_norm_eps", "rope_theta", "num_hidden_layers"],
    );
    let jamba = of(
        "JambaForCausalLM",
        "jamba",
        json!({"num_experts": 5, "num_experts_per_tok": 2, "attn_layer_period": 3, "attn_layer_offset": 1,
            "num_hidden_layers": 4, "mamba_d_state": 10, "mamba_dt_rank": "auto"}),
        &["head_dim", "attention_bias", "rope_theta"],
    );
    vec![
        with(
            &jamba,
            "jamba, tied",
            json!({"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": true}),
        ),
        with(
            &jamba,
            "jamba, biased projections, no bias of the convolution, one expert, odd width",
            json!({"mamba_proj_bias": true, "mamba_conv_bias": false, "num_experts": 1, "num_experts_per_tok": 1,
                "mamba_expand": 1, "mamba_d_conv": 2, "hidden_size": 42,
                "num_attention_heads": 3, "num_key_value_heads": 1, "mamba_dt_rank": 7, "expert_layer_period": 1,
                "expert_layer_offset": 0}),
        ),
        with(
            &lfm2,
            "lfm2, adjusted width, tied",
            json!({"block_ff_dim": 100, "intermediate_size": null, "num_attention_heads": 3, "num_key_value_heads": 1, "conv_dim": 48, "theta": 5e5, "rope_theta": 5e5}),
        ),
        with(
            &lfm2,
            "lfm2, biased convolutions over 5 tokens, other width, untied",
            json!({"conv_bias": true, "conv_L_cache": 5, "tie_embedding": false, "block_auto_adjust_ff_dim": false,
                "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 42}),
        ),
        with(
            &lfm2,
            "lfm2, layer types, no factor, no older inputs",
            json!({"layer_types": ["conv", "conv", "full_attention", "conv"], "full_attn_idxs": null, "conv_L_cache": 1,
                "block_ffn_dim_multiplier": null, "norm_eps": 1e-3}),
        ),
        with(&lfm2_moe, "lfm2_moe, scaled", json!({"routed_scaling_factor": 1.7})),
        with(
            &lfm2_moe,
            "lfm2_moe, no bias of the choice, not renormalised, tied",
            json!({"use_expert_bias": false, "norm_topk_prob": false, "tie_word_embeddings": true, "num_dense_layers": 0}),
        ),
        with(
            &granite,
            "granite 4, mamba, two groups of B and C, experts",
            json!({"num_local_experts": 5, "num_experts_per_tok": 2, "mamba_n_groups": 2, "mamba_d_conv": 3,
                "time_step_limit": [0.4, 1.1]}),
        ),
        with(
            &granite,
            "granite 4, mamba, biased projections, no bias of the convolution, rope",
            json!({"mamba_proj_bias": true, "mamba_conv_bias": false, "mamba_n_heads": 3, "mamba_d_head": 16,
                "mamba_expand": 1, "position_embedding_type": "rope", "num_attention_heads": 3, "num_key_value_heads": 1,
                "layers_block_type": ["linear_attention", "full_attention", "mamba"], "layer_types": null}),
        ),
        with(&nemotron, "nemotron_h, groups", json!({"num_attention_heads": 3, "num_key_value_heads": 1})),
        with(
            &nemotron,
            "nemotron_h, narrow experts",
            json!({"hybrid_override_pattern": "EM*E", "n_routed_experts": 5, "num_experts_per_tok": 2,
                "moe_intermediate_size": 20, "moe_latent_size": 18}),
        ),
        with(
            &nemotron,
            "nemotron_h, narrow experts and a shared network, every bias",
            json!({"hybrid_override_pattern": "ME*E", "n_routed_experts": 4, "num_experts_per_tok": 3, "mlp_bias": true,
                "moe_intermediate_size": 20, "moe_latent_size": 10, "moe_shared_expert_intermediate_size": 28,
                "n_shared_experts": 1, "routed_scaling_factor": 2.5, "num_attention_heads": 3, "num_key_value_heads": 1}),
        ),
        with(
            &nemotron,
            "nemotron_h, experts and a shared one, every bias, older name of the head",
            json!({"hybrid_override_pattern": null, "layers_block_type": ["moe", "mamba", "attention", "moe"],
                "n_routed_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_shared_experts": 1,
                "moe_shared_expert_intermediate_size": 28, "routed_scaling_factor": 1.5, "mlp_bias": true, "use_bias": true,
                "attention_bias": true, "use_conv_bias": false, "head_dim": null, "attention_head_dim": 24,
                "conv_kernel": 2, "n_groups": 3, "num_hidden_layers": 4, "tie_word_embeddings": false}),
        ),
    ]
}
