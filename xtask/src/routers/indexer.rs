//! NVIDIA's `dynamo.indexer` reads the KV events of a replica under random load, and must know its cache exactly.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::MODEL;
use super::packages::Packages;
use super::random::Random;
use crate::http::{Client, Service, free_port};
use crate::server::Server;

/// Number of prompts.
const PROMPTS: usize = 600;

/// Texts that prompts share the beginning of, and their length in tokens.
const TEXTS: usize = 12;
const LENGTH: usize = 300;

/// Tokens per block.
const BLOCK_SIZE: usize = 16;

/// A cache of about five of the texts, so that blocks are evicted all the time.
const CACHE: &str = "--kv-cache-memory-bytes=4M";

/// Time limit for events to arrive.
const PATIENCE: Duration = Duration::from_secs(10);

/// What was compared.
#[derive(Default)]
pub struct Compared {
    /// Prompts for which the indexer knew the number of cached tokens.
    pub equal: usize,
    /// How many of these prompts had a cached prefix.
    pub cached: usize,
    /// Resets of the prefix cache.
    pub resets: usize,
}

/// Compares for every prompt what the indexer says before and what the engine found.
///
/// # Errors
/// A program does not start, a request fails, or the two differ.
pub fn compare(quire: &Path, packages: &Packages, format: &str) -> Result<Compared, String> {
    let [events, replay, port] = [free_port()?, free_port()?, free_port()?];
    let [endpoint, replay_endpoint] = [events, replay].map(|port| format!("tcp://127.0.0.1:{port}"));
    let config = json!({
        "enable_kv_cache_events": true,
        "endpoint": format!("tcp://*:{events}"),
        "replay_endpoint": format!("tcp://*:{replay}"),
        "format": format,
    });
    let config = format!("--kv-events-config={config}");
    let server = Server::start(quire, ["--threads=1", CACHE, &config])?;
    let replica = Client::new(&server.url);
    let indexer = Client::new(format!("http://127.0.0.1:{port}"));
    let query = |tokens: &[usize]| -> Result<usize, String> {
        let answer = indexer.post("/query", &json!({"token_ids": tokens, "model_name": MODEL}))?;
        Ok(answer["instances"]["1"]["longest_matched"].as_u64().unwrap_or(0) as usize)
    };
    let mut command = Command::new(packages.program("python"));
    command.args(["-m", "dynamo.indexer", "--port", &port.to_string()]);
    let registration = json!({
        "instance_id": 1, "endpoint": endpoint, "replay_endpoint": replay_endpoint, "model_name": MODEL, "block_size": BLOCK_SIZE,
    });
    let log = packages.log("dynamo.indexer");
    let _indexer = Service::start(command, &log, || indexer.post("/register", &registration).is_ok())?;
    let (mut random, mut found) = (Random(1), Compared::default());
    for number in 0..PROMPTS {
        let mut tokens = text(random.below(TEXTS));
        tokens.truncate(BLOCK_SIZE + random.below(LENGTH - BLOCK_SIZE));
        tokens.extend((0..random.below(2 * BLOCK_SIZE)).map(|_| 5 + random.below(300)));
        // The engine computes at least one token of a prompt.
        let expected = query(&tokens[..tokens.len() - 1])?;
        let body = json!({"prompt": tokens, "max_tokens": 1, "ignore_eos": true});
        let answer = replica.post("/v1/completions", &body)?;
        let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
        if cached.as_u64() != Some(expected as u64) {
            return Err(format!(
                "prompt {number}: dynamo.indexer expected {expected} cached tokens, the engine had {cached}"
            ));
        }
        found.equal += 1;
        found.cached += usize::from(expected > 0);
        wait(&format!("the blocks of prompt {number}"), tokens.len() / BLOCK_SIZE * BLOCK_SIZE, || query(&tokens))?;
        if random.below(100) == 0 {
            replica.post("/reset_prefix_cache", &Value::Null)?;
            found.resets += 1;
            wait("a reset", 0, || query(&tokens))?;
        }
    }
    if found.cached < PROMPTS / 10 || found.cached > PROMPTS * 9 / 10 || found.resets == 0 {
        let Compared { cached, resets, .. } = found;
        return Err(format!(
            "{cached} of {PROMPTS} prompts had a cached prefix, {resets} resets: the load shows too little"
        ));
    }
    Ok(found)
}

/// Returns the tokens of a text.
fn text(which: usize) -> Vec<usize> {
    let mut random = Random(100 + which as u64);
    (0..LENGTH).map(|_| 5 + random.below(300)).collect()
}

/// Waits until the indexer has read the events of what has just happened.
fn wait(what: &str, expected: usize, query: impl Fn() -> Result<usize, String>) -> Result<(), String> {
    let begun = Instant::now();
    loop {
        let found = query()?;
        if found == expected {
            return Ok(());
        }
        if begun.elapsed() > PATIENCE {
            let seconds = PATIENCE.as_secs();
            return Err(format!(
                "dynamo.indexer says {found} cached tokens {seconds} s after {what}, expected {expected}"
            ));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}
