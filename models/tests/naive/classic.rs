//! Families with LayerNorm of weight and bias, learned positions or ALiBi, and packed projections.

use half::bf16;

use super::Pass;
use super::experts::transposed;
use super::math::{
    Heads, Rows, activation, add, alibi_slopes, attend, clamp, gelu, gelu_tanh, map, split, split_groups, within,
};
use super::tensors::product;

pub fn gpt2(p: Pass) -> Vec<f64> {
    let (c, w) = (p.config, p.w);
    let (hidden, count, eps) = (c.n("n_embd"), c.n("n_head"), c.f("layer_norm_epsilon", 1e-5));
    let heads = Heads { q: count, kv: count, dim: hidden / count };
    let inner = c.n_if("n_inner").unwrap_or(4 * hidden);
    let act = activation(c.text("activation_function").unwrap_or("gelu_new"));
    let pre = w.prefix("transformer.", "wte.weight");
    // Conv1D keeps matrices [in, out].
    let conv = |x: &Rows, name: String, outputs: usize| {
        w.enter(x, &name);
        let inputs = x[0].len();
        let weight = w.matrix(&format!("{name}.weight"), &[inputs, outputs], inputs);
        product(x, &transposed(&weight, outputs), Some(&w.vector(&format!("{name}.bias"), outputs)))
    };
    let words = w.embed(&format!("{pre}wte.weight"), [c.n("vocab_size"), hidden], p.tokens.iter().copied());
    let positions = w.embed(&format!("{pre}wpe.weight"), [c.n("n_positions"), hidden], 0..p.tokens.len());
    let mut x = add(&words, &positions);
    for i in 0..c.n("n_layer") {
        let at = format!("{pre}h.{i}.");
        let n = w.layer_norm(&x, &format!("{at}ln_1"), eps, true);
        let [q, k, v] = split(&conv(&n, format!("{at}attn.c_attn"), 3 * hidden), [hidden; 3]);
        let mut scale = if c.on("scale_attn_weights", true) { (heads.dim as f64).powf(-0.5) } else { 1.0 };
        if c.on("scale_attn_by_inverse_layer_idx", false) {
            scale /= (i + 1) as f64;
        }
        let a = attend([&q, &k, &v], heads, scale, &within(None), None);
        x = add(&x, &conv(&a, format!("{at}attn.c_proj"), hidden));
        let n = w.layer_norm(&x, &format!("{at}ln_2"), eps, true);
        let up = map(&conv(&n, format!("{at}mlp.c_fc"), inner), act);
        x = add(&x, &conv(&up, format!("{at}mlp.c_proj"), hidden));
    }
    let x = w.layer_norm(&x, &format!("{pre}ln_f"), eps, true);
    w.head(x.last().unwrap(), &format!("{pre}wte"), c.n("vocab_size"), false)
}

/// As GPT-2 with ordinary matrices; one key and value head, or `[q | k | v]` of each head.
pub fn gpt_bigcode(p: Pass) -> Vec<f64> {
    let (c, w) = (p.config, p.w);
    let (hidden, count, eps) = (c.n("n_embd"), c.n("n_head"), c.f("layer_norm_epsilon", 1e-5));
    let dim = hidden / count;
    let multi_query = c.on("multi_query", true);
    let heads = Heads { q: count, kv: if multi_query { 1 } else { count }, dim };
    let inner = c.n_if("n_inner").unwrap_or(4 * hidden);
    let act = activation(c.text("activation_function").unwrap_or("gelu_pytorch_tanh"));
    let words = w.embed("transformer.wte.weight", [c.n("vocab_size"), hidden], p.tokens.iter().copied());
    let positions = w.embed("transformer.wpe.weight", [c.n("n_positions"), hidden], 0..p.tokens.len());
    let mut x = add(&words, &positions);
    for i in 0..c.n("n_layer") {
        let at = format!("transformer.h.{i}.");
        let n = w.layer_norm(&x, &format!("{at}ln_1"), eps, true);
        let qkv = w.linear(&n, &format!("{at}attn.c_attn"), hidden + 2 * heads.kv * dim, true);
        let [q, k, v] = match multi_query {
            true => split(&qkv, [hidden, dim, dim]),
            false => split_groups(&qkv, count, [dim; 3]),
        };
        let a = attend([&q, &k, &v], heads, (dim as f64).powf(-0.5), &within(None), None);
        x = add(&x, &w.linear(&a, &format!("{at}attn.c_proj"), hidden, true));
        let n = w.layer_norm(&x, &format!("{at}ln_2"), eps, true);
        let up = map(&w.linear(&n, &format!("{at}mlp.c_fc"), inner, true), act);
        x = add(&x, &w.linear(&up, &format!("{at}mlp.c_proj"), hidden, true));
    }
    let x = w.layer_norm(&x, "transformer.ln_f", eps, true);
    w.head(x.last().unwrap(), "transformer.wte", c.n("vocab_size"), false)
}

/// Positions start at 2; norms before the branches, or after the sums.
pub fn opt(p: Pass) -> Vec<f64> {
    let (c, w, heads, eps) = (p.config, p.w, p.config.heads(), 1e-5);
    let (hidden, vocab) = (c.n("hidden_size"), c.n("vocab_size"));
    let words = c.n_if("word_embed_proj_dim").unwrap_or(hidden);
    let (before, bias) = (c.on("do_layer_norm_before", true), c.on("enable_bias", true));
    let act = activation(c.text("activation_function").unwrap_or("relu"));
    let pre = w.prefix("model.decoder.", "embed_tokens.weight");
    let table = format!("{pre}embed_tokens");
    let mut x = w.embed(&format!("{table}.weight"), [vocab, words], p.tokens.iter().copied());
    if words != hidden {
        x = w.linear(&x, &format!("{pre}project_in"), hidden, false);
    }
    let shape = [c.n("max_position_embeddings") + 2, hidden];
    x = add(&x, &w.embed(&format!("{pre}embed_positions.weight"), shape, 2..p.tokens.len() + 2));
    for i in 0..c.n("num_hidden_layers") {
        let at = format!("{pre}layers.{i}.");
        let norm = |x: &Rows, name: &str| w.layer_norm(x, &format!("{at}{name}"), eps, true);
        let n = if before { norm(&x, "self_attn_layer_norm") } else { x.clone() };
        let [q, k, v] = p.project_at(&n, &at, heads, bias);
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(None), None);
        x = add(&x, &w.linear(&a, &format!("{at}self_attn.out_proj"), hidden, bias));
        if !before {
            x = norm(&x, "self_attn_layer_norm");
        }
        let n = if before { norm(&x, "final_layer_norm") } else { x.clone() };
        let up = map(&w.linear(&n, &format!("{at}fc1"), c.n("ffn_dim"), bias), act);
        x = add(&x, &w.linear(&up, &format!("{at}fc2"), hidden, bias));
        if !before {
            x = norm(&x, "final_layer_norm");
        }
    }
    if before && !c.on("_remove_final_layer_norm", false) {
        x = w.layer_norm(&x, &format!("{pre}final_layer_norm"), eps, true);
    }
    if words != hidden {
        x = w.linear(&x, &format!("{pre}project_out"), words, false);
    }
    w.head(x.last().unwrap(), &table, vocab, false)
}

impl Pass<'_> {
    fn project_at(&self, x: &Rows, at: &str, heads: Heads, bias: bool) -> [Rows; 3] {
        ["q", "k", "v"].map(|n| self.w.linear(x, &format!("{at}self_attn.{n}_proj"), heads.q * heads.dim, bias))
    }
}

/// `[q | k | v]` of each head; branches beside each other or one after the other.
pub fn gpt_neox(p: Pass) -> Vec<f64> {
    let (c, w, eps) = (p.config, p.w, p.config.f("layer_norm_eps", 1e-5));
    let (hidden, heads) = (c.n("hidden_size"), c.heads());
    let dims = (heads.dim as f64 * c.f("rotary_pct", c.partial(0.25))) as usize;
    let rope = c.rope(dims, c.f("rotary_emb_base", 1e4), p.context);
    let (bias, act) = (c.on("attention_bias", true), activation(c.text("hidden_act").unwrap_or("gelu")));
    let vocab = c.n("vocab_size");
    let mut x = w.embed("gpt_neox.embed_in.weight", [vocab, hidden], p.tokens.iter().copied());
    for i in 0..c.n("num_hidden_layers") {
        let at = format!("gpt_neox.layers.{i}.");
        let n = w.layer_norm(&x, &format!("{at}input_layernorm"), eps, true);
        let qkv = w.linear(&n, &format!("{at}attention.query_key_value"), 3 * hidden, bias);
        let [q, k, v] = split_groups(&qkv, heads.q, [heads.dim; 3]);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(None), None);
        let a = w.linear(&a, &format!("{at}attention.dense"), hidden, bias);
        let mlp = |x: &Rows| {
            let n = w.layer_norm(x, &format!("{at}post_attention_layernorm"), eps, true);
            let up = map(&w.linear(&n, &format!("{at}mlp.dense_h_to_4h"), c.n("intermediate_size"), true), act);
            w.linear(&up, &format!("{at}mlp.dense_4h_to_h"), hidden, true)
        };
        let sum = add(&x, &a);
        x = if c.on("use_parallel_residual", true) { add(&sum, &mlp(&x)) } else { add(&sum, &mlp(&sum)) };
    }
    let x = w.layer_norm(&x, "gpt_neox.final_layer_norm", eps, true);
    let head = if c.on("tie_word_embeddings", false) { "gpt_neox.embed_in" } else { "embed_out" };
    w.head(x.last().unwrap(), head, vocab, false)
}

/// Three layouts of rows, rope or ALiBi, and one, two or successive norms.
pub fn falcon(p: Pass) -> Vec<f64> {
    let (c, w, eps) = (p.config, p.w, p.config.f("layer_norm_epsilon", 1e-5));
    let (hidden, count, bias) = (c.n("hidden_size"), c.n("num_attention_heads"), c.on("bias", false));
    let dim = hidden / count;
    let (grouped, alibi) = (c.on("new_decoder_architecture", false), c.on("alibi", false));
    let multi_query = c.on("multi_query", true);
    let parallel = grouped || c.on("parallel_attn", true);
    let two_norms = grouped && c.n_if("num_ln_in_parallel_attn") != Some(1);
    let kv = match (grouped, multi_query) {
        (true, _) => c.n_if("num_kv_heads").unwrap_or(count),
        (false, true) => 1,
        (false, false) => count,
    };
    let heads = Heads { q: count, kv, dim };
    let rope = c.rope(dim, 1e4, p.context);
    let slopes: Vec<f64> = alibi_slopes(count).iter().map(|slope| bf16::from_f64(*slope).to_f64()).collect();
    let scale = (dim as f64).powf(-0.5);
    let biased = |h: usize, _: usize, j: usize, score: f64| Some(score + slopes[h] * j as f64 * scale);
    let plain = within(None);
    let inner = c.n_if("ffn_hidden_size").unwrap_or(4 * hidden);
    let vocab = c.n("vocab_size");
    let mut x = w.embed("transformer.word_embeddings.weight", [vocab, hidden], p.tokens.iter().copied());
    for i in 0..c.n("num_hidden_layers") {
        let at = format!("transformer.h.{i}.");
        let norm = |x: &Rows, name: &str| w.layer_norm(x, &format!("{at}{name}"), eps, true);
        let n = norm(&x, if two_norms { "ln_attn" } else { "input_layernorm" });
        let qkv = w.linear(&n, &format!("{at}self_attention.query_key_value"), (count + 2 * kv) * dim, bias);
        // Multi-query is one group of all heads; the oldest layout has one group for each head.
        let [mut q, mut k, v] = split_groups(&qkv, kv, [count / kv * dim, dim, dim]);
        if !alibi {
            (q, k) = (rope.rotate(&q, dim), rope.rotate(&k, dim));
        }
        let a = attend([&q, &k, &v], heads, scale, if alibi { &biased } else { &plain }, None);
        let a = w.linear(&a, &format!("{at}self_attention.dense"), hidden, bias);
        let mlp = |n: &Rows| {
            let up = map(&w.linear(n, &format!("{at}mlp.dense_h_to_4h"), inner, bias), gelu);
            w.linear(&up, &format!("{at}mlp.dense_4h_to_h"), hidden, bias)
        };
        let sum = add(&x, &a);
        x = match (two_norms, parallel) {
            (true, _) => add(&sum, &mlp(&norm(&x, "ln_mlp"))),
            (false, true) => add(&sum, &mlp(&n)),
            (false, false) => add(&sum, &mlp(&norm(&sum, "post_attention_layernorm"))),
        };
    }
    let x = w.layer_norm(&x, "transformer.ln_f", eps, true);
    let head = if c.on("tie_word_embeddings", true) { "transformer.word_embeddings" } else { "lm_head" };
    w.head(x.last().unwrap(), head, vocab, false)
}

/// ALiBi, a norm after the embedding, `[q | k | v]` of each head.
pub fn bloom(p: Pass) -> Vec<f64> {
    let (c, w, eps) = (p.config, p.w, p.config.f("layer_norm_epsilon", 1e-5));
    let (hidden, count, vocab) =
        (c.n_if("hidden_size").unwrap_or_else(|| c.n("n_embed")), c.n("n_head"), c.n("vocab_size"));
    let heads = Heads { q: count, kv: count, dim: hidden / count };
    let slopes = alibi_slopes(count);
    let score = |h: usize, _: usize, j: usize, score: f64| Some(score + slopes[h] * j as f64);
    let pre = w.prefix("transformer.", "word_embeddings.weight");
    let mut x = w.embed(&format!("{pre}word_embeddings.weight"), [vocab, hidden], p.tokens.iter().copied());
    x = w.layer_norm(&x, &format!("{pre}word_embeddings_layernorm"), eps, true);
    for i in 0..c.n("n_layer") {
        let at = format!("{pre}h.{i}.");
        let n = w.layer_norm(&x, &format!("{at}input_layernorm"), eps, true);
        let qkv = w.linear(&n, &format!("{at}self_attention.query_key_value"), 3 * hidden, true);
        let [q, k, v] = split_groups(&qkv, count, [heads.dim; 3]);
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &score, None);
        x = add(&x, &w.linear(&a, &format!("{at}self_attention.dense"), hidden, true));
        let n = w.layer_norm(&x, &format!("{at}post_attention_layernorm"), eps, true);
        let up = map(&w.linear(&n, &format!("{at}mlp.dense_h_to_4h"), 4 * hidden, true), gelu_tanh);
        x = add(&x, &w.linear(&up, &format!("{at}mlp.dense_4h_to_h"), hidden, true));
    }
    let x = w.layer_norm(&x, &format!("{pre}ln_f"), eps, true);
    w.head(x.last().unwrap(), &format!("{pre}word_embeddings"), vocab, false)
}

/// ALiBi with its own order of slopes, no biases, clamped thirds.
pub fn mpt(p: Pass) -> Vec<f64> {
    let (c, w, eps) = (p.config, p.w, p.config.f("layer_norm_epsilon", 1e-5));
    let (hidden, count, vocab) = (c.n("d_model"), c.n("n_heads"), c.n("vocab_size"));
    let attention = super::Config(c.get("attn_config").unwrap());
    let heads = Heads { q: count, kv: count, dim: hidden / count };
    let n2 = count.next_power_of_two();
    let all: Vec<f64> =
        (1..=n2).map(|k| 2f64.powf(-attention.f("alibi_bias_max", 8.0) * k as f64 / n2 as f64)).collect();
    let slopes: Vec<f64> = match n2 == count {
        true => all,
        false => all.iter().skip(1).step_by(2).chain(all.iter().step_by(2)).copied().collect(),
    };
    let score = |h: usize, _: usize, j: usize, score: f64| Some(score + slopes[h] * j as f64);
    let scale = attention.f("softmax_scale", (heads.dim as f64).powf(-0.5));
    let mut x = w.embed("transformer.wte.weight", [vocab, hidden], p.tokens.iter().copied());
    for i in 0..c.n("n_layers") {
        let at = format!("transformer.blocks.{i}.");
        let n = w.layer_norm(&x, &format!("{at}norm_1"), eps, false);
        let qkv = clamp(&w.linear(&n, &format!("{at}attn.Wqkv"), 3 * hidden, false), attention.f_if("clip_qkv"));
        let [q, k, v] = split(&qkv, [hidden; 3]);
        let a = attend([&q, &k, &v], heads, scale, &score, None);
        x = add(&x, &w.linear(&a, &format!("{at}attn.out_proj"), hidden, false));
        let n = w.layer_norm(&x, &format!("{at}norm_2"), eps, false);
        let inner = c.n_if("expansion_ratio").unwrap_or(4) * hidden;
        let up = map(&w.linear(&n, &format!("{at}ffn.up_proj"), inner, false), gelu);
        x = add(&x, &w.linear(&up, &format!("{at}ffn.down_proj"), hidden, false));
    }
    let x = w.layer_norm(&x, "transformer.norm_f", eps, false);
    w.head(x.last().unwrap(), "transformer.wte", vocab, false)
}
