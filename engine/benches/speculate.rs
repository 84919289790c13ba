//! Output tokens per second without and with speculation, on the CPU: text that repeats at one stream and at 32, and random text; and
//! random text with a draft model that is always right, and with one that is seldom right.
//!
//! The model has random weights, so it repeats nothing by itself. A constraint allows one token at each position, and the model "writes"
//! an edited copy of the code in its prompt, or JSON records. Lookups, verification, masks and draws are those of a server. Random
//! text is sampled freely. The draft model that is right is the model's first two layers of twelve, of which the others add nothing to
//! the stream. Runs without and with speculation alternate; each number is the median of its runs.
//!
//! `cargo bench -p engine --bench speculate [-- NAME]`
#![allow(clippy::unwrap_used, missing_docs)]

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::time::Instant;

#[path = "../tests/common/mod.rs"]
mod common;

use engine::{
    Constraint, ConstraintError, Engine, EngineConfig, GenerationParams, GenerationRequest, Mask, ModelSource,
    Quantization, SamplingParams, TokenEvent, TokenSet,
};
use serde_json::{Map, Value};
use tempfile::TempDir;
use testkit::model::Shape;

const VOCABULARY: usize = 8192;
const ROUNDS: usize = 3;

/// Allows exactly these tokens, one after the other.
#[derive(Clone)]
struct Script(std::sync::Arc<[u32]>, usize);

impl Constraint for Script {
    fn mask(&mut self) -> Result<Mask, ConstraintError> {
        let mut tokens = TokenSet::new(VOCABULARY);
        self.0.get(self.1).into_iter().for_each(|token| tokens.insert(*token));
        Ok(Mask { tokens, may_end: false })
    }

    fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
        self.1 += 1;
        Ok(())
    }

    fn is_complete(&self) -> bool {
        self.1 == self.0.len()
    }

    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }
}

/// A token for each word and each other character, about as a tokenizer splits code.
fn tokens(text: &str) -> Vec<u32> {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let characters: Vec<char> = text.chars().collect();
    let words = characters.chunk_by(|a, b| is_word(*a) && is_word(*b) || a == &' ' && b == &' ');
    let id = |word: &[char]| {
        let mut hasher = DefaultHasher::new();
        word.hash(&mut hasher);
        3 + (hasher.finish() % (VOCABULARY as u64 - 3)) as u32
    };
    words.map(id).collect()
}

/// Prompt and answer: this file with a renamed function and a new argument.
fn code_edit() -> (Vec<u32>, Vec<u32>) {
    let code: String = include_str!("speculate.rs").lines().skip(24).take(25).map(|line| format!("{line}\n")).collect();
    let edited = code.replace("tokens", "words").replace("fn mask(&mut self)", "fn mask(&mut self, most: usize)");
    (tokens(&format!("Rename tokens to words.\n{code}")), tokens(&edited))
}

fn json() -> (Vec<u32>, Vec<u32>) {
    let record = |i: usize| {
        format!(
            "  {{\"id\": {i}, \"name\": \"user{}\", \"active\": {}, \"roles\": [\"reader\"]}},\n",
            i * 7,
            i.is_multiple_of(3)
        )
    };
    (tokens("List the users as JSON."), tokens(&(0..16).map(record).collect::<String>()))
}

/// Tokens per second of `streams` requests that are submitted together.
fn speed(config: &EngineConfig, streams: usize, text: Option<&(Vec<u32>, Vec<u32>)>, speculative: Option<&str>) -> f64 {
    let speculative = speculative.map(|text| text.parse().unwrap());
    let mut engine = Engine::load(&EngineConfig { speculative, ..config.clone() }, &|_, _| {}).unwrap();
    for stream in 0..streams {
        let sampling = SamplingParams { seed: Some(stream as u64), ..Default::default() };
        let (prompt, answer) = match text {
            Some((prompt, answer)) => (prompt.clone(), answer.clone()),
            None => ((0..40).map(|i| (i * i * 31 + stream * 977) as u32 % 8000 + 3).collect(), vec![0; 96]),
        };
        let params =
            GenerationParams { sampling, max_tokens: Some(answer.len()), ignore_eos: true, ..Default::default() };
        let request = GenerationRequest { prompt, params, ..Default::default() };
        match text {
            Some(_) => engine.submit_constrained(request, Box::new(Script(answer.into(), 0))).unwrap(),
            None => engine.submit(request).unwrap(),
        };
    }
    // From the last first token on, so that prompts do not count.
    let (mut begun, mut count, mut start) = (0, 0, Instant::now());
    while engine.has_work() {
        let before = begun;
        engine.step(|_, event| match event {
            TokenEvent::Started { .. } => begun += 1,
            TokenEvent::Token { token: Some(_), .. } => count += 1,
            _ => {}
        });
        if begun > before {
            (count, start) = (0, Instant::now());
        }
    }
    f64::from(count) / start.elapsed().as_secs_f64()
}

/// A copy of a checkpoint whose layers from 2 on leave the stream as it is, and one with its first two layers alone.
fn with_silent_layers(folder: &Path) -> [TempDir; 2] {
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let mut config: Value = serde_json::from_slice(&read("config.json")).unwrap();
    let mut weights = read("model.safetensors");
    let header = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    let tensors: Map<String, Value> = serde_json::from_slice(&weights[8..8 + header]).unwrap();
    for (name, tensor) in &tensors {
        let layer = name.split('.').find_map(|word| word.parse::<usize>().ok());
        if layer.is_some_and(|layer| layer >= 2) && (name.contains("o_proj") || name.contains("down_proj")) {
            let at = |end: usize| 8 + header + tensor["data_offsets"][end].as_u64().unwrap() as usize;
            weights[at(0)..at(1)].fill(0);
        }
    }
    let write = |config: &Value| {
        let folder = TempDir::new().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), read("tokenizer.json")).unwrap();
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        std::fs::write(folder.path().join("model.safetensors"), &weights).unwrap();
        folder
    };
    let whole = write(&config);
    config["num_hidden_layers"] = 2.into();
    [whole, write(&config)]
}

/// Prints the medians of runs without and with speculation, which take turns.
fn compare(
    name: &str,
    config: &EngineConfig,
    streams: usize,
    text: Option<&(Vec<u32>, Vec<u32>)>,
    (method, setting): (&str, &str),
) {
    let mut runs: [Vec<f64>; 2] = Default::default();
    for _ in 0..ROUNDS {
        runs[0].push(speed(config, streams, text, None));
        runs[1].push(speed(config, streams, text, Some(setting)));
    }
    let [without, with] = runs.map(|mut runs| {
        runs.sort_by(f64::total_cmp);
        runs[ROUNDS / 2]
    });
    let ratio = with / without;
    println!("{name}, {streams} streams, {method}: {without:.1} tokens/s without, {with:.1} with: {ratio:.2} x");
}

fn main() {
    let wanted = std::env::args().skip(1).find(|name| !name.starts_with('-')).unwrap_or_default();
    let mut shape = Shape::named("m135").unwrap();
    (shape.layers, shape.vocab) = (12, VOCABULARY);
    let folder = common::checkpoint(&shape, &serde_json::json!({}));
    let config = EngineConfig {
        model: ModelSource::Folder(folder.path().to_path_buf()),
        quantization: Some(Quantization::Q8),
        kv_cache_memory_bytes: Some(512 << 20),
        max_model_len: Some(2048),
        max_num_seqs: 32,
        enable_prefix_caching: false,
        seed: Some(1),
        ..Default::default()
    };
    let ngram = r#"{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5}"#;
    let suffix = r#"{"method": "suffix", "num_speculative_tokens": 8, "suffix_decoding_max_spec_factor": 2}"#;
    let [silent, first_layers] = with_silent_layers(folder.path());
    let mut shallow = shape;
    shallow.layers = 2;
    let other = common::checkpoint(&shallow, &serde_json::json!({}));
    let at = |folder: &TempDir| folder.path().display().to_string();
    let draft = |folder: &TempDir| {
        format!(r#"{{"method": "draft_model", "model": "{}", "num_speculative_tokens": 8}}"#, at(folder))
    };
    let (right, seldom) = (draft(&first_layers), draft(&other));
    let silent = EngineConfig { model: ModelSource::Folder(silent.path().to_path_buf()), ..config.clone() };
    for streams in [1, 8, 32] {
        for (name, setting, config) in [("right", &right, &silent), ("seldom right", &seldom, &config)] {
            let name = format!("draft model that is {name}");
            if name.contains(&wanted) {
                compare(&name, config, streams, None, ("draft_model", setting));
            }
        }
    }
    for (name, text, streams) in [
        ("code edit", Some(code_edit()), 1),
        ("JSON", Some(json()), 1),
        ("random text", None, 1),
        ("random text", None, 32),
        ("JSON", Some(json()), 32),
    ] {
        if !name.contains(&wanted) {
            continue;
        }
        for (method, setting) in [("ngram", ngram), ("suffix", suffix)] {
            compare(name, &config, streams, text.as_ref(), (method, setting));
        }
    }
}
