//! Output tokens per second without and with speculation, on the CPU: text that repeats at one stream and at 32, and random text.
//!
//! The model has random weights, so it repeats nothing by itself. A constraint allows one token at each position, and the model "writes"
//! an edited copy of the code in its prompt, or JSON records. Lookups, verification, masks and draws are those of a server. Random
//! text is sampled freely. Runs without and with speculation alternate; each number is the median of its runs.
//!
//! `cargo bench -p engine --bench speculate [-- NAME]`
#![allow(clippy::unwrap_used, missing_docs)]

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Instant;

#[path = "../tests/common/mod.rs"]
mod common;

use engine::{
    Constraint, ConstraintError, Engine, EngineConfig, GenerationParams, GenerationRequest, Mask, ModelSource,
    Quantization, SamplingParams, TokenEvent, TokenSet,
};
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
            let mut runs: [Vec<f64>; 2] = Default::default();
            for _ in 0..ROUNDS {
                runs[0].push(speed(&config, streams, text.as_ref(), None));
                runs[1].push(speed(&config, streams, text.as_ref(), Some(setting)));
            }
            let [without, with] = runs.map(|mut runs| {
                runs.sort_by(f64::total_cmp);
                runs[ROUNDS / 2]
            });
            let ratio = with / without;
            println!(
                "{name}, {streams} streams, {method}: {without:.1} tokens/s without, {with:.1} with: {ratio:.2} x"
            );
        }
    }
}
