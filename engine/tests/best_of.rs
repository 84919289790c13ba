//! `best_of`: all candidates are made, the best are shown.

use crate::common::{config, request};
use engine::{BeamSearch, CompletionOutput, Event, FinishReason, GenerationRequest, Llm, SubmitError};

/// Candidates of different lengths: sampled, until a token that ends them.
fn candidates(n: usize) -> GenerationRequest {
    let mut request = request(5, 20, 24, n);
    request.params.stop_token_ids = (0..560).step_by(16).collect();
    request
}

/// The answers and all events.
fn run(llm: &mut Llm, request: GenerationRequest) -> (Vec<CompletionOutput>, Vec<Event>) {
    let (completion, events) = llm.run_with_events(vec![request]).unwrap().remove(0);
    (completion.outputs, events)
}

fn deltas(events: &[Event]) -> Vec<&engine::Delta> {
    events.iter().filter_map(|event| if let Event::Delta(delta) = event { Some(delta) } else { None }).collect()
}

/// Mean log-probability of each sequence's tokens.
fn means(events: &[Event], n: usize) -> Vec<f64> {
    let of = |index: usize| {
        let tokens = deltas(events).into_iter().filter(|delta| delta.index as usize == index).flat_map(|d| &d.tokens);
        let logprobs: Vec<f64> = tokens.map(|t| f64::from(t.logprobs.as_ref().unwrap().logprob)).collect();
        logprobs.iter().sum::<f64>() / logprobs.len() as f64
    };
    (0..n).map(of).collect()
}

#[test]
fn the_best_of_the_samples_are_the_answer_best_first() {
    let mut llm = Llm::new(config(64)).unwrap();
    let (all, events) = run(&mut llm, candidates(8));
    let means = means(&events, 8);
    let mut order: Vec<usize> = (0..8).collect();
    order.sort_by(|&a, &b| means[b].total_cmp(&means[a]));
    assert!(order[..3] != [0, 1, 2], "the test shows nothing");
    let lengths: Vec<usize> = all.iter().map(|output| output.token_ids.len()).collect();
    assert!(lengths.iter().any(|&length| length != lengths[0]), "{lengths:?}");

    let mut asked = candidates(3);
    asked.params.best_of = Some(8);
    let made = llm.stats().generation_tokens;
    let (best, events) = run(&mut llm, asked.clone());
    assert_eq!(best, order[..3].iter().map(|&i| all[i].clone()).collect::<Vec<_>>());
    assert_eq!(llm.stats().generation_tokens - made, lengths.iter().sum::<usize>() as u64, "every candidate counts");
    // They are returned together after the start, each as one delta.
    assert!(matches!(events[0], Event::Started { .. }));
    let deltas = deltas(&events);
    assert_eq!(deltas.iter().map(|delta| delta.index).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(deltas.iter().all(|delta| delta.finish.is_some()));
    assert!(deltas.iter().flat_map(|delta| &delta.tokens).all(|token| token.logprobs.as_ref().unwrap().top.len() == 2));

    // Log-probabilities that were not requested rank the candidates and are not returned.
    asked.params.sampling.logprobs = None;
    let (unasked, events) = run(&mut llm, asked);
    assert_eq!(unasked, best);
    assert!(self::deltas(&events).iter().flat_map(|delta| &delta.tokens).all(|token| token.logprobs.is_none()));
}

#[test]
fn candidates_end_at_stop_strings_and_survive_preemption() {
    let mut asked = request(5, 20, 24, 8);
    let mut llm = Llm::new(config(64)).unwrap();
    let (all, _) = run(&mut llm, asked.clone());
    // Two characters of one sample, from its midst.
    let text: String = all[4].text.chars().skip(4).take(2).collect();
    asked.params.stop = [text.clone()].into();
    let (stopped, events) = run(&mut llm, asked.clone());
    assert!(stopped.iter().any(|output| matches!(output.finish_reason, Some(FinishReason::Stop(_)))));
    let means = means(&events, 8);
    let best = (0..8).max_by(|&a, &b| means[a].total_cmp(&means[b]).then(b.cmp(&a))).unwrap();
    (asked.params.n, asked.params.best_of) = (1, Some(8));
    // A request wants 2 blocks of the prompt and 4 for each candidate, so 40 do not hold two of them.
    for blocks in [64, 40] {
        let mut llm = Llm::new(config(blocks)).unwrap();
        for completion in llm.run(vec![asked.clone(), asked.clone()]).unwrap() {
            assert_eq!(completion.outputs, stopped[best..=best]);
        }
        assert_eq!(llm.stats().scheduler.preemptions > 0, blocks == 40);
        assert_eq!(llm.stats().scheduler.kv_cache_usage(), 0.0);
    }
}

#[test]
fn as_many_candidates_as_answers_are_plain_samples() {
    let mut llm = Llm::new(config(64)).unwrap();
    let plain = run(&mut llm, candidates(3));
    let mut same = candidates(3);
    same.params.best_of = Some(3);
    let (outputs, events) = run(&mut llm, same);
    assert_eq!(outputs, plain.0);
    assert_eq!(deltas(&events), deltas(&plain.1), "told as they come");
}

#[test]
fn scoring_alone_has_candidates_without_tokens() {
    let mut asked = request(5, 20, 0, 2);
    (asked.params.best_of, asked.params.prompt_logprobs) = (Some(4), Some(1));
    let (outputs, events) = run(&mut Llm::new(config(64)).unwrap(), asked);
    assert!(outputs.len() == 2 && outputs.iter().all(|o| o.finish_reason == Some(FinishReason::Length)));
    assert!(matches!(&events[0], Event::PromptLogprobs(scores) if scores.len() == 20));
}

#[test]
fn contradictory_numbers_are_refused_with_the_name_of_the_field() {
    let mut llm = Llm::new(config(64)).unwrap();
    let mut refused = |change: &dyn Fn(&mut engine::GenerationParams)| {
        let mut request = request(1, 10, 4, 2);
        change(&mut request.params);
        match llm.run(vec![request]) {
            Err(SubmitError::Invalid { param, message }) => {
                assert!(message.starts_with(param) && !message.contains('\n'), "{message}");
                (param, message)
            }
            other => panic!("{other:?}"),
        }
    };
    let beam = |width| Some(BeamSearch::new(width));
    assert_eq!(refused(&|p| p.n = 0).0, "n");
    assert_eq!(refused(&|p| p.best_of = Some(1)).0, "best_of");
    assert_eq!(refused(&|p| (p.best_of, p.beam) = (Some(2), beam(2))).0, "best_of");
    assert_eq!(refused(&|p| p.beam = beam(1)).0, "beam_width");
    for length_penalty in [f32::NAN, f32::INFINITY] {
        let beam = Some(BeamSearch { length_penalty, ..BeamSearch::new(2) });
        assert_eq!(refused(&|p| p.beam = beam).0, "length_penalty");
    }
    let (param, message) = refused(&|p| (p.beam, p.stop) = (beam(2), ["a".into()].into()));
    assert!(param == "stop" && message.contains("stop_token_ids"), "{message}");
    // Limits of their own, with the name of the request's field.
    type Change = fn(&mut engine::GenerationParams);
    let beams: Change = |p| p.beam = Some(BeamSearch::new(usize::MAX));
    let changes: [(Change, &str, &str); 3] = [
        (|p| p.n = usize::MAX, "n", "at most 16384"),
        (|p| p.best_of = Some(usize::MAX), "best_of", "at most 16384"),
        (beams, "beam_width", "at most 16 sequences run at once (--max-num-seqs)"),
    ];
    for (change, name, limit) in changes {
        let (param, message) = refused(&change);
        assert!(param == name && message.contains(limit), "{message}");
    }
}
