//! Exchange with a connector that is slow, hangs or panics, and at moments that a folder cannot choose.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::api::{Event, GenerationParams, GenerationRequest, TokenEvent};
use crate::connector::{BlockName, Connector, ConnectorError, KvRole, KvTransfer, KvTransferConfig, Limits};
use crate::serve::AsyncEngine;
use crate::start::{LoadOn, Loaded, load};
use crate::{Engine, EngineConfig};

const STORE: KvTransfer = KvTransfer { load: false, store: true };
const LOAD: KvTransfer = KvTransfer { load: true, store: false };
const NEITHER: KvTransfer = KvTransfer { load: false, store: false };

/// Blocks in memory, which replicas of one process share.
#[derive(Clone, Default)]
struct Shelf(Arc<Shared>);

#[derive(Default)]
struct Shared {
    blocks: Mutex<HashMap<[u8; 32], Vec<u8>>>,
    /// A store takes some time.
    is_slow: AtomicBool,
    /// A load takes as long as this is set.
    hangs: AtomicBool,
    panics: AtomicBool,
    lookups: AtomicUsize,
}

impl Shelf {
    fn call(&self) {
        assert!(!self.0.panics.load(Ordering::SeqCst), "a planted panic");
    }

    fn len(&self) -> usize {
        self.0.blocks.lock().unwrap().len()
    }
}

impl Connector for Shelf {
    fn lookup(&self, name: &BlockName) -> bool {
        self.call();
        self.0.lookups.fetch_add(1, Ordering::SeqCst);
        self.0.blocks.lock().unwrap().contains_key(&name.digest)
    }

    fn load(&self, name: &BlockName, _: &[u32], contents: &mut [u8]) -> Result<(), ConnectorError> {
        self.call();
        wait_until(|| !self.0.hangs.load(Ordering::SeqCst));
        let blocks = self.0.blocks.lock().unwrap();
        contents.copy_from_slice(blocks.get(&name.digest).ok_or(ConnectorError::NotFound)?);
        Ok(())
    }

    fn store(&mut self, name: &BlockName, _: &[u32], contents: &[u8]) -> Result<(), ConnectorError> {
        self.call();
        if self.0.is_slow.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(2));
        }
        self.0.blocks.lock().unwrap().insert(name.digest, contents.to_vec());
        Ok(())
    }
}

fn wait_until(is_over: impl Fn() -> bool) {
    let since = Instant::now();
    while !is_over() {
        assert!(since.elapsed() < Duration::from_secs(30), "it waits for ever");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A replica with blocks of 8 tokens that exchanges them over a shelf.
fn loaded(shelf: &Shelf, wait_seconds: f64) -> (EngineConfig, Loaded) {
    let folder = tempfile::TempDir::new().unwrap();
    let path: PathBuf = folder.path().to_path_buf();
    let (role, max_bytes) = (KvRole::Both, 1 << 20);
    let config = EngineConfig {
        block_size: Some(8),
        kv_cache_memory_bytes: Some(16 << 20),
        kv_offloading_bytes: 16 << 20,
        kv_transfer: Some(KvTransferConfig { role, engine_id: None, path, max_bytes, wait_seconds, always: false }),
        threads: Some(1),
        seed: Some(1),
        ..Default::default()
    };
    let mut loaded = load(&config, LoadOn::Configured, &|_, _| {}).unwrap();
    loaded.parts.kv_transfer.as_mut().unwrap().connector = Box::new(shelf.clone());
    (config, loaded)
}

fn engine(shelf: &Shelf, change: impl FnOnce(&mut Loaded)) -> Engine {
    let (_, mut loaded) = loaded(shelf, 30.0);
    change(&mut loaded);
    Engine::new(loaded.parts).unwrap()
}

fn serving(shelf: &Shelf, wait_seconds: f64) -> AsyncEngine {
    let (config, loaded) = loaded(shelf, wait_seconds);
    AsyncEngine::run(&config, loaded).unwrap()
}

/// A prompt of `blocks` full blocks and a token.
fn request(which: u32, blocks: usize, max_tokens: usize, kv_transfer: KvTransfer) -> GenerationRequest {
    let prompt = (0..=8 * blocks as u32).map(|at| 5 + (at * 7 + which * 31) % 300).collect();
    let params = GenerationParams { max_tokens: Some(max_tokens), ignore_eos: true, ..Default::default() };
    GenerationRequest { prompt, params, kv_transfer, ..Default::default() }
}

/// Runs an engine until it has no work. Returns the greatest number of cached tokens of a request.
fn finish(engine: &mut Engine) -> usize {
    let mut cached = 0;
    while engine.has_work() {
        engine.step(|_, event| {
            if let TokenEvent::Started { cached_tokens } = event {
                cached = cached.max(cached_tokens);
            }
        });
    }
    engine.audit().unwrap();
    cached
}

/// Runs a request. Returns its numbers of tokens and of cached ones.
fn run(engine: &AsyncEngine, request: GenerationRequest) -> (usize, usize) {
    let (mut tokens, mut cached) = (0, 0);
    block_on(async {
        let mut stream = engine.submit(request).await.unwrap();
        while let Some(event) = stream.next().await {
            match event {
                Event::Started { cached_tokens } => cached = cached_tokens,
                Event::Delta(delta) => tokens += delta.tokens.len(),
                _ => {}
            }
        }
    });
    (tokens, cached)
}

fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
}

#[test]
fn a_request_that_its_caller_ends_is_stored_without_another_request() {
    let shelf = Shelf::default();
    let mut engine = engine(&shelf, |_| {});
    let id = engine.submit(request(1, 4, 30, STORE)).unwrap();
    engine.step(|_, _| {});
    // As for a stop string: between two steps.
    assert!(engine.finish_sequence(id, 0));
    finish(&mut engine);
    wait_until(|| shelf.len() == 4);
    // An aborted request is not stored, and leaves nothing behind.
    let id = engine.submit(request(2, 4, 30, STORE)).unwrap();
    engine.step(|_, _| {});
    assert!(engine.abort(id));
    finish(&mut engine);
    drop(engine);
    assert_eq!(shelf.len(), 4);
}

#[test]
fn loaded_blocks_are_taken_while_another_request_runs_and_one_has_just_ended() {
    let shelf = Shelf::default();
    let mut first = engine(&shelf, |_| {});
    first.submit(request(1, 6, 1, STORE)).unwrap();
    finish(&mut first);
    drop(first);
    assert_eq!(shelf.len(), 6);
    let mut second = engine(&shelf, |_| {});
    second.submit(request(2, 3, 40, NEITHER)).unwrap();
    let wanted = request(1, 6, 1, LOAD);
    shelf.0.hangs.store(true, Ordering::SeqCst);
    let (send, loaded) = std::sync::mpsc::channel();
    let load = second.begin_load(&wanted, move || send.send(()).unwrap()).unwrap();
    // Its blocks are to be copied, while the other request goes on.
    second.submit(request(3, 5, 1, STORE)).unwrap();
    while second.num_unfinished() > 1 || second.stats().scheduler.num_running == 0 {
        second.step(|_, _| {});
    }
    assert_eq!(second.ended_loads(), []);
    shelf.0.hangs.store(false, Ordering::SeqCst);
    loaded.recv_timeout(Duration::from_secs(30)).unwrap();
    assert_eq!(second.ended_loads(), [load]);
    second.submit(wanted).unwrap();
    assert_eq!(finish(&mut second), 48);
    drop(second);
    assert_eq!(shelf.len(), 6 + 5);
}

#[test]
fn a_prompt_is_handed_over_as_fast_as_it_is_stored_however_long_it_is() {
    let shelf = Shelf::default();
    shelf.0.is_slow.store(true, Ordering::SeqCst);
    let limits = |loaded: &mut Loaded| {
        let block = loaded.parts.info.host_block_bytes;
        loaded.parts.kv_transfer.as_mut().unwrap().limits = Limits { bytes: 2 * block, piece: 3 * block };
    };
    let mut first = engine(&shelf, limits);
    first.submit(request(1, 20, 1, STORE)).unwrap();
    finish(&mut first);
    drop(first);
    assert_eq!(shelf.len(), 20);
    // It is loaded in pieces, too, while no more is loaded than was taken.
    let (config, mut loaded) = loaded(&shelf, 30.0);
    limits(&mut loaded);
    let second = AsyncEngine::run(&config, loaded).unwrap();
    assert_eq!(run(&second, request(1, 20, 1, LOAD)), (1, 160));
}

#[test]
fn blocks_of_ended_requests_are_handed_over_before_an_engine_ends() {
    let shelf = Shelf::default();
    shelf.0.is_slow.store(true, Ordering::SeqCst);
    let (config, mut loaded) = loaded(&shelf, 30.0);
    let block = loaded.parts.info.host_block_bytes;
    loaded.parts.kv_transfer.as_mut().unwrap().limits = Limits { bytes: block, piece: block };
    let engine = AsyncEngine::run(&config, loaded).unwrap();
    assert_eq!(run(&engine, request(1, 20, 1, STORE)).0, 1);
    engine.end(Duration::from_secs(20));
    assert_eq!(shelf.len(), 20);
}

#[test]
fn a_request_waits_no_longer_than_it_may_whatever_the_connector_does_and_the_engine_is_healthy() {
    let shelf = Shelf::default();
    let wait = Duration::from_millis(300);
    let first = serving(&shelf, 30.0);
    assert_eq!(run(&first, request(1, 4, 1, STORE)), (1, 0));
    wait_until(|| shelf.len() == 4);
    shelf.0.hangs.store(true, Ordering::SeqCst);
    let second = serving(&shelf, wait.as_secs_f64());
    let since = Instant::now();
    std::thread::scope(|scope| {
        // One behind the other: the first hangs in its load, the second has to wait for the first.
        let requests = [1, 2].map(|which| {
            scope.spawn({
                let second = &second;
                move || run(second, request(which, 4, 2, LOAD))
            })
        });
        wait_until(|| second.num_unfinished() == 2);
        // No step can be expected, so that none completes is no sign of a stuck engine.
        assert_eq!(second.step_age(), None);
        for request in requests {
            assert_eq!(request.join().unwrap(), (2, 0));
        }
    });
    assert!(since.elapsed() >= wait && since.elapsed() < Duration::from_secs(15), "{:?}", since.elapsed());
    assert_eq!(second.num_unfinished(), 0);
    shelf.0.hangs.store(false, Ordering::SeqCst);
}

#[test]
fn a_client_that_has_gone_cancels_its_load() {
    let shelf = Shelf::default();
    let engine = serving(&shelf, 3600.0);
    block_on(async {
        let gone = tokio::time::timeout(Duration::from_millis(50), engine.submit(request(1, 4, 2, LOAD)));
        assert!(gone.await.is_err(), "it waits for blocks that nobody stores");
    });
    wait_until(|| engine.num_unfinished() == 0);
    assert!(shelf.0.lookups.load(Ordering::SeqCst) > 0);
    // Nobody looks for them any more.
    std::thread::sleep(Duration::from_millis(30));
    let lookups = shelf.0.lookups.load(Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(shelf.0.lookups.load(Ordering::SeqCst), lookups);
}

#[test]
fn a_panic_of_the_connector_costs_the_blocks_it_was_called_for_and_nothing_else() {
    let shelf = Shelf::default();
    let engine = serving(&shelf, 30.0);
    shelf.0.panics.store(true, Ordering::SeqCst);
    assert_eq!(run(&engine, request(1, 4, 2, STORE)), (2, 0));
    let since = Instant::now();
    assert_eq!(run(&engine, request(2, 4, 2, LOAD)), (2, 0));
    assert!(since.elapsed() < Duration::from_secs(20), "it does not wait for what cannot come");
    assert_eq!(engine.num_unfinished(), 0);
    shelf.0.panics.store(false, Ordering::SeqCst);
    assert_eq!(run(&engine, request(3, 4, 2, STORE)), (2, 0));
    wait_until(|| shelf.len() == 4);
    assert_eq!(run(&serving(&shelf, 30.0), request(3, 4, 2, LOAD)), (2, 32));
}

#[test]
fn nothing_that_was_loaded_or_computed_before_a_reset_is_taken_or_stored_after_it() {
    let shelf = Shelf::default();
    let mut first = engine(&shelf, |_| {});
    first.submit(request(1, 6, 1, STORE)).unwrap();
    finish(&mut first);
    drop(first);
    let mut second = engine(&shelf, |_| {});
    let wanted = request(1, 6, 1, LOAD);
    let (send, loaded) = std::sync::mpsc::channel();
    let load = second.begin_load(&wanted, move || send.send(()).unwrap()).unwrap();
    loaded.recv_timeout(Duration::from_secs(30)).unwrap();
    assert!(second.reset_prefix_cache(false));
    // The loaded piece is not taken any more, and the request waits no longer.
    assert_eq!(second.ended_loads(), [load]);
    second.submit(wanted).unwrap();
    assert_eq!(finish(&mut second), 0);
    // Blocks that are handed over, and blocks that wait for that.
    shelf.0.is_slow.store(true, Ordering::SeqCst);
    let mut third = engine(&shelf, |loaded| {
        let block = loaded.parts.info.host_block_bytes;
        loaded.parts.kv_transfer.as_mut().unwrap().limits = Limits { bytes: 9 * block, piece: 12 * block };
    });
    third.submit(request(2, 30, 1, STORE)).unwrap();
    while third.num_unfinished() > 0 {
        third.step(|_, _| {});
    }
    wait_until(|| shelf.len() > 6);
    assert!(third.has_exports() && third.reset_prefix_cache(false) && !third.has_exports());
    let stored = shelf.len();
    finish(&mut third);
    drop(third);
    assert!(shelf.len() <= stored + 1, "{} blocks were stored after the reset", shelf.len() - stored);
}

#[test]
fn a_reset_ends_the_wait_for_blocks() {
    let shelf = Shelf::default();
    let first = serving(&shelf, 30.0);
    assert_eq!(run(&first, request(1, 4, 1, STORE)), (1, 0));
    wait_until(|| shelf.len() == 4);
    shelf.0.hangs.store(true, Ordering::SeqCst);
    let second = serving(&shelf, 3600.0);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| run(&second, request(1, 4, 2, LOAD)));
        wait_until(|| second.num_unfinished() == 1);
        let since = Instant::now();
        assert_eq!(block_on(second.reset_prefix_cache(false)), Some(true));
        assert_eq!(waiting.join().unwrap(), (2, 0));
        assert!(since.elapsed() < Duration::from_secs(15), "it waited for the load to fail");
    });
    shelf.0.hangs.store(false, Ordering::SeqCst);
}
