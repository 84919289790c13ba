//! Conversations, which show whether a router keeps their turns on one replica, and steady load while a replica dies.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::MODEL;
use super::random::Random;
use crate::http::Client;

/// Number of conversations.
const CONVERSATIONS: usize = 15;

/// Number of conversations that run at the same time.
const AT_ONCE: usize = 5;

/// Turns of each.
const TURNS: usize = 6;

/// Clients of the steady load.
const CLIENTS: usize = 4;

/// Tokens per block of the replicas.
const BLOCK_SIZE: u64 = 16;

const CHAT: &str = "/v1/chat/completions";

/// What became of the conversations.
#[derive(Default)]
pub struct Affinity {
    /// Number of requests.
    pub requests: usize,
    /// Turns after the first.
    pub later: usize,
    /// Turns after the first whose replica had computed the turn before.
    pub affine: usize,
}

impl Affinity {
    /// Returns the share of later turns that reached the replica with their prefix.
    pub fn share(&self) -> f64 {
        self.affine as f64 / self.later.max(1) as f64
    }
}

/// Runs the conversations. A turn has reached the replica of the turn before if all full blocks of that prompt were cached.
///
/// # Errors
/// A request fails.
pub fn conversations(client: &Client) -> Result<Affinity, String> {
    let run = |index: usize| -> Result<Affinity, String> {
        let mut random = Random(index as u64);
        let (mut messages, mut before, mut counted) = (Vec::new(), 0, Affinity::default());
        for turn in 0..TURNS {
            messages.push(json!({"role": "user", "content": random.words(if turn == 0 { 40 } else { 4 })}));
            let body = json!({"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0});
            let answer = client.post(CHAT, &body)?;
            let usage = &answer["usage"];
            let count = |value: &Value| value.as_u64().ok_or_else(|| format!("found no counts in {answer}"));
            let cached = count(&usage["prompt_tokens_details"]["cached_tokens"])?;
            counted.requests += 1;
            if turn > 0 {
                counted.later += 1;
                // The last token of a prompt may become another one when text follows it.
                counted.affine += usize::from(cached >= (before - 1) / BLOCK_SIZE * BLOCK_SIZE);
            }
            before = count(&usage["prompt_tokens"])?;
            messages.push(answer["choices"][0]["message"].clone());
        }
        Ok(counted)
    };
    let all: Vec<Result<Affinity, String>> = thread::scope(|scope| {
        let one_after_the_other = |first| move || (first..CONVERSATIONS).step_by(AT_ONCE).map(run).collect::<Vec<_>>();
        let threads: Vec<_> = (0..AT_ONCE).map(|first| scope.spawn(one_after_the_other(first))).collect();
        let panicked = |_| vec![Err("a client panicked".into())];
        threads.into_iter().flat_map(|thread| thread.join().unwrap_or_else(panicked)).collect()
    });
    let mut sum = Affinity::default();
    for one in all {
        let one = one?;
        sum.requests += one.requests;
        sum.later += one.later;
        sum.affine += one.affine;
    }
    Ok(sum)
}

/// What clients see when a replica dies.
pub struct Failover {
    /// Number of requests that ended after it died.
    pub requests: usize,
    /// Those of them that failed.
    pub failed: usize,
    /// Time from its death to the last failure; zero without any.
    pub until_all_succeed: Duration,
    /// Longest time of a successful request that ended after it died.
    pub longest: Duration,
}

/// Sends steady load, lets `kill` end a replica, and goes on, each for its time.
///
/// # Errors
/// A request fails before, or requests still fail in the last third of the time after.
pub fn failover(client: &Client, [before, after]: [Duration; 2], kill: impl FnOnce()) -> Result<Failover, String> {
    let stop = AtomicBool::new(false);
    // Start, end, and the error of each request.
    type Sent = (Instant, Instant, Option<String>);
    let send = |index: usize| -> Vec<Sent> {
        let (mut random, mut sent) = (Random(1000 + index as u64), Vec::new());
        while !stop.load(Ordering::Relaxed) {
            let begun = Instant::now();
            let content = random.words(12);
            let body = json!({"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 8});
            let error = client.post(CHAT, &body).err();
            sent.push((begun, Instant::now(), error));
            thread::sleep(Duration::from_millis(20));
        }
        sent
    };
    let (killed, sent) = thread::scope(|scope| {
        let send = &send;
        let threads: Vec<_> = (0..CLIENTS).map(|index| scope.spawn(move || send(index))).collect();
        thread::sleep(before);
        let killed = Instant::now();
        kill();
        thread::sleep(after);
        stop.store(true, Ordering::Relaxed);
        (killed, threads.into_iter().flat_map(|thread| thread.join().unwrap_or_default()).collect::<Vec<Sent>>())
    });
    let limit = after * 2 / 3;
    let (after, before): (Vec<&Sent>, Vec<&Sent>) = sent.iter().partition(|(_, ended, _)| *ended >= killed);
    if let Some((_, _, Some(error))) = before.iter().find(|(_, _, error)| error.is_some()) {
        return Err(format!("a request failed while both replicas ran: {error}"));
    }
    let failures = || after.iter().filter(|(_, _, error)| error.is_some());
    let times = after.iter().filter(|(_, _, error)| error.is_none()).map(|(begun, ended, _)| *ended - *begun);
    let found = Failover {
        requests: after.len(),
        failed: failures().count(),
        until_all_succeed: failures().map(|(_, ended, _)| *ended - killed).max().unwrap_or_default(),
        longest: times.max().unwrap_or_default(),
    };
    if before.is_empty() || found.requests == found.failed || found.until_all_succeed > limit {
        let last = failures().next_back().and_then(|(_, _, error)| error.clone()).unwrap_or_default();
        let (failed, requests) = (found.failed, found.requests);
        return Err(format!("{failed} of {requests} requests failed after a replica died, the last one with: {last}"));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;
    use std::sync::Arc;

    /// A server that answers each body with what `answer` makes of it: a status and JSON.
    fn server(answer: impl Fn(Value) -> (u16, Value) + Send + Sync + 'static) -> Client {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = Client::new(format!("http://{}", listener.local_addr().unwrap()));
        let answer = Arc::new(answer);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let answer = answer.clone();
                thread::spawn(move || {
                    let mut stream = stream.unwrap();
                    let mut reader = BufReader::new(stream.try_clone().unwrap());
                    let (mut line, mut length) = (String::new(), 0);
                    while line != "\r\n" {
                        line.clear();
                        reader.read_line(&mut line).unwrap();
                        let header = line.to_ascii_lowercase();
                        if let Some(value) = header.strip_prefix("content-length:") {
                            length = value.trim().parse().unwrap();
                        }
                    }
                    let mut body = vec![0; length];
                    reader.read_exact(&mut body).unwrap();
                    let (status, json) = answer(serde_json::from_slice(&body).unwrap());
                    let json = json.to_string();
                    let length = json.len();
                    // The client may have gone.
                    let head = format!("HTTP/1.1 {status} X\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n");
                    let _ = write!(stream, "{head}{json}");
                });
            }
        });
        client
    }

    /// An answer to a prompt of 40 tokens per message.
    fn answer(body: &Value, cached_blocks: u64) -> Value {
        let prompt_tokens = 40 * body["messages"].as_array().unwrap().len() as u64;
        let details = json!({"cached_tokens": 16 * cached_blocks});
        json!({
            "choices": [{"message": {"role": "assistant", "content": "x"}}],
            "usage": {"prompt_tokens": prompt_tokens, "prompt_tokens_details": details},
        })
    }

    #[test]
    fn a_turn_counts_as_affine_if_all_full_blocks_of_the_turn_before_were_cached() {
        // Turn 2 has 3 messages; the turn before had one, with 40 tokens, and 2 full blocks without its last token.
        let cached = |less: u64| {
            move |body: Value| {
                let before = 40 * (body["messages"].as_array().unwrap().len() as u64).saturating_sub(2);
                (200, answer(&body, (before.saturating_sub(1) / 16).saturating_sub(less)))
            }
        };
        let found = conversations(&server(cached(0))).unwrap();
        assert_eq!((found.requests, found.later, found.affine), (90, 75, 75));
        assert_eq!(conversations(&server(cached(1))).unwrap().share(), 0.0);
        assert!(conversations(&server(|body| (503, answer(&body, 0)))).is_err());
    }

    #[test]
    fn failures_after_the_death_of_a_replica_are_counted_until_the_last() {
        let died = Arc::new(std::sync::Mutex::new(None::<Instant>));
        let until = |limit: Duration| {
            let died = died.clone();
            *died.lock().unwrap() = None;
            server(move |body| {
                let is_down = died.lock().unwrap().is_some_and(|at| at.elapsed() < limit);
                (if is_down { 503 } else { 200 }, answer(&body, 0))
            })
        };
        let kill = || *died.lock().unwrap() = Some(Instant::now());
        let times = [Duration::from_millis(100), Duration::from_millis(900)];
        let found = failover(&until(Duration::from_millis(150)), times, kill).unwrap();
        assert!(found.failed > 0 && found.requests > found.failed, "{} of {}", found.failed, found.requests);
        assert!(found.until_all_succeed > Duration::from_millis(50), "{:?}", found.until_all_succeed);
        let found = failover(&until(Duration::ZERO), times, kill).unwrap();
        assert_eq!((found.failed, found.until_all_succeed), (0, Duration::ZERO));
        assert!(failover(&until(Duration::from_secs(60)), times, kill).is_err(), "it never recovers");
        let broken = server(|body| (500, answer(&body, 0)));
        assert!(failover(&broken, times, || ()).is_err_and(|error| error.contains("while both replicas ran")));
    }
}
