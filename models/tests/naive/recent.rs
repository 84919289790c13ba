//! Families of 2025 and 2026 with the usual order of norms: each is an attention and a network.

use super::Pass;
use super::config::Rope;
use super::experts::{Choice, mix, softmax_then_top, transposed};
use super::latent::v3_router;
use super::math::{Heads, Rows, add, attend, map, rms, sigmoid, silu, softmax, split, times, top_k, within, zip};
use super::tensors::product;

/// What a layer adds, given the normed stream, its number, and the prefix of its tensors.
type Part<'a> = &'a dyn Fn(&Rows, usize, &str) -> Rows;

impl Pass<'_> {
    /// The normed stream behind layers of attention and a network, each with a norm of its input of the given name.
    pub fn layered(&self, x: Rows, norm: &dyn Fn(&Rows, &str) -> Rows, names: [&str; 2], parts: [Part; 2]) -> Rows {
        let mut x = x;
        for (i, at) in self.layers() {
            for (name, part) in names.iter().zip(parts) {
                x = add(&x, &part(&norm(&x, &format!("{at}{name}")), i, &at));
            }
        }
        norm(&x, "model.norm")
    }

    /// Experts `MODULE.experts.N` with separate matrices.
    pub fn experts(
        &self,
        n: &Rows,
        module: &str,
        choices: &[Choice],
        names: [&str; 3],
        inner: usize,
        bias: bool,
    ) -> Rows {
        let count = choices.iter().flatten().map(|(expert, _)| expert + 1).max().unwrap();
        // Tensors are made for all experts.
        mix(n, choices, count.max(self.count()), |e| {
            let part =
                |x: &Rows, name: &str, rows| self.w.linear(x, &format!("{module}.experts.{e}.{name}"), rows, bias);
            let [gate, up] = [names[0], names[1]].map(|name| part(n, name, inner));
            part(&zip(&gate, &up, |g, u| silu(g) * u), names[2], n[0].len())
        })
    }

    /// The number of experts under the name that the configuration has for it.
    fn count(&self) -> usize {
        let keys = ["num_local_experts", "num_experts", "moe_num_experts", "n_routed_experts"];
        keys.iter().find_map(|key| self.config.n_if(key)).unwrap()
    }

    /// Projections with norms of query and key heads before a rotation.
    fn attended_normed(&self, n: &Rows, at: &str, rope: &Rope, bias: bool, eps: f64) -> Rows {
        let (w, heads) = (self.w, self.config.heads());
        let [q, k, v] = self.project(n, at, heads, bias);
        let [q, k] = [(q, "q_norm"), (k, "k_norm")].map(|(x, name)| {
            rope.rotate(&w.rms_heads(&x, &format!("{at}self_attn.{name}"), heads.dim, eps), heads.dim)
        });
        self.output(&full([&q, &k, &v], heads), at, bias)
    }
}

const NORMS: [&str; 2] = ["input_layernorm", "post_attention_layernorm"];
const GATED: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];
const MIXTRAL: [&str; 3] = ["w1", "w3", "w2"];

fn full(qkv: [&Rows; 3], heads: Heads) -> Rows {
    attend(qkv, heads, (heads.dim as f64).powf(-0.5), &within(None), None)
}

/// Sigmoid scores; a bias chooses alone; weights sum to `scale`.
fn by_sigmoid(z: &[f64], bias: Option<&[f64]>, k: usize, scale: f64) -> Choice {
    let scores: Vec<f64> = z.iter().map(|v| sigmoid(*v)).collect();
    let ranked: Vec<f64> = scores.iter().enumerate().map(|(e, s)| s + bias.map_or(0.0, |bias| bias[e])).collect();
    let chosen = top_k(&ranked, k);
    let sum: f64 = chosen.iter().map(|e| scores[*e]).sum();
    chosen.into_iter().map(|e| (e, scores[e] / sum * scale)).collect()
}

/// Norms of whole rows of queries and keys.
pub fn minimax_m2(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads) = (p.config, p.w, p.eps(1e-6), p.config.heads());
    let dims = c.n_if("rotary_dim").unwrap_or((heads.dim as f64 * c.partial(1.0)) as usize);
    let rope = c.rope(dims, 5e6, p.context);
    let attention = |n: &Rows, _: usize, at: &str| {
        let [mut q, mut k, v] = p.project(n, at, heads, false);
        if c.on("use_qk_norm", true) {
            (q, k) =
                (w.rms(&q, &format!("{at}self_attn.q_norm"), eps), w.rms(&k, &format!("{at}self_attn.k_norm"), eps));
        }
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        p.output(&full([&q, &k, &v], heads), at, false)
    };
    let network = |n: &Rows, _: usize, at: &str| {
        let (moe, count) = (format!("{at}block_sparse_moe"), c.n("num_local_experts"));
        let z = w.linear(n, &format!("{moe}.gate"), count, false);
        let bias = c.on("use_routing_bias", true).then(|| w.vector(&format!("{moe}.e_score_correction_bias"), count));
        let bias = bias.as_ref().map(|bias| &bias[..]);
        let choices: Vec<_> = z.iter().map(|z| by_sigmoid(z, bias, c.n("num_experts_per_tok"), 1.0)).collect();
        p.experts(n, &moe, &choices, MIXTRAL, c.n("intermediate_size"), false)
    };
    p.head(&p.layered(p.embed(), &|x, name| w.rms(x, name, eps), NORMS, [&attention, &network]), false)
}

/// Softmax scores; a bias chooses alone; experts in some layers.
pub fn ernie_moe(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads) = (p.config, p.w, p.eps(1e-5), p.config.heads());
    let (rope, bias) = (p.rope(5e5, 1.0).interleaved(), c.on("use_bias", false));
    let attention = |n: &Rows, _: usize, at: &str| {
        let [q, k, v] = p.project(n, at, heads, bias);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        p.output(&full([&q, &k, &v], heads), at, bias)
    };
    let end = c.get("moe_layer_end_index").map_or(-1, |end| end.as_i64().unwrap());
    let network = |n: &Rows, i: usize, at: &str| {
        let mlp = format!("{at}mlp");
        let is_sparse = (i + 1).is_multiple_of(c.n_if("moe_layer_interval").unwrap_or(1))
            && i >= c.n_if("moe_layer_start_index").unwrap_or(1)
            && (end < 0 || i as i64 <= end);
        if !is_sparse {
            return p.gated(n, &mlp, c.n("intermediate_size"), silu, bias);
        }
        let (count, inner) = (c.n("moe_num_experts"), c.n("moe_intermediate_size"));
        let z = w.linear(n, &format!("{mlp}.gate"), count, false);
        let correction = w.get(&format!("{mlp}.moe_statics.e_score_correction_bias"), &[1, count], 0.0, 0.2);
        let choice = |z: &Vec<f64>| -> Choice {
            let scores = softmax(z);
            let ranked: Vec<f64> = scores.iter().zip(correction.iter()).map(|(s, b)| s + b).collect();
            let chosen = top_k(&ranked, c.n("moe_k"));
            let sum: f64 = chosen.iter().map(|e| scores[*e]).sum();
            chosen.into_iter().map(|e| (e, scores[e] / sum)).collect()
        };
        let m = p.experts(n, &mlp, &z.iter().map(choice).collect::<Vec<_>>(), GATED, inner, bias);
        match c.n_if("moe_num_shared_experts").unwrap_or(2) {
            0 => m,
            shared => add(&m, &p.gated(n, &format!("{mlp}.shared_experts"), shared * inner, silu, bias)),
        }
    };
    p.head(&p.layered(p.embed(), &|x, name| w.rms(x, name, eps), NORMS, [&attention, &network]), true)
}

/// Chunks and late norms in layers with rope, growing queries in the others; gates multiply the inputs of experts.
pub fn llama4(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads) = (p.config, p.w, p.eps(1e-5), p.config.heads());
    let (rope, bias) = (p.rope(5e5, 1.0).interleaved(), c.on("attention_bias", false));
    let rotates =
        |i: usize| match c.get("no_rope_layers").and_then(|list| list.as_array()).filter(|list| !list.is_empty()) {
            Some(list) => list[i] == 1,
            None => !(i + 1).is_multiple_of(c.n_if("no_rope_layer_interval").unwrap_or(4)),
        };
    let attention = |n: &Rows, i: usize, at: &str| {
        let [mut q, mut k, v] = p.project(n, at, heads, bias);
        if rotates(i) {
            [q, k] = [q, k].map(|x| rope.rotate(&x, heads.dim));
            if c.on("use_qk_norm", true) {
                [q, k] = [q, k].map(|x| rms(&x, &vec![1.0; heads.dim], eps));
            }
        } else if c.get("attn_temperature_tuning").is_none_or(|tuned| *tuned != false) {
            let (floor, scale) = (c.f("floor_scale", 8192.0), c.f("attn_scale", 0.1));
            let grown = |(pos, row): (usize, &Vec<f64>)| {
                let factor = 1.0 + scale * (1.0 + ((pos as f64 + 1.0) / floor).floor()).ln();
                row.iter().map(|v| v * factor).collect()
            };
            q = q.iter().enumerate().map(grown).collect();
        }
        let is_chunked = c.get("layer_types").map_or(rotates(i), |types| types[i] == "chunked_attention");
        let chunk = c.n_if("attention_chunk_size").filter(|_| is_chunked);
        let sees = |_: usize, i: usize, j: usize, score: f64| chunk.is_none_or(|c| i / c == j / c).then_some(score);
        p.output(&attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &sees, None), at, bias)
    };
    let step = c.n_if("interleave_moe_layer_step").unwrap_or(1);
    let network = |n: &Rows, i: usize, at: &str| {
        let ff = format!("{at}feed_forward");
        let is_sparse = match c.get("moe_layers") {
            Some(list) => list.as_array().unwrap().iter().any(|layer| layer.as_u64() == Some(i as u64)),
            None => (i + 1).is_multiple_of(step),
        };
        if !is_sparse {
            return p.gated(n, &ff, c.n("intermediate_size_mlp"), silu, false);
        }
        let (count, inner, hidden) = (c.n("num_local_experts"), c.n("intermediate_size"), c.n("hidden_size"));
        let z = w.linear(n, &format!("{ff}.router"), count, false);
        let gate_up = w.matrix(&format!("{ff}.experts.gate_up_proj"), &[count, hidden, 2 * inner], hidden);
        let down = w.matrix(&format!("{ff}.experts.down_proj"), &[count, inner, hidden], inner);
        let choices: Vec<Choice> =
            z.iter().map(|z| top_k(z, c.n("num_experts_per_tok")).into_iter().map(|e| (e, 1.0)).collect()).collect();
        let m = mix(n, &choices, count, |e| {
            let input: Rows =
                n.iter().zip(&z).map(|(row, z)| row.iter().map(|v| v * sigmoid(z[e])).collect()).collect();
            let both =
                product(&input, &transposed(&gate_up[e * hidden * 2 * inner..][..hidden * 2 * inner], 2 * inner), None);
            let [gate, up] = split(&both, [inner, inner]);
            let matrix = transposed(&down[e * hidden * inner..][..hidden * inner], hidden);
            product(&zip(&gate, &up, |g, u| silu(g) * u), &matrix, None)
        });
        add(&m, &p.gated(n, &format!("{ff}.shared_expert"), inner, silu, false))
    };
    p.head(&p.layered(p.embed(), &|x, name| w.rms(x, name, eps), NORMS, [&attention, &network]), false)
}

/// Qwen3-VL's mixtures: Qwen3-MoE with transposed stacks.
pub fn qwen3_vl_moe(p: Pass) -> Vec<f64> {
    let (c, w, eps, rope) = (p.config, p.w, p.eps(1e-6), p.rope(1e4, 1.0));
    let attention = |n: &Rows, _: usize, at: &str| p.attended_normed(n, at, &rope, c.on("attention_bias", false), eps);
    let network = |n: &Rows, i: usize, at: &str| {
        if !p.is_sparse(i) {
            return p.gated(n, &format!("{at}mlp"), c.n("intermediate_size"), silu, false);
        }
        let (count, inner, hidden) = (c.n("num_experts"), c.n("moe_intermediate_size"), c.n("hidden_size"));
        let z = w.linear(n, &format!("{at}mlp.gate"), count, false);
        let renorm = c.on("norm_topk_prob", true);
        let choices: Vec<_> = z.iter().map(|z| softmax_then_top(z, c.n("num_experts_per_tok"), renorm)).collect();
        let gate_up = w.matrix(&format!("{at}mlp.experts.gate_up_proj"), &[count, hidden, 2 * inner], hidden);
        let down = w.matrix(&format!("{at}mlp.experts.down_proj"), &[count, inner, hidden], inner);
        mix(n, &choices, count, |e| {
            let both =
                product(n, &transposed(&gate_up[e * hidden * 2 * inner..][..hidden * 2 * inner], 2 * inner), None);
            let [gate, up] = split(&both, [inner, inner]);
            let matrix = transposed(&down[e * hidden * inner..][..hidden * inner], hidden);
            product(&zip(&gate, &up, |g, u| silu(g) * u), &matrix, None)
        })
    };
    p.head(&p.layered(p.embed(), &|x, name| w.rms(x, name, eps), NORMS, [&attention, &network]), false)
}

/// Late norms of heads; experts beside a shared network in every layer.
pub fn hunyuan_moe(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-5), p.config.heads(), p.rope(1e4, 1.0));
    let bias = c.on("attention_bias", false);
    let of_layer = |key: &str, i: usize| {
        let value = c.get(key).unwrap();
        value.as_u64().unwrap_or_else(|| value[i].as_u64().unwrap()) as usize
    };
    let attention = |n: &Rows, _: usize, at: &str| {
        let [q, k, v] = p.project(n, at, heads, bias);
        let [q, k] = [(q, "query"), (k, "key")].map(|(x, name)| {
            let x = rope.rotate(&x, heads.dim);
            match c.on("use_qk_norm", true) {
                true => w.rms_heads(&x, &format!("{at}self_attn.{name}_layernorm"), heads.dim, eps),
                false => x,
            }
        });
        p.output(&full([&q, &k, &v], heads), at, bias)
    };
    let network = |n: &Rows, i: usize, at: &str| {
        let (count, inner) = (of_layer("num_experts", i), c.n("intermediate_size"));
        let z = w.linear(n, &format!("{at}mlp.gate.wg"), count, false);
        let choices: Vec<_> = z.iter().map(|z| softmax_then_top(z, of_layer("moe_topk", i), true)).collect();
        let m = mix(n, &choices, count, |e| p.gated(n, &format!("{at}mlp.experts.{e}"), inner, silu, false));
        add(&m, &p.gated(n, &format!("{at}mlp.shared_mlp"), inner, silu, false))
    };
    p.head(&p.layered(p.embed(), &|x, name| w.rms(x, name, eps), NORMS, [&attention, &network]), false)
}

/// Ling and Ring V2: packed projections, norms of heads, rope on a part, V3's router.
pub fn bailing(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads) = (p.config, p.w, p.eps(1e-6), p.config.heads());
    let hidden = c.n("hidden_size");
    let dims = c.n_if("rotary_dim").unwrap_or((heads.dim as f64 * c.partial(0.5)) as usize);
    let rope = c.rope(dims, 6e5, p.context);
    let attention = |n: &Rows, _: usize, at: &str| {
        let (name, kv) = (format!("{at}attention"), heads.kv * heads.dim);
        let rows = heads.q * heads.dim + 2 * kv;
        let qkv = w.linear(n, &format!("{name}.query_key_value"), rows, c.on("use_qkv_bias", false));
        let [mut q, mut k, v] = split(&qkv, [heads.q * heads.dim, kv, kv]);
        if c.on("use_qk_norm", true) {
            q = w.rms_heads(&q, &format!("{name}.query_layernorm"), heads.dim, eps);
            k = w.rms_heads(&k, &format!("{name}.key_layernorm"), heads.dim, eps);
        }
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        w.linear(&full([&q, &k, &v], heads), &format!("{name}.dense"), hidden, c.on("use_bias", false))
    };
    let network = |n: &Rows, i: usize, at: &str| {
        let mlp = format!("{at}mlp");
        if i < c.n_if("first_k_dense_replace").unwrap_or(1) {
            return p.gated(n, &mlp, c.n("intermediate_size"), silu, false);
        }
        let (count, inner) = (c.n("num_experts"), c.n("moe_intermediate_size"));
        let z = w.linear(n, &format!("{mlp}.gate"), count, false);
        let has_bias = c.on("moe_router_enable_expert_bias", true);
        let bias = has_bias.then(|| w.vector(&format!("{mlp}.gate.expert_bias"), count).to_vec());
        let bias = bias.unwrap_or_else(|| vec![0.0; count]);
        let choices: Vec<_> = z.iter().map(|z| v3_router(p, z, &bias)).collect();
        let m = p.experts(n, &mlp, &choices, GATED, inner, false);
        match c.n_if("num_shared_experts").unwrap_or(1) {
            0 => m,
            shared => {
                let inner = shared * c.n_if("moe_shared_expert_intermediate_size").unwrap_or(inner);
                add(&m, &p.gated(n, &format!("{mlp}.shared_experts"), inner, silu, false))
            }
        }
    };
    let x = w.embed("model.word_embeddings.weight", [c.n("vocab_size"), hidden], p.tokens.iter().copied());
    let x = p.layered(x, &|x, name| w.rms(x, name, eps), NORMS, [&attention, &network]);
    let head = if c.on("tie_word_embeddings", false) { "model.word_embeddings" } else { "lm_head" };
    w.head(x.last().unwrap(), head, c.n("vocab_size"), false)
}

/// Norms around both branches; a gate of attention; rope in the layers with a window.
pub fn afmoe(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-5), p.config.heads(), p.rope(1e4, 1.0));
    let attention = |n: &Rows, i: usize, at: &str| {
        let [q, k, v] = p.project(n, at, heads, false);
        let [mut q, mut k] = [(q, "q_norm"), (k, "k_norm")]
            .map(|(x, name)| w.rms_heads(&x, &format!("{at}self_attn.{name}"), heads.dim, eps));
        let slides = c.slides(i, Some(c.n_if("global_attn_every_n_layers").unwrap_or(4)));
        if slides {
            [q, k] = [q, k].map(|x| rope.rotate(&x, heads.dim));
        }
        let window = within(c.n_if("sliding_window").filter(|_| slides));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &window, None);
        let gate = w.linear(n, &format!("{at}self_attn.gate_proj"), heads.q * heads.dim, false);
        let a = p.output(&zip(&a, &gate, |a, g| a * sigmoid(g)), at, false);
        w.rms(&a, &format!("{at}post_attention_layernorm"), eps)
    };
    let network = |n: &Rows, i: usize, at: &str| {
        let mlp = format!("{at}mlp");
        let m = if i < c.n_if("num_dense_layers").unwrap_or(1) {
            p.gated(n, &mlp, c.n("intermediate_size"), silu, false)
        } else {
            let (count, inner) = (c.n("num_experts"), c.n("moe_intermediate_size"));
            let z = w.linear(n, &format!("{mlp}.router.gate"), count, false);
            let bias = w.vector(&format!("{mlp}.expert_bias"), count);
            let choice = |z: &Vec<f64>| by_sigmoid(z, Some(&bias), c.n("num_experts_per_tok"), c.f("route_scale", 1.0));
            let m = p.experts(n, &mlp, &z.iter().map(choice).collect::<Vec<_>>(), GATED, inner, false);
            match c.n_if("num_shared_experts").unwrap_or(1) {
                0 => m,
                shared => add(&m, &p.gated(n, &format!("{mlp}.shared_experts"), shared * inner, silu, false)),
            }
        };
        w.rms(&m, &format!("{at}post_mlp_layernorm"), eps)
    };
    let scale = if c.on("mup_enabled", false) { (c.n("hidden_size") as f64).sqrt() } else { 1.0 };
    let names = ["input_layernorm", "pre_mlp_layernorm"];
    let x = p.layered(times(&p.embed(), scale), &|x, name| w.rms(x, name, eps), names, [&attention, &network]);
    p.head(&x, false)
}

/// The expert of the greatest logit, with its share in the softmax over those that are near it; then the same without it.
fn sparse_mixer(z: &[f64], k: usize, jitter: f64) -> Choice {
    let mut left = z.to_vec();
    let one = |left: &mut Vec<f64>| {
        let best = top_k(left, 1)[0];
        let most = left[best];
        let masked = left.iter().zip(z).map(|(v, z)| {
            let far = (most - z) / z.abs().max(most) > 2.0 * jitter;
            if far { f64::NEG_INFINITY } else { *v }
        });
        let weight = softmax(&masked.collect::<Vec<_>>())[best];
        left[best] = f64::NEG_INFINITY;
        (best, weight)
    };
    (0..k).map(|_| one(&mut left)).collect()
}

pub fn phimoe(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-5), p.config.heads(), p.rope(1e6, 1.0));
    let bias = c.on("attention_bias", false);
    let attention = |n: &Rows, _: usize, at: &str| {
        let [q, k, v] = p.project(n, at, heads, bias);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let window = within(c.n_if("sliding_window"));
        p.output(&attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &window, None), at, bias)
    };
    let network = |n: &Rows, _: usize, at: &str| {
        let moe = format!("{at}block_sparse_moe");
        let z = w.linear(n, &format!("{moe}.gate"), c.n("num_local_experts"), false);
        let jitter = c.f("router_jitter_noise", 0.01);
        let choices: Vec<_> = z.iter().map(|z| sparse_mixer(z, c.n("num_experts_per_tok"), jitter)).collect();
        p.experts(n, &moe, &choices, MIXTRAL, c.n("intermediate_size"), false)
    };
    let norm = |x: &Rows, name: &str| w.layer_norm(x, name, eps, true);
    let x = p.layered(p.embed(), &norm, NORMS, [&attention, &network]);
    let head = if c.on("tie_word_embeddings", false) { "model.embed_tokens" } else { "lm_head" };
    w.head(x.last().unwrap(), head, c.n("vocab_size"), c.on("lm_head_bias", false))
}

/// Norms of heads; a network without a gate, whose activation has learned parameters.
pub fn apertus(p: Pass) -> Vec<f64> {
    let (c, w, eps, rope) = (p.config, p.w, p.eps(1e-5), p.rope(1.2e7, 1.0));
    let attention = |n: &Rows, _: usize, at: &str| p.attended_normed(n, at, &rope, c.on("attention_bias", false), eps);
    let network = |n: &Rows, _: usize, at: &str| {
        let act = format!("{at}mlp.act_fn");
        let softplus = |name: &str| w.get(&format!("{act}.{name}"), &[1], 0.3, 0.4)[0].exp().ln_1p();
        let (beta, least) = (0.5, -1e-6);
        let (above, below) = (softplus("alpha_p"), beta + softplus("alpha_n"));
        let xielu = |x: f64| match x > 0.0 {
            true => above * x * x + beta * x,
            false => below * (x.min(least).exp_m1() - x) + beta * x,
        };
        let up = w.linear(n, &format!("{at}mlp.up_proj"), c.n("intermediate_size"), false);
        w.linear(&map(&up, xielu), &format!("{at}mlp.down_proj"), n[0].len(), false)
    };
    let names = ["attention_layernorm", "feedforward_layernorm"];
    p.head(&p.layered(p.embed(), &|x, name| w.rms(x, name, eps), names, [&attention, &network]), false)
}
