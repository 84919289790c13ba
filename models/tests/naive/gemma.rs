//! Gemma 1 to 3: norms of weight 1 + w, embeddings times √hidden.

use serde_json::Value;

use super::Pass;
use super::config::Config;
use super::math::{Rows, add, attend, gelu_tanh, times, within};

impl Pass<'_> {
    /// Embeddings times √hidden, in float32 as the computation.
    fn gemma_embed(&self) -> Rows {
        let root = (self.config.n("hidden_size") as f64).sqrt();
        times(&self.embed(), f64::from(root as f32))
    }
}

pub fn gemma(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-6), p.config.heads(), p.rope(1e4, 1.0));
    let bias = c.on("attention_bias", false);
    let norm = |x: &Rows, name: String| w.rms_plus_one(x, &name, x[0].len(), eps);
    let mut x = p.gemma_embed();
    for (_, at) in p.layers() {
        let n = norm(&x, format!("{at}input_layernorm"));
        let [q, k, v] = p.project(&n, &at, heads, bias);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let a = attend([&q, &k, &v], heads, (heads.dim as f64).powf(-0.5), &within(None), None);
        x = add(&x, &p.output(&a, &at, bias));
        let n = norm(&x, format!("{at}post_attention_layernorm"));
        x = add(&x, &p.gated(&n, &format!("{at}mlp"), c.n("intermediate_size"), gelu_tanh, false));
    }
    p.head(&norm(&x, "model.norm".into()), true)
}

/// Even layers slide; scores and logits are capped.
pub fn gemma2(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-6), p.config.heads(), p.rope(1e4, 1.0));
    let bias = c.on("attention_bias", false);
    let cap = |key: &str| {
        let cap = c.f_if(key);
        move |score: f64| cap.map_or(score, |cap| cap * (score / cap).tanh())
    };
    let norm = |x: &Rows, name: String| w.rms_plus_one(x, &name, x[0].len(), eps);
    let mut x = p.gemma_embed();
    for (i, at) in p.layers() {
        let n = norm(&x, format!("{at}input_layernorm"));
        let [q, k, v] = p.project(&n, &at, heads, bias);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let slides = match c.get("layer_types") {
            Some(types) => types[i] == "sliding_attention",
            None => i % 2 == 0,
        };
        let visible = within(c.n_if("sliding_window").filter(|_| slides));
        let soft = cap("attn_logit_softcapping");
        let score = |h: usize, i: usize, j: usize, score: f64| visible(h, i, j, soft(score));
        let a = attend([&q, &k, &v], heads, c.f("query_pre_attn_scalar", 256.0).powf(-0.5), &score, None);
        x = add(&x, &norm(&p.output(&a, &at, bias), format!("{at}post_attention_layernorm")));
        let n = norm(&x, format!("{at}pre_feedforward_layernorm"));
        let m = p.gated(&n, &format!("{at}mlp"), c.n("intermediate_size"), gelu_tanh, false);
        x = add(&x, &norm(&m, format!("{at}post_feedforward_layernorm")));
    }
    p.head(&norm(&x, "model.norm".into()), true).into_iter().map(cap("final_logit_softcapping")).collect()
}

/// Normed heads; sliding layers have a rope of their own, without scaling.
pub fn gemma3(p: Pass) -> Vec<f64> {
    let (c, w, eps, heads, rope) = (p.config, p.w, p.eps(1e-6), p.config.heads(), p.rope(1e6, 1.0));
    let bias = c.on("attention_bias", false);
    let plain = Config(&Value::Null);
    let local = c.rope_by(plain, heads.dim, c.f("rope_local_base_freq", 1e4), p.context);
    let norm = |x: &Rows, name: String| w.rms_plus_one(x, &name, x[0].len(), eps);
    let mut x = p.gemma_embed();
    for (i, at) in p.layers() {
        let slides = c.slides(i, Some(c.n_if("sliding_window_pattern").unwrap_or(6)));
        let n = norm(&x, format!("{at}input_layernorm"));
        let [q, k, v] = p.project(&n, &at, heads, bias);
        let q = w.rms_plus_one(&q, &format!("{at}self_attn.q_norm"), heads.dim, eps);
        let k = w.rms_plus_one(&k, &format!("{at}self_attn.k_norm"), heads.dim, eps);
        let rope = if slides { &local } else { &rope };
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let window = within(c.n_if("sliding_window").filter(|_| slides));
        let a = attend([&q, &k, &v], heads, c.f("query_pre_attn_scalar", 256.0).powf(-0.5), &window, None);
        x = add(&x, &norm(&p.output(&a, &at, bias), format!("{at}post_attention_layernorm")));
        let n = norm(&x, format!("{at}pre_feedforward_layernorm"));
        let m = p.gated(&n, &format!("{at}mlp"), c.n("intermediate_size"), gelu_tanh, false);
        x = add(&x, &norm(&m, format!("{at}post_feedforward_layernorm")));
    }
    p.head(&norm(&x, "model.norm".into()), true)
}
