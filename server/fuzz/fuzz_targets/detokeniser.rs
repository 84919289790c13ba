//! Any token ids behind any prompt: the pieces add up to the text of the whole, stop strings never show.
#![no_main]

use std::sync::{Arc, OnceLock};

use engine::text::TextStream;
use engine::{AsyncEngine, EngineConfig, GenerationParams, Tokenizer};

fn tokenizer() -> &'static (Arc<Tokenizer>, usize) {
    static TOKENIZER: OnceLock<(Arc<Tokenizer>, usize)> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let config = EngineConfig { kv_cache_memory_bytes: Some(1 << 20), threads: Some(1), ..EngineConfig::default() };
        let engine = AsyncEngine::start(config, &|_, _| {}).unwrap_or_else(|error| panic!("{error}"));
        (engine.tokenizer().clone(), engine.info().vocab_size)
    })
}

libfuzzer_sys::fuzz_target!(|input: (Vec<u16>, Vec<u16>, Vec<String>, bool)| {
    let (prompt, output, stop, skip_special_tokens) = input;
    let (tokenizer, vocab) = tokenizer();
    let ids = |of: &[u16]| of.iter().map(|id| u32::from(*id) % *vocab as u32).collect::<Vec<u32>>();
    let stop: Vec<String> = stop.into_iter().filter(|text| !text.is_empty()).collect();
    let params = GenerationParams { stop: stop.clone(), skip_special_tokens, ..GenerationParams::default() };
    let read = |params: &GenerationParams| {
        let mut stream = TextStream::new(tokenizer.clone(), &ids(&prompt), params);
        let mut text = String::new();
        for id in ids(&output) {
            let delta = stream.push(id);
            text += &delta.text;
            if delta.stop.is_some() {
                return text;
            }
        }
        text + &stream.finish()
    };
    let whole = read(&GenerationParams { stop: Vec::new(), ..params.clone() });
    let text = read(&params);
    assert!(whole.starts_with(&text));
    assert!(stop.iter().all(|stop| !text.contains(stop)));
});
