//! Drafts of predictors: MTP layers and EAGLE-3 heads. They change nothing, and they are what the predictor computes of the text alone.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use attention_kernels::{KernelChoice, KvCache, select};
use engine::speculate::{ProposeError, Speculation};
use engine::worker::{StepError, StepInput, StepOutput, Worker};
use engine::{
    DraftCheckpoint, Engine, EngineConfig, EngineParts, GenerationRequest, ModelSource, SpeculativeConfig,
    SpeculativeMethod, TokenEvent,
};
use models::{Eagle3, ForwardBatch, Model, ModelConfig, ModelFiles, States, StepLimits, Weights};
use sched::SeqId;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::reference;
use testkit::tensors::{Tensors, random_tensors, write_checkpoint};

use crate::common::{VOCABULARY, config, on_sim, request, shared};
use crate::overlap::Load;
use crate::speculate::{Case, check_with};

/// A folder with the tokenizer of `llama`.
fn with_tokenizer(config: &Value, tensors: &Tensors, integers: &[(&str, Vec<i64>)]) -> TempDir {
    let folder = TempDir::new().unwrap();
    for file in ["tokenizer.json", "tokenizer_config.json", "generation_config.json"] {
        std::fs::copy(reference::folder("llama").join(file), folder.path().join(file)).unwrap();
    }
    write_checkpoint(folder.path(), config, tensors, integers).unwrap();
    folder
}

fn base(class: &str, model_type: &str, more: &Value) -> Value {
    let mut config = json!({
        "architectures": [class], "model_type": model_type, "vocab_size": VOCABULARY, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": false, "eos_token_id": 2,
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

/// A checkpoint of one of three families that carries an MTP layer.
fn mtp(family: usize) -> TempDir {
    let experts = json!({"first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "num_nextn_predict_layers": 1});
    let mut config = match family {
        0 => base("DeepseekV3ForCausalLM", "deepseek_v3", &experts),
        1 => base("Glm4MoeForCausalLM", "glm4_moe", &experts),
        _ => base(
            "Qwen3NextForCausalLM",
            "qwen3_next",
            &json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1, "full_attention_interval": 2,
                "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
                "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4}),
        ),
    };
    if family == 0 {
        let latent = json!({"q_lora_rank": null, "kv_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
            "v_head_dim": 32, "head_dim": null, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1});
        config.as_object_mut().unwrap().extend(latent.as_object().unwrap().clone());
    }
    let bare = with_tokenizer(&config, &Tensors::new(), &[]);
    let ModelConfig { decoder, predictor, .. } = ModelConfig::load(&ModelFiles::open(bare.path()).unwrap()).unwrap();
    let shapes = decoder.tensors().chain(predictor.unwrap().tensors()).collect::<Vec<_>>();
    with_tokenizer(&config, &random_tensors(shapes, 5), &[])
}

/// An EAGLE-3 head of random weights for the reference case `llama`.
fn eagle3() -> TempDir {
    let sizes: Value =
        serde_json::from_slice(&std::fs::read(reference::folder("llama").join("config.json")).unwrap()).unwrap();
    let of = |key: &str| sizes[key].as_u64().unwrap() as usize;
    let (hidden, heads, kv, inner) =
        (of("hidden_size"), of("num_attention_heads"), of("num_key_value_heads"), of("intermediate_size"));
    let dim = sizes["head_dim"].as_u64().map_or(hidden / heads, |dim| dim as usize);
    let mut config = sizes.clone();
    config["architectures"] = json!(["LlamaForCausalLMEagle3"]);
    (config["num_hidden_layers"], config["draft_vocab_size"]) = (1.into(), 280.into());
    config["eagle_aux_hidden_state_layer_ids"] = json!([0, 1, 2]);
    let shapes = [
        ("fc", vec![hidden, 3 * hidden]),
        ("midlayer.input_layernorm", vec![hidden]),
        ("midlayer.hidden_norm", vec![hidden]),
        ("midlayer.post_attention_layernorm", vec![hidden]),
        ("midlayer.self_attn.q_proj", vec![heads * dim, 2 * hidden]),
        ("midlayer.self_attn.k_proj", vec![kv * dim, 2 * hidden]),
        ("midlayer.self_attn.v_proj", vec![kv * dim, 2 * hidden]),
        ("midlayer.self_attn.o_proj", vec![hidden, heads * dim]),
        ("midlayer.mlp.gate_proj", vec![inner, hidden]),
        ("midlayer.mlp.up_proj", vec![inner, hidden]),
        ("midlayer.mlp.down_proj", vec![hidden, inner]),
        ("norm", vec![hidden]),
        ("lm_head", vec![280, hidden]),
    ];
    let shapes = shapes.map(|(name, shape)| (format!("{name}.weight"), shape));
    // Row i is token 2 i.
    with_tokenizer(&config, &random_tensors(shapes, 11), &[("d2t", (0..280).collect())])
}

/// What a case is: the model's folder, and the head's.
struct Predictor {
    name: &'static str,
    model: TempDir,
    head: Option<TempDir>,
}

fn predictors() -> Vec<Predictor> {
    let mtp = |family, name| Predictor { name, model: mtp(family), head: None };
    let llama = TempDir::new().unwrap();
    for file in std::fs::read_dir(reference::folder("llama")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), llama.path().join(file.file_name())).unwrap();
    }
    vec![
        mtp(0, "deepseek_v3"),
        mtp(1, "glm4_moe"),
        mtp(2, "qwen3_next"),
        Predictor { name: "EAGLE-3", model: llama, head: Some(eagle3()) },
    ]
}

impl Predictor {
    fn config(&self, config: EngineConfig, num_speculative_tokens: usize) -> EngineConfig {
        let method = match &self.head {
            None => SpeculativeMethod::Mtp,
            Some(head) => {
                SpeculativeMethod::Eagle3(DraftCheckpoint { model: head.path().to_path_buf(), revision: None })
            }
        };
        let speculative = Some(SpeculativeConfig { method, num_speculative_tokens });
        EngineConfig { speculative, ..self.without(config) }
    }

    /// The same model without drafts. States of recurrent layers need larger blocks.
    fn without(&self, config: EngineConfig) -> EngineConfig {
        let (block_size, factor) = if self.name == "qwen3_next" { (Some(32), 16) } else { (config.block_size, 4) };
        let model = ModelSource::Folder(self.model.path().to_path_buf());
        let bytes = config.kv_cache_memory_bytes.map(|bytes| bytes * factor);
        EngineConfig { model, block_size, kv_cache_memory_bytes: bytes, ..config }
    }

    fn engine(
        &self,
        config: &EngineConfig,
        most: usize,
        wrap: impl FnOnce(Box<dyn Worker>) -> Box<dyn Worker>,
    ) -> Engine {
        let parts = shared::parts(&self.config(config.clone(), most)).unwrap();
        let speculation = parts.speculation.map(|speculation| Speculation { is_adaptive: false, ..speculation });
        Engine::new(EngineParts { speculation, worker: wrap(parts.worker), ..parts }).unwrap()
    }
}

/// Sequence, number of known tokens, drafts.
type Drafted = (SeqId, usize, Vec<u32>);

/// Notes the drafts that a worker computes.
struct Noting(Box<dyn Worker>, Arc<Mutex<Vec<Drafted>>>);

impl Worker for Noting {
    fn draft(&mut self, input: &StepInput) -> Result<Vec<u32>, ProposeError> {
        let all = self.0.draft(input)?;
        let mut rest = &all[..];
        for span in input.plan.spans.iter().filter(|span| span.drafts > 0) {
            let (own, others) = rest.split_at(span.drafts);
            rest = others;
            let known = span.start + span.tokens.len() - span.drafts;
            self.1.lock().unwrap().push((span.seq, known, own.to_vec()));
        }
        Ok(all)
    }

    fn submit(&mut self, input: Arc<StepInput>) {
        self.0.submit(input);
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        self.0.collect(output)
    }

    fn num_sequences(&self) -> usize {
        self.0.num_sequences()
    }
}

/// The drafts behind a text, computed from it alone with the models.
struct Naive {
    target: Model,
    caches: Vec<KvCache>,
    predictor: Model,
    own_caches: Vec<KvCache>,
    head_tokens: Option<Vec<u32>>,
}

const BLOCKS: usize = 4;
const SIZE: usize = 64;

fn batch(groups: usize, start: usize, tokens: &[u32]) -> ForwardBatch {
    let tables: Vec<Vec<i32>> =
        (0..groups as i32).map(|group| (group * BLOCKS as i32..(group + 1) * BLOCKS as i32).collect()).collect();
    let slot = |table: &[i32], at: usize| i64::from(table[at / SIZE]) * SIZE as i64 + (at % SIZE) as i64;
    let positions = start..start + tokens.len();
    let slots: Vec<Vec<i64>> =
        tables.iter().map(|table| positions.clone().map(|at| slot(table, at)).collect()).collect();
    let mut batch = ForwardBatch::default();
    batch.clear(groups);
    batch.push(start, tokens, slots.iter().zip(&tables).map(|(slots, table)| (&slots[..], &table[..])));
    batch
}

impl Naive {
    fn of(predictor: &Predictor) -> Naive {
        let device = device::open("cpu", Some(1)).unwrap();
        let files = ModelFiles::open(predictor.model.path()).unwrap();
        let (mut config, weights) = (ModelConfig::load(&files).unwrap(), Weights::open(&files).unwrap());
        let head = predictor.head.as_ref().map(|head| open(head.path()));
        let declared = match &head {
            None => config.predictor.clone().unwrap(),
            Some((files, weights)) => {
                let eagle = Eagle3::load(files, weights, &config.decoder).unwrap();
                config.decoder.taps = eagle.taps;
                eagle.decoder
            }
        };
        let own = head.as_ref().map_or(&weights, |(_, weights)| weights);
        let kernels = |decoder| select(&KernelChoice::default(), &Model::needs(decoder, &*device)).unwrap();
        let of_target = kernels(&config.decoder);
        let mut target =
            Model::load(&config.decoder, &weights, device.clone(), of_target, 128, &|_, _| Ok(())).unwrap();
        let of_predictor = kernels(&declared);
        let mut module = Model::load_predictor(&declared, own, &target, of_predictor, 128, &|_, _| Ok(())).unwrap();
        let limits = StepLimits {
            max_rows: 128,
            max_seqs: 4,
            max_model_len: BLOCKS * SIZE,
            block_size: SIZE,
            num_blocks: BLOCKS,
        };
        target.reserve(&limits).unwrap();
        module.reserve(&limits).unwrap();
        let caches = target.new_cache(BLOCKS * target.layout().groups.len(), SIZE).unwrap();
        let own_caches = module.new_cache(BLOCKS, SIZE).unwrap();
        let head_tokens = models::head_tokens(&declared, own).unwrap();
        Naive { target, caches, predictor: module, own_caches, head_tokens }
    }

    /// Row i has the token behind position `start + i`, and this state.
    fn draft(&mut self, start: usize, tokens: &[u32], rows: &[u32], own: Option<&[device::Buffer]>) -> u32 {
        let buffers = own.unwrap_or_else(|| self.target.states());
        let states = States { buffers, rows, are_own: own.is_some() };
        self.predictor.forward_after(&batch(1, start, tokens), states, &mut self.own_caches).unwrap();
        let logits = self.predictor.logits(&[tokens.len() as u32 - 1]).unwrap();
        let best = (0..logits.len()).rev().max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
        self.head_tokens.as_ref().map_or(best as u32, |tokens| tokens[best])
    }

    fn drafts(&mut self, text: &[u32], count: usize) -> Vec<u32> {
        let rows: Vec<u32> = (0..text.len() as u32 - 1).collect();
        let groups = self.target.layout().groups.len();
        self.target.forward(&batch(groups, 0, &text[..rows.len()]), &mut self.caches).unwrap();
        let mut drafts = vec![self.draft(0, &text[1..], &rows, None)];
        let (_, mut own) = self.predictor.alloc_states(4).unwrap();
        while drafts.len() < count {
            let last = if drafts.len() == 1 { rows.len() as u32 - 1 } else { 0 };
            self.predictor.copy_own(&[last], &mut own[0]).unwrap();
            let at = text.len() - 2 + drafts.len();
            let token = *drafts.last().unwrap();
            drafts.push(self.draft(at, &[token], &[0], Some(&own)));
        }
        drafts
    }
}

fn open(folder: &Path) -> (ModelFiles, Weights) {
    let files = ModelFiles::open(folder).unwrap();
    let weights = Weights::open(&files).unwrap();
    (files, weights)
}

/// A request without randomness.
fn greedy(which: u32, len: usize, max_tokens: usize) -> GenerationRequest {
    let mut greedy = request(which, len, max_tokens, 1);
    greedy.params.sampling.temperature = 0.0;
    greedy
}

#[test]
fn drafts_of_a_predictor_are_what_it_computes_of_the_text_alone() {
    for predictor in predictors() {
        let noted = Arc::new(Mutex::new(Vec::new()));
        let config = EngineConfig { max_num_batched_tokens: 26, enable_prefix_caching: false, ..config(60) };
        let mut engine = predictor.engine(&config, 3, |worker| Box::new(Noting(worker, noted.clone())));
        let loads: Vec<Load> =
            [(1, 31, 14), (2, 9, 20), (3, 2, 12)].map(|(which, len, most)| (greedy(which, len, most), None)).into();
        let mut texts: HashMap<u64, Vec<u32>> =
            loads.iter().zip(0..).map(|((request, _), id)| (id, request.prompt.clone())).collect();
        for (request, _) in &loads {
            engine.submit(request.clone()).unwrap();
        }
        while engine.has_work() {
            engine.step(|id, event| {
                if let TokenEvent::Token { token: Some(token), .. } = event {
                    texts.get_mut(&id.0).unwrap().push(token.token);
                }
            });
        }
        let mut naive = Naive::of(&predictor);
        let noted = noted.lock().unwrap();
        assert!(noted.len() > 20, "{}: {} verifications", predictor.name, noted.len());
        for (seq, known, drafts) in &*noted {
            let text = &texts[&seq.request.0][..*known];
            assert_eq!(*drafts, naive.drafts(text, drafts.len()), "{}: {seq} behind {known} tokens", predictor.name);
        }
    }
}

#[test]
fn drafts_of_predictors_change_no_token_and_no_log_probability_of_any_load() {
    for (at, predictor) in predictors().into_iter().enumerate() {
        for (seed, swaps) in [(at as u64, false), (at as u64 + 9, true)] {
            let (method, most, wrong) = (0, 3, 0);
            let budget = if swaps { 15 } else { 40 };
            let case =
                Case { seed, first: at, count: 6, method, most, wrong, blocks: 16, budget, swaps, caches: !swaps };
            let load = |config: &EngineConfig, _: &[Vec<TokenEvent>]| predictor.engine(config, most, |worker| worker);
            let (engine, _) = check_with(&case, |config| predictor.without(config), load).unwrap();
            assert!(engine.stats().spec_decode.num_draft_tokens > 40, "{}", predictor.name);
        }
    }
}

#[test]
fn on_cuda_sim_drafts_of_predictors_change_nothing_either() {
    if on_sim(config(200)).is_none() {
        return;
    }
    // A simulated step takes as long as many on the CPU.
    for predictor in predictors().into_iter().skip(2) {
        let (seed, first, count, method, most, wrong) = (3, 0, 1, 0, 2, 0);
        let case = Case { seed, first, count, method, most, wrong, blocks: 40, budget: 30, swaps: false, caches: true };
        let load = |config: &EngineConfig, _: &[Vec<TokenEvent>]| predictor.engine(config, most, |worker| worker);
        let (engine, _) = check_with(&case, |config| on_sim(predictor.without(config)).unwrap(), load).unwrap();
        assert!(engine.stats().spec_decode.num_draft_tokens > 10, "{}", predictor.name);
    }
}

#[test]
fn a_predictor_that_cannot_be_used_is_one_line() {
    let refused = |config: EngineConfig| {
        let line = shared::engine(&config).err().unwrap().to_string();
        assert!(!line.contains('\n'), "{line}");
        line
    };
    let mtp = SpeculativeConfig { method: SpeculativeMethod::Mtp, num_speculative_tokens: 2 };
    let none = refused(EngineConfig { speculative: Some(mtp.clone()), ..config(60) });
    assert!(none.contains("expected a checkpoint that carries a layer for further tokens"), "{none}");
    // The configuration says that there is one, but the tensors are missing.
    let stripped = reference::folder("qwen3-next");
    let model = ModelSource::Folder(stripped);
    let missing = refused(EngineConfig { speculative: Some(mtp), model, block_size: None, ..config(600) });
    assert!(missing.contains("mtp."), "{missing}");
    let method = SpeculativeMethod::Eagle3(DraftCheckpoint { model: reference::folder("llama"), revision: None });
    let eagle = Some(SpeculativeConfig { method, num_speculative_tokens: 2 });
    let other = refused(EngineConfig { speculative: eagle, ..config(60) });
    assert!(other.contains("LlamaForCausalLMEagle3"), "{other}");
}
