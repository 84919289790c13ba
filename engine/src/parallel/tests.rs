//! Ranks whose workers differ, fail, or end.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use collective::{Collective, CollectiveError, MOST_BROADCAST_BYTES, threads};
use models::decoder::Reduce;
use sampling::{Sampled, SamplingParams};
use sched::{RequestId, SeqId};

use super::follow::{EndOnPanic, obey};
use super::rank::Rank;
use super::worker::GroupWorker;
use crate::api::{
    EngineConfig, FinishReason, GenerationParams, GenerationRequest, LoraConfig, ParallelConfig, TokenEvent,
};
use crate::serve::AsyncEngine;
use crate::start::{LoadOn, load};
use crate::worker::{NewRequest, StepError, StepInput, StepOutput, Worker};

/// Draws its step's number and that of new prompt tokens, or something else in one step.
struct Stub {
    step: u64,
    odd: Option<(u64, Odd)>,
    ended: Sender<u64>,
}

#[derive(Clone, Copy)]
enum Odd {
    OtherToken,
    Fails,
    Panics,
}

impl Worker for Stub {
    fn submit(&mut self, input: Arc<StepInput>) {
        self.step = input.plan.step.0 + input.requests.iter().map(|request| request.prompt.len() as u64).sum::<u64>();
    }

    fn collect(&mut self, output: &mut StepOutput) -> Result<(), StepError> {
        output.clear();
        let mut token = self.step as u32;
        match self.odd {
            Some((step, Odd::OtherToken)) if step == self.step => token += 1,
            Some((step, Odd::Fails)) if step == self.step => return Err(StepError("a kernel failed".to_string())),
            Some((step, Odd::Panics)) if step == self.step => panic!("a planted panic"),
            _ => {}
        }
        let seq = SeqId { request: RequestId(7), index: 0 };
        output.drawn.push((seq, Sampled { token, logprob: None }));
        Ok(())
    }

    fn num_sequences(&self) -> usize {
        0
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        let _ = self.ended.send(self.step);
    }
}

fn config() -> ParallelConfig {
    ParallelConfig { tensor_parallel_size: 2, ..Default::default() }
}

/// A group of two ranks, of which `odd` does something else in one step, and what tells that a worker was dropped.
fn group(odd: Option<(usize, u64, Odd)>) -> (GroupWorker, Receiver<u64>) {
    let config = config();
    let (ended, wait) = channel();
    let stub = |rank: usize| {
        let odd = odd.filter(|(of, ..)| *of == rank).map(|(_, step, odd)| (step, odd));
        Stub { step: 0, odd, ended: ended.clone() }
    };
    let mut ranks = threads(2).into_iter();
    let (first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
    let (mut follower, of_second) = (stub(1), config.clone());
    let thread = std::thread::spawn(move || {
        let _guard = EndOnPanic(second.clone());
        let rank = Rank::new(second, &of_second, Vec::new()).unwrap();
        if let Err(reason) = obey(&rank, &mut follower, None) {
            rank.world.abort(&reason);
        }
    });
    let rank = Rank::new(first, &config, vec![thread]).unwrap();
    (GroupWorker::new(rank, Box::new(stub(0))), wait)
}

fn new_request() -> NewRequest {
    NewRequest {
        id: RequestId(7),
        prompt: vec![5],
        sequences: 1,
        first_sequence: 0,
        sampling: SamplingParams::default(),
        stop_ids: Vec::new(),
        seed: 0,
        on_host: false,
        prompt_logprobs: None,
        pooling: None,
        second: None,
        adapter: None,
        speculative: false,
    }
}

#[test]
fn requests_of_one_call_are_sent_with_their_lists_once() {
    let sampling = SamplingParams {
        bad_words: (0..100).map(|word| vec![word; 100]).collect(),
        seed: Some(3),
        ..Default::default()
    };
    let input = |others: usize| {
        let of = |sampling: &SamplingParams| Arc::new(NewRequest { sampling: sampling.clone(), ..new_request() });
        let other = SamplingParams { temperature: 0.5, ..Default::default() };
        let requests = (0..others).map(|_| of(&sampling)).chain([of(&other), of(&sampling)]).collect();
        StepInput { requests, ..Default::default() }
    };
    let bytes = |input: &StepInput| postcard::to_allocvec(input).unwrap();
    let (one, many) = (bytes(&input(0)), bytes(&input(63)));
    assert!(one.len() > 10_000 && many.len() < one.len() + 64 * 32, "{} and {} bytes", one.len(), many.len());
    let received: StepInput = postcard::from_bytes(&many).unwrap();
    assert_eq!(received, input(63));
    assert!(received.requests[0].sampling.is_clone_of(&received.requests[64].sampling));
    // A peer's index of parameters that it did not send is an error.
    let wrong = postcard::to_allocvec(&(Vec::<SamplingParams>::new(), vec![7usize], vec![new_request()])).unwrap();
    let empty = bytes(&StepInput::default());
    let at = postcard::to_allocvec(&StepInput::default().plan).unwrap().len();
    let spliced = [&empty[..at], &wrong, &empty[at + 3..]].concat();
    assert!(postcard::from_bytes::<StepInput>(&spliced).is_err());
}

fn step(worker: &mut GroupWorker, number: u64) -> Result<u32, String> {
    submit(worker, number, Vec::new())
}

fn submit(worker: &mut GroupWorker, number: u64, requests: Vec<Arc<NewRequest>>) -> Result<u32, String> {
    let mut input = StepInput { requests, ..StepInput::default() };
    input.plan.step = sched::StepId(number);
    worker.submit(Arc::new(input));
    let mut output = StepOutput::default();
    worker.collect(&mut output).map(|()| output.drawn[0].1.token).map_err(|error| error.to_string())
}

#[test]
fn ranks_compute_every_step_and_end_with_rank_0() {
    let (mut worker, wait) = group(None);
    (1..20).for_each(|number| assert_eq!(step(&mut worker, number), Ok(number as u32)));
    assert!(!worker.is_lost() && wait.try_recv().is_err());
    drop(worker);
    assert_eq!([wait.recv().unwrap(), wait.recv().unwrap()], [19, 19]);
}

#[test]
fn a_step_larger_than_any_broadcast_reaches_every_rank() {
    let (mut worker, _wait) = group(None);
    let prompt = vec![u32::MAX; MOST_BROADCAST_BYTES / 5 + 1];
    let length = prompt.len() as u32;
    let request = NewRequest { prompt, ..new_request() };
    assert_eq!(submit(&mut worker, 1, vec![Arc::new(request)]), Ok(1 + length));
    assert_eq!((step(&mut worker, 2), worker.is_lost()), (Ok(2), false));
}

#[test]
fn a_rank_that_draws_another_token_or_fails_alone_ends_the_group_and_is_named() {
    for (rank, odd) in [(1, Odd::OtherToken), (0, Odd::OtherToken), (1, Odd::Fails), (0, Odd::Fails)] {
        let (mut worker, _wait) = group(Some((rank, 3, odd)));
        assert_eq!((step(&mut worker, 1), step(&mut worker, 2)), (Ok(1), Ok(2)));
        let error = step(&mut worker, 3).unwrap_err();
        assert!(error.starts_with("order 3: rank 1: hash of the results of a step "), "{error}");
        assert!(error.contains("that of rank 0"), "{error}");
        assert_eq!(matches!(odd, Odd::Fails) && rank == 0, error.contains("a kernel failed"), "{error}");
        assert!(worker.is_lost());
        // Every later step fails at once, with the same reason.
        assert_eq!(step(&mut worker, 4).unwrap_err(), error);
    }
}

#[test]
fn a_failure_of_every_rank_fails_the_step_alone() {
    let (mut worker, _wait) = group(None);
    let both = |worker: &mut GroupWorker| step(worker, 5);
    assert_eq!(both(&mut worker), Ok(5));
    let config = config();
    drop(worker);
    // Both ranks fail in step 2.
    let (ended, _wait) = channel();
    let stub = || Stub { step: 0, odd: Some((2, Odd::Fails)), ended: ended.clone() };
    let mut ranks = threads(2).into_iter();
    let (first, second) = (ranks.next().unwrap(), ranks.next().unwrap());
    let (mut follower, of_second) = (stub(), config.clone());
    let thread = std::thread::spawn(move || {
        obey(&Rank::new(second, &of_second, Vec::new()).unwrap(), &mut follower, None).unwrap();
    });
    let rank = Rank::new(first, &config, vec![thread]).unwrap();
    let mut worker = GroupWorker::new(rank, Box::new(stub()));
    assert_eq!(step(&mut worker, 1), Ok(1));
    assert_eq!(step(&mut worker, 2), Err("a kernel failed".to_string()));
    assert_eq!(step(&mut worker, 3), Ok(3));
    assert!(!worker.is_lost());
}

#[test]
fn a_panic_of_a_rank_ends_the_group_with_an_error() {
    let (mut worker, _wait) = group(Some((1, 2, Odd::Panics)));
    assert_eq!(step(&mut worker, 1), Ok(1));
    let error = step(&mut worker, 2).unwrap_err();
    assert!(error.contains("rank 1 has panicked"), "{error}");
}

#[test]
fn ranks_with_other_settings_are_named_before_they_load() {
    let agreed = |change: fn(&mut EngineConfig)| {
        let first = EngineConfig { parallel: config(), ..Default::default() };
        let mut second = first.clone();
        change(&mut second);
        let ranks = threads(2).into_iter().zip([first, second]).map(|(world, engine)| {
            std::thread::spawn(move || {
                let rank = Rank::new(world, &config(), Vec::new()).unwrap();
                rank.agree(&engine, 7).map_err(|error| error.to_string())
            })
        });
        let ranks: Vec<_> = ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect();
        assert_eq!(ranks[0], ranks[1]);
        ranks[0].clone()
    };
    // What differs from machine to machine.
    assert_eq!(agreed(|engine| engine.threads = Some(3)), Ok(()));
    let changes: [fn(&mut EngineConfig); 5] = [
        |engine| engine.max_num_seqs += 1,
        |engine| engine.parallel.tp_reduce = Reduce::Sum,
        |engine| engine.parallel.pipeline_partition = Some(vec![3]),
        |engine| engine.speculative = r#"{"method": "ngram", "num_speculative_tokens": 4}"#.parse().ok(),
        |engine| engine.quantization = Some(linear::Quantization::Q8),
    ];
    for (number, change) in changes.into_iter().enumerate() {
        let line = agreed(change).unwrap_err();
        assert!(line.contains("rank 1: hash of the settings "), "{number}: {line}");
    }
}

#[test]
fn an_adapter_that_another_rank_cannot_read_is_refused_when_it_is_loaded() {
    let folder = tempfile::TempDir::new().unwrap();
    let modules = [("model.layers.0.self_attn.q_proj".to_string(), 192, 192)];
    let path = |name: &str| folder.path().join(name);
    ["a", "b"].iter().zip(0..).for_each(|(name, seed)| testkit::adapters::simple(&path(name), &modules, 2, seed));
    let lora = Some(LoraConfig { max_loras: 1, max_lora_rank: 8, max_cpu_loras: None });
    let two = EngineConfig { parallel: config(), lora, threads: Some(1), ..Default::default() };
    let mut engine =
        load(&two, LoadOn::Configured, &|_, _| {}).and_then(|loaded| crate::Engine::new(loaded.parts)).unwrap();
    // Between this rank and the other the files change, as on two machines.
    let read = |engine: &crate::Engine, name: &str| engine.adapter_store().unwrap().load(path(name)).unwrap();
    let (gone, other) = (read(&engine, "a"), read(&engine, "b"));
    std::fs::remove_dir_all(path("a")).unwrap();
    testkit::adapters::simple(&path("b"), &modules, 2, 9);
    let missing = engine.add_adapter("a", gone, false).unwrap_err().to_string();
    assert!(missing.starts_with("rank 1: ") && missing.contains("no such folder"), "{missing}");
    let changed = engine.add_adapter("b", other, false).unwrap_err().to_string();
    assert!(changed.starts_with("rank 1: ") && !engine.is_lost(), "{changed}");
    // The group goes on, with an adapter that both have, also after both have dropped it.
    for (name, seed) in [("c", 3), ("d", 4)] {
        testkit::adapters::simple(&path(name), &modules, 2, seed);
        engine.load_adapter(name, &path(name), false).unwrap();
    }
    for adapter in ["c", "d", "c"].map(|name| Some(name.to_string())) {
        let params = GenerationParams { max_tokens: Some(3), ignore_eos: true, ..Default::default() };
        engine.submit(GenerationRequest { prompt: vec![5, 6], params, adapter, ..Default::default() }).unwrap();
    }
    let mut tokens = 0;
    while engine.has_work() {
        engine.step(|_, event| tokens += usize::from(matches!(event, TokenEvent::Token { token: Some(_), .. })));
    }
    assert_eq!((tokens, engine.stats().failed_steps, engine.is_lost()), (9, 0, false));
    // Read here alone, under a name that is taken: the other rank has dropped it, and cannot read it any more.
    let (adapter, loaded) = read(&engine, "c");
    std::fs::remove_dir_all(path("c")).unwrap();
    assert!(engine.add_adapter("d", (adapter, loaded), false).is_err());
    let of = |name: Option<&str>| {
        let params = GenerationParams { max_tokens: Some(3), ignore_eos: true, ..Default::default() };
        let adapter = name.map(str::to_string);
        GenerationRequest { prompt: vec![5, 6], params, adapter, ..Default::default() }
    };
    let ids = [of(Some("c")), of(None)].map(|request| engine.submit(request).unwrap());
    let mut ended = Vec::new();
    while engine.has_work() {
        engine.step(|id, event| {
            if let TokenEvent::Token { finish: Some(finish), .. } = event {
                ended.push((id == ids[1], matches!(finish, FinishReason::Error(_))));
            }
        });
    }
    ended.sort_unstable();
    assert_eq!((ended, engine.is_lost()), (vec![(false, true), (true, false)], false));
}

/// A rank that counts its broadcasts, and stops in one while it is told to.
struct Stops {
    group: Arc<dyn Collective>,
    broadcasts: Arc<AtomicU64>,
    stopped: Arc<AtomicBool>,
}

impl Collective for Stops {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn carrier(&self) -> &'static str {
        self.group.carrier()
    }

    fn split(&self, color: usize) -> Result<Arc<dyn Collective>, CollectiveError> {
        self.group.split(color)
    }

    fn broadcast(&self, root: usize, bytes: &mut Vec<u8>) -> Result<(), CollectiveError> {
        let outcome = self.group.broadcast(root, bytes);
        while self.stopped.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.broadcasts.fetch_add(1, Ordering::SeqCst);
        outcome
    }

    fn all_gather(&self, own: &[u8], rows: usize, widths: &[usize], all: &mut [u8]) -> Result<(), CollectiveError> {
        self.group.all_gather(own, rows, widths, all)
    }

    fn send(&self, to: usize, bytes: &[u8]) -> Result<(), CollectiveError> {
        self.group.send(to, bytes)
    }

    fn receive(&self, from: usize, bytes: &mut [u8]) -> Result<(), CollectiveError> {
        self.group.receive(from, bytes)
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
    }
}

#[test]
fn a_rank_that_stops_answering_while_idle_is_found_within_the_timeout() {
    let limit = Duration::from_millis(400);
    let (broadcasts, stopped, (ended, _wait)) = (Arc::default(), Arc::<AtomicBool>::default(), channel());
    let mut ranks = threads(2).into_iter();
    let (first, group) = (ranks.next().unwrap(), ranks.next().unwrap());
    let second = Stops { group, broadcasts: Arc::clone(&broadcasts), stopped: stopped.clone() };
    let follower = std::thread::spawn(move || {
        let rank = Rank::new(Arc::new(second), &config(), Vec::new()).unwrap();
        obey(&rank, &mut Stub { step: 0, odd: None, ended }, None)
    });
    let mut loaded = load(&EngineConfig::default(), LoadOn::Configured, &|_, _| {}).unwrap();
    let rank = Rank::new(first, &config(), Vec::new()).unwrap();
    loaded.ranks = Some(rank.world.clone());
    loaded.parts.worker = Box::new(GroupWorker::new(rank, loaded.parts.worker));
    let engine = AsyncEngine::run(&EngineConfig::default(), loaded).unwrap();
    let probes = || broadcasts.load(Ordering::SeqCst);
    let wait = |is_over: &dyn Fn() -> bool| {
        let since = Instant::now();
        while !is_over() {
            assert!(since.elapsed() < Duration::from_secs(20), "it waits for ever");
            std::thread::sleep(Duration::from_millis(1));
        }
        since.elapsed()
    };
    // Nobody asks before it is told to.
    std::thread::sleep(limit / 4);
    assert_eq!((probes(), engine.step_age()), (0, None));
    engine.probe_ranks(limit / 2);
    let three = wait(&|| probes() == 3);
    assert!(three > limit / 2, "three probes in {three:?} are too many");
    wait(&|| engine.is_healthy(limit));
    // It hangs behind the next order, and has answered the last one.
    stopped.store(true, Ordering::SeqCst);
    let found = wait(&|| !engine.is_healthy(limit));
    assert!(found < 5 * limit, "found after {found:?}");
    assert_eq!((probes(), engine.is_alive()), (3, true));
    assert!(engine.dump().contains("idle, ranks have not answered for 0."), "{}", engine.dump());
    assert!(engine.end_group("a test"));
    wait(&|| !engine.is_alive());
    stopped.store(false, Ordering::SeqCst);
    assert!(follower.join().unwrap().unwrap_err().contains("a test"));
}
