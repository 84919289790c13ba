//! Conversations that exceed the pool, without a host tier, with one, and in a pool that holds all of them: the share of prompt
//! tokens that were cached, and the time to the first token of a turn.
//!
//! Turns of all conversations alternate, one request at a time, so that each conversation is evicted before its next turn. The model
//! is the demo model.
//!
//! `cargo bench -p engine --bench host_tier`
#![allow(clippy::unwrap_used, missing_docs)]

use std::time::{Duration, Instant};

use engine::{Engine, EngineConfig, GenerationParams, GenerationRequest, TokenEvent};

const CONVERSATIONS: u32 = 16;
const TURNS: u32 = 4;
// Tokens of the first message, of later ones, and of an answer.
const FIRST: usize = 160;
const MESSAGE: usize = 24;
const ANSWER: usize = 16;

/// Tokens of a message; no two are equal.
fn message(which: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|i| 10 + (which * 131 + i * 17 + i * i * which) % 200).collect()
}

/// Runs a request, and returns its tokens, the number of cached tokens and the time to the first token.
fn run(engine: &mut Engine, prompt: Vec<u32>) -> (Vec<u32>, usize, Duration) {
    let params = GenerationParams { max_tokens: Some(ANSWER), ignore_eos: true, ..Default::default() };
    let (start, mut first) = (Instant::now(), None);
    let (mut tokens, mut cached) = (Vec::new(), 0);
    engine.submit(GenerationRequest { prompt, params, ..Default::default() }).unwrap();
    while engine.has_work() {
        engine.step(|_, event| match event {
            TokenEvent::Started { cached_tokens } => cached = cached_tokens,
            TokenEvent::Token { token: Some(token), .. } => {
                first.get_or_insert_with(|| start.elapsed());
                tokens.push(token.token);
            }
            _ => {}
        });
    }
    (tokens, cached, first.unwrap())
}

fn main() {
    // Cargo passes this to every benchmark. Without it, as in `cargo test`, there is nothing to measure.
    if !std::env::args().any(|arg| arg == "--bench") {
        return;
    }
    let base = EngineConfig { seed: Some(1), ..Default::default() };
    let bytes_per_token = engine::plan(&base).unwrap().kv_bytes_per_token;
    let longest = FIRST + TURNS as usize * (MESSAGE + ANSWER);
    let all = (CONVERSATIONS as usize * longest) as u64 * bytes_per_token;
    println!("{CONVERSATIONS} conversations of {longest} tokens, {TURNS} turns");
    println!("| pool | host tier | cached | first token, median | p90 |");
    println!("|---|---|---|---|---|");
    let mut answers = None;
    for (share, pool, host) in [("a quarter", all / 4, 0), ("a quarter", all / 4, 2 * all), ("all", 2 * all, 0)] {
        let (kv_cache_memory_bytes, kv_offloading_bytes) = (Some(pool), host);
        let config = EngineConfig { kv_cache_memory_bytes, kv_offloading_bytes, ..base.clone() };
        let mut engine = Engine::load(&config, &|_, _| {}).unwrap();
        let mut so_far: Vec<Vec<u32>> = (0..CONVERSATIONS).map(|which| message(which, FIRST)).collect();
        let (mut times, mut prompts, mut cached) = (Vec::new(), 0, 0);
        for turn in 0..TURNS {
            for (which, tokens) in (0..).zip(&mut so_far) {
                let (answer, found, first) = run(&mut engine, tokens.clone());
                // The first turn has nothing to find.
                if turn > 0 {
                    times.push(first);
                    prompts += tokens.len();
                    cached += found;
                }
                tokens.extend(answer);
                tokens.extend(message(100 * (turn + 1) + which, MESSAGE));
            }
        }
        times.sort_unstable();
        let at = |share: usize| times[(times.len() - 1) * share / 100].as_secs_f64() * 1e3;
        let hits = 100 * cached / prompts;
        println!(
            "| {share} | {} | {hits} % | {:.2} ms | {:.2} ms |",
            if host > 0 { "yes" } else { "no" },
            at(50),
            at(90)
        );
        assert!(*answers.get_or_insert_with(|| so_far.clone()) == so_far, "the tier changed a token");
    }
}
