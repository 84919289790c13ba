//! Predictors against their formulas in float64: what goes into their layers, what comes out, and what is fed back.

use std::sync::Arc;

use attention_kernels::{Dtype, KernelChoice, KvCache, Needs, select};
use device::{Buffer, Device, Options};
use models::decoder::{Linear, Part, Role};
use models::{
    Decoder, Eagle3, ForwardBatch, Model, ModelConfig, ModelFiles, States, StepLimits, Weights, head_tokens,
    weight_bytes_beside,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::tensors::{Tensors, random_tensors, write_checkpoint};

const BLOCK: usize = 8;
const LIMITS: StepLimits =
    StepLimits { max_rows: 64, max_seqs: 4, max_model_len: 128, block_size: BLOCK, num_blocks: 8 };

fn folder(config: &Value, tensors: &Tensors, integers: &[(&str, Vec<i64>)]) -> TempDir {
    let folder = TempDir::new().unwrap();
    write_checkpoint(folder.path(), config, tensors, integers).unwrap();
    folder
}

struct Opened {
    files: ModelFiles,
    weights: Weights,
}

fn open(folder: &TempDir) -> Opened {
    let files = ModelFiles::open(folder.path()).unwrap();
    Opened { weights: Weights::open(&files).unwrap(), files }
}

fn cpu() -> Arc<dyn Device> {
    device::open("cpu", Some(2)).unwrap()
}

fn needs(device: &dyn Device, decoder: &Decoder) -> Needs {
    Needs { dtype: Dtype::F32, row_invariant: true, block_size: BLOCK, ..Model::needs(decoder, device) }
}

struct Running {
    model: Model,
    caches: Vec<KvCache>,
    block: usize,
}

impl Running {
    fn of(mut model: Model) -> Running {
        let format = select(&KernelChoice::default(), &needs(&*cpu(), model.decoder())).unwrap().format;
        let block = models::PageLayout::least_block_size(model.decoder(), &format).max(BLOCK);
        let num_blocks = LIMITS.num_blocks * model.layout().groups.len();
        model.reserve(&StepLimits { block_size: block, num_blocks, max_model_len: 8 * block, ..LIMITS }).unwrap();
        let caches = model.new_cache(num_blocks, block).unwrap();
        Running { model, caches, block }
    }

    fn load(decoder: &Decoder, weights: &Weights, device: &Arc<dyn Device>) -> Running {
        let kernels = select(&KernelChoice::default(), &needs(&**device, decoder)).unwrap();
        let model = Model::load(decoder, weights, device.clone(), kernels, LIMITS.max_rows, &|_, _| Ok(())).unwrap();
        Running::of(model)
    }

    fn predictor(decoder: &Decoder, weights: &Weights, target: &Running, device: &Arc<dyn Device>) -> Running {
        let kernels = select(&KernelChoice::default(), &needs(&**device, decoder)).unwrap();
        let rows = LIMITS.max_rows;
        let model = Model::load_predictor(decoder, weights, &target.model, kernels, rows, &|_, _| Ok(())).unwrap();
        Running::of(model)
    }

    /// Tokens of one sequence from a position on.
    fn batch(&self, start: usize, tokens: &[u32]) -> ForwardBatch {
        let groups = self.model.layout().groups.len();
        let tables: Vec<Vec<i32>> = (0..groups)
            .map(|group| ((group * LIMITS.num_blocks) as i32..((group + 1) * LIMITS.num_blocks) as i32).rev().collect())
            .collect();
        let slot = |table: &[i32], at: usize| i64::from(table[at / self.block]) * self.block as i64;
        let slots: Vec<Vec<i64>> = tables
            .iter()
            .map(|table| (start..start + tokens.len()).map(|at| slot(table, at) + (at % self.block) as i64).collect())
            .collect();
        let mut batch = ForwardBatch::default();
        batch.clear(groups);
        batch.push(start, tokens, slots.iter().zip(&tables).map(|(slots, table)| (&slots[..], &table[..])));
        batch
    }

    fn forward(&mut self, start: usize, tokens: &[u32]) {
        let batch = self.batch(start, tokens);
        self.model.forward(&batch, &mut self.caches).unwrap();
    }

    fn after(&mut self, start: usize, tokens: &[u32], states: States<'_>) {
        let batch = self.batch(start, tokens);
        self.model.forward_after(&batch, states, &mut self.caches).unwrap();
    }

    fn logits(&mut self, rows: usize) -> Vec<Vec<f32>> {
        let rows: Vec<u32> = (0..rows as u32).collect();
        let logits = self.model.logits(&rows).unwrap();
        logits.chunks(logits.len() / rows.len()).map(<[f32]>::to_vec).collect()
    }
}

/// Root mean square norm.
fn rms(x: &[f64], weight: &[f32], eps: f64, plus_one: bool) -> Vec<f64> {
    let scale = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64 + eps).sqrt();
    let weight = weight.iter().map(|w| f64::from(*w) + if plus_one { 1.0 } else { 0.0 });
    x.iter().zip(weight).map(|(x, w)| x * scale * w).collect()
}

/// Row r: the products of row r of a matrix, of which `columns` are used, with x.
fn product((shape, matrix): &(Vec<usize>, Vec<f32>), columns: std::ops::Range<usize>, x: &[f64]) -> Vec<f64> {
    let row = |row: &[f32]| row[columns.clone()].iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
    matrix.chunks(shape[1]).map(row).collect()
}

fn sum(a: Vec<f64>, b: &[f64]) -> Vec<f64> {
    a.into_iter().zip(b).map(|(a, b)| a + b).collect()
}

fn wide(row: &[f32]) -> Vec<f64> {
    row.iter().map(|x| f64::from(*x)).collect()
}

fn check(found: &[f32], expected: &[f64], what: &str) {
    check_within(found, expected, 1e-4, what);
}

fn check_within(found: &[f32], expected: &[f64], tolerance: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let error = found.iter().zip(expected).map(|(a, b)| (f64::from(*a) - b).abs()).fold(0.0, f64::max);
    assert!(error < tolerance, "{what}: {error}");
}

const TOKENS: [u32; 24] = [5, 17, 90, 3, 44, 61, 8, 8, 29, 75, 33, 12, 94, 56, 7, 81, 20, 66, 41, 2, 58, 13, 77, 39];

fn base(class: &str, model_type: &str, more: Value) -> Value {
    let mut config = json!({
        "architectures": [class], "model_type": model_type, "vocab_size": 96, "hidden_size": 48, "intermediate_size": 56,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": false, "num_nextn_predict_layers": 1,
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

/// A checkpoint with an MTP module, and the names of its norms and projection.
struct Mtp {
    config: Value,
    names: [&'static str; 4],
    plus_one: bool,
    zero_first: bool,
    feeds_normed: bool,
}

fn mtp_cases() -> Vec<Mtp> {
    let layer = |config: Value| Mtp {
        config,
        names: [
            "model.layers.2.enorm.weight",
            "model.layers.2.hnorm.weight",
            "model.layers.2.eh_proj.weight",
            "model.layers.2.shared_head.norm.weight",
        ],
        plus_one: false,
        zero_first: true,
        feeds_normed: false,
    };
    let experts = json!({"first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "norm_topk_prob": true,
        "routed_scaling_factor": 1.5});
    let mut deepseek = base("DeepseekV3ForCausalLM", "deepseek_v3", experts.clone());
    deepseek.as_object_mut().unwrap().extend(
        json!({"q_lora_rank": 20, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24,
        "head_dim": null, "num_key_value_heads": 4, "moe_layer_freq": 1})
        .as_object()
        .unwrap()
        .clone(),
    );
    // Fewer tokens are chosen than there are.
    let mut indexed = deepseek.clone();
    let more = json!({"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_n_heads": 3,
        "index_head_dim": 12, "index_topk": 5});
    indexed.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let mut glm = base("Glm4MoeForCausalLM", "glm4_moe", experts);
    glm["use_qk_norm"] = true.into();
    let own = |config: Value| Mtp {
        config,
        names: [
            "mtp.pre_fc_norm_embedding.weight",
            "mtp.pre_fc_norm_hidden.weight",
            "mtp.fc.weight",
            "mtp.norm.weight",
        ],
        plus_one: true,
        zero_first: false,
        feeds_normed: true,
    };
    let recurrent = json!({"full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4});
    let next = json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "norm_topk_prob": true});
    let mut next = base("Qwen3NextForCausalLM", "qwen3_next", next);
    next.as_object_mut().unwrap().extend(recurrent.as_object().unwrap().clone());
    let normed =
        |config: Value, names: [&'static str; 4]| Mtp { names, feeds_normed: true, zero_first: false, ..layer(config) };
    let ling = json!({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
        "num_shared_experts": 1, "first_k_dense_replace": 1});
    let mimo = json!({"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_layer_freq": [0, 1], "hybrid_layer_pattern": [0, 1], "swa_num_key_value_heads": 4, "v_head_dim": 12,
        "sliding_window": 7, "attention_value_scale": 0.75, "layernorm_epsilon": 1e-5});
    let nemotron = json!({"hybrid_override_pattern": "*E", "mtp_hybrid_override_pattern": "*E", "layer_norm_epsilon": 1e-5,
        "rms_norm_eps": null, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 24, "n_shared_experts": 1, "moe_latent_size": 20,
        "norm_topk_prob": true, "mlp_hidden_act": "relu2", "mamba_num_heads": 6, "mamba_head_dim": 8, "n_groups": 2,
        "ssm_state_size": 6, "conv_kernel": 3});
    vec![
        layer(deepseek),
        layer(glm),
        own(next),
        own(base("Qwen3_5ForCausalLM", "qwen3_5_text", recurrent)),
        layer(indexed),
        normed(
            base("BailingMoeV2ForCausalLM", "bailing_moe_v2", ling),
            [
                "model.layers.2.enorm.weight",
                "model.layers.2.hnorm.weight",
                "model.layers.2.eh_proj.weight",
                "model.layers.2.final_layernorm.weight",
            ],
        ),
        normed(
            base("MiMoV2FlashForCausalLM", "mimo_v2_flash", mimo),
            [
                "model.mtp.layers.0.enorm.weight",
                "model.mtp.layers.0.hnorm.weight",
                "model.mtp.layers.0.eh_proj.weight",
                "model.mtp.layers.0.final_layernorm.weight",
            ],
        ),
        normed(
            base("NemotronHForCausalLM", "nemotron_h", nemotron),
            [
                "mtp.layers.0.enorm.weight",
                "mtp.layers.0.hnorm.weight",
                "mtp.layers.0.eh_proj.weight",
                "mtp.layers.1.final_layernorm.weight",
            ],
        ),
    ]
}

#[test]
fn an_mtp_module_reads_a_token_and_the_state_before_it_and_continues_with_its_own_output() {
    for Mtp { config, names, plus_one, zero_first, feeds_normed } in mtp_cases() {
        let what = config["model_type"].as_str().unwrap();
        // First without tensors: the declaration says which there are.
        let bare = folder(&config, &random_tensors([("x".to_string(), vec![2, 2])], 1), &[]);
        let ModelConfig { decoder, predictor, .. } = ModelConfig::load(&open(&bare).files).unwrap();
        let predictor = predictor.expect(what);
        let mut tensors = random_tensors(decoder.tensors().chain(predictor.tensors()), 7);
        let kept = folder(&config, &tensors, &[]);
        let device = cpu();
        let Opened { weights, .. } = open(&kept);
        models::check_weights(&decoder, &weights).unwrap();
        let mut target = Running::load(&decoder, &weights, &device);
        let mut module = Running::predictor(&predictor, &weights, &target, &device);
        target.forward(0, &TOKENS);
        let n = TOKENS.len() - 1;
        let rows: Vec<u32> = (0..n as u32).collect();
        let states = States { buffers: target.model.states(), rows: &rows, are_own: false };
        module.after(0, &TOKENS[1..], states);
        let mut found = module.logits(n);
        let mut own = vec![device.alloc(64 * 48 * 4).unwrap()];
        module.model.copy_own(&[n as u32 - 1], &mut own[0]).unwrap();
        let own_row = own[0].host::<f32>().unwrap()[..48].to_vec();

        // The formulas.
        let eps = 1e-5;
        let table = ["model.embed_tokens.weight", "model.word_embeddings.weight", "backbone.embeddings.weight"];
        let embeddings = table.iter().find_map(|name| tensors.get(*name)).unwrap().clone();
        let fused = |token: u32, position: usize, state: &[f32]| {
            let mut embedding = wide(&embeddings.1[token as usize * 48..][..48]);
            if zero_first && position == 0 {
                embedding.fill(0.0);
            }
            let e = rms(&embedding, &tensors[names[0]].1, eps, plus_one);
            let h = rms(&wide(state), &tensors[names[1]].1, eps, plus_one);
            sum(product(&tensors[names[2]], 0..48, &e), &product(&tensors[names[2]], 48..96, &h))
        };
        let states = target.model.states()[0].host::<f32>().unwrap();
        let inputs = (0..n).map(|at| fused(TOKENS[at + 1], at, &states[at * 48..][..48]));
        let mut inputs: Vec<Vec<f64>> = inputs.collect();
        inputs.push(fused(33, n, &own_row));
        let end = match feeds_normed {
            true => wide(&own_row),
            false => rms(&wide(&own_row), &tensors[names[3]].1, eps, plus_one),
        };
        check(&found[n - 1], &product(&tensors["lm_head.weight"], 0..48, &end), &format!("{what}, what is fed back"));
        module.after(n, &[33], States { buffers: &own, rows: &[0], are_own: true });
        found.extend(module.logits(1));

        // The layer itself is one of the family: a plain decoder whose embeddings are these inputs.
        let numbers = inputs.iter().flatten().map(|x| *x as f32).collect();
        tensors.insert("fused.weight".into(), (vec![n + 1, 48], numbers));
        let plain = folder(&config, &tensors, &[]);
        let table = Linear { adapters: false, ..Linear::new(48, Role::Column, [Part::new("fused", n + 1)]) };
        let mut layer = predictor.clone();
        (layer.embedding.tokens, layer.embedding.beside) = (table, None);
        let mut layer = Running::load(&layer, &open(&plain).weights, &device);
        layer.forward(0, &(0..=n as u32).collect::<Vec<_>>());
        for (at, (found, expected)) in found.iter().zip(layer.logits(n + 1)).enumerate() {
            check(found, &wide(&expected), &format!("{what}, row {at}"));
        }

        // Chunks change no bit.
        for (start, end) in [(0, 10), (10, 11), (11, n)] {
            let rows: Vec<u32> = (start as u32..end as u32).collect();
            let states = States { buffers: target.model.states(), rows: &rows, are_own: false };
            module.after(start, &TOKENS[start + 1..=end], states);
            assert_eq!(module.logits(end - start), found[start..end], "{what}, rows {start} to {end}");
        }
        let features = device.features();
        let kernels = select(&KernelChoice::default(), &needs(&*device, &predictor)).unwrap();
        let bytes = |target| weight_bytes_beside(&predictor, &weights, features, &kernels, target).unwrap().all;
        assert_eq!(bytes(None) - bytes(Some(&decoder)), 2 * 96 * 48 * 4, "the table of tokens and the head are shared");
    }
}

/// Causal attention of a sequence in float64: queries, keys and values of 4, 2 and 2 heads of 16.
fn attend(qkv: &[Vec<f64>]) -> Vec<Vec<f64>> {
    let rotated = |at: usize, head: usize| {
        let x = &qkv[at][head * 16..][..16];
        let turn = |i: usize| (at as f64 * 10000f64.powf(-2.0 * i as f64 / 16.0)).sin_cos();
        let low = (0..8).map(|i| x[i] * turn(i).1 - x[i + 8] * turn(i).0);
        let high = (0..8).map(|i| x[i + 8] * turn(i).1 + x[i] * turn(i).0);
        low.chain(high).collect::<Vec<f64>>()
    };
    let row = |at: usize| {
        let head = |head: usize| {
            let query = rotated(at, head);
            let score =
                |key: usize| rotated(key, 4 + head / 2).iter().zip(&query).map(|(a, b)| a * b).sum::<f64>() / 4.0;
            let scores: Vec<f64> = (0..=at).map(|key| score(key).exp()).collect();
            let total: f64 = scores.iter().sum();
            let value = move |i: usize| {
                (0..=at).map(|key| scores[key] / total * qkv[key][(6 + head / 2) * 16 + i]).sum::<f64>()
            };
            (0..16).map(value).collect::<Vec<f64>>()
        };
        (0..4).flat_map(head).collect()
    };
    (0..qkv.len()).map(row).collect()
}

/// Llama of 6 layers, and EAGLE-3 heads for it: with a head and a table of their own or those of the target, and with both orders of
/// norm and residual.
fn eagle(own_table: bool, norm_before_residual: bool) -> (Tensors, TempDir, TempDir) {
    let target = base("LlamaForCausalLM", "llama", json!({"num_hidden_layers": 6}));
    let bare = folder(&target, &random_tensors([("x".to_string(), vec![2, 2])], 1), &[]);
    let tensors = random_tensors(ModelConfig::load(&open(&bare).files).unwrap().decoder.tensors(), 3);
    let of_target = folder(&target, &tensors, &[]);
    let mut shapes: Vec<(String, Vec<usize>)> = [
        ("fc.weight", vec![48, 144]),
        ("midlayer.input_layernorm.weight", vec![48]),
        ("midlayer.hidden_norm.weight", vec![48]),
        ("midlayer.post_attention_layernorm.weight", vec![48]),
        ("midlayer.self_attn.q_proj.weight", vec![64, 96]),
        ("midlayer.self_attn.k_proj.weight", vec![32, 96]),
        ("midlayer.self_attn.v_proj.weight", vec![32, 96]),
        ("midlayer.self_attn.o_proj.weight", vec![48, 64]),
        ("midlayer.mlp.gate_proj.weight", vec![56, 48]),
        ("midlayer.mlp.up_proj.weight", vec![56, 48]),
        ("midlayer.mlp.down_proj.weight", vec![48, 56]),
        ("norm.weight", vec![48]),
    ]
    .map(|(name, shape)| (name.to_string(), shape))
    .to_vec();
    let mut config = base("LlamaForCausalLMEagle3", "llama", json!({"num_hidden_layers": 1}));
    config["norm_before_residual"] = norm_before_residual.into();
    let mut integers = Vec::new();
    if own_table {
        shapes.push(("embed_tokens.weight".into(), vec![96, 48]));
        shapes.push(("lm_head.weight".into(), vec![32, 48]));
        config["draft_vocab_size"] = 32.into();
        // Row i is token 3 i.
        integers.push(("d2t", (0..32).map(|row| 2 * row).collect()));
    }
    let of_head = random_tensors(shapes, 9);
    let head = folder(&config, &of_head, &integers);
    let mut all = tensors;
    all.extend(of_head.into_iter().map(|(name, tensor)| (format!("eagle.{name}"), tensor)));
    (all, of_target, head)
}

#[test]
fn an_eagle_3_head_is_what_its_paper_says() {
    for (own_table, normed) in [(true, false), (false, false), (true, true)] {
        let what = format!("own table {own_table}, norm before residual {normed}");
        let (tensors, of_target, of_head) = eagle(own_table, normed);
        let device = cpu();
        let (opened, head) = (open(&of_target), open(&of_head));
        let mut decoder = ModelConfig::load(&opened.files).unwrap().decoder;
        let Eagle3 { decoder: predictor, taps, .. } = Eagle3::load(&head.files, &head.weights, &decoder).unwrap();
        assert_eq!(taps, [2, 3, 3]);
        decoder.taps = vec![1, 3, 4];
        let mut target = Running::load(&decoder, &opened.weights, &device);
        let mut module = Running::predictor(&predictor, &head.weights, &target, &device);
        target.forward(0, &TOKENS);
        let n = TOKENS.len() - 1;
        let rows: Vec<u32> = (0..n as u32).collect();
        module.after(0, &TOKENS[1..], States { buffers: target.model.states(), rows: &rows, are_own: false });
        let mut found = module.logits(n);
        let mut own = vec![device.alloc(64 * 48 * 4).unwrap()];
        module.model.copy_own(&[n as u32 - 1], &mut own[0]).unwrap();
        module.after(n, &[33], States { buffers: &own, rows: &[0], are_own: true });
        found.extend(module.logits(1));

        // The states are the streams in front of these layers: a shorter decoder ends with them.
        for (tap, layers) in target.model.states().iter().zip([1, 3, 4]) {
            let mut shorter = decoder.clone();
            (shorter.taps, shorter.final_norm) = (Vec::new(), None);
            shorter.layers.truncate(layers);
            let mut shorter = Running::load(&shorter, &opened.weights, &device);
            shorter.forward(0, &TOKENS);
            let hidden = shorter.model.hidden(&rows).unwrap();
            assert_eq!(hidden, &tap.host::<f32>().unwrap()[..hidden.len()], "the stream in front of layer {layers}");
        }

        let eps = 1e-5;
        let of = |name: &str| &tensors[&format!("eagle.{name}.weight")];
        let table = if own_table { of("embed_tokens") } else { &tensors["model.embed_tokens.weight"] };
        let states: Vec<&[f32]> = target.model.states().iter().map(|state| state.host::<f32>().unwrap()).collect();
        let stream = |at: usize| -> Vec<f64> {
            let state: Vec<f64> = states.iter().flat_map(|state| wide(&state[at * 48..][..48])).collect();
            product(of("fc"), 0..144, &state)
        };
        let mut streams: Vec<Vec<f64>> = (0..n).map(stream).collect();
        streams.push(wide(&own[0].host::<f32>().unwrap()[..48]));
        let tokens: Vec<u32> = TOKENS[1..].iter().copied().chain([33]).collect();
        let qkv = |(stream, token): (&Vec<f64>, &u32)| -> Vec<f64> {
            let e = rms(&wide(&table.1[*token as usize * 48..][..48]), &of("midlayer.input_layernorm").1, eps, false);
            let h = rms(stream, &of("midlayer.hidden_norm").1, eps, false);
            let x: Vec<f64> = e.into_iter().chain(h).collect();
            let projections = ["q_proj", "k_proj", "v_proj"].map(|name| of(&format!("midlayer.self_attn.{name}")));
            projections.into_iter().flat_map(|projection| product(projection, 0..96, &x)).collect()
        };
        let qkv: Vec<Vec<f64>> = streams.iter().zip(&tokens).map(qkv).collect();
        for (at, (attended, stream)) in attend(&qkv).iter().zip(&streams).enumerate() {
            let residual = if normed { rms(stream, &of("midlayer.hidden_norm").1, eps, false) } else { stream.clone() };
            let stream = sum(product(of("midlayer.self_attn.o_proj"), 0..64, attended), &residual);
            let x = rms(&stream, &of("midlayer.post_attention_layernorm").1, eps, false);
            let [gate, up] =
                ["gate_proj", "up_proj"].map(|name| product(of(&format!("midlayer.mlp.{name}")), 0..48, &x));
            let inner: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let stream = sum(product(of("midlayer.mlp.down_proj"), 0..56, &inner), &stream);
            if at == n - 1 {
                check(&own[0].host::<f32>().unwrap()[..48], &stream, &format!("{what}, what is fed back"));
            }
            let end = rms(&stream, &of("norm").1, eps, false);
            let head = if own_table { of("lm_head") } else { &tensors["lm_head.weight"] };
            check(&found[at], &product(head, 0..48, &end), &format!("{what}, row {at}"));
        }
        let tokens = head_tokens(&predictor, &head.weights).unwrap();
        assert_eq!(tokens, own_table.then(|| (0..32).map(|row| 3 * row).collect()), "{what}");
    }
}

#[test]
fn predictors_on_cuda_sim_give_nearly_the_logits_of_the_cpu() {
    let options = Options { deterministic: true, ..Options::default() };
    let Some(launching) = crate::support::opened::open(options) else { return };
    let run = |device: &Arc<dyn Device>, decoder: &Decoder, predictor: &Decoder, weights: [&Weights; 2]| {
        let mut target = Running::load(decoder, weights[0], device);
        let mut module = Running::predictor(predictor, weights[1], &target, device);
        target.forward(0, &TOKENS);
        let mut carried: Vec<Buffer> = Vec::new();
        for _ in target.model.states() {
            carried.push(device.alloc(64 * 48 * 4).unwrap());
        }
        target.model.copy_states(&[22, 21], &mut carried).unwrap();
        let rows: Vec<u32> = (0..23).collect();
        module.after(0, &TOKENS[1..], States { buffers: target.model.states(), rows: &rows, are_own: false });
        let mut logits = module.logits(23);
        module.after(22, &TOKENS[23..], States { buffers: &carried, rows: &[0], are_own: false });
        assert_eq!(module.logits(1)[0], logits[22], "a copy of a state has its bits");
        let mut own = vec![device.alloc(64 * 48 * 4).unwrap()];
        module.model.copy_own(&[0], &mut own[0]).unwrap();
        module.after(23, &[33], States { buffers: &own, rows: &[0], are_own: true });
        logits.extend(module.logits(1));
        logits
    };
    let compare = |decoder: &Decoder, predictor: &Decoder, weights: [&Weights; 2], what: &str| {
        let [on_cpu, found] = [&cpu(), &launching].map(|device| run(device, decoder, predictor, weights));
        for (at, (a, b)) in found.iter().zip(on_cpu).enumerate() {
            // The states of the target differ too.
            check_within(a, &wide(&b), 2e-3, &format!("{what}, row {at}"));
        }
    };
    for Mtp { config, .. } in mtp_cases().into_iter().take(3) {
        let bare = folder(&config, &random_tensors([("x".to_string(), vec![2, 2])], 1), &[]);
        let ModelConfig { decoder, predictor, .. } = ModelConfig::load(&open(&bare).files).unwrap();
        let predictor = predictor.unwrap();
        let kept = folder(&config, &random_tensors(decoder.tensors().chain(predictor.tensors()), 7), &[]);
        let Opened { weights, .. } = open(&kept);
        compare(&decoder, &predictor, [&weights, &weights], config["model_type"].as_str().unwrap());
    }
    let (_, of_target, of_head) = eagle(true, true);
    let (opened, head) = (open(&of_target), open(&of_head));
    let mut decoder = ModelConfig::load(&opened.files).unwrap().decoder;
    let eagle = Eagle3::load(&head.files, &head.weights, &decoder).unwrap();
    decoder.taps = eagle.taps;
    compare(&decoder, &eagle.decoder, [&opened.weights, &head.weights], "EAGLE-3");
}

#[test]
fn a_predictor_that_does_not_fit_is_one_line() {
    let (_, of_target, _) = eagle(true, false);
    let target = ModelConfig::load(&open(&of_target).files).unwrap().decoder;
    let refused = |change: &dyn Fn(&mut Value), expected: &str| {
        let (_, _, of_head) = eagle(true, false);
        let path = of_head.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        change(&mut config);
        std::fs::write(path, config.to_string()).unwrap();
        let head = open(&of_head);
        let line = Eagle3::load(&head.files, &head.weights, &target).err().unwrap().to_string();
        assert!(line.contains(expected) && !line.contains('\n'), "{line}");
    };
    refused(&|config| config["architectures"] = json!(["LlamaForCausalLM"]), "LlamaForCausalLMEagle3");
    refused(&|config| config["hidden_size"] = 64.into(), "expected 48, the hidden size of the model");
    refused(&|config| config["vocab_size"] = 100.into(), "expected 96, the vocabulary of the model");
    refused(&|config| config["draft_vocab_size"] = 200.into(), "at most 96, the vocabulary");
    refused(
        &|config| config["eagle_aux_hidden_state_layer_ids"] = json!([1, 2, 6]),
        "3 numbers of layers of the model",
    );
    // A row of a token that does not exist.
    let (tensors, _, _) = eagle(true, false);
    let own = tensors.into_iter().filter_map(|(name, it)| Some((name.strip_prefix("eagle.")?.to_string(), it)));
    let config = base("LlamaForCausalLMEagle3", "llama", json!({"num_hidden_layers": 1, "draft_vocab_size": 32}));
    let of_head = folder(&config, &own.collect(), &[("d2t", vec![70; 32])]);
    let head = open(&of_head);
    let eagle = Eagle3::load(&head.files, &head.weights, &target).unwrap();
    let line = head_tokens(&eagle.decoder, &head.weights).unwrap_err().to_string();
    assert!(line.contains("d2t") && line.contains("token ids below 96"), "{line}");
}
