//! Phi-3-small: the pass with a plain mask, and what its sparse layers share with dense ones.

use attention_kernels::{KernelChoice, Needs, select};
use models::decoder::{Attention, Mixer};
use models::{Model, StepLimits};
use serde_json::{Value, json};

use super::Pass;
use super::case::{Case, with};
use super::config::Rope;
use super::math::{Heads, Rows, add, sigmoid, softmax, times};
use super::tests::{checked, computed_on, difference, launching_device, make_of, write};
use crate::common;

/// Whether head h of the query at position i sees position j, as the rule is written for the mask of a whole sequence.
fn visible(p: &Pass, h: usize, i: usize, j: usize) -> bool {
    let c = p.config;
    let [size, local, stride] = [("block_size", 64), ("num_local_blocks", 16), ("vert_stride", 8)]
        .map(|(key, default)| c.n_if(&format!("blocksparse_{key}")).unwrap_or(default) as i64);
    let alike = c.on("blocksparse_homo_head_pattern", false);
    let step = if alike { 0 } else { (stride / c.n("num_attention_heads") as i64).max(1) };
    let (q, k) = (i as i64 / size, j as i64 / size);
    j <= i && (q - k < local || (k + h as i64 * step + 1) % stride == 0)
}

fn attention(p: &Pass, qkv: [&Rows; 3], heads: Heads, scale: f64, sparse: bool) -> Rows {
    let [q, k, v] = qkv;
    let mut out = vec![vec![0.0; heads.q * heads.dim]; q.len()];
    for i in 0..q.len() {
        for h in 0..heads.q {
            let g = h / (heads.q / heads.kv);
            let mut scores = vec![f64::NEG_INFINITY; i + 1];
            for j in 0..=i {
                if !sparse || visible(p, h, i, j) {
                    scores[j] =
                        (0..heads.dim).map(|d| q[i][h * heads.dim + d] * k[j][g * heads.dim + d]).sum::<f64>() * scale;
                }
            }
            for (j, weight) in softmax(&scores).into_iter().enumerate() {
                for d in 0..heads.dim {
                    out[i][h * heads.dim + d] += weight * v[j][g * heads.dim + d];
                }
            }
        }
    }
    out
}

/// LongRoPE with a factor of cosines and sines for each list.
fn rope(p: &Pass, dim: usize) -> Rope {
    let c = p.config;
    let plain = Rope::new(dim, c.f("rope_embedding_base", 1e6));
    let Some(lists) = c.get("rope_scaling").map(super::config::Config) else {
        let scale = c.f("rope_position_scale", 1.0);
        return plain.scaled(|_, f| f * scale, 1.0);
    };
    let original = lists.f_if("original_max_position_embeddings").unwrap();
    let most = c.n("max_position_embeddings") as f64;
    let is_long = p.context as f64 > original;
    let (factors, mscale, default) = match is_long {
        true => ("long_factor", "long_mscale", (1.0 + (most / original).ln() / original.ln()).sqrt()),
        false => ("short_factor", "short_mscale", 1.0),
    };
    let factors: Vec<f64> = serde_json::from_value(lists.get(factors).unwrap().clone()).unwrap();
    plain.scaled(|i, f| f / factors[i], lists.f(mscale, default))
}

pub fn phi3_small(p: Pass) -> Vec<f64> {
    let (c, w, eps) = (p.config, p.w, p.config.f("layer_norm_epsilon", 1e-5));
    let (hidden, inner, heads) = (c.n("hidden_size"), c.n("ff_intermediate_size"), c.heads());
    let (group, dim, rope) = (heads.q / heads.kv, heads.dim, rope(&p, heads.dim));
    let norm =
        if c.on("mup_use_scaling", true) { dim as f64 / c.f("mup_attn_multiplier", 1.0) } else { (dim as f64).sqrt() };
    // `null` means: no layer is dense, no limit, no factor.
    let or_none = |key: &str, default: f64| if c.0.get(key).is_some() { c.f_if(key) } else { Some(default) };
    let dense_each = or_none("dense_attention_every_n_layers", 2.0).map(|each| each as usize);
    let limit = or_none("gegelu_limit", 20.0).unwrap_or(f64::INFINITY);
    let mut x = times(&p.embed(), or_none("mup_embedding_multiplier", 10.0).unwrap_or(1.0));
    for (i, at) in p.layers() {
        let n = w.layer_norm(&x, &format!("{at}input_layernorm"), eps, true);
        let qkv = w.linear(&n, &format!("{at}self_attn.query_key_value"), (heads.q + 2 * heads.kv) * dim, true);
        let [mut q, mut k, mut v] = [(); 3].map(|()| vec![Vec::new(); qkv.len()]);
        for (t, row) in qkv.iter().enumerate() {
            for packed in row.chunks_exact((group + 2) * dim) {
                q[t].extend_from_slice(&packed[..group * dim]);
                k[t].extend_from_slice(&packed[group * dim..(group + 1) * dim]);
                v[t].extend_from_slice(&packed[(group + 1) * dim..]);
            }
        }
        let (q, k) = (rope.rotate(&q, dim), rope.rotate(&k, dim));
        let sparse = dense_each.is_none_or(|each| (i + 1) % each != 0);
        let a = attention(&p, [&q, &k, &v], heads, 1.0 / norm, sparse);
        x = add(&x, &w.linear(&a, &format!("{at}self_attn.dense"), hidden, true));
        let n = w.layer_norm(&x, &format!("{at}post_attention_layernorm"), eps, true);
        let up = w.linear(&n, &format!("{at}mlp.up_proj"), 2 * inner, true);
        let gegelu = |pair: &[f64]| {
            let (gelu, linear) = (pair[0].min(limit), pair[1].clamp(-limit, limit));
            gelu * sigmoid(1.702 * gelu) * (linear + 1.0)
        };
        let y: Rows = up.iter().map(|row| row.chunks_exact(2).map(gegelu).collect()).collect();
        x = add(&x, &w.linear(&y, &format!("{at}mlp.down_proj"), hidden, true));
    }
    let x = w.layer_norm(&x, "model.final_layernorm", eps, true);
    let width = or_none("mup_width_multiplier", 8.0).unwrap_or(1.0);
    let mut logits: Vec<f64> = p.head(&x, true).iter().map(|logit| logit / width).collect();
    for id in c.get("dummy_token_indices").and_then(Value::as_array).into_iter().flatten() {
        logits[id.as_u64().unwrap() as usize] = f64::NEG_INFINITY;
    }
    logits
}

/// Sparse blocks of 8 tokens, 2 of them local, and columns of which each of 4 heads sees others.
fn tiny() -> Value {
    json!({
        "architectures": ["Phi3SmallForCausalLM"], "model_type": "phi3small", "vocab_size": 96, "hidden_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "ff_intermediate_size": 56,
        "max_position_embeddings": 128, "hidden_act": "gegelu", "gegelu_limit": 0.7, "blocksparse_block_size": 8,
        "blocksparse_num_local_blocks": 2, "blocksparse_vert_stride": 3, "blocksparse_homo_head_pattern": false,
        "dense_attention_every_n_layers": 2, "layer_norm_epsilon": 1e-5, "rope_embedding_base": 10000,
        "mup_use_scaling": true, "mup_attn_multiplier": 6.0, "mup_embedding_multiplier": 2.0, "mup_width_multiplier": 4.0,
        "dummy_token_indices": [7, 90, 91], "bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "float32",
    })
}

pub fn cases() -> Vec<Case> {
    let tiny = tiny();
    let lists = |original: u32| {
        let list = |step: f64| (0..8).map(|i| 1.0 + step * f64::from(i)).collect::<Vec<_>>();
        json!({"type": "su", "short_factor": list(0.1), "long_factor": list(0.6), "original_max_position_embeddings": original})
    };
    let mut stated = lists(32);
    stated["short_mscale"] = json!(1.1);
    stated["long_mscale"] = json!(1.3);
    vec![
        with(&tiny, "phi3small", json!({})),
        with(
            &tiny,
            "phi3small, all sparse, heads alike, no limit or factors",
            json!({"dense_attention_every_n_layers": null, "blocksparse_homo_head_pattern": true, "gegelu_limit": null,
            "blocksparse_num_local_blocks": 1, "mup_use_scaling": false, "mup_embedding_multiplier": null,
            "mup_width_multiplier": null, "rope_position_scale": 0.5}),
        ),
        with(
            &tiny,
            "phi3small, wide stride, odd heads, longrope",
            json!({"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48, "blocksparse_vert_stride": 7,
            "blocksparse_num_local_blocks": 1, "rope_scaling": stated}),
        ),
        with(
            &tiny,
            "phi3small, longrope, short",
            json!({"rope_scaling": lists(128), "dense_attention_every_n_layers": 3, "tie_word_embeddings": false}),
        ),
        with(&tiny, "phi3small, longrope, long", json!({"rope_scaling": lists(32), "dummy_token_indices": null})),
    ]
}

/// The last logits of the first tokens of the prompt in chunks of this length, with blocks of 4 tokens, after a change.
fn computed(config: &Value, len: usize, chunk: usize, change: impl Fn(&mut Attention)) -> (Vec<f32>, Vec<f64>) {
    let (prompt, tensors, want) = make_of(config, 5, len);
    let folder = write(config, tensors.to_bytes(|name, _| Some(name.to_string())));
    let (config, weights) = checked(folder.path()).unwrap();
    let mut decoder = config.decoder.for_context(config.max_position_embeddings);
    for branch in decoder.layers.iter_mut().flat_map(|layer| &mut layer.branches) {
        if let Mixer::Attention(attention) = &mut branch.mixer {
            change(attention);
        }
    }
    let device = device::open("cpu", Some(2)).unwrap();
    let needs = Needs { row_invariant: true, block_size: 4, ..common::needs(&*device, &decoder) };
    let kernels = select(&KernelChoice::default(), &needs).unwrap();
    let mut model = Model::load(&decoder, &weights, device, kernels, 128, &|_, _| Ok(())).unwrap();
    let limits = StepLimits { max_rows: 128, max_seqs: 1, max_model_len: 128, block_size: 4, num_blocks: 32 };
    model.reserve(&limits).unwrap();
    let mut caches = model.new_cache(limits.num_blocks, limits.block_size).unwrap();
    (common::last_logits(&mut model, &mut caches, (4, 32), &prompt, chunk), want)
}

#[test]
fn chunks_and_decoded_tokens_have_the_bits_of_a_whole_prompt_and_the_logits_of_the_mask() {
    for (len, step) in [(100, "1"), (73, "homogeneous")] {
        let mut config = tiny();
        config["blocksparse_homo_head_pattern"] = json!(step == "homogeneous");
        let (whole, want) = computed(&config, len, len, |_| {});
        let error = difference(&whole, &want);
        assert!(error < 2e-3, "{len} tokens: error {error}");
        for chunk in [1, 7, 32] {
            assert_eq!(computed(&config, len, chunk, |_| {}).0, whole, "{len} tokens in chunks of {chunk}");
        }
    }
}

#[test]
fn a_prompt_of_local_blocks_alone_has_the_bits_of_dense_attention() {
    let dense = |attention: &mut Attention| attention.sparse = None;
    for (len, alike) in [(1, true), (9, true), (16, true), (17, false), (60, false)] {
        let [sparse, dense] = [computed(&tiny(), len, len, |_| {}).0, computed(&tiny(), len, len, dense).0];
        assert_eq!(sparse == dense, alike, "{len} tokens");
    }
}

/// Everything but the sparse layers, which no kernel that is launched has yet.
#[test]
fn the_same_model_with_dense_layers_gives_the_logits_of_the_cpu_on_cuda_sim() {
    let Some(device) = launching_device() else { return };
    let (_, tensors, _) = make_of(&tiny(), 5, 1);
    let folder = write(&tiny(), tensors.to_bytes(|name, _| Some(name.to_string())));
    let [cpu, launched] = [device::open("cpu", Some(1)).unwrap(), device]
        .map(|device| computed_on(device, folder.path(), |attention| attention.sparse = None).unwrap());
    let cpu: Vec<f64> = cpu.into_iter().map(f64::from).collect();
    assert_eq!(cpu.iter().filter(|logit| **logit == f64::NEG_INFINITY).count(), 3);
    let error = difference(&launched, &cpu);
    assert!(error < 2e-3, "error {error}");
}

#[test]
fn the_published_configuration_has_its_defaults() {
    let published = json!({"architectures": ["Phi3SmallForCausalLM"], "model_type": "phi3small"});
    let folder = write(&published, Vec::new());
    let decoder = models::ModelConfig::load(&models::ModelFiles::open(folder.path()).unwrap()).unwrap().decoder;
    let sparse: Vec<bool> = decoder.attention().map(|layer| layer.sparse.is_some()).collect();
    assert_eq!(sparse, [true, false].repeat(16));
    let first = decoder.attention().next().unwrap().clone();
    let rule = first.sparse.unwrap();
    assert_eq!((rule.block_size, rule.local_blocks, rule.vertical_stride, rule.head_sliding_step), (64, 16, 8, 1));
    assert_eq!((first.scale, decoder.embedding.scale, decoder.head.scale), (1.0 / 128.0, 10.0, 0.125));
    assert_eq!((decoder.vocab_size(), decoder.sparse_block(), decoder.is_tied()), (100_352, Some(64), true));
    let masked = &decoder.head.masked;
    assert_eq!((masked.len(), masked.contains(&100_257), masked.contains(&100_266)), (91, false, false));
    assert!(format!("{:7.1e}", decoder.num_parameters() as f64).contains("7.4e9"), "{}", decoder.num_parameters());
    // One table of blocks for all layers, of which none is freed: other heads see what one skips.
    let layout = models::PageLayout::new(&decoder);
    assert_eq!((layout.groups.len(), layout.groups[0].window), (1, None));
}
