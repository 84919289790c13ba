//! The engine on its own thread: streams, cancellation, draining, health.

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

use crate::common::noop::NoOp;
use crate::common::slow::slow;
use crate::common::{config, overlapping, request};
use engine::{
    AsyncEngine, Delta, EngineConfig, Event, FinishReason, GenerationParams, GenerationRequest, LoadOn,
    StructuredOutput, SubmitError,
};
use text::Grammar;

fn start() -> AsyncEngine {
    AsyncEngine::start(config(64), &|_, _| {}).unwrap()
}

/// An engine on which 400 tokens take seconds, so that a test can act while a request runs.
fn start_slow() -> AsyncEngine {
    AsyncEngine::start(slow(config(64)), &|_, _| {}).unwrap()
}

fn wait(what: &str, until: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !until() {
        assert!(Instant::now() < end, "{what}: not within 30 s");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn deltas(mut stream: engine::OutputStream) -> Vec<Delta> {
    let mut all = Vec::new();
    while let Some(event) = stream.next_blocking() {
        if let Event::Delta(delta) = event {
            all.push(delta);
        }
    }
    all
}

fn submit(engine: &AsyncEngine, request: engine::GenerationRequest) -> Result<engine::OutputStream, SubmitError> {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(engine.submit(request))
}

fn started_on(device: Arc<NoOp>) -> AsyncEngine {
    AsyncEngine::run(&config(64), engine::load(&config(64), LoadOn::Device(device), &|_, _| {}).unwrap()).unwrap()
}

#[test]
fn streams_of_concurrent_requests_carry_their_own_tokens_to_the_end() {
    let engine = start();
    let streams: Vec<_> = (0..6).map(|i| submit(&engine, request(i, 10, 12, 1)).unwrap()).collect();
    let together: Vec<Vec<u32>> =
        streams.into_iter().map(|s| deltas(s).iter().flat_map(|d| d.tokens.iter().map(|t| t.id)).collect()).collect();
    for (i, got) in together.iter().enumerate() {
        let all = deltas(submit(&engine, request(i as u32, 10, 12, 1)).unwrap());
        assert_eq!(*got, all.iter().flat_map(|d| d.tokens.iter().map(|t| t.id)).collect::<Vec<_>>());
        let finishes: Vec<_> = all.iter().filter_map(|d| d.finish.clone()).collect();
        assert_eq!(finishes, [FinishReason::Length], "exactly one finish, on the last delta");
        assert!(all.last().unwrap().finish.is_some());
        let stats = engine.stats();
        assert_eq!(
            (stats.scheduler.num_running, stats.scheduler.kv_cache_usage()),
            (0, 0.0),
            "whoever has the answer finds its blocks free"
        );
    }
    assert!(engine.stats().scheduler.prefix_hits > 0, "the second round reads the first one's blocks");
}

#[test]
fn dropping_a_stream_cancels_its_request_and_frees_the_blocks() {
    let engine = start_slow();
    let mut stream = submit(&engine, request(1, 10, 400, 1)).unwrap();
    assert!(matches!(stream.next_blocking(), Some(Event::Started { cached_tokens: 0 })));
    wait("running", || engine.stats().scheduler.num_running == 1);
    drop(stream);
    wait("cancelled", || engine.num_unfinished() == 0 && engine.stats().scheduler.kv_cache_usage() == 0.0);
    assert!(engine.stats().generation_tokens < 400);
}

#[test]
fn draining_refuses_new_requests_and_finishes_running_ones() {
    let engine = start();
    let stream = submit(&engine, request(1, 10, 60, 1)).unwrap();
    engine.drain();
    assert_eq!(submit(&engine, request(2, 10, 5, 1)).err(), Some(SubmitError::Closed));
    assert_eq!(deltas(stream).len(), 60);
    wait("idle", || engine.num_unfinished() == 0);
}

#[test]
fn health_follows_the_engine_thread() {
    let engine = start_slow();
    assert!(engine.is_healthy(Duration::from_secs(60)));
    let stream = submit(&engine, request(1, 10, 400, 1)).unwrap();
    engine.shutdown();
    assert!(deltas(stream).iter().all(|d| d.finish.is_none()), "a stream that the engine leaves has no finish");
    wait("the thread to end", || !engine.is_healthy(Duration::from_secs(60)));
    assert_eq!(submit(&engine, request(2, 10, 5, 1)).err(), Some(SubmitError::Closed));
}

#[test]
fn an_engine_has_ended_when_nothing_of_its_thread_is_left() {
    let device = NoOp::new();
    let engine = started_on(device.clone());
    let stream = submit(&engine, request(1, 10, 400, 1)).unwrap();
    engine.end(Duration::from_secs(60));
    assert_eq!(Arc::strong_count(&device), 1);
    assert!(deltas(stream).iter().all(|d| d.finish.is_none()));
}

#[test]
fn health_follows_completed_steps_and_not_planned_ones() {
    let device = NoOp::new();
    let engine = started_on(device.clone());
    let limit = Duration::from_millis(300);
    let failed = |stream| deltas(stream).iter().any(|d| matches!(d.finish, Some(FinishReason::Error(_))));
    assert!(!failed(submit(&engine, request(0, 10, 8, 1)).unwrap()));
    let steps = engine.stats().steps;
    assert!(steps >= 8 && engine.stats().failed_steps == 0);

    device.fails.store(true, Ordering::Relaxed);
    assert!(failed(submit(&engine, request(1, 10, 8, 1)).unwrap()));
    assert!(engine.is_healthy(limit), "one failure is no failing engine");
    wait("an unhealthy engine", || {
        let queue: Vec<_> = (0..4).map(|i| submit(&engine, request(i, 10, 8, 1)).unwrap()).collect();
        assert!(queue.into_iter().all(failed));
        !engine.is_healthy(limit)
    });
    assert_eq!(engine.stats().steps, steps, "a failed step is no completed one");
    assert!(engine.step_age().unwrap() > limit && engine.is_alive());
    assert!(!engine.is_healthy(limit), "also while nobody asks for anything");

    device.fails.store(false, Ordering::Relaxed);
    assert!(!failed(submit(&engine, request(5, 10, 8, 1)).unwrap()));
    assert!(engine.is_healthy(limit) && engine.stats().steps > steps);
}

#[test]
fn a_gpu_that_hangs_ends_requests_with_its_error_and_the_engine_for_good() {
    let device = NoOp::new();
    let engine = started_on(device.clone());
    assert!(engine.is_healthy(Duration::from_secs(60)));
    device.hangs.store(true, Ordering::Relaxed);
    let stream = submit(&engine, request(1, 10, 40, 2)).unwrap();
    let finishes: Vec<_> = deltas(stream).into_iter().filter_map(|delta| delta.finish).collect();
    assert_eq!(finishes.len(), 2);
    for finish in finishes {
        let FinishReason::Error(error) = finish else { panic!("{finish:?}") };
        assert!(error.contains("cuda: the GPU has not finished within 60 s"), "{error}");
    }
    wait("the thread to end", || !engine.is_healthy(Duration::MAX));
    // The server waits for this, and ends with an error.
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(engine.death());
    assert!(submit(&engine, request(2, 10, 5, 1)).is_err());
}

#[test]
fn invalid_requests_are_refused_before_any_output() {
    let engine = start();
    let mut bad = request(1, 10, 5, 1);
    bad.prompt[3] = 560;
    let Err(SubmitError::Invalid { param, message }) = submit(&engine, bad) else { panic!("taken") };
    assert_eq!((param, &message[..]), ("prompt", "prompt: token id 560 is outside of the vocabulary of 560"));
    let mut bad = request(1, 10, 5, 1);
    bad.params.sampling.temperature = -1.0;
    assert!(matches!(submit(&engine, bad), Err(SubmitError::Invalid { param: "temperature", .. })));
    let mut bad = request(1, 10, 5, 1);
    bad.prompt.clear();
    assert!(matches!(submit(&engine, bad), Err(SubmitError::Invalid { param: "prompt", .. })));
}

#[test]
fn a_reader_that_falls_behind_loses_only_its_own_request() {
    let config = EngineConfig { max_unread_events: 8, ..config(64) };
    let engine = AsyncEngine::start(config, &|_, _| {}).unwrap();
    let mut unread = submit(&engine, request(1, 10, 200, 1)).unwrap();
    let mut read = submit(&engine, request(2, 10, 50, 1)).unwrap();
    let mut tokens = 0;
    while let Some(event) = read.next_blocking() {
        tokens += if let Event::Delta(delta) = event { delta.tokens.len() } else { 0 };
    }
    assert!(read.fell_behind() || tokens == 50, "whoever reads gets everything, unless this thread slept");
    wait("the unread request to be dropped", || engine.num_unfinished() == 0);
    assert!(unread.fell_behind());
    let mut events = 0;
    while unread.next_blocking().is_some() {
        events += 1;
    }
    assert_eq!(events, 8 + 1, "the events of eight steps, and the first of the request, are still there");
    assert_eq!(engine.stats().scheduler.kv_cache_usage(), 0.0);
}

#[test]
fn a_full_queue_refuses_requests_and_reports_its_length() {
    let config = EngineConfig { max_queued_requests: 0, ..config(64) };
    let engine = AsyncEngine::start(config, &|_, _| {}).unwrap();
    assert_eq!(submit(&engine, request(1, 10, 5, 1)).err(), Some(SubmitError::QueueFull { waiting: 0, limit: 0 }));
}

#[test]
fn a_stream_returns_when_its_request_left_the_queue_and_when_each_event_was_emitted() {
    let engine = AsyncEngine::start(config(64), &|_, _| {}).unwrap();
    let mut stream = submit(&engine, request(1, 10, 5, 1)).unwrap();
    let submitted = stream.last_event();
    let mut last = submitted;
    while stream.next_blocking().is_some() {
        assert!(stream.last_event() >= last);
        last = stream.last_event();
    }
    let scheduled = stream.scheduled().unwrap();
    assert!(scheduled <= last, "the step began before its events were made");
}

#[test]
fn whoever_watches_sees_a_request_and_its_blocks_come_and_go() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let engine = start_slow();
    runtime.block_on(async {
        let mut watcher = engine.watch();
        let idle = watcher.next().await.unwrap();
        assert_eq!((idle.stats.scheduler.blocks_in_use, idle.requests.len()), (0, 0));
        assert_eq!(idle.map.runs, [(0, 64)], "every block is free");

        let mut stream = engine.submit(request(1, 20, 200, 2)).await.unwrap();
        while !matches!(stream.next().await, Some(Event::Delta(_))) {}
        let busy = loop {
            watcher.look();
            let seen = watcher.next().await.unwrap();
            // Until then the last block of the prompt is one for both.
            if seen.requests.first().is_some_and(|request| request.computed_tokens > 20) {
                break seen;
            }
        };
        let shown = &busy.requests[0];
        assert_eq!((shown.state, shown.sequences, shown.prompt_tokens, busy.requests.len()), ("running", 2, 20, 1));
        assert!(shown.computed_tokens >= 20 && shown.blocks >= 4, "{shown:?}");
        assert_eq!(shown.blocks, busy.stats.scheduler.blocks_in_use);
        let shared = busy.map.owners.iter().any(|owner| owner.references == 2 && owner.requests == [shown.id]);
        assert!(shared, "two sequences share the full blocks of their prompt: {:?}", busy.map.owners);
        let (total, sum) = (
            busy.stats.scheduler.blocks_total,
            busy.stats.scheduler.blocks_in_use + busy.stats.scheduler.blocks_cached + busy.stats.scheduler.blocks_free,
        );
        assert_eq!(total, sum);

        drop(stream);
        let over = loop {
            let seen = watcher.next().await.unwrap();
            if seen.requests.is_empty() {
                break seen;
            }
        };
        assert_eq!(over.stats.scheduler.blocks_in_use, 0, "nobody asked: the end of work is shown by itself");
        assert!(over.map.owners.is_empty() && over.stats.scheduler.blocks_cached > 0);
        assert!(over.history.decode.iter().sum::<u64>() > 0);

        engine.shutdown();
        while watcher.next().await.is_some() {}
    });
}

#[test]
fn no_snapshot_is_taken_without_watchers() {
    let engine = start();
    assert_eq!(
        deltas(submit(&engine, request(1, 10, 12, 1)).unwrap()).last().unwrap().finish,
        Some(FinishReason::Length)
    );
    drop(engine.watch());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let seen = runtime.block_on(async { engine.watch().next().await.unwrap() });
    assert_eq!(seen.stats.generation_tokens, 12, "what was counted meanwhile is there all the same");
}

#[test]
fn a_request_whose_grammar_compiles_while_the_engine_starts_draining_is_refused() {
    let engine = AsyncEngine::start(EngineConfig { threads: Some(1), ..Default::default() }, &|_, _| {}).unwrap();
    let request = |which: usize| {
        let grammar = Grammar::Regex(format!("[a-z]{{1,{}}}", 40 + which));
        let structured_outputs = Some(Arc::new(StructuredOutput { grammar, param: "structured_outputs" }));
        let params = GenerationParams { structured_outputs, ..Default::default() };
        GenerationRequest { prompt: vec![1, 2, 3], params, ..Default::default() }
    };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        // Grammars are compiled two at a time, so the last of them waits for those in front of it.
        let mut submitted: Vec<_> = (0..12).map(|which| Box::pin(engine.submit(request(which)))).collect();
        for submission in &mut submitted {
            let waits = poll_fn(|context| Poll::Ready(submission.as_mut().poll(context).is_pending())).await;
            assert!(waits, "a grammar was compiled at once");
        }
        engine.drain();
        let last = submitted.pop().unwrap();
        drop(submitted);
        assert_eq!(last.await.err(), Some(SubmitError::Closed));
    });
    assert_eq!(engine.num_unfinished(), 0);
}

/// Whether the cache was emptied.
fn reset(engine: &AsyncEngine, reset_running: bool) -> bool {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(engine.reset_prefix_cache(reset_running)).unwrap()
}

/// Tokens of a request, and how many tokens of its prompt were cached.
fn tokens(mut stream: engine::OutputStream) -> (Vec<u32>, usize) {
    let (mut tokens, mut cached) = (Vec::new(), 0);
    while let Some(event) = stream.next_blocking() {
        match event {
            Event::Started { cached_tokens } => cached = cached_tokens,
            Event::Delta(delta) => tokens.extend(delta.tokens.iter().map(|token| token.id)),
            _ => {}
        }
    }
    (tokens, cached)
}

#[test]
fn b33_an_idle_engine_empties_its_prefix_cache_and_a_busy_one_refuses() {
    let engine = start_slow();
    let mut running = submit(&engine, request(1, 20, 400, 1)).unwrap();
    running.next_blocking();
    assert!(!reset(&engine, false), "a request owns blocks");
    drop(running);
    wait("cancelled", || engine.num_unfinished() == 0);
    let cached = || tokens(submit(&engine, request(1, 20, 1, 1)).unwrap()).1;
    assert_eq!((cached(), cached()), (16, 16));
    assert!(reset(&engine, false));
    assert_eq!((cached(), cached()), (0, 16));
    engine.shutdown();
    wait("the thread to end", || !engine.is_alive());
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert_eq!(runtime.block_on(engine.reset_prefix_cache(false)), None);
}

#[test]
fn b33_a_reset_of_running_requests_changes_no_token_also_while_steps_are_in_flight() {
    let overlapping = overlapping(24).map(|config| EngineConfig { deterministic: true, ..config });
    for config in [Some(slow(config(64))), overlapping].into_iter().flatten() {
        let alone = AsyncEngine::start(config.clone(), &|_, _| {}).unwrap();
        let expected: Vec<_> = (0..3).map(|i| tokens(submit(&alone, request(i, 20, 24, 1)).unwrap()).0).collect();
        let engine = AsyncEngine::start(config, &|_, _| {}).unwrap();
        let streams: Vec<_> = (0..3).map(|i| submit(&engine, request(i, 20, 24, 1)).unwrap()).collect();
        wait("running", || engine.stats().scheduler.num_running == 3);
        for _ in 0..3 {
            assert!(reset(&engine, true));
        }
        assert!(
            engine.num_unfinished() > 0 && engine.stats().scheduler.tokens_lost > 0,
            "nothing ran when the cache was reset"
        );
        let got: Vec<_> = streams.into_iter().map(|stream| tokens(stream).0).collect();
        assert_eq!(got, expected);
    }
}
