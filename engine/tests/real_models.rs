//! Trained checkpoints against transformers in float32, on texts, not on random ids: token ids, log-probabilities, greedy tokens,
//! perplexity. `cargo xtask real-models` fetches them; `testkit/real-models` has the expected values.
//!
//! An ordinary run computes the smallest checkpoint but for its long window, of the others all ids and some texts. `QUIRE_TEST_ALL=1`
//! (`cargo xtask test-all`) computes everything, and the table of `docs/real-models.md`, which
//! `QUIRE_TEST_ALL=1 QUIRE_WRITE_DOCS=1 cargo test -p engine --test all real_models` writes.

use std::path::{Path, PathBuf};

use crate::common::shared;
use engine::{
    Dtype, EngineConfig, Event, GenerationParams, GenerationRequest, KvCacheDtype, Llm, ModelSource, Pooling,
    RoundActivations, SamplingParams, TokenLogprobs,
};
use serde_json::Value;
use testkit::capability::Capability;
use testkit::everything;
use testkit::real_models::{DECODERS, expected, file_for_tests};

/// Greatest difference of a log-probability in float32. The measured one is 8e-5.
const TOLERANCE: f64 = 1e-3;
/// Greatest difference of the sum of a window's log-probabilities, as a share of it. The measured one is 2e-7.
const SUM_TOLERANCE: f64 = 2e-6;
/// Greatest difference between a perplexity and the one that the page states: vector units sum in different orders.
const STATED: f64 = 1e-3;

const PAGE: &str = "docs/real-models.md";

/// The checkpoint in float32, with activations as they are.
fn config(file: &Path) -> EngineConfig {
    EngineConfig {
        model: ModelSource::Folder(file.to_owned()),
        dtype: Some(Dtype::F32),
        activations: RoundActivations::Never,
        kv_cache_memory_bytes: Some(384 << 20),
        max_model_len: Some(4096),
        // The harness runs several tests at once.
        threads: Some(1),
        device: "cpu".into(),
        ..Default::default()
    }
}

fn read<T: serde::de::DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap()
}

/// The tests compare every n-th entry.
fn some(entries: &Value, step: usize) -> impl Iterator<Item = &Value> {
    entries.as_array().unwrap().iter().step_by(step)
}

/// The scores of all tokens but the first of each text: of the token, and of the most likely one.
fn scores(llm: &mut Llm, texts: Vec<Vec<u32>>) -> Vec<Vec<TokenLogprobs>> {
    let request = |prompt: Vec<u32>| GenerationRequest {
        prompt,
        params: GenerationParams { prompt_logprobs: Some(1), max_tokens: Some(0), ..Default::default() },
        ..Default::default()
    };
    let done = llm.run_with_events(texts.into_iter().map(request).collect()).unwrap();
    let scores = done.into_iter().map(|(_, events)| {
        let scores = events.into_iter().find_map(|event| match event {
            Event::PromptLogprobs(scores) => Some(scores),
            _ => None,
        });
        scores.unwrap().into_iter().flatten().collect()
    });
    scores.collect()
}

fn ids_are_the_references(llm: &Llm, expected: &Value) {
    let mut compared = 0;
    let mut wrong = Vec::new();
    let chats = some(&expected["chat_template"]["cases"], 1);
    for (entry, key, special) in some(&expected["tokenize"], 1)
        .flat_map(|entry| [(entry, "ids", false), (entry, "ids_with_special", true)])
        .chain(chats.map(|entry| (entry, "ids", false)))
    {
        let text = entry["text"].as_str().unwrap();
        let (found, want): (Vec<u32>, Vec<u32>) = (llm.tokenizer().encode(text, special).unwrap(), read(&entry[key]));
        compared += 1;
        if found != want {
            wrong.push(format!("{text:?}: {found:?}, expected {want:?}"));
        }
    }
    assert!(compared >= 150, "{compared} texts");
    assert!(wrong.is_empty(), "{} of {compared} texts: {}", wrong.len(), wrong.join("\n"));
}

fn log_probabilities_are_the_references(llm: &mut Llm, expected: &Value, step: usize) {
    let texts: Vec<&Value> = some(&expected["logprobs"], step).collect();
    let found = scores(llm, texts.iter().map(|text| read(&text["ids"])).collect());
    for (text, found) in texts.into_iter().zip(found) {
        let (want, margins): (Vec<f64>, Vec<f64>) = (read(&text["logprobs"]), read(&text["margins"]));
        assert!(found.len() == want.len() && want.len() >= 90, "{}", text["name"]);
        for (at, (found, want)) in found.iter().zip(want).enumerate() {
            let name = || format!("{}, token {}", text["name"], at + 1);
            assert!((f64::from(found.logprob) - want).abs() < TOLERANCE, "{}: {found:?}, expected {want}", name());
            let is_likeliest = u64::from(found.top[0].0) == text["top1"][at].as_u64().unwrap();
            assert!(is_likeliest || margins[at] < TOLERANCE, "{}: {found:?}, expected {}", name(), text["top1"][at]);
        }
    }
}

fn greedy_tokens_are_the_references(llm: &mut Llm, expected: &Value, step: usize) {
    let prompts: Vec<&Value> = some(&expected["greedy"], step).collect();
    let request = |prompt: &&Value| GenerationRequest {
        prompt: read(&prompt["prompt_ids"]),
        params: GenerationParams {
            sampling: SamplingParams { temperature: 0.0, ..Default::default() },
            max_tokens: Some(prompt["ids"].as_array().unwrap().len() + usize::from(prompt["ends"] == true)),
            ..Default::default()
        },
        ..Default::default()
    };
    let done = llm.run(prompts.iter().map(request).collect()).unwrap();
    let mut compared = 0;
    for (prompt, completion) in prompts.into_iter().zip(done) {
        let (want, margins): (Vec<u32>, Vec<f64>) = (read(&prompt["ids"]), read(&prompt["margins"]));
        let sure = margins.iter().take_while(|margin| **margin >= TOLERANCE).count();
        let found = &completion.outputs[0].token_ids;
        assert_eq!(found[..sure.min(found.len())], want[..sure], "{}", prompt["name"]);
        // One that the reference ends has no token behind the end.
        assert!(sure < want.len() || found.len() == want.len(), "{}: {found:?}", prompt["name"]);
        compared += sure;
    }
    assert!(compared >= 100, "{compared} tokens");
}

/// Perplexity of each window, the sum of its log-probabilities, and how many of the most likely tokens are the reference's.
struct Windows {
    perplexity: Vec<f64>,
    sums: Vec<f64>,
    /// Over all windows: how many are equal, and how many there are.
    top1: (usize, usize),
}

fn windows(llm: &mut Llm, expected: &Value, count: usize) -> Windows {
    let wanted: Vec<&Value> = some(&expected["perplexity"], 1).take(count).collect();
    let mut windows = Windows { perplexity: Vec::new(), sums: Vec::new(), top1: (0, 0) };
    for window in wanted {
        let found = scores(llm, vec![read(&window["ids"])]).remove(0);
        let top1: Vec<u32> = read(&window["top1"]);
        assert_eq!((found.len(), found.len()), (top1.len(), read(&window["tokens"])), "{}", window["name"]);
        let sum: f64 = found.iter().map(|score| f64::from(score.logprob)).sum();
        windows.perplexity.push((-sum / found.len() as f64).exp());
        windows.sums.push(sum);
        windows.top1.0 += found.iter().zip(&top1).filter(|(found, want)| found.top[0].0 == **want).count();
        windows.top1.1 += top1.len();
    }
    windows
}

fn references(expected: &Value) -> Vec<f64> {
    let of = |window: &Value| (-window["sum_logprobs"].as_f64().unwrap() / window["tokens"].as_f64().unwrap()).exp();
    some(&expected["perplexity"], 1).map(of).collect()
}

/// `step`: in an ordinary run, every n-th text and prompt; `count`: and so many windows.
fn check(name: &str, step: usize, count: usize) {
    let Some(file) = file_for_tests(name) else { return };
    let (step, count) = if everything() { (1, 2) } else { (step, count) };
    let expected = expected(name);
    let mut llm = shared::llm(config(&file)).unwrap();
    ids_are_the_references(&llm, &expected);
    log_probabilities_are_the_references(&mut llm, &expected, step);
    greedy_tokens_are_the_references(&mut llm, &expected, step);
    let Windows { sums, top1, .. } = windows(&mut llm, &expected, count);
    for (sum, window) in sums.iter().zip(some(&expected["perplexity"], 1)) {
        let want = window["sum_logprobs"].as_f64().unwrap();
        assert!((sum / want - 1.0).abs() < SUM_TOLERANCE, "{}: a sum of {sum}, expected {want}", window["name"]);
    }
    // Two tokens may be about equally likely.
    assert!(top1.0 + 2 >= top1.1, "{} of {} most likely tokens", top1.0, top1.1);
}

#[test]
fn smollm2_gives_the_ids_scores_and_tokens_of_transformers() {
    check("smollm2", 1, 1);
}

#[test]
fn gemma3_gives_the_ids_scores_and_tokens_of_transformers() {
    check("gemma3", 4, 1);
}

#[test]
fn qwen2_5_coder_gives_the_ids_scores_and_tokens_of_transformers() {
    check("qwen2.5-coder", 4, 1);
}

/// A line of the page: what differs from float32, and by how much the perplexity of a window may differ from the reference's.
type Setting = (&'static str, fn(&mut EngineConfig), f64);

/// Caches in float types of 8 bits have no bound but the figure that the page states.
const SETTINGS: [Setting; 8] = [
    ("`--dtype float32`", |_| (), 1e-5),
    ("`--dtype bfloat16`", |config| config.dtype = Some(Dtype::Bf16), 0.002),
    ("`--activations int8`", |config| config.activations = RoundActivations::Int8, 0.01),
    ("`--kv-cache-dtype float16`", |config| config.kv_cache_dtype = KvCacheDtype::Float16, 0.002),
    ("`--kv-cache-dtype bfloat16`", |config| config.kv_cache_dtype = KvCacheDtype::Bfloat16, 0.002),
    ("`--kv-cache-dtype int8`", |config| config.kv_cache_dtype = KvCacheDtype::Int8, 0.005),
    ("`--kv-cache-dtype fp8`", |config| config.kv_cache_dtype = KvCacheDtype::Fp8E4m3, f64::INFINITY),
    ("`--kv-cache-dtype fp8_e5m2`", |config| config.kv_cache_dtype = KvCacheDtype::Fp8E5m2, f64::INFINITY),
];

/// Computes the rows of a checkpoint, and the perplexities in them.
fn rows(name: &str, file: &Path) -> Vec<(String, Vec<f64>)> {
    let expected = expected(name);
    let references = references(&expected);
    let row = |(setting, change, bound): Setting| {
        let mut config = EngineConfig { threads: None, ..config(file) };
        change(&mut config);
        let Windows { perplexity, top1, .. } = windows(&mut shared::llm(config).unwrap(), &expected, 2);
        let mut row = format!("| {name} | {setting} |");
        for (found, reference) in perplexity.iter().zip(&references) {
            let more = found / reference - 1.0;
            assert!(more.abs() <= bound, "{name}, {setting}: a perplexity of {found}, expected {reference}");
            row += &format!(" {found:.4} | {:+.2} % |", 100.0 * more);
        }
        let row = format!("{row} {:.1} % |", 100.0 * top1.0 as f64 / top1.1 as f64);
        println!("{row}");
        (row, perplexity)
    };
    SETTINGS.into_iter().map(row).collect()
}

#[test]
fn the_page_of_real_models_states_the_perplexity_of_every_setting() {
    if !everything() {
        return testkit::not_run::report(Capability::TestAll, "perplexity of trained models in every setting");
    }
    let files: Option<Vec<PathBuf>> = DECODERS.iter().map(|name| file_for_tests(name)).collect();
    let Some(files) = files else { return };
    let rows: Vec<_> = DECODERS.iter().zip(&files).flat_map(|(name, file)| rows(name, file)).collect();
    let path = testkit::workspace::root().join(PAGE);
    let page = std::fs::read_to_string(&path).unwrap();
    if std::env::var_os("QUIRE_WRITE_DOCS").is_some() {
        let start = page.find(&format!("| {} | `--dtype", DECODERS[0])).unwrap();
        let end = start + page[start..].find("\n\n").unwrap();
        let table: Vec<&str> = rows.iter().map(|(row, _)| row.as_str()).collect();
        return std::fs::write(&path, format!("{}{}{}", &page[..start], table.join("\n"), &page[end..])).unwrap();
    }
    for (row, found) in rows {
        let key = row.split('|').take(3).collect::<Vec<_>>().join("|");
        let stated = page.lines().find(|line| line.starts_with(&key));
        let stated = stated.unwrap_or_else(|| panic!("{PAGE} has no row {row}"));
        for (found, column) in found.into_iter().zip([3, 5]) {
            let stated: f64 = stated.split('|').nth(column).unwrap().trim().parse().unwrap();
            assert!((found / stated - 1.0).abs() < STATED, "{PAGE} states {stated}, found {found}: {row}");
        }
    }
}

/// Greatest difference of an element of an embedding, of 7 digits.
const EMBEDDING_TOLERANCE: f64 = 2e-4;

#[test]
fn the_embeddings_of_a_trained_encoder_are_those_of_transformers() {
    let Some(file) = file_for_tests("minilm") else { return };
    let expected = expected("minilm");
    let mut llm = Llm::new(EngineConfig { max_model_len: None, ..config(file.parent().unwrap()) }).unwrap();
    let embed = |llm: &mut Llm, texts: Vec<Vec<u32>>| -> Vec<Vec<f32>> {
        let request = |prompt| {
            let params = GenerationParams::pooled(Pooling::Mean);
            GenerationRequest { prompt, params, ..Default::default() }
        };
        let done = llm.run_with_events(texts.into_iter().map(request).collect()).unwrap();
        let embedding = |events: Vec<Event>| {
            events.into_iter().find_map(|event| if let Event::Embedding(vector) = event { Some(vector) } else { None })
        };
        done.into_iter().map(|(_, events)| embedding(events).unwrap()).collect()
    };
    let long = &expected["too_long"];
    let mut rows: Vec<(&str, Vec<u32>, Vec<f64>)> = Vec::new();
    for row in some(&expected["rows"], 1) {
        let (text, ids) = (row["text"].as_str().unwrap(), read(&row["ids"]));
        assert_eq!(llm.tokenizer().encode(text, true).unwrap(), ids, "{text}");
        rows.push((text, ids, read(&row["embedding"])));
    }
    rows.push((long["text"].as_str().unwrap(), read(&long["ids_truncated"]), read(&long["embedding_truncated"])));
    let together = embed(&mut llm, rows.iter().map(|(_, ids, _)| ids.clone()).collect());
    for ((text, ids, want), found) in rows.iter().zip(&together) {
        let worst = found.iter().zip(want).map(|(a, b)| (f64::from(*a) - b).abs()).max_by(f64::total_cmp).unwrap();
        assert!(found.len() == want.len() && worst < EMBEDDING_TOLERANCE, "{text}: off by {worst}");
        assert_eq!(embed(&mut llm, vec![ids.clone()]).remove(0), *found, "{text}: alone and in a batch");
    }
    // The longest text keeps its end.
    let (ids, frame) = (&rows[rows.len() - 1].1, llm.tokenizer().frame().unwrap());
    let whole = llm.tokenizer().encode(rows[rows.len() - 1].0, false).unwrap();
    assert_eq!((ids.len(), whole.len() + frame.len()), (256, 602));
    assert_eq!(frame.single(&whole[..256 - frame.len()]), *ids);
}
