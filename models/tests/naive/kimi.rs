//! Kimi-Linear: delta nets whose decays differ by channel, token by token, and latent attention without positions.

use serde_json::{Value, json};

use super::Pass;
use super::case::{Case, skeleton, with};
use super::experts::{Choice, mix};
use super::math::{Heads, Rows, add, attend, map, rms, sigmoid, silu, split, split_groups, top_k, within, zip};
use super::states::convolved;

pub(super) fn kimi_linear(p: Pass) -> Vec<f64> {
    let (c, w, eps) = (p.config, p.w, p.eps(1e-6));
    let layers = &c.get("linear_attn_config").unwrap()["kda_layers"];
    let is_delta = |i: usize| layers.as_array().unwrap().iter().any(|layer| layer.as_u64() == Some(i as u64 + 1));
    let mut x = p.embed();
    for (i, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let mixed = if is_delta(i) { delta_net(&p, &n, &format!("{at}self_attn")) } else { latent(&p, &n, &at) };
        x = add(&x, &mixed);
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        let is_dense = c.get("num_experts").is_none() || i < c.n_if("first_k_dense_replace").unwrap_or(0);
        let network = match is_dense || !i.is_multiple_of(c.n_if("moe_layer_freq").unwrap_or(1)) {
            true => p.gated(&n, &format!("{at}mlp"), c.n("intermediate_size"), silu, false),
            false => routed(&p, &n, &format!("{at}block_sparse_moe")),
        };
        x = add(&x, &network);
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}

fn delta_net(p: &Pass, n: &Rows, at: &str) -> Rows {
    let (w, of) = (p.w, p.config.get("linear_attn_config").unwrap());
    let size = |key: &str| of[key].as_u64().map(|size| size as usize);
    let (heads, dim) = (size("num_heads").unwrap(), size("head_dim").unwrap());
    let (kernel, width) = (size("short_conv_kernel_size").unwrap_or(4), heads * dim);
    let linear = |x: &Rows, name: &str, rows: usize| w.linear(x, &format!("{at}.{name}"), rows, false);
    let [q, k, v] = ["q", "k", "v"].map(|name| {
        let projected = linear(n, &format!("{name}_proj"), width);
        map(&convolved(p, &projected, &format!("{at}.{name}_conv1d"), kernel, false), silu)
    });
    let steps = linear(&linear(n, "f_a_proj", dim), "f_b_proj", width);
    let gates = linear(&linear(n, "g_a_proj", dim), "g_b_proj", width);
    let betas = linear(n, "b_proj", heads);
    let a_log = w.matrix(&format!("{at}.A_log"), &[1, 1, heads, 1], 1);
    let dt_bias = w.vector(&format!("{at}.dt_bias"), width);
    let mut out = vec![vec![0.0; width]; n.len()];
    for h in 0..heads {
        let mut s = vec![vec![0.0; dim]; dim];
        for (t, out) in out.iter_mut().enumerate() {
            let unit = |x: &Rows| -> Vec<f64> {
                let x = &x[t][h * dim..][..dim];
                let length = (x.iter().map(|v| v * v).sum::<f64>() + 1e-6).sqrt();
                x.iter().map(|v| v / length).collect()
            };
            let (q, k) = (unit(&q), unit(&k));
            for (i, row) in s.iter_mut().enumerate() {
                let channel = h * dim + i;
                let step = (steps[t][channel] + dt_bias[channel]).exp().ln_1p();
                let decay = (-a_log[h].exp() * step).exp();
                row.iter_mut().for_each(|s| *s *= decay);
            }
            let read = |s: &Rows, x: &[f64], j: usize| s.iter().zip(x).map(|(row, x)| row[j] * x).sum::<f64>();
            let beta = sigmoid(betas[t][h]);
            let delta: Vec<f64> = (0..dim).map(|j| beta * (v[t][h * dim + j] - read(&s, &k, j))).collect();
            for (row, k) in s.iter_mut().zip(&k) {
                row.iter_mut().zip(&delta).for_each(|(s, delta)| *s += k * delta);
            }
            (0..dim).for_each(|j| out[h * dim + j] = read(&s, &q, j) / (dim as f64).sqrt());
        }
    }
    let normed = rms(&out, &w.scale(&format!("{at}.o_norm.weight"), dim), p.eps(1e-6));
    linear(&zip(&normed, &gates, |o, gate| o * sigmoid(gate)), "o_proj", n[0].len())
}

/// Latent attention whose shared part of the keys has no position.
fn latent(p: &Pass, n: &Rows, at: &str) -> Rows {
    let (c, w) = (p.config, p.w);
    let (nope, shared, v_dim) = (c.n("qk_nope_head_dim"), c.n("qk_rope_head_dim"), c.n("v_head_dim"));
    let (count, rank) = (c.n("num_attention_heads"), c.n("kv_lora_rank"));
    let part = |name: &str| format!("{at}self_attn.{name}");
    let dim = nope + shared;
    let q = match c.n_if("q_lora_rank") {
        None => w.linear(n, &part("q_proj"), count * dim, false),
        Some(rank) => {
            let low = w.rms(&w.linear(n, &part("q_a_proj"), rank, false), &part("q_a_layernorm"), 1e-6);
            w.linear(&low, &part("q_b_proj"), count * dim, false)
        }
    };
    let [low, of_all] = split(&w.linear(n, &part("kv_a_proj_with_mqa"), rank + shared, false), [rank, shared]);
    let low = w.rms(&low, &part("kv_a_layernorm"), 1e-6);
    let [k_nope, v] =
        split_groups(&w.linear(&low, &part("kv_b_proj"), count * (nope + v_dim), false), count, [nope, v_dim]);
    let key = |(own, of_all): (&Vec<f64>, &Vec<f64>)| own.chunks(nope).flat_map(|own| [own, of_all].concat()).collect();
    let k: Rows = k_nope.iter().zip(&of_all).map(key).collect();
    let heads = Heads { q: count, kv: count, dim };
    p.output(&attend([&q, &k, &v], heads, (dim as f64).powf(-0.5), &within(None), None), at, false)
}

fn routed(p: &Pass, n: &Rows, at: &str) -> Rows {
    let (c, w) = (p.config, p.w);
    let (count, inner) = (c.n("num_experts"), c.n("moe_intermediate_size"));
    let bias = w.vector(&format!("{at}.gate.e_score_correction_bias"), count);
    let router = |z: &Vec<f64>| -> Choice {
        let scores: Vec<f64> = z.iter().map(|z| sigmoid(*z)).collect();
        let mut ranked: Vec<f64> = scores.iter().zip(bias.iter()).map(|(score, bias)| score + bias).collect();
        let (groups, kept) = (c.n_if("num_expert_group").unwrap_or(1), c.n_if("topk_group").unwrap_or(1));
        let size = count / groups;
        let ranks: Vec<f64> =
            ranked.chunks_exact(size).map(|group| top_k(group, 2).into_iter().map(|e| group[e]).sum()).collect();
        let kept = top_k(&ranks, kept);
        let outside = |e: &usize| !kept.contains(&(e / size));
        (0..count).filter(outside).for_each(|e| ranked[e] = f64::NEG_INFINITY);
        let chosen = top_k(&ranked, c.n("num_experts_per_token"));
        let sum: f64 = if c.on("moe_renormalize", true) { chosen.iter().map(|e| scores[*e]).sum() } else { 1.0 };
        let factor = c.f("routed_scaling_factor", 1.0);
        chosen.into_iter().map(|e| (e, scores[e] / sum * factor)).collect()
    };
    let choices: Vec<Choice> = w.linear(n, &format!("{at}.gate"), count, false).iter().map(router).collect();
    let expert = |e: usize| {
        let part = |x: &Rows, name: &str, rows: usize| w.linear(x, &format!("{at}.experts.{e}.{name}"), rows, false);
        let (gate, up) = (part(n, "w1", inner), part(n, "w3", inner));
        part(&zip(&gate, &up, |g, u| silu(g) * u), "w2", n[0].len())
    };
    let mixed = mix(n, &choices, count, expert);
    match c.n_if("num_shared_experts").unwrap_or(0) {
        0 => mixed,
        shared => add(&mixed, &p.gated(n, &format!("{at}.shared_experts"), shared * inner, silu, false)),
    }
}

pub fn cases() -> Vec<Case> {
    let delta = |full: &[u64], delta: &[u64], more: Value| {
        let mut config = json!({"full_attn_layers": full, "kda_layers": delta, "head_dim": 12, "num_heads": 3});
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    let base = with(
        &skeleton("KimiLinearForCausalLM", "kimi_linear"),
        "",
        json!({
            "num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": null, "kv_lora_rank": 24, "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8, "v_head_dim": 16, "mla_use_nope": true, "num_experts": 5, "num_experts_per_token": 2,
            "moe_intermediate_size": 20, "num_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.4,
            "linear_attn_config": delta(&[3], &[1, 2], json!({"short_conv_kernel_size": 3})),
        }),
    );
    let mut dense = base.config.clone();
    for key in ["num_experts", "num_experts_per_token", "moe_intermediate_size", "num_shared_experts", "rope_theta"] {
        dense.as_object_mut().unwrap().shift_remove(key);
    }
    vec![
        with(&base.config, "kimi_linear, experts", json!({})),
        with(
            &base.config,
            "kimi_linear, groups of experts, none shared, narrow queries, tied",
            json!({"num_experts": 6, "num_expert_group": 3, "topk_group": 2, "num_shared_experts": 0, "moe_renormalize": false,
                "q_lora_rank": 20, "tie_word_embeddings": true, "linear_attn_config": delta(&[1], &[2, 3], json!({}))}),
        ),
        with(
            &dense,
            "kimi_linear, one layer a delta net, wide heads, no experts",
            json!({"linear_attn_config": delta(&[1, 3], &[2], json!({"head_dim": 40, "num_heads": 2, "short_conv_kernel_size": 1}))}),
        ),
    ]
}
