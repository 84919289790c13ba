//! KV events of an engine: a router that reads them knows the engine's cache exactly, after every step. Numbers such as B29 are
//! those of `docs/routers.md`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use engine::{Engine, EngineConfig, GenerationRequest, KvEventsConfig, PreemptionMode, TokenEvent};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use testkit::kv_events::{Known, Router, Subscriber};

use crate::common::{TOKEN_BYTES, config, overlapping, prompt, request};
use crate::lora::{LORA, adapters, with_lora};

/// An engine that publishes, and a router that reads.
struct Observed {
    engine: Engine,
    subscriber: Subscriber,
    router: Router,
    next_seq: u64,
}

fn publishing(config: EngineConfig) -> EngineConfig {
    let events = r#"{"enable_kv_cache_events": true, "endpoint": "tcp://*:0", "topic": "kv@pod@model"}"#;
    EngineConfig { kv_events: Some(events.parse().unwrap()), ..config }
}

impl Observed {
    fn new(config: EngineConfig) -> Observed {
        let engine = Engine::load(&publishing(config), &|_, _| {}).unwrap();
        let at = engine.kv_event_addresses().unwrap().0.unwrap();
        let subscriber = Subscriber::connect(at, "kv@").unwrap();
        let observed = Observed { engine, subscriber, router: Router::default(), next_seq: 0 };
        observed.wait(|stats| stats.subscribers == 1);
        observed
    }

    fn wait(&self, until: impl Fn(kvevents::Stats) -> bool) {
        let start = Instant::now();
        while !until(self.engine.kv_event_stats().unwrap()) {
            assert!(start.elapsed() < Duration::from_secs(20));
            std::thread::yield_now();
        }
    }

    /// Reads what was published, and compares the router with the engine (B38).
    fn check(&mut self) {
        self.wait(|stats| stats.processed == stats.handed);
        while self.next_seq < self.engine.kv_event_stats().unwrap().messages {
            let (topic, seq, payload) = self.subscriber.message().unwrap();
            assert_eq!((topic.as_str(), seq), ("kv@pod@model", self.next_seq));
            self.next_seq += 1;
            self.router.apply(&payload).unwrap();
        }
        let mut media: BTreeMap<u64, BTreeSet<String>> = BTreeMap::new();
        let cached = self.engine.cached_prefixes().into_iter().map(|change| match change {
            kvevents::Change::Stored { medium, parent, hashes, token_ids, lora_name, cache_salt } => {
                assert_eq!(hashes.len(), 1);
                media.entry(hashes[0].get()).or_default().insert(medium.name().to_string());
                let known = Known {
                    parent: parent.map(|hash| hash.get()),
                    tokens: token_ids.into_iter().map(u64::from).collect(),
                    lora_name: lora_name.as_deref().map(str::to_string),
                    salt: cache_salt.filter(|_| parent.is_none()).as_deref().map(str::to_string),
                };
                (hashes[0].get(), known)
            }
            other => panic!("found {other:?}"),
        });
        let cached: BTreeMap<u64, Known> = cached.collect();
        assert_eq!(self.router.known, cached, "the router differs from the engine's cache");
        assert_eq!(self.router.media, media, "B32, B37");
    }

    /// Runs until nothing is left to do. Returns the cached tokens of each request that started, in order.
    fn run(&mut self) -> Vec<usize> {
        let mut cached = Vec::new();
        while self.engine.has_work() {
            self.engine.step(|_, event| {
                if let TokenEvent::Started { cached_tokens } = event {
                    cached.push(cached_tokens);
                }
            });
            self.check();
        }
        cached
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// A prompt of `shared` tokens of one of a few texts, and `own` others.
    Submit {
        text: u32,
        shared: usize,
        own: usize,
        max_tokens: usize,
        n: usize,
        salt: Option<u8>,
    },
    Abort(usize),
    Steps(usize),
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    let submit = (0..3u32, 1..40usize, 0..12usize, 1..20usize, 1..3usize, prop::option::weighted(0.2, 0..2u8));
    let submit = submit.prop_map(|(text, shared, own, max_tokens, n, salt)| Op::Submit {
        text,
        shared,
        own,
        max_tokens,
        n,
        salt,
    });
    prop_oneof![4 => submit, 1 => (0..8usize).prop_map(Op::Abort), 4 => (1..6usize).prop_map(Op::Steps), 1 => Just(Op::Reset)]
}

fn run_history(observed: &mut Observed, history: &[Op]) {
    let mut ids = Vec::new();
    for (at, op) in history.iter().enumerate() {
        match op {
            Op::Submit { text, shared, own, max_tokens, n, salt } => {
                let mut tokens = prompt(*text, *shared);
                tokens.extend(prompt(1000 + at as u32, *own));
                let base = request(at as u32, 1, *max_tokens, *n);
                let cache_salt = salt.map(|salt| format!("tenant {salt}"));
                let request = GenerationRequest { prompt: tokens, cache_salt, ..base };
                ids.push(observed.engine.submit(request).unwrap());
            }
            Op::Abort(which) => {
                if let Some(id) = ids.get(*which) {
                    observed.engine.abort(*id);
                }
            }
            Op::Steps(count) => {
                for _ in 0..*count {
                    observed.engine.step(|_, _| {});
                    observed.check();
                }
            }
            Op::Reset => {
                observed.engine.reset_prefix_cache(false);
                observed.check();
            }
        }
    }
    observed.run();
}

/// A pool that is too small for the load, so that blocks are evicted and requests preempted.
fn tight(preemption_mode: PreemptionMode) -> EngineConfig {
    EngineConfig { swap_space_bytes: 30 * 8 * TOKEN_BYTES, preemption_mode, max_model_len: Some(80), ..config(24) }
}

#[test]
fn b38_a_router_knows_the_cached_prefixes_after_every_step_of_any_history() {
    let (mut swaps, mut on_host) = (0, 0);
    let tiered = |mode| EngineConfig { kv_offloading_bytes: 20 * 8 * TOKEN_BYTES, ..tight(mode) };
    let modes = [PreemptionMode::Recompute, PreemptionMode::Swap];
    for config in [tight(modes[0]), tight(modes[1]), tiered(modes[0]), tiered(modes[1])] {
        let mut observed = Observed::new(config);
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        for _ in 0..if testkit::everything() { 200 } else { 20 } {
            let history = prop::collection::vec(op(), 4..40).new_tree(&mut runner).unwrap().current();
            run_history(&mut observed, &history);
        }
        let stats = observed.engine.stats();
        assert!(stats.scheduler.preemptions > 0 && stats.scheduler.prefix_hits > 0, "{stats:?}");
        assert!(observed.router.cleared > 0 && observed.router.stored > 100);
        swaps += stats.scheduler.swap_preemptions;
        on_host += stats.scheduler.blocks_loaded;
    }
    assert!(on_host > 20, "{on_host} blocks came back from the host");
    assert!(swaps > 0, "nothing was swapped: the test shows less than it says (B37)");
}

#[test]
fn b38_the_same_holds_where_a_step_is_planned_while_another_runs() {
    let Some(config) = overlapping(10) else { return };
    let mut observed = Observed::new(config);
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    for _ in 0..2 {
        let history = prop::collection::vec(op(), 8..16).new_tree(&mut runner).unwrap().current();
        run_history(&mut observed, &history);
    }
    assert!(observed.engine.stats().scheduler.preemptions > 0);
}

#[test]
fn b38_the_cached_tokens_that_a_router_expects_are_those_of_the_next_request() {
    let mut observed = Observed::new(config(40));
    for (which, shared) in [(1, 40), (1, 24), (2, 33), (1, 40), (2, 64)] {
        let tokens = prompt(which, shared);
        // The engine computes at least one token of a prompt.
        let expected = observed.router.cached_tokens(&tokens[..shared - 1], 8, None, None);
        observed.engine.submit(GenerationRequest { prompt: tokens, ..request(which, 1, 4, 1) }).unwrap();
        assert_eq!(observed.run(), [expected]);
    }
    assert!(observed.engine.stats().scheduler.prefix_hits > 0);
}

#[test]
fn b34_events_name_the_adapter_and_the_salt_of_a_request() {
    let folder = adapters();
    let mut observed = Observed::new(with_lora(64, LORA));
    observed.engine.load_adapter("french", &folder.path().join("a"), false).unwrap();
    let variants = [(None, None), (Some("french"), None), (None, Some("tenant")), (Some("french"), Some("tenant"))];
    for (adapter, salt) in variants {
        let (adapter, cache_salt) = (adapter.map(str::to_string), salt.map(str::to_string));
        let request = GenerationRequest { prompt: prompt(1, 20), adapter, cache_salt, ..request(1, 1, 2, 1) };
        observed.engine.submit(request).unwrap();
        assert_eq!(observed.run(), [0], "nothing is shared between them");
    }
    for (adapter, salt) in variants {
        assert_eq!(observed.router.cached_tokens(&prompt(1, 20), 8, adapter, salt), 16, "{adapter:?} {salt:?}");
    }
    assert_eq!(observed.router.cached_tokens(&prompt(1, 20), 8, Some("german"), None), 0);
}

#[test]
fn b33_a_reset_of_the_prefix_cache_is_announced() {
    let mut observed = Observed::new(config(40));
    observed.engine.submit(request(1, 20, 30, 1)).unwrap();
    observed.engine.step(|_, _| {});
    observed.check();
    assert!(!observed.engine.reset_prefix_cache(false), "a request owns blocks");
    observed.run();
    assert!(!observed.router.known.is_empty());
    assert!(observed.engine.reset_prefix_cache(false));
    observed.check();
    assert_eq!((observed.router.known.len(), observed.router.cleared), (0, 1));
}

#[test]
fn an_engine_without_kv_events_opens_no_socket_and_records_nothing() {
    let disabled = KvEventsConfig { enabled: false, ..publishing(config(8)).kv_events.unwrap() };
    for kv_events in [None, Some(disabled)] {
        let mut engine = Engine::load(&EngineConfig { kv_events, ..config(40) }, &|_, _| {}).unwrap();
        engine.submit(request(1, 20, 4, 1)).unwrap();
        while engine.has_work() {
            engine.step(|_, _| {});
        }
        assert_eq!((engine.kv_event_stats(), engine.kv_event_addresses()), (None, None));
        assert!(!engine.cached_prefixes().is_empty(), "the cache works as before");
    }
}

#[test]
fn b36_a_subscriber_that_never_reads_and_a_full_queue_change_no_token() {
    let requests: Vec<GenerationRequest> = (0..8).map(|which| request(which, 30, 24, 1)).collect();
    let want = crate::common::alone(&requests);
    let small = |events| KvEventsConfig { max_queue_size: 1, hwm: 1, ..events };
    let config = publishing(tight(PreemptionMode::Auto));
    let config = EngineConfig { kv_events: config.kv_events.map(small), ..config };
    let mut engine = Engine::load(&config, &|_, _| {}).unwrap();
    let _deaf = Subscriber::connect(engine.kv_event_addresses().unwrap().0.unwrap(), "").unwrap();
    let ids: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    let mut got = vec![vec![Vec::new()]; ids.len()];
    while engine.has_work() {
        engine.step(|id, event| {
            if let TokenEvent::Token { token: Some(token), .. } = event {
                got[ids.iter().position(|other| *other == id).unwrap()][0].push(token.token);
            }
        });
    }
    assert_eq!(got, want);
}

#[test]
fn a_port_in_use_is_reported_in_one_line_before_the_weights_are_read() {
    let first = Engine::load(&publishing(config(8)), &|_, _| {}).unwrap();
    let port = first.kv_event_addresses().unwrap().0.unwrap().port();
    let taken = |events| KvEventsConfig { endpoint: format!("tcp://*:{port}"), ..events };
    let config = publishing(config(8));
    let config = EngineConfig { kv_events: config.kv_events.map(taken), ..config };
    let error = Engine::load(&config, &|_, _| panic!("weights are read")).err().unwrap().to_string();
    let expected = format!("--kv-events-config: endpoint: cannot listen at tcp://*:{port} (");
    assert!(error.starts_with(&expected) && !error.contains('\n'), "{error}");
}

#[test]
fn b31_a_model_with_windows_announces_each_logical_block_once() {
    let folder = crate::windows::mixed();
    let model = engine::ModelSource::Folder(folder.path().to_path_buf());
    let mut observed = Observed::new(EngineConfig { model, kv_cache_memory_bytes: Some(1 << 22), ..config(1) });
    for which in 0..3 {
        observed.engine.submit(request(which, 60, 30, 2)).unwrap();
    }
    observed.run();
    // The router refuses a hash that is announced twice.
    assert!(observed.router.known.len() > 3 * 60 / 8, "{}", observed.router.known.len());
}
