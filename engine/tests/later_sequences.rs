//! More sequences of a prompt than run at once: they wait, and have the tokens that they have together.

use engine::{
    AsyncEngine, CompletionOutput, Delta, EngineConfig, Event, GenerationRequest, Grammar, Llm, StructuredOutput,
    SubmitError,
};

use crate::common::slow::slow;
use crate::common::{config, on_sim, request};
use crate::lora::{LORA, adapters, with_lora};

/// Sampled sequences of different lengths.
fn asked(n: usize) -> GenerationRequest {
    let mut request = request(5, 20, 24, n);
    request.params.stop_token_ids = (0..560).step_by(16).collect();
    request
}

fn run(config: EngineConfig, request: GenerationRequest) -> (Vec<CompletionOutput>, Vec<Event>) {
    let mut llm = Llm::new(config).unwrap();
    let (completion, events) = llm.run_with_events(vec![request]).unwrap().remove(0);
    assert_eq!(llm.stats().scheduler.kv_cache_usage(), 0.0, "blocks are left over");
    (completion.outputs, events)
}

/// The same answers, with as many sequences in a step and with three. Returns the events of the latter.
fn same(config: &EngineConfig, request: &GenerationRequest, what: &str) -> Vec<Event> {
    let (want, _) = run(config.clone(), request.clone());
    let (got, events) = run(EngineConfig { max_num_seqs: 3, ..config.clone() }, request.clone());
    assert!(got == want, "{what}: {got:?}\nexpected {want:?}");
    let distinct: std::collections::BTreeSet<_> = got.iter().map(|output| &output.token_ids).collect();
    assert!(distinct.len() > request.params.n / 2, "{what}: the test shows nothing");
    events
}

#[test]
fn more_sequences_than_run_at_once_have_the_tokens_that_they_have_together() {
    let unseeded = |mut request: GenerationRequest| {
        request.params.sampling.seed = None;
        request
    };
    let text = |mut request: GenerationRequest| {
        request.params.stop = ["a".to_string(), "e".to_string()].into();
        request
    };
    let grammar = |mut request: GenerationRequest| {
        let grammar = Grammar::Regex("[a-z]{4,12}".to_string());
        request.params.structured_outputs = Some(StructuredOutput { grammar, param: "regex" }.into());
        request.params.ignore_eos = false;
        request
    };
    let best = |mut request: GenerationRequest| {
        (request.params.n, request.params.best_of) = (4, Some(11));
        request
    };
    let uncached = EngineConfig { enable_prefix_caching: false, ..config(64) };
    let cases = [
        ("plain", config(64), asked(11)),
        ("without a seed", config(64), unseeded(asked(11))),
        ("stop strings", config(64), text(asked(11))),
        ("a grammar", config(64), grammar(request(5, 20, 24, 11))),
        ("the best", config(64), best(asked(4))),
        ("without a prefix cache", uncached, asked(11)),
    ];
    for (what, config, request) in cases {
        let events = same(&config, &request, what);
        let count = |wanted: fn(&Event) -> bool| events.iter().filter(|event| wanted(event)).count();
        assert_eq!(count(|event| matches!(event, Event::Started { .. })), 1, "{what}");
        let ends = count(|event| matches!(event, Event::Delta(Delta { finish: Some(_), .. })));
        assert_eq!(ends, request.params.n, "{what}");
    }
}

#[test]
fn later_sequences_have_the_same_tokens_where_the_device_draws() {
    let config = on_sim(EngineConfig { max_model_len: Some(64), ..config(64) });
    config.into_iter().for_each(|config| drop(same(&config, &asked(11), "on a device")));
}

#[test]
fn later_sequences_begin_in_order_when_one_before_them_has_ended() {
    let mut scored = asked(11);
    scored.params.prompt_logprobs = Some(1);
    let events = same(&config(64), &scored, "scored");
    assert_eq!(events.iter().filter(|event| matches!(event, Event::PromptLogprobs(_))).count(), 1);
    let (mut begun, mut open) = (0, 0);
    for event in &events {
        let Event::Delta(delta) = event else { continue };
        if delta.index == begun {
            (begun, open) = (begun + 1, open + 1);
        }
        assert!(delta.index < begun, "sequence {} before {begun}", delta.index);
        assert!(open <= 3, "{open} sequences run");
        open -= usize::from(delta.finish.is_some());
    }
    assert_eq!((begun, open), (11, 0));
}

#[test]
fn a_number_of_sequences_beyond_all_bounds_is_refused() {
    let mut llm = Llm::new(config(64)).unwrap();
    for n in [16_385, usize::MAX] {
        match llm.run(vec![asked(n)]) {
            Err(SubmitError::Invalid { param: "n", message }) => {
                assert!(message.contains("at most 16384"), "{message}")
            }
            other => panic!("{other:?}"),
        }
    }
}

fn on_one_thread<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(work)
}

#[test]
fn a_request_that_is_cancelled_takes_its_later_sequences_with_it() {
    let engine = AsyncEngine::start(slow(EngineConfig { max_num_seqs: 2, ..config(64) }), &|_, _| {}).unwrap();
    let mut stream = on_one_thread(engine.submit(asked(9))).unwrap();
    // A later sequence runs.
    while !matches!(stream.next_blocking(), Some(Event::Delta(delta)) if delta.index > 2) {}
    drop(stream);
    let mut next = on_one_thread(engine.submit(request(1, 9, 3, 1))).unwrap();
    while next.next_blocking().is_some() {}
    let stats = engine.stats().scheduler;
    assert_eq!((stats.num_running, stats.num_waiting, stats.kv_cache_usage()), (0, 0, 0.0));
}

#[test]
fn later_sequences_keep_the_adapter_that_the_request_named() {
    let folder = adapters();
    let path = |name: &str| folder.path().join(name);
    let request = GenerationRequest { adapter: Some("x".into()), ..asked(6) };
    let mut llm = Llm::new(with_lora(64, LORA)).unwrap();
    llm.load_adapter("x", &path("a"), false).unwrap();
    let want = llm.run(vec![request.clone()]).unwrap().remove(0).outputs;

    let alone = slow(EngineConfig { max_num_seqs: 1, ..with_lora(64, LORA) });
    let engine = AsyncEngine::start(alone, &|_, _| {}).unwrap();
    on_one_thread(engine.load_adapter("x", path("a"), false)).unwrap();
    let mut stream = on_one_thread(engine.submit(request)).unwrap();
    assert!(matches!(stream.next_blocking(), Some(Event::Started { .. })));
    on_one_thread(engine.load_adapter("x", path("b"), true)).unwrap();
    let mut got = vec![Vec::new(); 6];
    while let Some(event) = stream.next_blocking() {
        if let Event::Delta(delta) = event {
            got[delta.index as usize].extend(delta.tokens.iter().map(|token| token.id));
        }
    }
    assert_eq!(got, want.into_iter().map(|output| output.token_ids).collect::<Vec<_>>());
}
