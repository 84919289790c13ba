//! Beam search end to end, against searches that look at everything.

use std::collections::HashMap;

use crate::common::{alone, config, prompt, request, tokens};
use engine::{
    BeamSearch, CompletionOutput, Engine, EngineConfig, Event, FinishReason, GenerationParams, GenerationRequest, Llm,
    SamplingParams, StopCause, TokenEvent,
};

/// The reference model's end-of-sequence token.
const EOS: u32 = 2;
/// The allowed tokens.
const ALLOWED: [u32; 4] = [EOS, 17, 300, 411];
/// Makes the end about as likely as the other tokens.
const BIAS: f32 = 0.5;
/// Per token that the hypothesis holds already.
const FREQUENCY_PENALTY: f32 = 0.4;
/// Longest hypothesis.
const STEPS: usize = 5;
/// Number of prefixes that continue to the last step: a beam of this width loses none.
const ALL_PREFIXES: usize = 3 * 3 * 3 * 3;

fn sampling() -> SamplingParams {
    SamplingParams {
        allowed_token_ids: Some(ALLOWED.into()),
        logit_bias: vec![(EOS, BIAS)],
        frequency_penalty: FREQUENCY_PENALTY,
        // Of no effect on a search.
        temperature: 0.3,
        top_k: 1,
        ..Default::default()
    }
}

fn search(beam: BeamSearch, n: usize) -> GenerationRequest {
    let params =
        GenerationParams { sampling: sampling(), n, max_tokens: Some(STEPS), beam: Some(beam), ..Default::default() };
    GenerationRequest { prompt: prompt(1, 20), params, ..Default::default() }
}

fn wide(blocks: u64) -> EngineConfig {
    EngineConfig { max_num_seqs: 96, max_num_batched_tokens: 128, ..config(blocks) }
}

/// Per prefix of the output, the log-probability of each of [`ALLOWED`]: raw and as the search must see it.
type Table = HashMap<Vec<u32>, [(f64, f64); 4]>;

/// Computed by scoring requests for every continuation, without any part of the search.
fn table() -> Table {
    let mut paths = vec![Vec::new()];
    for _ in 1..STEPS {
        paths =
            paths.iter().flat_map(|path: &Vec<u32>| ALLOWED[1..].iter().map(|&t| [&path[..], &[t]].concat())).collect();
    }
    let base = prompt(1, 20);
    let score = |path: &Vec<u32>| GenerationRequest {
        prompt: [&base[..], path, &[EOS]].concat(),
        params: GenerationParams { prompt_logprobs: Some(560), max_tokens: Some(0), ..Default::default() },
        ..Default::default()
    };
    let mut table = Table::new();
    let mut llm = Llm::new(wide(1000)).unwrap();
    let scored = llm.run_with_events(paths.iter().map(score).collect()).unwrap();
    assert_eq!(scored.len(), paths.len());
    for (path, (_, events)) in paths.iter().zip(scored) {
        let Event::PromptLogprobs(scores) = &events[0] else { panic!("{events:?}") };
        for length in 0..STEPS {
            let row: HashMap<u32, f32> = scores[base.len() + length].as_ref().unwrap().top.iter().copied().collect();
            let raw = ALLOWED.map(|token| f64::from(row[&token]));
            let adjusted: [f64; 4] = std::array::from_fn(|i| {
                let count = path[..length].iter().filter(|&&token| token == ALLOWED[i]).count();
                let bias = if ALLOWED[i] == EOS { BIAS } else { 0.0 };
                raw[i] + f64::from(bias) - f64::from(FREQUENCY_PENALTY) * count as f64
            });
            let mass = adjusted.iter().map(|logprob| logprob.exp()).sum::<f64>().ln();
            table.insert(path[..length].to_vec(), std::array::from_fn(|i| (raw[i], adjusted[i] - mass)));
        }
    }
    table
}

/// Tokens and score.
type Hypothesis = (Vec<u32>, f64);

fn best(mut ended: Vec<Hypothesis>, beam: BeamSearch, n: usize) -> Vec<Hypothesis> {
    for (tokens, sum) in &mut ended {
        *sum /= (tokens.len() as f64).powf(beam.length_penalty.into());
    }
    ended.sort_by(|a, b| b.1.total_cmp(&a.1));
    assert!(ended.windows(2).take(n).all(|two| two[0].1 - two[1].1 > 1e-6), "too close to tell: {ended:?}");
    ended.truncate(n);
    ended
}

fn extended(table: &Table, (tokens, sum): &Hypothesis) -> Vec<Hypothesis> {
    let row = table[tokens];
    ALLOWED.iter().zip(row).map(|(&token, (_, logprob))| ([&tokens[..], &[token]].concat(), sum + logprob)).collect()
}

fn has_ended((tokens, _): &Hypothesis) -> bool {
    tokens.len() == STEPS || tokens.last() == Some(&EOS)
}

fn exhaustive(table: &Table) -> Vec<Hypothesis> {
    let (mut open, mut ended) = (vec![(Vec::new(), 0.0)], Vec::new());
    while !open.is_empty() {
        let (over, rest) = open.iter().flat_map(|one| extended(table, one)).partition(has_ended);
        ended.extend::<Vec<_>>(over);
        open = rest;
    }
    ended
}

/// A beam search that keeps lists and ends at the limit, or early if it is to.
fn naive(table: &Table, beam: BeamSearch) -> Vec<Hypothesis> {
    let (mut live, mut ended) = (vec![(Vec::new(), 0.0)], Vec::new());
    while !(live.is_empty() || beam.early_stopping && ended.len() >= beam.width) {
        let mut next = Vec::new();
        for one in &live {
            let mut children = extended(table, one);
            children.sort_by(|a, b| b.1.total_cmp(&a.1));
            next.extend(children.into_iter().take(2 * beam.width));
        }
        next.sort_by(|a: &Hypothesis, b| b.1.total_cmp(&a.1));
        let (over, mut rest): (Vec<_>, Vec<_>) = next.into_iter().partition(has_ended);
        ended.extend(over);
        rest.truncate(beam.width);
        live = rest;
    }
    ended
}

fn outputs(llm: &mut Llm, request: GenerationRequest) -> Vec<CompletionOutput> {
    llm.run(vec![request]).unwrap().remove(0).outputs
}

fn assert_equal(found: &[CompletionOutput], best: &[Hypothesis], what: &str) {
    let ids: Vec<&[u32]> = found.iter().map(|output| &output.token_ids[..]).collect();
    assert_eq!(ids, best.iter().map(|(tokens, _)| &tokens[..]).collect::<Vec<_>>(), "{what}");
    for (output, (tokens, _)) in found.iter().zip(best) {
        let wanted = if tokens.ends_with(&[EOS]) { FinishReason::Stop(None) } else { FinishReason::Length };
        assert_eq!(output.finish_reason, Some(wanted), "{what}");
    }
}

const PENALTIES: [f32; 4] = [-1.0, 0.0, 1.0, 2.5];

#[test]
fn a_beam_as_wide_as_all_prefixes_gives_the_best_of_an_exhaustive_search() {
    let table = table();
    let all = exhaustive(&table);
    assert_eq!(all.len(), (1 + 3 + 9 + 27 + 81) + 3 * 81);
    let mut llm = Llm::new(wide(400)).unwrap();
    let mut answers = Vec::new();
    for length_penalty in PENALTIES {
        let beam = BeamSearch { length_penalty, ..BeamSearch::new(ALL_PREFIXES) };
        let found = outputs(&mut llm, search(beam, 12));
        assert_equal(&found, &best(all.clone(), beam, 12), &format!("length penalty {length_penalty}"));
        answers.push(found);
    }
    assert!(answers[0] != answers[1] && answers[1] != answers[3], "the length penalty decides something");
    let ends = |reason| answers.iter().flatten().any(|output| output.finish_reason.as_ref() == Some(reason));
    assert!(ends(&FinishReason::Stop(None)) && ends(&FinishReason::Length), "both kinds of end are among the best");
}

#[test]
fn a_narrow_beam_gives_what_a_naive_search_finds() {
    let table = table();
    let mut missed = 0;
    for enable_prefix_caching in [true, false] {
        let mut llm = Llm::new(EngineConfig { enable_prefix_caching, ..config(64) }).unwrap();
        for width in [1, 2, 3, 5, 8] {
            for length_penalty in PENALTIES {
                for early_stopping in [false, true] {
                    let beam = BeamSearch { width, length_penalty, early_stopping };
                    let wanted = best(naive(&table, beam), beam, width);
                    assert_equal(&outputs(&mut llm, search(beam, width)), &wanted, &format!("{beam:?}"));
                    missed += usize::from(wanted != best(exhaustive(&table), beam, width));
                }
            }
        }
    }
    assert!(missed > 0, "no beam was too narrow: the test shows nothing");
}

#[test]
fn log_probabilities_of_the_results_are_those_of_the_raw_distribution() {
    let table = table();
    let mut request = search(BeamSearch::new(3), 2);
    request.params.sampling.logprobs = Some(4);
    let (_, events) = Llm::new(config(64)).unwrap().run_with_events(vec![request]).unwrap().remove(0);
    let deltas: Vec<_> = events.iter().filter_map(|e| if let Event::Delta(d) = e { Some(d) } else { None }).collect();
    assert_eq!(deltas.iter().map(|delta| delta.index).collect::<Vec<_>>(), [0, 1], "each result as one delta");
    for delta in deltas {
        let ids: Vec<u32> = delta.tokens.iter().map(|token| token.id).collect();
        for (at, token) in delta.tokens.iter().enumerate() {
            let place = ALLOWED.iter().position(|&id| id == token.id).unwrap();
            let found = token.logprobs.as_ref().unwrap();
            assert!((f64::from(found.logprob) - table[&ids[..at]][place].0).abs() < 1e-6);
            assert_eq!(found.top.len(), 4);
        }
    }
}

/// A search over the whole vocabulary, long enough to fill blocks.
fn long(which: u32, width: usize) -> GenerationRequest {
    let mut request = request(which, 21 + which as usize, 20, width.min(2));
    request.params.sampling.repetition_penalty = 1.3;
    request.params.beam = Some(BeamSearch::new(width));
    request
}

#[test]
fn block_size_prefix_cache_chunks_and_preemption_change_no_result() {
    let mut requests: Vec<GenerationRequest> = (0..5).map(|i| long(i, 2 + i as usize % 3)).collect();
    requests.push(request(9, 30, 24, 3));
    let want = alone(&requests);
    assert!(want[..5].iter().all(|results| results[0] != results[1]));
    for block_size in [8, 16] {
        for enable_prefix_caching in [true, false] {
            for tokens_of_pool in [1024, 256] {
                let blocks = tokens_of_pool / 8;
                let sizes = EngineConfig { block_size: Some(block_size), enable_prefix_caching, ..config(blocks) };
                let mut llm = Llm::new(EngineConfig { max_num_batched_tokens: 24, ..sizes }).unwrap();
                let what = format!("blocks of {block_size}, pool of {tokens_of_pool}, cache {enable_prefix_caching}");
                assert_eq!(tokens(&mut llm, requests.clone()), want, "{what}");
                assert_eq!(llm.stats().scheduler.preemptions > 0, tokens_of_pool == 256, "{what}");
                assert_eq!(llm.stats().scheduler.kv_cache_usage(), 0.0, "{what}: blocks are left over");
            }
        }
    }
}

/// Runs an engine to its end; the events of each step, and the blocks in use after it.
fn steps(engine: &mut Engine, blocks: f64) -> Vec<(Vec<TokenEvent>, f64)> {
    let mut steps = Vec::new();
    while engine.has_work() {
        let mut events = Vec::new();
        engine.step(|_, event| events.push(event));
        steps.push((events, (engine.stats().scheduler.kv_cache_usage() * blocks).round()));
    }
    steps
}

#[test]
fn beams_share_the_blocks_of_the_prompt_and_of_common_prefixes() {
    let mut request = long(3, 4);
    request.prompt = prompt(3, 64);
    let mut engine = Engine::load(&config(64), &|_, _| {}).unwrap();
    engine.submit(request).unwrap();
    let used: Vec<f64> = steps(&mut engine, 64.0).into_iter().map(|(_, used)| used).collect();
    let most = used.iter().copied().fold(0.0, f64::max);
    // 64 tokens fill 8 blocks; 19 tokens behind them want 3 for each of 4 beams. Unshared it would be 4 * 11.
    assert!((9.0..=20.0).contains(&most), "{used:?}");
    assert_eq!((used[0], *used.last().unwrap()), (8.0, 0.0), "{used:?}");
}

#[test]
fn the_start_is_reported_after_the_prompt_and_the_results_at_the_end() {
    let mut request = long(1, 3);
    request.params.prompt_logprobs = Some(1);
    let mut engine = Engine::load(&config(64), &|_, _| {}).unwrap();
    engine.submit(request).unwrap();
    let steps = steps(&mut engine, 64.0);
    assert!(
        matches!(&steps[0].0[..], [TokenEvent::PromptLogprobs(scores), TokenEvent::Started { .. }] if scores.len() == 22)
    );
    let (last, before) = steps.split_last().unwrap();
    assert!(before.len() >= 5 && before[1..].iter().all(|(events, _)| events.is_empty()));
    let ends = last.0.iter().filter(|event| matches!(event, TokenEvent::Token { finish: Some(_), .. })).count();
    assert_eq!(ends, 2);
    // Three beams per step; hypotheses that ended earlier count too.
    assert!(engine.stats().generation_tokens >= 3 * before.len() as u64);
}

#[test]
fn a_search_can_be_cancelled_at_any_step() {
    for step in 0..12 {
        let mut engine = Engine::load(&config(64), &|_, _| {}).unwrap();
        let id = engine.submit(long(1, 4)).unwrap();
        (0..step).for_each(|_| engine.step(|_, _| ()));
        assert!(!engine.finish_sequence(id, 0), "results are not known yet");
        assert!(engine.abort(id));
        assert_eq!((engine.has_work(), engine.stats().scheduler.kv_cache_usage()), (false, 0.0));
    }
}

#[test]
fn stop_tokens_end_hypotheses_but_not_before_min_tokens() {
    let mut llm = Llm::new(config(64)).unwrap();
    let mut asked = search(BeamSearch { length_penalty: -1.0, ..BeamSearch::new(4) }, 4);
    asked.params.stop_token_ids = vec![300];
    let found = outputs(&mut llm, asked.clone());
    let stopped = |id| Some(FinishReason::Stop(id));
    assert!(found.iter().any(|output| output.finish_reason == stopped(Some(StopCause::Token(300)))));
    assert!(
        found
            .iter()
            .all(|output| output.token_ids[..output.token_ids.len() - 1].iter().all(|id| ![EOS, 300].contains(id)))
    );
    asked.params.sampling.min_tokens = 3;
    let lengths: Vec<usize> = outputs(&mut llm, asked.clone()).iter().map(|output| output.token_ids.len()).collect();
    assert!(lengths.iter().all(|&length| length > 3) && lengths.contains(&4), "{lengths:?}");
    asked.params.sampling.min_tokens = 0;
    (asked.params.ignore_eos, asked.params.stop_token_ids) = (true, Vec::new());
    assert!(outputs(&mut llm, asked).iter().all(|output| output.finish_reason == Some(FinishReason::Length)));
}

#[test]
fn if_fewer_continuations_exist_than_requested_the_rest_is_empty() {
    let mut llm = Llm::new(config(64)).unwrap();
    let mut asked = search(BeamSearch::new(3), 3);
    asked.params.sampling.allowed_token_ids = Some([17].into());
    let found: Vec<Vec<u32>> = outputs(&mut llm, asked.clone()).into_iter().map(|output| output.token_ids).collect();
    assert_eq!(found, [vec![17; STEPS], Vec::new(), Vec::new()]);
    asked.params.max_tokens = Some(0);
    let found = outputs(&mut llm, asked);
    assert!(found.iter().all(|o| o.token_ids.is_empty() && o.finish_reason == Some(FinishReason::Length)));
}
