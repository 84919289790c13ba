//! Beam search: forks between output tokens, blocks shared until they differ, and invalid outcomes.

use sched::{CommitError, MemOp, Outcome, Request, RequestId, SchedConfig, Scheduler, SeqId, StepPlan};

use super::{drain, scheduler};
use crate::common::{blocks_per_request, config, request, seq, spans};

fn search(id: u64, prompt: usize, width: usize, max_tokens: usize) -> Request {
    Request { n: width, beam_search: true, ..request(id, prompt, max_tokens) }
}

/// Beam `index` continues beam `parent` with a token.
fn from(index: u32, parent: u32, token: u32) -> Outcome {
    Outcome { parent, ..Outcome::token(seq(0, index), token, false) }
}

fn ended(index: u32) -> Outcome {
    Outcome { seq: seq(0, index), parent: index, tokens: vec![], finished: true }
}

fn commit(s: &mut Scheduler, plan: &StepPlan, outcomes: &[Outcome]) {
    s.submitted(plan.step).unwrap();
    s.commit(plan.step, outcomes).unwrap();
    s.audit().unwrap();
}

fn copies(plan: &StepPlan) -> usize {
    plan.memory.iter().filter(|op| matches!(op, MemOp::Copy { .. })).count()
}

#[test]
fn beams_share_their_prompt_and_copy_only_the_blocks_in_which_they_differ() {
    let mut s = scheduler(config(20, 4));
    s.submit(search(0, 10, 3, 20)).unwrap();
    let plan = s.plan();
    assert_eq!((spans(&plan), plan.spans[0].sample.clone()), (vec![(0, 10)], 0..3));
    commit(&mut s, &plan, &[from(0, 0, 1), from(1, 1, 2), from(2, 2, 3)]);
    assert_eq!(s.stats().blocks_in_use, 3, "three beams, one prompt");

    // All beams share the third block and write to it: two copies, and the last beam writes in place.
    let plan = s.plan();
    assert_eq!((spans(&plan), copies(&plan)), (vec![(0, 1), (0, 1), (0, 1)], 2));
    commit(&mut s, &plan, &[from(0, 0, 4), from(1, 0, 5), from(2, 2, 6)]);
    assert_eq!(s.stats().blocks_in_use, 4, "beam 1 continues beam 0, and its own block is freed");

    let plan = s.plan();
    assert_eq!(copies(&plan), 1, "beams 0 and 1 write to the same block");
    assert_eq!(plan.released, [seq(0, 1)], "beam 1 has a new table");
    assert_eq!(plan.spans[1].groups[0].table.append.len(), 3);
    assert_eq!(plan.spans.iter().map(|span| span.tokens[0]).collect::<Vec<_>>(), [4, 5, 6]);
    let lines = plan.to_string();
    let lines: Vec<&str> = lines.lines().filter(|line| !line.contains("poison")).collect();
    assert_eq!(
        lines,
        [
            "step 3: 3 spans, 3 tokens",
            "  drop the table of request 0, sequence 1",
            "  copy block 3 to block 4",
            "  request 0, sequence 0: positions 11..12; table: keep 2, 0 holes, append [4]; samples 0..1",
            "  request 0, sequence 1: positions 11..12; table: keep 0, 0 holes, append [0, 1, 3]; samples 1..2",
            "  request 0, sequence 2: positions 11..12; table: keep 3, 0 holes, append []; samples 2..3",
        ]
    );
    // All continue beam 2: the last blocks of the others are freed, and the three tables are equal.
    commit(&mut s, &plan, &[from(0, 2, 7), from(1, 2, 8), from(2, 2, 9)]);
    assert_eq!(s.stats().blocks_in_use, 3);
    let plan = s.plan();
    assert_eq!(copies(&plan), 0, "the shared block is full, so each beam takes a new one");
    assert_eq!(blocks_per_request(&s), [(RequestId(0), 6)]);
    commit(&mut s, &plan, &[ended(0), ended(1), ended(2)]);
    assert!(!s.has_work());
    assert_eq!((s.stats().blocks_free, s.stats().blocks_copied), (20, 3));
}

#[test]
fn an_ended_beam_can_become_a_fork_and_still_counts_against_max_num_seqs() {
    let mut s = scheduler(SchedConfig { max_num_seqs: 3, ..config(40, 4) });
    s.submit(search(0, 4, 3, 9)).unwrap();
    let plan = s.plan();
    commit(&mut s, &plan, &[from(0, 0, 1), ended(1), ended(2)]);
    s.submit(request(1, 4, 9)).unwrap();
    let plan = s.plan();
    assert_eq!(spans(&plan), [(0, 1)], "ended beams count against max_num_seqs");
    commit(&mut s, &plan, &[from(0, 0, 2), from(2, 0, 3)]);
    let plan = s.plan();
    let beams: Vec<SeqId> = plan.spans.iter().map(|span| span.seq).collect();
    assert_eq!((beams, plan.spans[1].start), (vec![seq(0, 0), seq(0, 2)], 5));
    assert_eq!(plan.spans.iter().map(|span| span.tokens[0]).collect::<Vec<_>>(), [2, 3]);
    commit(&mut s, &plan, &[from(0, 2, 2), from(1, 0, 2), from(2, 2, 2)]);
    assert_eq!(s.plan().spans.len(), 3);
}

#[test]
fn beams_that_are_computed_again_wait_for_each_other() {
    // The budget computes the tokens of one beam after those of the other.
    let mut s = scheduler(SchedConfig { max_num_batched_tokens: 5, max_num_seqs: 4, ..config(40, 4) });
    s.submit(search(0, 2, 2, 9)).unwrap();
    let step = |s: &mut Scheduler| {
        let plan = s.plan();
        let sampled = plan.spans.iter().flat_map(|span| span.sample.clone());
        commit(s, &plan, &sampled.map(|index| from(index, index, index)).collect::<Vec<_>>());
        plan
    };
    (0..5).for_each(|_| drop(step(&mut s)));
    assert!(s.reset_prefix_cache(true));
    let plans: Vec<StepPlan> = (0..4).map(|_| step(&mut s)).collect();
    let seen: Vec<Vec<(u32, usize, bool)>> = plans
        .iter()
        .map(|p| p.spans.iter().map(|q| (q.seq.index, q.tokens.len(), q.sample.is_empty())).collect())
        .collect();
    // The prompt, then four tokens of each beam, then the fifth of both in one step.
    assert_eq!(
        seen,
        [vec![(0, 2, true)], vec![(0, 4, true), (1, 1, true)], vec![(1, 3, true)], vec![(0, 1, false), (1, 1, false)]]
    );
}

#[test]
fn a_search_is_not_planned_ahead_of_its_outcome() {
    let mut s = scheduler(SchedConfig { max_in_flight: 2, ..config(40, 4) });
    s.submit(search(0, 4, 2, 9)).unwrap();
    let plan = s.plan();
    s.submitted(plan.step).unwrap();
    assert!(s.plan().spans.is_empty());
    commit(&mut s, &plan, &[from(0, 0, 1), from(1, 1, 2)]);
    let plan = s.plan();
    assert_eq!(plan.spans.iter().map(|span| span.awaits).collect::<Vec<_>>(), [None, None]);
    s.submitted(plan.step).unwrap();
    s.submit(request(1, 4, 2)).unwrap();
    let behind = s.plan();
    assert_eq!(spans(&behind), [(1, 4)], "other requests are planned ahead");
    commit(&mut s, &plan, &[from(0, 1, 1), from(1, 1, 2)]);
}

#[test]
fn s11_a_beam_width_above_max_num_seqs_is_refused() {
    let mut s = scheduler(config(40, 4));
    assert_eq!(
        s.submit(search(0, 4, 17, 9)).unwrap_err().to_string(),
        "the beam width is 17, but at most 16 sequences run at once (--max-num-seqs)"
    );
    assert_eq!(s.submit(search(0, 4, 0, 9)).unwrap_err().to_string(), "n is 0: at least one sequence is needed");
    assert!(!s.has_work() && s.stats().blocks_free == 40);
}

#[test]
fn an_invalid_parent_is_refused_and_nothing_is_committed() {
    let mut s = scheduler(config(40, 4));
    s.submit(search(0, 4, 2, 9)).unwrap();
    s.submit(Request { n: 2, ..request(1, 4, 9) }).unwrap();
    let plan = s.plan();
    let others = [Outcome::token(seq(1, 0), 1, false), Outcome::token(seq(1, 1), 1, false)];
    let mut error = |outcomes: &[Outcome]| s.commit(plan.step, outcomes).unwrap_err();
    let [one, two] = others.clone();
    let wrong = [from(0, 0, 1), from(1, 7, 1), one.clone(), two.clone()];
    assert_eq!(error(&wrong), CommitError::Parent { seq: seq(0, 1), parent: 7 });
    let wrong = [from(0, 0, 1), from(1, 0, 1), Outcome { parent: 1, ..one }, two];
    assert_eq!(error(&wrong), CommitError::Parent { seq: seq(1, 0), parent: 1 });
    let text = error(&wrong).to_string();
    assert!(text.contains("found parent 1") && !text.contains('\n'), "{text}");
    let missing = [from(0, 0, 1), others[0].clone(), others[1].clone()];
    assert_eq!(error(&missing), CommitError::MissingToken { seq: seq(0, 1) });
    let empty = [Outcome { tokens: vec![], ..from(0, 0, 1) }, from(1, 0, 1), others[0].clone(), others[1].clone()];
    assert_eq!(error(&empty), CommitError::MissingToken { seq: seq(0, 0) });
    assert!(!s.finish_sequence(seq(0, 0)), "beams end by outcomes");
    commit(&mut s, &plan, &[from(0, 0, 1), from(1, 1, 1), others[0].clone(), others[1].clone()]);
    drain(&mut s);
}
