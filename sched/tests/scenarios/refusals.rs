//! Refused requests, configurations and commits.

use sched::{CacheGroup, CommitError, Outcome, Refusal, Request, SchedConfig, Scheduler, StepId};

use super::scheduler;
use crate::common::{config, request, seq, spans};

#[test]
fn s11_a_request_that_can_never_fit_is_refused_with_the_numbers_and_the_next_runs() {
    let mut s = scheduler(config(49, 16));
    let refusal = s.submit(request(0, 1000, 1)).unwrap_err();
    assert_eq!(refusal, Refusal::NeverFits { needed: 63, pool: 49, longest_prompt: 784 });
    assert_eq!(refusal.to_string(), "needs 63 blocks, the pool holds 49; the longest prompt that fits is 784 tokens");
    s.submit(request(1, 784, 1)).unwrap();
    assert_eq!(spans(&s.plan()), [(1, 784)]);
}

#[test]
fn s11_each_refusal_names_its_reason() {
    let mut s = scheduler(config(49, 16));
    let mut message = |request| s.submit(request).unwrap_err().to_string();
    assert_eq!(message(request(0, 0, 1)), "the prompt is empty: at least one token is needed");
    assert_eq!(message(request(0, 1, 0)), "max_tokens is 0: at least one token is needed");
    assert_eq!(message(Request { n: 0, ..request(0, 1, 1) }), "n is 0: at least one sequence is needed");
    assert_eq!(
        message(Request { n: 17, ..request(0, 1, 1) }),
        "n is 17, but at most 16 sequences run at once (--max-num-seqs)"
    );
    assert_eq!(
        message(request(0, 2000, 49)),
        "the prompt has 2000 tokens and max_tokens is 49: together more than the context of 2048 (--max-model-len)"
    );
    s.submit(request(3, 1, 1)).unwrap();
    assert_eq!(s.submit(request(3, 1, 1)).unwrap_err().to_string(), "request 3 is live already");
}

#[test]
fn an_invalid_commit_is_an_error_and_changes_nothing() {
    let mut s = scheduler(SchedConfig { max_num_batched_tokens: 17, ..config(20, 16) });
    s.submit(request(0, 10, 5)).unwrap();
    s.submit(request(1, 10, 5)).unwrap();
    let plan = s.plan();
    let (a, b) = (seq(0, 0), seq(1, 0));
    let outcome = |seq, tokens: &[u32]| Outcome { seq, parent: seq.index, tokens: tokens.to_vec(), finished: false };
    let mut error = |step, outcomes: &[Outcome]| s.commit(step, outcomes).unwrap_err();
    assert_eq!(
        error(StepId(7), &[]).to_string(),
        "step 7 is not the oldest in flight (step 1 is): commit each plan that has spans once, in order"
    );
    assert_eq!(error(plan.step, &[]), CommitError::MissingToken { seq: a });
    assert_eq!(error(plan.step, &[outcome(a, &[])]), CommitError::MissingToken { seq: a });
    assert_eq!(error(plan.step, &[outcome(a, &[1]), outcome(a, &[1])]), CommitError::Duplicate { seq: a });
    assert_eq!(error(plan.step, &[outcome(seq(5, 0), &[1])]), CommitError::Unplanned { seq: seq(5, 0) });
    let expected = CommitError::TooManyTokens { seq: b, found: 1, expected: 0 };
    assert_eq!(error(plan.step, &[outcome(a, &[1]), outcome(b, &[1])]), expected);
    s.commit(plan.step, &[outcome(a, &[1])]).unwrap();
    assert!(matches!(s.commit(plan.step, &[outcome(a, &[1])]), Err(CommitError::NotInFlight { in_flight: None, .. })));
    assert_eq!(spans(&s.plan()), [(0, 1), (1, 3)]);
}

#[test]
fn a_configuration_under_which_a_request_could_starve_is_refused() {
    let message = |config| Scheduler::new(config).err().map(|e| e.to_string()).unwrap_or_default();
    let text = message(SchedConfig { max_num_batched_tokens: 16, ..config(10, 16) });
    assert_eq!(
        text,
        "--max-num-batched-tokens 16 must be greater than --max-num-seqs 16, or running sequences leave no token for \
         prompts: raise the former or lower the latter"
    );
    let text = message(SchedConfig { enable_chunked_prefill: false, ..config(10, 16) });
    assert!(
        text.starts_with("--max-num-batched-tokens 1024 is less than --max-model-len 2048: without --enable-chunked")
    );
    assert_eq!(
        message(SchedConfig { max_num_seqs: 0, ..config(10, 16) }),
        "--max-num-seqs: found 0, expected at least 1"
    );
    for max_in_flight in [0, 3] {
        let text = message(SchedConfig { max_in_flight, ..config(10, 16) });
        assert_eq!(text, format!("max_in_flight: found {max_in_flight}, expected 1 or 2 steps"));
    }
    for max_in_flight in [0, 65] {
        let text = message(SchedConfig { max_in_flight, pipeline: true, ..config(10, 16) });
        assert_eq!(text, format!("max_in_flight: found {max_in_flight}, expected 1 to 64 steps"));
    }
    assert!(message(config(0, 16)).starts_with("num_blocks: found 0, expected 1 to "));
}

#[test]
fn the_longest_prompt_of_a_refusal_fits_and_no_longer_one_does() {
    let sliding = |window| vec![CacheGroup::Full, CacheGroup::Sliding { window }];
    for (block_size, num_blocks, max_model_len, groups) in [
        (1, 7, 100, vec![CacheGroup::Full]),
        (4, 9, 100, vec![CacheGroup::Full]),
        (4, 9, 30, vec![CacheGroup::Full]),
        (16, 5, 70, vec![CacheGroup::Full]),
        (2, 20, 41, vec![CacheGroup::Full]),
        (4, 19, 60, sliding(6)),
        (2, 30, 50, sliding(1)),
    ] {
        let config = SchedConfig { groups, max_model_len, ..config(num_blocks, block_size) };
        let mut s = scheduler(config.clone());
        let mut submit = |prompt, n, max_tokens| s.submit(Request { n, ..request(prompt as u64, prompt, max_tokens) });
        for (n, max_tokens) in (1..5).flat_map(|n| (1..20).map(move |max_tokens| (n, max_tokens))) {
            // An id that is live already means that the request fits.
            let fits = |outcome: &Result<(), Refusal>| matches!(outcome, Ok(()) | Err(Refusal::DuplicateId(_)));
            let outcomes: Vec<_> = (1..=max_model_len).map(|prompt| submit(prompt, n, max_tokens)).collect();
            let longest = outcomes.iter().rposition(fits).map_or(0, |at| at + 1);
            for outcome in outcomes {
                if let Err(Refusal::NeverFits { longest_prompt, .. }) = outcome {
                    assert_eq!(longest_prompt, longest, "{config:?}, n {n}, max_tokens {max_tokens}");
                }
            }
        }
    }
}
