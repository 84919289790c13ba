//! Encoders, embeddings and classifiers against transformers in float32, text by text and in one batch with the same bits.
//!
//! The cases are in `tests/encoders`; `QUIRE_REFERENCE_ENCODERS` names a folder with more.

use std::path::Path;
use std::sync::Arc;

use attention_kernels::{Dtype as AnyDtype, KernelChoice, Needs, select};
use device::Device;
use models::{ForwardBatch, Model, ModelConfig, ModelFiles, Pooler, Pooling, StepLimits, Task, Weights, check_weights};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView, serialize};
use serde_json::{Value, json};

use crate::common::{ids, list, made_weight, message, text};
use crate::texts::TextFiles;

/// Greatest difference of an element of a hidden state, of a normalised embedding, and of others and logits.
const HIDDEN: f64 = 1e-4;
const UNIT: f64 = 2e-5;
const OTHER: f64 = 1e-4;

/// A model on the CPU, with the memory of the largest step.
pub struct Loaded {
    pub model: Model,
    pub pooler: Pooler,
    pub config: ModelConfig,
}

pub fn load(folder: &Path, threads: usize) -> Loaded {
    load_on(folder, device::open("cpu", Some(threads)).unwrap(), AnyDtype::F32)
}

/// [`load`] on a device, in this type.
pub fn load_on(folder: &Path, device: Arc<dyn Device>, dtype: AnyDtype) -> Loaded {
    let files = ModelFiles::open(folder).unwrap();
    let mut config = ModelConfig::load(&files).unwrap();
    let weights = Weights::open(&files).unwrap();
    config.drop_missing_head(&files, &weights);
    check_weights(&config.decoder, &weights).unwrap();
    let needs = Needs { dtype, ..Model::needs(&config.decoder, &*device) };
    let kernels = select(&KernelChoice::default(), &needs).unwrap();
    // A reranker without a classifier scores the log-odds of two tokens.
    let expected =
        std::fs::read(folder.join("expected.json")).map_or(Value::Null, |text| serde_json::from_slice(&text).unwrap());
    let odds = expected["inputs"][0]["logits_no_yes"].is_array().then(|| {
        let tokenizer = text::Tokenizer::load(&TextFiles(&files)).unwrap();
        ["yes", "no"].map(|token| tokenizer.token_to_id(token).unwrap())
    });
    let pooler = Pooler::load(&files, &config, &weights, odds).unwrap();
    let model =
        Model::load(&config.decoder, &weights, Arc::clone(&device), kernels, MOST_ROWS, &|_, _| Ok(())).unwrap();
    Loaded { model, pooler, config }
}

const BLOCK: usize = 16;
/// Tokens of the largest step.
const MOST_ROWS: usize = 2048;

/// The hidden states of each text, all computed in one step. A text has its tokens and where those of a second text begin.
pub fn hidden(model: &mut Model, texts: &[(Vec<u32>, Option<usize>)]) -> Vec<Vec<f32>> {
    let groups = model.layout().groups.len();
    let rows: usize = texts.iter().map(|(ids, _)| ids.len()).sum();
    let blocks: usize = texts.iter().map(|(ids, _)| ids.len().div_ceil(BLOCK)).sum::<usize>() * groups;
    let limits =
        StepLimits { max_rows: MOST_ROWS, max_seqs: 16, max_model_len: 512, block_size: BLOCK, num_blocks: blocks };
    model.reserve(&limits).unwrap();
    let mut caches = model.new_cache(blocks, BLOCK).unwrap();
    let (mut batch, mut next) = (ForwardBatch::default(), 0);
    batch.clear(groups);
    for (ids, second) in texts {
        let tables: Vec<Vec<i32>> = (0..groups)
            .map(|_| {
                let table = (next..next + ids.len().div_ceil(BLOCK) as i32).collect::<Vec<_>>();
                next += table.len() as i32;
                table
            })
            .collect();
        let slots =
            |table: &Vec<i32>| (0..ids.len()).map(|p| i64::from(table[p / BLOCK]) * 16 + p as i64 % 16).collect();
        let slots: Vec<Vec<i64>> = tables.iter().map(slots).collect();
        batch.push(0, ids, slots.iter().zip(&tables).map(|(slots, table)| (&slots[..], &table[..])));
        second.iter().for_each(|at| batch.set_second(*at as u32));
    }
    model.forward(&batch, &mut caches).unwrap();
    let all: Vec<u32> = (0..rows as u32).collect();
    let states: Vec<f32> =
        all.chunks(models::LOGIT_ROWS).flat_map(|rows| model.hidden(rows).unwrap().to_vec()).collect();
    let width = states.len() / rows;
    let mut start = 0;
    let of_text = |(ids, _): &(Vec<u32>, _)| {
        start += ids.len() * width;
        states[start - ids.len() * width..start].to_vec()
    };
    texts.iter().map(of_text).collect()
}

/// Pools as a worker does, written as the definitions are.
fn pooled(pooling: Pooling, states: &[f32], width: usize) -> Vec<f64> {
    let rows: Vec<&[f32]> = states.chunks_exact(width).collect();
    let wide = |row: &[f32]| row.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    match pooling {
        Pooling::Last => wide(rows[rows.len() - 1]),
        Pooling::Cls => wide(rows[0]),
        Pooling::Mean => {
            (0..width).map(|c| rows.iter().map(|row| f64::from(row[c])).sum::<f64>() / rows.len() as f64).collect()
        }
        other => panic!("no case has {other:?}"),
    }
}

fn worst(found: &[f32], want: &[f32]) -> f64 {
    assert_eq!(found.len(), want.len());
    let errors = found.iter().zip(want).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs());
    errors.max_by(f64::total_cmp).unwrap_or(0.0)
}

/// Where the second text of a pair begins for the model, given the ids' types.
fn second(input: &Value) -> Option<usize> {
    input["token_type_ids"].as_array()?.iter().position(|kind| kind == 1)
}

fn check(folder: &Path) {
    let name = folder.file_name().unwrap().to_string_lossy().into_owned();
    let expected: Value = serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
    let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let numbers = |tensor: &Value| -> Vec<f32> {
        let view = tensors.tensor(text(tensor)).unwrap();
        view.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    let Loaded { mut model, pooler, config } = load(folder, 1);
    let width = config.decoder.output_width();
    let prompts = expected["prompts"].as_array().into_iter().flatten();
    let cases: Vec<&Value> = list(&expected["inputs"]).iter().chain(prompts).collect();
    let texts: Vec<_> = cases.iter().map(|case| (ids(&case["ids"]), second(case))).collect();
    let alone: Vec<Vec<f32>> =
        texts.iter().map(|one| hidden(&mut model, std::slice::from_ref(one)).remove(0)).collect();
    let mut compared = 0;
    for (case, states) in cases.iter().zip(&alone) {
        let at = || format!("{name}, {}", case["name"]);
        if !case["hidden"].is_null() {
            let error = worst(states, &numbers(&case["hidden"]));
            assert!(error < HIDDEN, "{}: hidden states differ by {error}", at());
            compared += 1;
        }
        let Some(pooling) = pooler.pooling else { panic!("{name}: the pooling is not supported") };
        let found = pooler.apply(pooled(pooling, states, width), &simd::Pool::new(Some(1)).unwrap());
        let (want, most) = match &pooler.task {
            Task::Embed { normalised } if !case["embedding"].is_null() => {
                (numbers(&case["embedding"]), if *normalised { UNIT } else { OTHER })
            }
            Task::Classify { .. } if case["logits"].is_array() => {
                (serde_json::from_value(case["logits"].clone()).unwrap(), OTHER)
            }
            Task::Classify { .. } => {
                let logits: Vec<f32> = serde_json::from_value(case["logits_no_yes"].clone()).unwrap();
                (vec![logits[1] - logits[0]], 2.0 * OTHER)
            }
            Task::Embed { .. } => continue,
        };
        let error = worst(&found, &want);
        assert!(error < most, "{}: the result differs by {error}", at());
        if let Task::Classify { scores, .. } = &pooler.task {
            let want: Vec<f32> = match case["probs"].is_null() {
                true => vec![case["score"].as_f64().unwrap() as f32],
                false => serde_json::from_value(case["probs"].clone()).unwrap(),
            };
            assert!(worst(&scores.of(&found), &want) < 1e-5, "{}: scores", at());
        }
        compared += 1;
    }
    assert!(compared >= cases.len(), "{name}: {compared} results of {} cases", cases.len());
    // One batch without padding, in another order and on several threads.
    let Loaded { model: mut threaded, .. } = load(folder, 3);
    let turned: Vec<_> = texts.iter().rev().cloned().collect();
    for model in [&mut model, &mut threaded] {
        for (first, batch) in turned.chunks(7).enumerate() {
            for (i, found) in hidden(model, batch).iter().enumerate() {
                let want = &alone[texts.len() - 1 - first * 7 - i];
                assert!(
                    found.iter().map(|x| x.to_bits()).eq(want.iter().map(|x| x.to_bits())),
                    "{name}: batch {first}, {i}"
                );
            }
        }
    }
}

#[test]
fn encoders_and_classifiers_give_the_results_of_transformers_alone_and_in_a_batch() {
    let folders = testkit::reference::encoders();
    assert!(folders.len() >= 3);
    folders.iter().for_each(|folder| check(folder));
}

/// Names, shapes and numbers of the tensors of a case of `classifiers.json`.
pub fn tensors(case: &Value) -> impl Iterator<Item = (String, Vec<usize>, Vec<f32>)> {
    let number = |tensor: &str, i: usize| match tensor.to_lowercase().contains("norm") {
        true => 0.5 + made_weight(tensor, i),
        false => (made_weight(tensor, i) - 0.5) / 2.0,
    };
    case["tensors"].as_object().unwrap().iter().map(move |(tensor, shape)| {
        let shape: Vec<usize> = serde_json::from_value(shape.clone()).unwrap();
        let numbers = (0..shape.iter().product()).map(|i| number(tensor, i)).collect();
        (tensor.clone(), shape, numbers)
    })
}

/// The logits of a case's text.
pub fn logits(folder: &Path, case: &Value) -> Vec<f32> {
    let Loaded { mut model, pooler, config } = load(folder, 1);
    let second = case["second"].as_u64().map(|at| at as usize);
    let states = hidden(&mut model, &[(ids(&case["ids"]), second)]).remove(0);
    let vector = pooled(pooler.pooling.unwrap(), &states, config.decoder.output_width());
    pooler.apply(vector, &simd::Pool::new(Some(1)).unwrap())
}

/// A checkpoint with the tensors of a case and this configuration.
pub fn made(case: &Value, config: &Value) -> tempfile::TempDir {
    let folder = tempfile::TempDir::new().unwrap();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let bytes = |(name, shape, numbers): (String, Vec<usize>, Vec<f32>)| {
        (name, shape, numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>())
    };
    let tensors: Vec<_> = tensors(case).map(bytes).collect();
    let views = tensors
        .iter()
        .map(|(tensor, shape, bytes)| (tensor, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    std::fs::write(folder.path().join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
    folder
}

/// Every family's head, with the names that its tensors have in transformers. The weights are numbers of [`made_weight`], so the file
/// has names, shapes and results alone.
#[test]
fn the_heads_of_encoders_give_the_logits_of_transformers() {
    let cases: Value = serde_json::from_str(include_str!("classifiers.json")).unwrap();
    for case in list(&cases) {
        let name = text(&case["name"]);
        let found = logits(made(case, &case["config"]).path(), case);
        let want: Vec<f32> = serde_json::from_value(case["logits"].clone()).unwrap();
        let error = worst(&found, &want);
        println!("{name}: error {error:.1e}");
        assert!(error < UNIT, "{name}: {found:?}, not {want:?}");
    }
}

#[test]
fn a_classifier_that_pools_late_has_the_mean_of_the_logits_of_all_tokens() {
    let cases: Value = serde_json::from_str(include_str!("classifiers.json")).unwrap();
    let case = list(&cases).iter().find(|case| text(&case["name"]) == "eurobert, bos").unwrap();
    let threads = simd::Pool::new(Some(1)).unwrap();
    let tokens = [(ids(&case["ids"]), None)];
    // Its head gives the logits of one row.
    let Loaded { mut model, pooler, .. } = load(made(case, &case["config"]).path(), 1);
    let states = hidden(&mut model, &tokens).remove(0);
    let rows = states.chunks(24).map(|row| pooler.apply(row.iter().map(|x| f64::from(*x)).collect(), &threads));
    let rows: Vec<Vec<f32>> = rows.collect();
    let mean = |label: usize| rows.iter().map(|row| row[label]).sum::<f32>() / rows.len() as f32;
    let want: Vec<f32> = (0..3).map(mean).collect();
    for pooling in [json!("late"), Value::Null] {
        let mut config = case["config"].clone();
        config["classifier_pooling"] = pooling;
        let found = logits(made(case, &config).path(), case);
        assert!(worst(&found, &want) < UNIT, "{found:?}, not {want:?}");
    }
}

#[test]
fn options_of_encoders_that_are_not_computed_are_refused_by_their_keys() {
    let cases: Value = serde_json::from_str(include_str!("classifiers.json")).unwrap();
    let refused = |name: &str, changes: Value, parts: &[&str]| {
        let case = list(&cases).iter().find(|case| text(&case["name"]) == name).unwrap();
        let mut config = case["config"].clone();
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        let folder = tempfile::TempDir::new().unwrap();
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        message(ModelConfig::load(&ModelFiles::open(folder.path()).unwrap()), parts);
    };
    refused("eurobert, bos", json!({"classifier_pooling": "max"}), &["classifier_pooling", "late", "mean"]);
    let jina = |changes: Value| {
        let mut config = json!({"architectures": ["JinaBertForMaskedLM"], "position_embedding_type": "alibi", "feed_forward_type": "geglu"});
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        config
    };
    let code =
        jina(json!({"auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}}));
    refused("bert", code, &["auto_map", "add their input twice"]);
    refused("bert", jina(json!({"feed_forward_type": "original"})), &["feed_forward_type", "geglu"]);
    refused("bert", jina(json!({"position_embedding_type": "absolute"})), &["position_embedding_type", "alibi"]);
    let tasks = json!({"architectures": ["XLMRobertaModel"], "lora_adaptations": ["retrieval.query", "separation"]});
    refused("bert", tasks, &["lora_adaptations", "jina-embeddings-v3"]);
    refused("gte, two types", json!({"logn_attention_scale": true}), &["logn_attention_scale", "false"]);
    refused("gte, two types", json!({"layer_norm_type": "rms_norm"}), &["layer_norm_type", "layer_norm"]);
    let mixed = json!({"rope_scaling": {"type": "ntk", "factor": 2.0, "mixed_b": 0.6}});
    refused("gte, ntk, one type", mixed, &["mixed_b", "null"]);
}
