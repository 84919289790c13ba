//! How sequences end, and the text that they return then.

use crate::common::{config, prompt};
use engine::{CompletionOutput, FinishReason, GenerationParams, GenerationRequest, Llm, SamplingParams, StopCause};

/// The reference model's end-of-sequence token.
const EOS: u32 = 2;

/// Greedy, with these tokens pushed above all others, the first the most.
fn pushed(tokens: &[u32], change: impl FnOnce(&mut GenerationParams)) -> CompletionOutput {
    let bias = tokens.iter().zip((0..).map(|i| 100.0 - 10.0 * i as f32)).map(|(&id, bias)| (id, bias)).collect();
    let sampling = SamplingParams { temperature: 0.0, logit_bias: bias, ..Default::default() };
    let mut params = GenerationParams { sampling, max_tokens: Some(12), ..Default::default() };
    change(&mut params);
    let mut llm = Llm::new(config(64)).unwrap();
    let request = GenerationRequest { prompt: prompt(1, 20), params, ..Default::default() };
    llm.run(vec![request]).unwrap().remove(0).outputs.remove(0)
}

fn stopped_by(token: u32) -> Option<FinishReason> {
    Some(FinishReason::Stop(Some(StopCause::Token(token))))
}

#[test]
fn s7_an_end_of_sequence_token_ends_it_unseen_unless_it_is_ignored_or_held_back() {
    let ended = pushed(&[EOS], |_| ());
    assert_eq!((ended.token_ids.as_slice(), ended.text.as_str()), (&[EOS][..], ""));
    assert_eq!(ended.finish_reason, Some(FinishReason::Stop(None)));
    let ignored = pushed(&[EOS], |p| p.ignore_eos = true);
    assert_eq!((ignored.token_ids, ignored.finish_reason), (vec![EOS; 12], Some(FinishReason::Length)));
    let held_back = pushed(&[EOS, 300], |p| p.sampling.min_tokens = 5);
    assert_eq!(held_back.token_ids, [300, 300, 300, 300, 300, EOS]);
}

#[test]
fn s7_a_stop_token_ends_the_sequence_and_is_named_as_the_cause() {
    let ended = pushed(&[300], |p| p.stop_token_ids = vec![299, 300]);
    assert_eq!((ended.token_ids.as_slice(), ended.text.as_str()), (&[300][..], ""));
    assert_eq!(ended.finish_reason, stopped_by(300));
    let shown = pushed(&[300], |p| (p.stop_token_ids, p.include_stop_str_in_output) = (vec![300], true));
    assert!(!shown.text.is_empty());
    let held_back = pushed(&[300, 301], |p| (p.stop_token_ids, p.sampling.min_tokens) = (vec![300], 3));
    assert_eq!(held_back.token_ids, [301, 301, 301, 300]);
    assert_eq!(held_back.finish_reason, stopped_by(300));
}

#[test]
fn s7_a_stop_string_ends_the_sequence_in_the_step_that_completes_it() {
    let plain = pushed(&[300], |_| ()).text;
    let letter: String = plain.chars().take(1).collect();
    let stop = letter.repeat(3);
    let ended = pushed(&[300], |p| p.stop = ["never".into(), stop.clone()].into());
    assert_eq!((ended.token_ids.len(), ended.text.as_str()), (3, ""));
    assert_eq!(ended.finish_reason, Some(FinishReason::Stop(Some(StopCause::Text(stop.clone())))));
    let included = pushed(&[300], |p| (p.stop, p.include_stop_str_in_output) = ([stop.clone()].into(), true));
    assert_eq!(included.text, stop);
}

#[test]
fn one_sample_that_stops_early_does_not_end_the_others() {
    let mut llm = Llm::new(config(64)).unwrap();
    let sampling = SamplingParams { seed: Some(3), temperature: 1.5, ..Default::default() };
    let params = GenerationParams { sampling, max_tokens: Some(30), ignore_eos: true, n: 4, ..Default::default() };
    let request = GenerationRequest { prompt: prompt(2, 20), params, ..Default::default() };
    let whole = llm.run(vec![request.clone()]).unwrap().remove(0).outputs;
    // A token of one sample alone becomes a stop token.
    let lonely = |id: &&u32| whole[1..].iter().all(|o| !o.token_ids.contains(id));
    let stop = *whole[0].token_ids.iter().find(lonely).unwrap();
    let mut stopping = request;
    stopping.params.stop_token_ids = vec![stop];
    let outputs = llm.run(vec![stopping]).unwrap().remove(0).outputs;
    let until = whole[0].token_ids.iter().position(|&id| id == stop).unwrap();
    assert_eq!(outputs[0].token_ids, whole[0].token_ids[..=until]);
    assert_eq!(outputs[1..], whole[1..], "the others are as they were");
}
