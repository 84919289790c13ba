//! Sources of drafts against searches of every place, and the settings that choose them.

use engine::speculate::{DraftScope, Ngram, Proposal, Proposer, Suffix, SuffixLimits};
use proptest::prelude::*;
use sched::SeqId;

use crate::counter::allocated_bytes;

/// The rules of prompt lookup, by looking at every place.
fn naive_ngram(tokens: &[u32], min: usize, max: usize, most: usize) -> Vec<u32> {
    let len = tokens.len();
    for n in (min..=max.min(len)).rev() {
        if let Some(at) = (n..len).find(|at| tokens[at - n..*at] == tokens[len - n..]) {
            return tokens[at..(at + most).min(len)].to_vec();
        }
    }
    Vec::new()
}

/// The rules of suffix decoding, by looking at every place: a draft and its score. `texts` are earlier outputs; `None`: the context's
/// own text, whose end is no earlier place.
fn naive_suffix(texts: Option<&[Vec<u32>]>, context: &[u32], most: usize, limits: &SuffixLimits) -> (Vec<u32>, f64) {
    let is_own_end = |at: usize, text: &[u32]| texts.is_none() && at == text.len();
    let own = [context.to_vec()];
    let mut best = (Vec::new(), 0.0);
    for length in 2..=limits.max_tree_depth.min(context.len()) {
        let end = &context[context.len() - length..];
        // What follows each occurrence, latest first.
        let mut behind: Vec<&[u32]> = texts
            .unwrap_or(&own)
            .iter()
            .flat_map(|text| {
                (length..=text.len())
                    .filter(|at| text[at - length..*at] == *end && !is_own_end(*at, text))
                    .map(|at| &text[at..])
            })
            .collect();
        behind.reverse();
        let (mut draft, mut probability, mut score) = (Vec::new(), 1.0, 0.0);
        while draft.len() < most.min((length as f64 * limits.max_spec_factor) as usize) {
            let next: Vec<u32> = behind.iter().filter_map(|text| text.get(draft.len()).copied()).collect();
            let count = |token: u32| next.iter().filter(|other| **other == token).count();
            let Some(&token) = next.iter().rev().max_by_key(|token| count(**token)) else { break };
            probability *= count(token) as f64 / behind.len() as f64;
            if probability < limits.min_token_prob {
                break;
            }
            score += probability;
            draft.push(token);
            behind.retain(|text| text.get(draft.len() - 1) == Some(&token));
        }
        if score >= best.1 {
            best = (draft, score);
        }
    }
    best
}

fn seq(id: u64) -> SeqId {
    SeqId { request: sched::RequestId(id), index: 0 }
}

fn ask(proposer: &mut dyn Proposer, seq: SeqId, most: usize) -> Vec<u32> {
    let mut wanted = [Proposal { seq, most, drafts: Vec::new() }];
    proposer.propose(&mut wanted).unwrap();
    let [Proposal { drafts, .. }] = wanted;
    drafts
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn prompt_lookup_proposes_what_a_search_of_every_place_finds(
        prompt in prop::collection::vec(0u32..3, 1..20),
        output in prop::collection::vec(0u32..3, 1..20),
        (min, more) in (1usize..4, 0usize..4),
        most in 1usize..6,
    ) {
        let mut ngram = Ngram::new(min, min + more);
        // Two sequences of a request share its prompt, and nothing that they draw.
        let [one, other] = [0, 1].map(|index| SeqId { index, ..seq(0) });
        ngram.begin(one, &DraftScope::default(), &prompt);
        let (mut tokens, mut others) = (prompt.clone(), prompt.clone());
        for (at, token) in output.iter().enumerate() {
            ngram.extend(one, *token);
            tokens.push(*token);
            if at == 0 {
                ngram.begin(other, &DraftScope::default(), &prompt);
            }
            ngram.extend(other, output[output.len() - 1 - at]);
            others.push(output[output.len() - 1 - at]);
            for (seq, tokens) in [(one, &tokens), (other, &others)] {
                prop_assert_eq!(ask(&mut ngram, seq, most), naive_ngram(tokens, min, min + more, most));
            }
        }
    }

    #[test]
    fn suffix_decoding_proposes_what_a_search_of_every_place_finds_and_nothing_of_another_source(
        texts in prop::collection::vec((0usize..3, prop::collection::vec(0u32..3, 0..4), prop::collection::vec(0u32..3, 1..12)), 1..9),
        depth in 2usize..8,
        kept in 0usize..4,
        factor in 0.5f64..3.0,
        least in 0.0f64..0.7,
        most in 1usize..8,
    ) {
        let limits = SuffixLimits {
            max_tree_depth: depth,
            max_cached_requests: kept,
            max_spec_factor: factor,
            min_token_prob: least,
        };
        let sources = [
            DraftScope::default(),
            DraftScope { cache_salt: Some("a".into()), adapter: None },
            DraftScope { cache_salt: Some("a".into()), adapter: Some("b".into()) },
        ];
        let mut suffix = Suffix::new(limits);
        let mut earlier: Vec<(usize, Vec<u32>)> = Vec::new();
        for ((source, prompt, output), id) in texts.into_iter().zip(0..) {
            suffix.begin(seq(id), &sources[source], &prompt);
            // Another sequence of the request, which shares the prompt, and nothing that it draws.
            let other = SeqId { index: 1, ..seq(id) };
            suffix.begin(other, &sources[source], &prompt);
            let mut others = prompt.clone();
            let mut own = prompt;
            let of_source: Vec<Vec<u32>> =
                earlier.iter().filter(|(of, _)| *of == source).map(|(_, text)| text.clone()).collect();
            let opposite: Vec<u32> = output.iter().rev().copied().collect();
            for (token, opposite) in output.iter().zip(&opposite) {
                for (seq, text, token) in [(seq(id), &mut own, token), (other, &mut others, opposite)] {
                    suffix.extend(seq, *token);
                    text.push(*token);
                    let (mine, score) = naive_suffix(None, text, most, &limits);
                    let (of_others, better) = naive_suffix(Some(&of_source), text, most, &limits);
                    let want = if better > score { of_others } else { mine };
                    prop_assert_eq!(ask(&mut suffix, seq, most), want, "{:?} behind {:?}", text, of_source);
                }
            }
            suffix.end(seq(id));
            suffix.end(other);
            earlier.extend([(source, output), (source, opposite)]);
            let surplus = earlier.len().saturating_sub(kept);
            earlier.drain(..surplus);
        }
    }
}

#[test]
fn a_prompt_is_indexed_once_for_all_sequences_of_its_request() {
    let prompt: Vec<u32> = (0..20_000).map(|at| at * at % 997).collect();
    let proposers: [fn() -> Box<dyn Proposer>; 2] =
        [|| Box::new(Ngram::new(2, 4)), || Box::new(Suffix::new(SuffixLimits::default()))];
    for proposer in proposers {
        let bytes = |sequences: u32| {
            let (mut proposer, before) = (proposer(), allocated_bytes());
            for index in 0..sequences {
                let seq = SeqId { index, ..seq(1) };
                proposer.begin(seq, &DraftScope::default(), &prompt);
                proposer.extend(seq, 7);
            }
            allocated_bytes() - before
        };
        let (one, many) = (bytes(1), bytes(128));
        assert!(one > 4 * prompt.len() && many < 2 * one, "{one} bytes for a sequence, {many} for 128");
    }
}

#[test]
fn a_setting_of_speculation_that_cannot_be_used_is_one_line_that_says_what_is_allowed() {
    let parse = |text: &str| text.parse::<engine::SpeculativeConfig>();
    let refused = |text: &str| {
        let line = parse(text).unwrap_err();
        assert!(!line.contains('\n'), "{line}");
        line
    };
    for (text, message) in [
        ("ngram", "not valid JSON"),
        ("[]", "expected a JSON object such as"),
        ("{}", r#"method: missing, expected "ngram", "suffix", "draft_model", "eagle3" or "mtp""#),
        (r#"{"method": "medusa"}"#, r#"method: found "medusa", expected "ngram", "suffix""#),
        (r#"{"method": "eagle3", "num_speculative_tokens": 2}"#, "model: missing, expected a folder"),
        (r#"{"method": "mtp"}"#, "num_speculative_tokens: missing, expected a whole number"),
        (
            r#"{"method": "mtp", "num_speculative_tokens": 2, "model": "x"}"#,
            r#"unknown key "model", expected one of method, num_speculative_tokens for mtp"#,
        ),
        (
            r#"{"method": "draft_model", "num_speculative_tokens": 2}"#,
            "model: missing, expected a folder, a .gguf file, or a hub id",
        ),
        (r#"{"method": "draft_model", "model": "x"}"#, "num_speculative_tokens: missing, expected a whole number"),
        (
            r#"{"method": "draft_model", "model": "x", "num_speculative_tokens": 2, "prompt_lookup_max": 3}"#,
            r#"unknown key "prompt_lookup_max", expected one of method, num_speculative_tokens, model, revision"#,
        ),
        (r#"{"method": "ngram"}"#, "num_speculative_tokens: missing, expected a whole number from 1 to 32"),
        (
            r#"{"method": "ngram", "num_speculative_tokens": 33}"#,
            "num_speculative_tokens: found 33, expected a whole number from 1 to 32",
        ),
        (
            r#"{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 4, "prompt_lookup_max": 3}"#,
            "prompt_lookup_min: found 4, expected at most prompt_lookup_max, 3",
        ),
        (
            r#"{"method": "suffix", "prompt_lookup_max": 3}"#,
            r#"unknown key "prompt_lookup_max", expected one of method, num_speculative_tokens, suffix_decoding_max_tree_depth"#,
        ),
        (
            r#"{"method": "suffix", "suffix_decoding_min_token_prob": 2}"#,
            "suffix_decoding_min_token_prob: found 2, expected a number from 0 to 1",
        ),
    ] {
        let line = refused(text);
        assert!(line.contains(message), "{text}: {line}");
    }
    let config = parse(r#"{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}"#).unwrap();
    assert_eq!(config.method, engine::SpeculativeMethod::Ngram { min: 4, max: 4 }, "the one given is also the other");
    assert_eq!(parse(r#"{"method": "suffix"}"#).unwrap().num_speculative_tokens, 24);
}
