//! DeepSeek V2 and V3 with expanded keys and values, and GLM-4.5, which shares V3's router.

use super::Pass;
use super::config::Rope;
use super::experts::{Choice, mix};
use super::math::{Heads, Rows, add, attend, sigmoid, silu, softmax, split, split_groups, top_k, within};

/// DeepSeek V2: softmax; the greatest member ranks a group; weights are not renormed.
fn v2_router(p: Pass, z: &[f64]) -> Choice {
    let c = p.config;
    let scores = softmax(z);
    let mut ranked = scores.clone();
    if c.text("topk_method") == Some("group_limited_greedy") {
        keep_groups(p, &mut ranked, |group| group.iter().copied().fold(f64::NEG_INFINITY, f64::max));
    }
    let factor = c.f("routed_scaling_factor", 1.0);
    top_k(&ranked, c.n("num_experts_per_tok")).into_iter().map(|e| (e, scores[e] * factor)).collect()
}

/// DeepSeek V3: sigmoid; a bias chooses alone; the two greatest members rank a group.
pub fn v3_router(p: Pass, z: &[f64], bias: &[f64]) -> Choice {
    let c = p.config;
    let scores: Vec<f64> = z.iter().map(|v| sigmoid(*v)).collect();
    let mut ranked: Vec<f64> = scores.iter().zip(bias).map(|(s, b)| s + b).collect();
    keep_groups(p, &mut ranked, |group| top_k(group, 2).into_iter().map(|e| group[e]).sum());
    let chosen = top_k(&ranked, c.n("num_experts_per_tok"));
    let sum: f64 = if c.on("norm_topk_prob", true) { chosen.iter().map(|e| scores[*e]).sum() } else { 1.0 };
    let factor = c.f("routed_scaling_factor", 1.0);
    chosen.into_iter().map(|e| (e, scores[e] / sum * factor)).collect()
}

/// Experts outside of the best `topk_group` groups are not chosen.
fn keep_groups(p: Pass, scores: &mut [f64], rank: impl Fn(&[f64]) -> f64) {
    let (groups, kept) = (p.config.n_if("n_group").unwrap_or(1), p.config.n_if("topk_group").unwrap_or(1));
    let size = scores.len() / groups;
    let ranks: Vec<f64> = scores.chunks_exact(size).map(rank).collect();
    let kept = top_k(&ranks, kept);
    for (e, score) in scores.iter_mut().enumerate() {
        if !kept.contains(&(e / size)) {
            *score = f64::NEG_INFINITY;
        }
    }
}

/// A dense network in the first layers, then experts and shared experts.
fn network(p: Pass, n: &Rows, i: usize, at: &str, router: &dyn Fn(&[f64]) -> Choice) -> Rows {
    let c = p.config;
    let is_dense = match c.get("mlp_layer_types") {
        Some(types) => types[i] == "dense",
        None => i < c.n_if("first_k_dense_replace").unwrap_or(0),
    };
    if is_dense {
        return p.gated(n, &format!("{at}mlp"), c.n("intermediate_size"), silu, false);
    }
    routed(p, n, at, router)
}

/// Experts, and shared ones.
fn routed(p: Pass, n: &Rows, at: &str, router: &dyn Fn(&[f64]) -> Choice) -> Rows {
    let (c, w) = (p.config, p.w);
    let (experts, inner) = (c.n("n_routed_experts"), c.n("moe_intermediate_size"));
    let z = w.linear(n, &format!("{at}mlp.gate"), experts, false);
    let choices: Vec<_> = z.iter().map(|z| router(z)).collect();
    let m = mix(n, &choices, experts, |e| p.gated(n, &format!("{at}mlp.experts.{e}"), inner, silu, false));
    match c.n_if("n_shared_experts").unwrap_or(0) {
        0 => m,
        shared => add(&m, &p.gated(n, &format!("{at}mlp.shared_experts"), shared * inner, silu, false)),
    }
}

/// The default of `norm_topk_prob` is true.
pub fn v3_network(p: Pass, n: &Rows, i: usize, at: &str) -> Rows {
    let name = format!("{at}mlp.gate.e_score_correction_bias");
    let experts = p.config.n("n_routed_experts");
    network(p, n, i, at, &|z| v3_router(p, z, &p.w.vector(&name, experts)))
}

/// The experts of V3.
pub fn v3_experts(p: Pass, n: &Rows, at: &str) -> Rows {
    let name = format!("{at}mlp.gate.e_score_correction_bias");
    let experts = p.config.n("n_routed_experts");
    routed(p, n, at, &|z| v3_router(p, z, &p.w.vector(&name, experts)))
}

pub fn deepseek_v2(p: Pass) -> Vec<f64> {
    deepseek(p, &|n, i, at| network(p, n, i, at, &|z| v2_router(p, z)))
}

/// DeepSeek V3.2 and GLM-5: an indexer chooses the tokens that a query sees.
pub fn indexed(p: Pass) -> Vec<f64> {
    deepseek(p, &|n, i, at| v3_network(p, n, i, at))
}

/// Whether a layer has an indexer of its own; the others take the choice of the one before.
fn has_indexer(p: Pass, i: usize) -> bool {
    let c = p.config;
    if let Some(types) = c.get("indexer_types") {
        return types[i] == "full";
    }
    if let Some(pattern) = c.text("index_topk_pattern") {
        return pattern.as_bytes()[i] == b'F';
    }
    let offset = c.n_if("index_skip_topk_offset").unwrap_or(0);
    (i + 1).saturating_sub(offset).is_multiple_of(c.n_if("index_topk_freq").unwrap_or(1))
}

/// The positions that each query sees, by the scores of the indexer.
fn choose(p: Pass, n: &Rows, low: &Rows, at: &str, rope: &Rope) -> Vec<Vec<usize>> {
    let (c, w) = (p.config, p.w);
    let is_glm = c.text("model_type") == Some("glm_moe_dsa");
    let (heads, dim) = (c.n_if("index_n_heads").unwrap_or(if is_glm { 32 } else { 64 }), c.n("index_head_dim"));
    let mut rope = rope.clone();
    rope.interleaved = c.on("indexer_rope_interleave", is_glm);
    let q = rope.rotate(&w.linear(low, &format!("{at}wq_b"), heads * dim, false), dim);
    let k = w.layer_norm(&w.linear(n, &format!("{at}wk"), dim, false), &format!("{at}k_norm"), 1e-6, true);
    let k = rope.rotate(&k, dim);
    let weights = w.linear(n, &format!("{at}weights_proj"), heads, false);
    let of_row = |t: usize| {
        let score = |s: usize| -> f64 {
            let of_head = |h: usize| {
                let dot: f64 = q[t][h * dim..][..dim].iter().zip(&k[s]).map(|(a, b)| a * b).sum();
                weights[t][h] / (heads as f64).sqrt() * (dot / (dim as f64).sqrt()).max(0.0)
            };
            (0..heads).map(of_head).sum()
        };
        top_k(&(0..=t).map(score).collect::<Vec<f64>>(), c.n("index_topk"))
    };
    (0..n.len()).map(of_row).collect()
}

pub fn deepseek_v3(p: Pass) -> Vec<f64> {
    deepseek(p, &|n, i, at| v3_network(p, n, i, at))
}

/// Keys and values are expanded from one latent vector of each position; a rotated part of the key is shared by all heads.
fn deepseek(p: Pass, network: &dyn Fn(&Rows, usize, &str) -> Rows) -> Vec<f64> {
    let (c, w, eps) = (p.config, p.w, p.eps(1e-6));
    let bias = c.on("attention_bias", false);
    let (nope, rotary, v_dim) = (c.n("qk_nope_head_dim"), c.n("qk_rope_head_dim"), c.n("v_head_dim"));
    let (count, latent) = (c.n("num_attention_heads"), c.n("kv_lora_rank"));
    let heads = Heads { q: count, kv: count, dim: nope + rotary };
    let mut rope = c.rope(rotary, 1e4, p.context);
    rope.interleaved = c.on("rope_interleave", true);
    let scale = (heads.dim as f64).powf(-0.5) * c.mscale_of_scores();
    let mut x = p.embed();
    // The positions that each query sees.
    let mut chosen: Vec<Vec<usize>> = (0..p.tokens.len()).map(|t| (0..=t).collect()).collect();
    for (i, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let part = |name: &str| format!("{at}self_attn.{name}");
        let q = match c.n_if("q_lora_rank") {
            Some(rank) => {
                let low = w.rms(&w.linear(&n, &part("q_a_proj"), rank, bias), &part("q_a_layernorm"), 1e-6);
                if c.get("index_topk").is_some() && has_indexer(p, i) {
                    chosen = choose(p, &n, &low, &part("indexer."), &rope);
                }
                w.linear(&low, &part("q_b_proj"), count * heads.dim, false)
            }
            None => w.linear(&n, &part("q_proj"), count * heads.dim, false),
        };
        let [q_nope, q_rope] = split_groups(&q, count, [nope, rotary]);
        let low = w.linear(&n, &part("kv_a_proj_with_mqa"), latent + rotary, bias);
        let [low, k_rope] = split(&low, [latent, rotary]);
        let low = w.rms(&low, &part("kv_a_layernorm"), 1e-6);
        let kv = w.linear(&low, &part("kv_b_proj"), count * (nope + v_dim), false);
        let [k_nope, v] = split_groups(&kv, count, [nope, v_dim]);
        let (q_rope, k_rope) = (rope.rotate(&q_rope, rotary), rope.rotate(&k_rope, rotary));
        let k_rope: Rows = k_rope.iter().map(|row| row.repeat(count)).collect();
        let join = |a: &Rows, b: &Rows| -> Rows {
            let heads = |(a, b): (&Vec<f64>, &Vec<f64>)| {
                a.chunks(nope).zip(b.chunks(rotary)).flat_map(|(a, b)| [a, b].concat()).collect()
            };
            a.iter().zip(b).map(heads).collect()
        };
        let (q, k) = (join(&q_nope, &q_rope), join(&k_nope, &k_rope));
        let sees = |_: usize, i: usize, j: usize, score: f64| chosen[i].contains(&j).then_some(score);
        let a = attend([&q, &k, &v], heads, scale, &sees, None);
        x = add(&x, &p.output(&a, &at, bias));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        x = add(&x, &network(&n, i, &at));
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}

/// GLM-4.5: rope on a part of each head, optional norms of heads, V3's router.
pub fn glm4_moe(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-5), p.config.heads(), p.rope(1e4, 0.5));
    let bias = c.on("attention_bias", false);
    let mut x = p.embed();
    for (i, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let [mut q, mut k, v] = p.project(&n, &at, heads, bias);
        if c.on("use_qk_norm", false) {
            q = w.rms_heads(&q, &format!("{at}self_attn.q_norm"), heads.dim, eps);
            k = w.rms_heads(&k, &format!("{at}self_attn.k_norm"), heads.dim, eps);
        }
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(None), None);
        x = add(&x, &p.output(&a, &at, false));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        x = add(&x, &v3_network(p, &n, i, &at));
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}
