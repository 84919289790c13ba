//! The oracle's encoders: the hidden states of a whole text in float64, and the crate against them.

use std::path::Path;

use attention_kernels::Dtype;
use device::Options;
use serde_json::{Value, json};

use super::case::{Case, with};
use super::config::{Config, Rope};
use super::math::{self, Heads, Rows, softmax};
use super::tensors::Tensors;
use super::tests::{difference, write};
use crate::encoders::{self, Loaded};
use crate::support::opened;

/// What an encoder's pass reads: the keys, the tensors, the tokens, and the type of each.
struct Text<'a> {
    config: Config<'a>,
    w: &'a Tensors,
    tokens: &'a [usize],
    types: &'a [usize],
}

/// The configurations, with hidden states of this width: each option is on once and off once.
pub fn cases(width: usize) -> Vec<Case> {
    let bert = json!({
        "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 61, "hidden_size": width, "num_hidden_layers": 2,
        "num_attention_heads": 3, "intermediate_size": 52, "max_position_embeddings": 70, "hidden_act": "gelu",
        "layer_norm_eps": 1e-5, "torch_dtype": "float32",
    });
    let distilbert = json!({
        "architectures": ["DistilBertModel"], "model_type": "distilbert", "vocab_size": 61, "dim": width, "n_layers": 2, "n_heads": 3,
        "hidden_dim": 52, "max_position_embeddings": 70, "torch_dtype": "float32",
    });
    let modernbert = json!({
        "architectures": ["ModernBertModel"], "model_type": "modernbert", "vocab_size": 61, "hidden_size": width, "num_hidden_layers": 4,
        "num_attention_heads": 3, "intermediate_size": 28, "max_position_embeddings": 70, "local_attention": 10,
        "global_rope_theta": 5000.0, "local_rope_theta": 300.0, "torch_dtype": "float32",
    });
    let nomic = json!({
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "vocab_size": 61, "n_embd": width, "n_layer": 2, "n_head": 3,
        "n_inner": 28, "n_positions": 70, "rotary_emb_base": 1000, "torch_dtype": "float32",
    });
    vec![
        with(&bert, "bert", json!({})),
        with(&bert, "bert, tanh GELU, one type", json!({"hidden_act": "gelu_new", "type_vocab_size": 1})),
        with(&bert, "roberta", json!({"architectures": ["RobertaModel"], "type_vocab_size": 1, "pad_token_id": 1})),
        with(
            &bert,
            "camembert, another padding",
            json!({"architectures": ["CamembertModel"], "pad_token_id": 4, "hidden_act": "relu"}),
        ),
        with(&distilbert, "distilbert", json!({})),
        with(&distilbert, "distilbert, relu", json!({"activation": "relu", "n_heads": 2})),
        with(&bert, "mpnet", json!({"architectures": ["MPNetModel"]})),
        with(
            &bert,
            "mpnet, few buckets",
            json!({"architectures": ["MPNetModel"], "relative_attention_num_buckets": 8}),
        ),
        with(&modernbert, "modernbert", json!({})),
        with(
            &modernbert,
            "modernbert, biased, by types",
            json!({
                "attention_bias": true, "mlp_bias": true, "norm_bias": true, "hidden_activation": "gelu_pytorch_tanh",
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 700.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 90.0},
                },
            }),
        ),
        with(
            &modernbert,
            "modernbert, every second whole, odd width",
            json!({"global_attn_every_n_layers": 2, "local_attention": 7}),
        ),
        with(&nomic, "nomic", json!({})),
        with(
            &nomic,
            "nomic, half rotated, no types, another base",
            json!({
                "rotary_emb_fraction": 0.5, "type_vocab_size": 0, "rotary_emb_base": 50,
            }),
        ),
        with(
            &nomic,
            "nomic, longer than the training",
            json!({"rotary_scaling_factor": 2.0, "max_trained_positions": 40}),
        ),
        with(
            &bert,
            "jina",
            json!({"architectures": ["JinaBertForMaskedLM"], "position_embedding_type": "alibi", "feed_forward_type": "geglu"}),
        ),
        with(
            &bert,
            "jina, relu, heads that are a power of two",
            json!({"architectures": ["JinaBertModel"], "position_embedding_type": "alibi", "feed_forward_type": "reglu",
                "num_attention_heads": 2, "type_vocab_size": 3}),
        ),
    ]
}

/// Which keys a query sees, and what is added to their scores, by head, query and key.
type Seen<'a> = &'a dyn Fn(usize, usize, usize) -> Option<f64>;

/// Attention to both sides.
fn attend([q, k, v]: [&Rows; 3], Heads { q: heads, dim, .. }: Heads, seen: Seen) -> Rows {
    let mut out = vec![vec![0.0; heads * dim]; q.len()];
    for i in 0..q.len() {
        for h in 0..heads {
            let part = |row: &Vec<f64>| row[h * dim..][..dim].to_vec();
            let keys: Vec<(usize, f64)> = (0..k.len()).filter_map(|j| Some((j, seen(h, i, j)?))).collect();
            let dot = |j: usize| part(&q[i]).iter().zip(part(&k[j])).map(|(a, b)| a * b).sum::<f64>();
            let scores: Vec<f64> = keys.iter().map(|(j, bias)| dot(*j) / (dim as f64).sqrt() + bias).collect();
            for ((j, _), p) in keys.iter().zip(softmax(&scores)) {
                for (out, v) in out[i][h * dim..].iter_mut().zip(part(&v[*j])) {
                    *out += p * v;
                }
            }
        }
    }
    out
}

fn everything(_: usize, _: usize, _: usize) -> Option<f64> {
    Some(0.0)
}

impl Text<'_> {
    fn embed(&self, name: &str, rows: usize, width: usize, indices: impl Iterator<Item = usize>) -> Rows {
        self.w.embed(name, [rows, width], indices)
    }

    /// The layers of BERT: `names` are those of queries, keys, values, output, norm, up, down, norm, within a layer.
    fn layers(&self, x: Rows, names: [&str; 8], sizes: [usize; 3], (eps, act): (f64, &str), seen: Seen) -> Rows {
        let [layers, heads, inner] = sizes;
        let hidden = x[0].len();
        let heads = Heads { q: heads, kv: heads, dim: hidden / heads };
        let mut x = x;
        for i in 0..layers {
            let name = |at: usize| names[at].replace("{}", &i.to_string());
            let [q, k, v] = [0, 1, 2].map(|at| self.w.linear(&x, &name(at), hidden, true));
            let attended = self.w.linear(&attend([&q, &k, &v], heads, seen), &name(3), hidden, true);
            x = self.w.layer_norm(&math::add(&x, &attended), &name(4), eps, true);
            let up = math::map(&self.w.linear(&x, &name(5), inner, true), math::activation(act));
            let down = self.w.linear(&up, &name(6), hidden, true);
            x = self.w.layer_norm(&math::add(&x, &down), &name(7), eps, true);
        }
        x
    }
}

const BERT: [&str; 8] = [
    "encoder.layer.{}.attention.self.query",
    "encoder.layer.{}.attention.self.key",
    "encoder.layer.{}.attention.self.value",
    "encoder.layer.{}.attention.output.dense",
    "encoder.layer.{}.attention.output.LayerNorm",
    "encoder.layer.{}.intermediate.dense",
    "encoder.layer.{}.output.dense",
    "encoder.layer.{}.output.LayerNorm",
];

const MPNET: [&str; 8] = [
    "encoder.layer.{}.attention.attn.q",
    "encoder.layer.{}.attention.attn.k",
    "encoder.layer.{}.attention.attn.v",
    "encoder.layer.{}.attention.attn.o",
    "encoder.layer.{}.attention.LayerNorm",
    "encoder.layer.{}.intermediate.dense",
    "encoder.layer.{}.output.dense",
    "encoder.layer.{}.output.LayerNorm",
];

const DISTILBERT: [&str; 8] = [
    "transformer.layer.{}.attention.q_lin",
    "transformer.layer.{}.attention.k_lin",
    "transformer.layer.{}.attention.v_lin",
    "transformer.layer.{}.attention.out_lin",
    "transformer.layer.{}.sa_layer_norm",
    "transformer.layer.{}.ffn.lin1",
    "transformer.layer.{}.ffn.lin2",
    "transformer.layer.{}.output_layer_norm",
];

/// BERT and RoBERTa, whose positions begin at `first`.
fn bert(text: &Text, first: usize) -> Rows {
    let (c, len) = (text.config, text.tokens.len());
    let (hidden, eps) = (c.n("hidden_size"), c.f("layer_norm_eps", 1e-12));
    let words = text.embed("embeddings.word_embeddings.weight", c.n("vocab_size"), hidden, text.tokens.iter().copied());
    let rows = c.n("max_position_embeddings");
    let positions = text.embed("embeddings.position_embeddings.weight", rows, hidden, first..first + len);
    let kinds = c.n_if("type_vocab_size").unwrap_or(2);
    let kind = text.types.iter().map(|kind| (*kind).min(kinds - 1));
    let types = text.embed("embeddings.token_type_embeddings.weight", kinds, hidden, kind);
    let x = math::add(&math::add(&words, &types), &positions);
    let x = text.w.layer_norm(&x, "embeddings.LayerNorm", eps, true);
    let sizes = ["num_hidden_layers", "num_attention_heads", "intermediate_size"].map(|key| c.n(key));
    text.layers(x, BERT, sizes, (eps, c.text("hidden_act").unwrap_or("gelu")), &everything)
}

fn distilbert(text: &Text) -> Rows {
    let (c, len) = (text.config, text.tokens.len());
    let hidden = c.n("dim");
    let words = text.embed("embeddings.word_embeddings.weight", c.n("vocab_size"), hidden, text.tokens.iter().copied());
    let positions = text.embed("embeddings.position_embeddings.weight", c.n("max_position_embeddings"), hidden, 0..len);
    let x = text.w.layer_norm(&math::add(&words, &positions), "embeddings.LayerNorm", 1e-12, true);
    let sizes = ["n_layers", "n_heads", "hidden_dim"].map(|key| c.n(key));
    text.layers(x, DISTILBERT, sizes, (1e-12, c.text("activation").unwrap_or("gelu")), &everything)
}

/// The bucket of key j for query i, as transformers computes it.
fn bucket(i: usize, j: usize, buckets: usize) -> usize {
    let (mut n, half) = (i as i64 - j as i64, buckets / 2);
    let mut found = 0;
    if n < 0 {
        (found, n) = (half, -n);
    }
    let (n, exact) = (n as usize, half / 2);
    if n < exact {
        return found + n;
    }
    let grown = (n as f64 / exact as f64).ln() / (128.0 / exact as f64).ln() * (half - exact) as f64;
    // At the edges between buckets the logarithms are exact but for rounding.
    found + (exact + (grown + 1e-9) as usize).min(half - 1)
}

fn mpnet(text: &Text) -> Rows {
    let (c, len) = (text.config, text.tokens.len());
    let (hidden, eps) = (c.n("hidden_size"), c.f("layer_norm_eps", 1e-12));
    let words = text.embed("embeddings.word_embeddings.weight", c.n("vocab_size"), hidden, text.tokens.iter().copied());
    let rows = c.n("max_position_embeddings");
    let positions = text.embed("embeddings.position_embeddings.weight", rows, hidden, 2..2 + len);
    let x = text.w.layer_norm(&math::add(&words, &positions), "embeddings.LayerNorm", eps, true);
    let sizes = ["num_hidden_layers", "num_attention_heads", "intermediate_size"].map(|key| c.n(key));
    let (buckets, heads) = (c.n_if("relative_attention_num_buckets").unwrap_or(32), sizes[1]);
    let table = text.w.get("encoder.relative_attention_bias.weight", &[buckets, heads], 0.0, 2.0);
    let seen = |h: usize, i: usize, j: usize| Some(table[bucket(i, j, buckets) * heads + h]);
    text.layers(x, MPNET, sizes, (eps, c.text("hidden_act").unwrap_or("gelu")), &seen)
}

/// BERT with ALiBi to both sides, and a gated network.
fn jina(text: &Text) -> Rows {
    let c = text.config;
    let [hidden, inner, heads] = ["hidden_size", "intermediate_size", "num_attention_heads"].map(|key| c.n(key));
    let act = math::activation(if c.text("feed_forward_type") == Some("reglu") { "relu" } else { "gelu" });
    let eps = c.f("layer_norm_eps", 1e-12);
    let words = text.embed("embeddings.word_embeddings.weight", c.n("vocab_size"), hidden, text.tokens.iter().copied());
    let kinds = c.n_if("type_vocab_size").unwrap_or(2);
    let types = text.embed("embeddings.token_type_embeddings.weight", kinds, hidden, text.types.iter().copied());
    let mut x = text.w.layer_norm(&math::add(&words, &types), "embeddings.LayerNorm", eps, true);
    let slopes = math::alibi_slopes(heads);
    let seen = |h: usize, i: usize, j: usize| Some(-slopes[h] * i.abs_diff(j) as f64);
    let shape = Heads { q: heads, kv: heads, dim: hidden / heads };
    for i in 0..c.n("num_hidden_layers") {
        let name = |part: &str| format!("encoder.layer.{i}.{part}");
        let [q, k, v] = ["query", "key", "value"]
            .map(|part| text.w.linear(&x, &name(&format!("attention.self.{part}")), hidden, true));
        let attended =
            text.w.linear(&attend([&q, &k, &v], shape, &seen), &name("attention.output.dense"), hidden, true);
        x = text.w.layer_norm(&math::add(&x, &attended), &name("attention.output.LayerNorm"), eps, true);
        let [gate, up] = math::split(&text.w.linear(&x, &name("mlp.gated_layers"), 2 * inner, false), [inner; 2]);
        let product = math::zip(&gate, &up, |gate, up| act(gate) * up);
        let down = text.w.linear(&product, &name("mlp.wo"), hidden, true);
        x = text.w.layer_norm(&math::add(&x, &down), &name("mlp.layernorm"), eps, true);
    }
    x
}

fn modernbert(text: &Text) -> Rows {
    let c = text.config;
    let (hidden, eps) = (c.n("hidden_size"), c.f("norm_eps", 1e-5));
    let [norm_bias, attention_bias, mlp_bias] = ["norm_bias", "attention_bias", "mlp_bias"].map(|key| c.on(key, false));
    let words = text.embed("embeddings.tok_embeddings.weight", c.n("vocab_size"), hidden, text.tokens.iter().copied());
    let mut x = text.w.layer_norm(&words, "embeddings.norm", eps, norm_bias);
    let heads = c.heads();
    let act = math::activation(c.text("hidden_activation").unwrap_or("gelu"));
    let (inner, every) = (c.n("intermediate_size"), c.n_if("global_attn_every_n_layers").unwrap_or(3));
    let theta = |kind: &str, key: &str, default: f64| {
        let of_type = c.get("rope_parameters").and_then(|all| all[kind]["rope_theta"].as_f64());
        of_type.unwrap_or(c.f(key, default))
    };
    for i in 0..c.n("num_hidden_layers") {
        let name = |part: &str| format!("layers.{i}.{part}");
        let is_local = match c.get("layer_types") {
            Some(types) => types[i] == "sliding_attention",
            None => i % every != 0,
        };
        let (rope, reach) = match is_local {
            true => (theta("sliding_attention", "local_rope_theta", 1e4), c.n_if("local_attention").unwrap_or(128) / 2),
            false => (theta("full_attention", "global_rope_theta", 1.6e5), usize::MAX),
        };
        let rope = Rope::new(heads.dim, rope);
        let normed = if i == 0 { x.clone() } else { text.w.layer_norm(&x, &name("attn_norm"), eps, norm_bias) };
        let qkv = text.w.linear(&normed, &name("attn.Wqkv"), 3 * hidden, attention_bias);
        let [q, k, v] = math::split(&qkv, [hidden; 3]);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let seen = |_: usize, i: usize, j: usize| (i.abs_diff(j) <= reach).then_some(0.0);
        let attended = attend([&q, &k, &v], heads, &seen);
        x = math::add(&x, &text.w.linear(&attended, &name("attn.Wo"), hidden, attention_bias));
        let normed = text.w.layer_norm(&x, &name("mlp_norm"), eps, norm_bias);
        let both = text.w.linear(&normed, &name("mlp.Wi"), 2 * inner, mlp_bias);
        let [input, gate] = math::split(&both, [inner; 2]);
        let product = math::zip(&input, &gate, |input, gate| act(input) * gate);
        x = math::add(&x, &text.w.linear(&product, &name("mlp.Wo"), hidden, mlp_bias));
    }
    text.w.layer_norm(&x, "final_norm", eps, norm_bias)
}

fn nomic(text: &Text) -> Rows {
    let c = text.config;
    let [hidden, heads, inner] = ["n_embd", "n_head", "n_inner"].map(|key| c.n(key));
    let eps = c.f("layer_norm_epsilon", 1e-12);
    let mut x = text.embed("embeddings.word_embeddings.weight", c.n("vocab_size"), hidden, text.tokens.iter().copied());
    let kinds = c.n_if("type_vocab_size").unwrap_or(2);
    if kinds > 0 {
        let types = text.types.iter().copied();
        x = math::add(&x, &text.embed("embeddings.token_type_embeddings.weight", kinds, hidden, types));
    }
    x = text.w.layer_norm(&x, "emb_ln", eps, true);
    let heads = Heads { q: heads, kv: heads, dim: hidden / heads };
    let dims = (heads.dim as f64 * c.f("rotary_emb_fraction", 1.0)) as usize;
    let mut theta = c.f("rotary_emb_base", 1000.0);
    if let Some(factor) = c.f_if("rotary_scaling_factor") {
        // The base for the longest text that is served.
        let (trained, longest) = (c.f("max_trained_positions", 2048.0), c.n("n_positions") as f64);
        let growth = factor * longest / trained - (factor - 1.0);
        theta *= if longest > trained { growth.powf(dims as f64 / (dims as f64 - 2.0)) } else { 1.0 };
    }
    let rope = Rope::new(dims, theta);
    for i in 0..c.n("n_layer") {
        let name = |part: &str| format!("encoder.layers.{i}.{part}");
        let [q, k, v] = math::split(&text.w.linear(&x, &name("attn.Wqkv"), 3 * hidden, false), [hidden; 3]);
        let (q, k) = (rope.rotate(&q, heads.dim), rope.rotate(&k, heads.dim));
        let attended = text.w.linear(&attend([&q, &k, &v], heads, &everything), &name("attn.out_proj"), hidden, false);
        x = text.w.layer_norm(&math::add(&x, &attended), &name("norm1"), eps, true);
        let [up, gate] = ["mlp.fc11", "mlp.fc12"].map(|part| text.w.linear(&x, &name(part), inner, false));
        let product = math::zip(&up, &gate, |up, gate| up * math::silu(gate));
        let down = text.w.linear(&product, &name("mlp.fc2"), hidden, false);
        x = text.w.layer_norm(&math::add(&x, &down), &name("norm2"), eps, true);
    }
    x
}

/// The hidden states of a text, whose tokens are of type 1 from `second` on.
fn states(config: &Value, w: &Tensors, tokens: &[u32], second: usize) -> Rows {
    let tokens: Vec<usize> = tokens.iter().map(|id| *id as usize).collect();
    let types: Vec<usize> = (0..tokens.len()).map(|at| usize::from(at >= second)).collect();
    let c = Config(config);
    let text = Text { config: c, w, tokens: &tokens, types: &types };
    match config["architectures"][0].as_str().unwrap() {
        "BertModel" => bert(&text, 0),
        "RobertaModel" | "CamembertModel" => bert(&text, c.n_if("pad_token_id").unwrap_or(1) + 1),
        "DistilBertModel" => distilbert(&text),
        "MPNetModel" => mpnet(&text),
        "ModernBertModel" => modernbert(&text),
        "NomicBertModel" => nomic(&text),
        "JinaBertModel" | "JinaBertForMaskedLM" => jina(&text),
        other => panic!("no pass for {other}"),
    }
}

/// Greatest difference of an element of a hidden state.
const TOLERANCE: f64 = 1e-4;

fn tokens(seed: usize, len: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * i * 7 + 3 * i + 5 * seed + 11) % 61) as u32).collect()
}

/// Compares models that are loaded so with the oracle, and each text alone with the same in a batch.
fn compare(tolerance: f64, width: usize, load: impl Fn(&Path) -> Loaded) {
    let mut wrong = Vec::new();
    for (seed, Case { name, config }) in cases(width).into_iter().enumerate() {
        let w = Tensors::made(seed as u64, false);
        let texts = [(tokens(1, 37), Some(20)), (tokens(2, 1), None), (tokens(3, 60), None), (tokens(4, 12), Some(5))];
        let want: Vec<Rows> =
            texts.iter().map(|(ids, second)| states(&config, &w, ids, second.unwrap_or(usize::MAX))).collect();
        let folder = write(&config, w.to_bytes(|name, _| Some(name.to_string())));
        let Loaded { mut model, config: read, .. } = load(folder.path());
        assert!(read.is_headless && read.decoder.is_encoder() && model.layout().places == 0, "{name}");
        let together = encoders::hidden(&mut model, &texts);
        for ((found, want), text) in together.iter().zip(&want).zip(&texts) {
            let error = difference(found, &want.concat());
            println!("{name}: {} tokens, error {error:.1e}", want.len());
            if error.is_nan() || error >= tolerance {
                wrong.push(format!("{name}: {} tokens, error {error}", want.len()));
            }
            assert!(
                encoders::hidden(&mut model, std::slice::from_ref(text))[0] == *found,
                "{name}: alone and in a batch"
            );
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn every_option_of_every_encoder_gives_the_hidden_states_of_the_oracle() {
    compare(TOLERANCE, 36, |folder| encoders::load(folder, 2));
}

#[test]
fn every_option_of_every_encoder_gives_the_hidden_states_of_the_oracle_on_cuda_sim() {
    for (dtype, tolerance) in [(Dtype::F32, TOLERANCE), (Dtype::F16, 0.02), (Dtype::Bf16, 0.15)] {
        let Some(device) = opened::open(Options { seed: 7, deterministic: true, ..Options::default() }) else { return };
        // Devices have heads of whole vectors.
        compare(tolerance, 48, |folder| encoders::load_on(folder, device.clone(), dtype));
    }
}
