//! Families with routed experts.

use super::Pass;
use super::math::{Rows, add, attend, clamp, map, sigmoid, silu, softmax, split, times, top_k, within, zip};
use super::states;
use super::tensors::product;

/// What a router chose for a row: experts and their weights.
pub type Choice = Vec<(usize, f64)>;

/// Runs every expert on every row, and weighs what it gives.
pub fn mix(x: &Rows, choices: &[Choice], experts: usize, expert: impl Fn(usize) -> Rows) -> Rows {
    let mut out = vec![vec![0.0; x[0].len()]; x.len()];
    for e in 0..experts {
        for ((row, choice), y) in out.iter_mut().zip(choices).zip(expert(e)) {
            let weight: f64 = choice.iter().filter(|(chosen, _)| *chosen == e).map(|(_, weight)| weight).sum();
            row.iter_mut().zip(y).for_each(|(v, y)| *v += weight * y);
        }
    }
    out
}

/// The `k` greatest of the softmax of all, whose weights sum to 1 if `renorm`.
pub fn softmax_then_top(z: &[f64], k: usize, renorm: bool) -> Choice {
    let scores = softmax(z);
    let chosen = top_k(&scores, k);
    let sum: f64 = if renorm { chosen.iter().map(|e| scores[*e]).sum() } else { 1.0 };
    chosen.into_iter().map(|e| (e, scores[e] / sum)).collect()
}

/// The softmax of the `k` greatest.
fn top_then_softmax(z: &[f64], k: usize) -> Choice {
    let chosen = top_k(z, k);
    let scores = softmax(&chosen.iter().map(|e| z[*e]).collect::<Vec<_>>());
    chosen.into_iter().zip(scores).collect()
}

pub fn mixtral(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-5), p.config.heads(), p.rope(1e6, 1.0));
    let (experts, inner) = (c.n("num_local_experts"), c.n("intermediate_size"));
    let mut x = p.embed();
    for (_, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let [q, k, v] = p.project(&n, &at, heads, false);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let window = within(c.n_if("sliding_window"));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &window, None);
        x = add(&x, &p.output(&a, &at, false));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        let moe = format!("{at}block_sparse_moe");
        let z = w.linear(&n, &format!("{moe}.gate"), experts, false);
        let choices: Vec<_> = z.iter().map(|z| softmax_then_top(z, c.n("num_experts_per_tok"), true)).collect();
        let m = mix(&n, &choices, experts, |e| {
            let gate = w.linear(&n, &format!("{moe}.experts.{e}.w1"), inner, false);
            let up = w.linear(&n, &format!("{moe}.experts.{e}.w3"), inner, false);
            w.linear(&zip(&gate, &up, |g, u| silu(g) * u), &format!("{moe}.experts.{e}.w2"), x[0].len(), false)
        });
        x = add(&x, &m);
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}

impl Pass<'_> {
    /// Whether a layer of the Qwen family has experts.
    pub fn is_sparse(&self, i: usize) -> bool {
        let dense = self.config.get("mlp_only_layers").and_then(|list| list.as_array());
        !dense.is_some_and(|list| list.iter().any(|layer| layer.as_u64() == Some(i as u64)))
            && (i + 1).is_multiple_of(self.config.n_if("decoder_sparse_step").unwrap_or(1))
    }
}

/// With a shared expert behind a sigmoid.
pub fn qwen2_moe(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-6), p.config.heads(), p.rope(1e4, 1.0));
    let (experts, bias) = (c.n("num_experts"), c.on("qkv_bias", true));
    let mut x = p.embed();
    for (i, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let [q, k, v] = p.project(&n, &at, heads, bias);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let slides = c.on("use_sliding_window", false) && i >= c.n_if("max_window_layers").unwrap_or(28);
        let window = within(c.n_if("sliding_window").filter(|_| slides));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &window, None);
        x = add(&x, &p.output(&a, &at, false));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        if !p.is_sparse(i) {
            x = add(&x, &p.gated(&n, &format!("{at}mlp"), c.n("intermediate_size"), silu, false));
            continue;
        }
        let z = w.linear(&n, &format!("{at}mlp.gate"), experts, false);
        let renorm = c.on("norm_topk_prob", false);
        let choices: Vec<_> = z.iter().map(|z| softmax_then_top(z, c.n("num_experts_per_tok"), renorm)).collect();
        let inner = c.n("moe_intermediate_size");
        let m = mix(&n, &choices, experts, |e| p.gated(&n, &format!("{at}mlp.experts.{e}"), inner, silu, false));
        let inner = c.n("shared_expert_intermediate_size");
        let shared = p.gated(&n, &format!("{at}mlp.shared_expert"), inner, silu, false);
        let open = w.linear(&n, &format!("{at}mlp.shared_expert_gate"), 1, false);
        let shared: Rows =
            shared.iter().zip(open).map(|(row, open)| row.iter().map(|v| v * sigmoid(open[0])).collect()).collect();
        x = add(&add(&x, &m), &shared);
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}

pub fn qwen3_moe(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-6), p.config.heads(), p.rope(1e4, 1.0));
    let (experts, bias) = (c.n("num_experts"), c.on("attention_bias", false));
    let mut x = p.embed();
    for (i, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let [q, k, v] = p.project(&n, &at, heads, bias);
        let q = w.rms_heads(&q, &format!("{at}self_attn.q_norm"), heads.dim, eps);
        let k = w.rms_heads(&k, &format!("{at}self_attn.k_norm"), heads.dim, eps);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(None), None);
        x = add(&x, &p.output(&a, &at, bias));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        if !p.is_sparse(i) {
            x = add(&x, &p.gated(&n, &format!("{at}mlp"), c.n("intermediate_size"), silu, false));
            continue;
        }
        let z = w.linear(&n, &format!("{at}mlp.gate"), experts, false);
        let renorm = c.on("norm_topk_prob", false);
        let choices: Vec<_> = z.iter().map(|z| softmax_then_top(z, c.n("num_experts_per_tok"), renorm)).collect();
        let inner = c.n("moe_intermediate_size");
        x = add(&x, &mix(&n, &choices, experts, |e| p.gated(&n, &format!("{at}mlp.experts.{e}"), inner, silu, false)));
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}

/// Queries and keys are normed as whole vectors, then clamped.
pub fn olmoe(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-5), p.config.heads(), p.rope(1e4, 1.0));
    let (experts, bias) = (c.n("num_experts"), c.on("attention_bias", false));
    let mut x = p.embed();
    for (_, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let [q, k, v] = p.project(&n, &at, heads, bias);
        let q = w.rms(&q, &format!("{at}self_attn.q_norm"), eps);
        let k = w.rms(&k, &format!("{at}self_attn.k_norm"), eps);
        let [q, k, v] = [q, k, v].map(|x| clamp(&x, c.f_if("clip_qkv")));
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(None), None);
        x = add(&x, &p.output(&a, &at, bias));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        let z = w.linear(&n, &format!("{at}mlp.gate"), experts, false);
        let renorm = c.on("norm_topk_prob", false);
        let choices: Vec<_> = z.iter().map(|z| softmax_then_top(z, c.n("num_experts_per_tok"), renorm)).collect();
        let inner = c.n("intermediate_size");
        x = add(&x, &mix(&n, &choices, experts, |e| p.gated(&n, &format!("{at}mlp.experts.{e}"), inner, silu, false)));
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}

/// Stacked experts `[gate | up]`, and a shared network if the configuration gives it a size.
pub fn granite_moe(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-6), p.config.heads(), p.rope(1e4, 1.0));
    let (bias, branch) = (c.on("attention_bias", false), c.f("residual_multiplier", 1.0));
    let (experts, hidden) = (c.n_if("num_local_experts").unwrap_or(0), c.n("hidden_size"));
    let is_four = c.text("model_type") == Some("granitemoehybrid");
    let is_shared = is_four || c.text("model_type") == Some("granitemoeshared");
    let rotates = !is_four || c.text("position_embedding_type") == Some("rope");
    let mut x = times(&p.embed(), c.f("embedding_multiplier", 1.0));
    let kinds = c.get("layer_types").or(c.get("layers_block_type"));
    let is_mamba =
        |i: usize| is_four && kinds.is_some_and(|kinds| ["mamba", "linear_attention"].iter().any(|it| kinds[i] == *it));
    for (i, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let mixed = if is_mamba(i) {
            states::mamba2(&p, &n, &format!("{at}mamba"), &states::of_granite(&p, eps))
        } else {
            let [mut q, mut k, v] = p.project(&n, &at, heads, bias);
            if rotates {
                (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
            }
            let a = attend([&q, &k, &v], heads, c.f("attention_multiplier", 1.0), &within(None), None);
            p.output(&a, &at, bias)
        };
        x = add(&x, &times(&mixed, branch));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        let (moe, inner) = (format!("{at}block_sparse_moe"), c.n("intermediate_size"));
        let mut m = times(&n, 0.0);
        if experts > 0 {
            let z = w.linear(&n, &format!("{moe}.router.layer"), experts, false);
            let choices: Vec<_> = z.iter().map(|z| top_then_softmax(z, c.n("num_experts_per_tok"))).collect();
            let input = w.matrix(&format!("{moe}.input_linear.weight"), &[experts, 2 * inner, hidden], hidden);
            let output = w.matrix(&format!("{moe}.output_linear.weight"), &[experts, hidden, inner], inner);
            m = mix(&n, &choices, experts, |e| {
                let both = product(&n, &input[e * 2 * inner * hidden..][..2 * inner * hidden], None);
                let [gate, up] = split(&both, [inner, inner]);
                product(&zip(&gate, &up, |g, u| silu(g) * u), &output[e * hidden * inner..][..hidden * inner], None)
            });
        }
        if let Some(inner) = c.n_if("shared_intermediate_size").filter(|inner| is_shared && *inner > 0) {
            let both = w.linear(&n, &format!("{at}shared_mlp.input_linear"), 2 * inner, false);
            let [gate, up] = split(&both, [inner, inner]);
            let y = zip(&gate, &up, |g, u| silu(g) * u);
            m = add(&m, &w.linear(&y, &format!("{at}shared_mlp.output_linear"), hidden, false));
        }
        x = add(&x, &times(&m, branch));
    }
    let logits = p.head(&w.rms(&x, "model.norm", eps), false);
    logits.iter().map(|v| v / c.f("logits_scaling", 1.0)).collect()
}

/// Sinks; stacked experts of matrices `[in, out]` with interleaved gates, biases and bounds.
pub fn gpt_oss(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-5), p.config.heads(), p.rope(150000.0, 1.0));
    let (experts, inner, hidden) = (c.n("num_local_experts"), c.n("intermediate_size"), c.n("hidden_size"));
    let mut x = p.embed();
    for (i, at) in p.layers() {
        let n = w.rms(&x, &format!("{at}input_layernorm"), eps);
        let [q, k, v] = p.project(&n, &at, heads, true);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let slides = match c.get("layer_types") {
            Some(types) => types[i] == "sliding_attention",
            None => i % 2 == 0,
        };
        let window = within(c.n_if("sliding_window").filter(|_| slides));
        let sinks = w.vector(&format!("{at}self_attn.sinks"), heads.q);
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &window, Some(&sinks));
        x = add(&x, &p.output(&a, &at, true));
        let n = w.rms(&x, &format!("{at}post_attention_layernorm"), eps);
        let z = w.linear(&n, &format!("{at}mlp.router"), experts, true);
        let choices: Vec<_> = z.iter().map(|z| top_then_softmax(z, c.n("num_experts_per_tok"))).collect();
        let moe = format!("{at}mlp.experts");
        let gate_up = w.matrix(&format!("{moe}.gate_up_proj"), &[experts, hidden, 2 * inner], hidden);
        let gate_up_bias = w.get(&format!("{moe}.gate_up_proj_bias"), &[experts, 2 * inner], 0.0, 0.4);
        let down = w.matrix(&format!("{moe}.down_proj"), &[experts, inner, hidden], inner);
        let down_bias = w.get(&format!("{moe}.down_proj_bias"), &[experts, hidden], 0.0, 0.4);
        let m = mix(&n, &choices, experts, |e| {
            let matrix = transposed(&gate_up[e * hidden * 2 * inner..][..hidden * 2 * inner], 2 * inner);
            let h = product(&n, &matrix, Some(&gate_up_bias[e * 2 * inner..][..2 * inner]));
            let gate: Rows = h.iter().map(|row| row.iter().step_by(2).copied().collect()).collect();
            let up: Rows = h.iter().map(|row| row.iter().skip(1).step_by(2).copied().collect()).collect();
            let limit = c.f("swiglu_limit", 7.0);
            let up = map(&up, |v| v.clamp(-limit, limit) + 1.0);
            let gate = map(&gate, |v| v.min(limit) * sigmoid(1.702 * v.min(limit)));
            let matrix = transposed(&down[e * hidden * inner..][..hidden * inner], hidden);
            product(&zip(&gate, &up, |g, u| g * u), &matrix, Some(&down_bias[e * hidden..][..hidden]))
        });
        x = add(&x, &m);
    }
    p.head(&w.rms(&x, "model.norm", eps), false)
}

/// `[in, out]` as `[out, in]`.
pub fn transposed(x: &[f64], columns: usize) -> Vec<f64> {
    (0..columns).flat_map(|column| x.iter().skip(column).step_by(columns).copied()).collect()
}
