//! Pipelines: as many steps in flight as stages, and no sequence waits for a token of one.

use std::collections::{HashMap, VecDeque};

use sched::{
    CommitError, MemOp, Outcome, Policy, PreemptionMode, Request, RequestId, SchedConfig, Scheduler, SeqId, StepPlan,
};

use crate::common::{commit_all, config, outcomes, request, sampled, seq, spans};

fn pipeline(stages: usize) -> SchedConfig {
    SchedConfig { max_in_flight: stages, pipeline: true, ..config(2000, 16) }
}

/// A model of a pipeline. A stage computes the steps in order, each once the stage before it has. The host takes no time.
struct Pipeline {
    scheduler: Scheduler,
    stages: usize,
    /// Time at which each stage has computed the steps in flight.
    free_at: Vec<f64>,
    /// The steps in flight, with the time at which each is done.
    in_flight: VecDeque<(StepPlan, f64)>,
    clock: f64,
    /// Time that all stages together have computed.
    busy: f64,
}

impl Pipeline {
    fn new(config: SchedConfig) -> Pipeline {
        let stages = config.max_in_flight;
        let (scheduler, in_flight) = (Scheduler::new(config).unwrap(), VecDeque::new());
        Pipeline { scheduler, stages, free_at: vec![0.0; stages], in_flight, clock: 0.0, busy: 0.0 }
    }

    /// Plans steps until the pipeline is full or nothing can be planned. Returns them.
    fn fill(&mut self) -> Vec<StepPlan> {
        let mut planned = Vec::new();
        while self.in_flight.len() < self.stages {
            let plan = self.scheduler.plan();
            if plan.spans.is_empty() {
                break;
            }
            assert!(plan.spans.iter().all(|span| span.awaits.is_none()));
            self.scheduler.submitted(plan.step).unwrap();
            let seconds = 1.0 + plan.num_tokens() as f64 / 64.0;
            let mut done = self.clock;
            for free_at in &mut self.free_at {
                done = done.max(*free_at) + seconds;
                *free_at = done;
            }
            self.busy += seconds * self.stages as f64;
            planned.push(plan.clone());
            self.in_flight.push_back((plan, done));
        }
        planned
    }

    /// Waits for the oldest step, and commits it. Each sampled sequence draws a token.
    fn commit(&mut self) {
        let (plan, done) = self.in_flight.pop_front().unwrap();
        self.clock = done;
        commit_all(&mut self.scheduler, &plan, 7);
    }

    /// Commits and plans this many times. Returns the plans.
    fn run(&mut self, commits: usize) -> Vec<StepPlan> {
        let mut planned = Vec::new();
        for _ in 0..commits {
            self.commit();
            planned.extend(self.fill());
        }
        planned
    }
}

/// Number of spans of each plan.
fn sizes(plans: &[StepPlan]) -> Vec<usize> {
    plans.iter().map(|plan| plan.spans.len()).collect()
}

#[test]
fn every_stage_has_work_while_there_are_as_many_streams_as_stages() {
    for stages in [1, 2, 3, 4, 7, 64] {
        for streams in [stages, stages + 1, 2 * stages - 1, 2 * stages, 5 * stages + 3] {
            let what = format!("{stages} stages, {streams} streams");
            let sizes_of_pool = SchedConfig { max_num_seqs: 512, max_num_batched_tokens: 1024, ..pipeline(stages) };
            let mut p = Pipeline::new(SchedConfig { num_blocks: 5000, ..sizes_of_pool });
            (0..streams as u64).for_each(|id| p.scheduler.submit(request(id, 20, 200)).unwrap());
            // The prompts are computed, and the pipeline fills.
            p.fill();
            p.run(3 * stages);
            assert_eq!(p.in_flight.len(), stages, "{what}");
            let (clock, busy) = (p.clock, p.busy);
            for _ in 0..4 * stages {
                p.run(1);
                assert_eq!(p.in_flight.len(), stages, "{what}");
                let spans: Vec<usize> = p.in_flight.iter().map(|(plan, _)| plan.spans.len()).collect();
                assert_eq!(spans.iter().sum::<usize>(), streams, "{what}: each stream is in one step: {spans:?}");
                assert!(spans.iter().max().unwrap() - spans.iter().min().unwrap() <= 1, "{what}: {spans:?}");
            }
            let share = (p.busy - busy) / (p.clock - clock) / stages as f64;
            assert!(share > 0.95, "{what}: the stages compute {share} of the time");
        }
    }
}

#[test]
fn fewer_streams_than_stages_are_in_one_step_each() {
    for streams in 1..4u64 {
        let mut p = Pipeline::new(pipeline(4));
        (0..streams).for_each(|id| p.scheduler.submit(request(id, 20, 10)).unwrap());
        let prompts = p.fill();
        assert_eq!(sizes(&prompts), [streams as usize]);
        assert_eq!(sizes(&p.run(1)), vec![1; streams as usize]);
        let mut steps = 1 + streams;
        while p.scheduler.has_work() {
            steps += p.run(1).len() as u64;
            assert!(steps < 100, "no progress");
        }
        assert_eq!(steps, 1 + 9 * streams, "a stream gains nothing from the other stages, and loses nothing");
    }
}

#[test]
fn steps_are_of_equal_size_again_after_many_prompts_ended_in_one_step() {
    let mut p = Pipeline::new(SchedConfig { max_num_seqs: 64, ..pipeline(4) });
    (0..4).for_each(|id| p.scheduler.submit(request(id, 20, 200)).unwrap());
    p.fill();
    assert_eq!(sizes(&p.run(8))[4..], [1, 1, 1, 1, 1, 1, 1]);
    (4..44).for_each(|id| p.scheduler.submit(request(id, 20, 200)).unwrap());
    let prompts = p.run(1);
    assert_eq!(sizes(&prompts), [41], "one decode and forty prompts");
    assert_eq!(sizes(&p.run(3)), [1, 1, 1]);
    assert_eq!(sizes(&p.run(4)), [11, 11, 11, 11]);
    assert_eq!(sizes(&p.run(8)), [11; 8]);
}

#[test]
fn prompts_that_end_in_every_step_take_nothing_from_the_share_of_decodes() {
    let mut p = Pipeline::new(SchedConfig { max_num_seqs: 64, ..pipeline(4) });
    (0..7).for_each(|id| p.scheduler.submit(request(id, 20, 200)).unwrap());
    p.fill();
    p.run(12);
    for id in 7..40 {
        p.scheduler.submit(request(id, 20, 1)).unwrap();
        p.run(1);
        let decodes = |plan: &StepPlan| plan.spans.iter().filter(|span| span.start > 0).count();
        let decodes: Vec<usize> = p.in_flight.iter().map(|(plan, _)| decodes(plan)).collect();
        assert_eq!((decodes.iter().sum::<usize>(), p.in_flight.len()), (7, 4), "{decodes:?}");
    }
}

#[test]
fn chunks_of_a_prompt_are_in_all_stages_and_the_sampling_span_is_right_behind_them() {
    let mut p = Pipeline::new(SchedConfig { max_num_batched_tokens: 32, ..pipeline(4) });
    p.scheduler.submit(request(0, 5 * 32 + 1, 3)).unwrap();
    let chunks = p.fill();
    let positions = |plans: &[StepPlan]| -> Vec<_> {
        let of_span = |span: &sched::Span| (span.start, span.tokens.len(), span.sample.clone());
        plans.iter().flat_map(|plan| &plan.spans).map(of_span).collect()
    };
    assert_eq!(positions(&chunks), [(0, 32, 0..0), (32, 32, 0..0), (64, 32, 0..0), (96, 32, 0..0)]);
    // A short prompt does not wait for their end.
    p.scheduler.submit(request(1, 1, 9)).unwrap();
    assert_eq!(positions(&p.run(1)), [(128, 31, 0..0), (0, 1, 0..1)]);
    assert_eq!(positions(&p.run(1)), [(159, 2, 0..1)]);
    assert!(p.run(2).is_empty(), "both wait for their first token");
    assert_eq!(p.in_flight.len(), 2);
    assert_eq!(positions(&p.run(2)), [(1, 1, 0..1), (161, 1, 0..1)], "one step each");
    assert_eq!(p.in_flight.len(), 2);
}

#[test]
fn plans_of_a_single_stage_are_those_without_a_pipeline() {
    let crowded = SchedConfig { num_blocks: 20, block_size: 4, host_blocks: 8, ..pipeline(1) };
    let mut both = [true, false].map(|pipeline| Scheduler::new(SchedConfig { pipeline, ..crowded.clone() }).unwrap());
    for id in 0..12u64 {
        let request = Request { n: 1 + id as usize % 3, ..request(id, 9, 12) };
        both.iter_mut().for_each(|s| s.submit(request.clone()).unwrap());
    }
    while both[0].has_work() {
        let [plan, other] = both.each_mut().map(Scheduler::plan);
        assert_eq!(plan, other);
        both.iter_mut().for_each(|s| commit_all(s, &plan, 7));
    }
    assert!(!both[1].has_work() && both[1].stats().preemptions > 0);
}

#[test]
fn every_stream_advances_even_if_each_step_is_committed_before_the_next_is_planned() {
    let mut s = Scheduler::new(pipeline(4)).unwrap();
    (0..8).for_each(|id| s.submit(request(id, 20, 100)).unwrap());
    let mut last_planned: HashMap<RequestId, u64> = HashMap::new();
    for _ in 0..100 {
        let plan = s.plan();
        assert_eq!(plan.spans[0].seq, seq(0, 0), "the first request is in each step");
        for span in &plan.spans {
            let before = last_planned.insert(span.seq.request, plan.step.0);
            assert!(before.is_none_or(|step| plan.step.0 - step <= 8), "{} waits since {before:?}", span.seq);
        }
        commit_all(&mut s, &plan, 7);
    }
    assert!(last_planned.len() == 8 && last_planned.values().all(|step| *step > 92), "{last_planned:?}");
}

#[test]
fn a_prompt_gets_all_tokens_that_the_share_leaves() {
    let mut s = Scheduler::new(SchedConfig { max_num_batched_tokens: 40, ..pipeline(4) }).unwrap();
    (0..8).for_each(|id| s.submit(request(id, 4, 100)).unwrap());
    let prompts = s.plan();
    commit_all(&mut s, &prompts, 7);
    s.submit(request(8, 39, 5)).unwrap();
    let plans = [0, 1, 2].map(|_| {
        let plan = s.plan();
        commit_all(&mut s, &plan, 7);
        spans(&plan)
    });
    // The last token of the prompt is not part of the share. The first request is in each.
    assert_eq!(plans, [vec![(0, 1), (1, 1), (8, 38)], vec![(0, 1), (2, 1), (8, 1)], vec![(0, 1), (3, 1), (4, 1)]]);
}

#[test]
fn a_sequence_with_drafts_in_flight_is_not_planned() {
    let mut p = Pipeline::new(pipeline(3));
    p.scheduler.submit(request(0, 20, 50)).unwrap();
    p.fill();
    p.commit();
    assert!(p.scheduler.propose(seq(0, 0), vec![7, 7, 8]));
    let verified = p.fill();
    assert_eq!((spans(&verified[0]), verified.len()), (vec![(0, 4)], 1));
    assert!(!p.scheduler.propose(seq(0, 0), vec![7]), "the token before these drafts is unknown");
    p.in_flight.clear();
    let right = Outcome { tokens: vec![7, 7, 9], ..Outcome::token(seq(0, 0), 0, false) };
    p.scheduler.commit(verified[0].step, &[right]).unwrap();
    let next = p.fill();
    assert_eq!((next.len(), next[0].spans[0].start, &next[0].spans[0].tokens[..]), (1, 23, &[9][..]));
}

#[test]
fn sequences_of_a_request_fork_after_the_prompt_and_are_then_divided_over_the_stages() {
    let mut p = Pipeline::new(SchedConfig { max_num_batched_tokens: 17, ..pipeline(4) });
    p.scheduler.submit(Request { n: 4, ..request(0, 40, 9) }).unwrap();
    assert_eq!(p.fill().iter().map(spans).collect::<Vec<_>>(), [[(0, 17)], [(0, 17)], [(0, 6)]]);
    assert!(p.run(2).is_empty(), "three sequences have no table yet");
    let forked = p.run(1);
    let drawn: Vec<Vec<SeqId>> = forked.iter().map(|plan| sampled(plan).collect()).collect();
    assert_eq!(drawn, [1, 2, 3, 0].map(|index| vec![seq(0, index)]), "the first has computed the prompt");
}

#[test]
fn a_sequence_that_ended_in_flight_takes_no_share() {
    let mut p = Pipeline::new(pipeline(4));
    p.scheduler.submit(Request { n: 2, ..request(0, 20, 9) }).unwrap();
    p.fill();
    let steps = p.run(1);
    assert_eq!(steps.iter().flat_map(sampled).collect::<Vec<_>>(), [seq(0, 1), seq(0, 0)]);
    p.commit();
    assert!(p.scheduler.finish_sequence(seq(0, 0)));
    assert_eq!(p.fill().iter().flat_map(sampled).collect::<Vec<_>>(), [seq(0, 1)]);
    assert_eq!(p.in_flight.len(), 2);
}

#[test]
fn the_beams_of_a_search_are_in_one_step() {
    for stages in 2..6 {
        let mut p = Pipeline::new(pipeline(stages));
        (0..3).for_each(|id| p.scheduler.submit(request(id, 20, 200)).unwrap());
        p.scheduler.submit(Request { n: 4, beam_search: true, ..request(3, 20, 200) }).unwrap();
        p.fill();
        let plans = p.run(100);
        let beams = |plan: &StepPlan| plan.spans.iter().filter(|span| span.seq.request == RequestId(3)).count();
        assert!(plans.iter().all(|plan| [0, 4].contains(&beams(plan))));
        assert!(plans.iter().filter(|plan| beams(plan) == 4).count() >= 100 / (stages + 1));
    }
}

#[test]
fn steps_behind_a_failed_one_can_only_fail_however_many_there_are() {
    let caching = SchedConfig { max_num_batched_tokens: 32, enable_prefix_caching: true, ..pipeline(4) };
    let mut s = Scheduler::new(caching).unwrap();
    s.submit(request(0, 100, 3)).unwrap();
    let mut steps: VecDeque<StepPlan> = VecDeque::new();
    for id in 1..5 {
        let plan = s.plan();
        s.submitted(plan.step).unwrap();
        steps.push_back(plan);
        s.submit(request(id, 14, 3)).unwrap();
    }
    let requests = |plan: &StepPlan| plan.spans.iter().map(|span| span.seq.request.0).collect::<Vec<_>>();
    assert_eq!(steps.iter().map(requests).collect::<Vec<_>>(), [vec![0], vec![0, 1], vec![0, 2], vec![0, 3]]);
    commit_all(&mut s, &steps.pop_front().unwrap(), 7);
    let cached = s.cached_prefixes(0);
    while let Some(failed) = steps.pop_front() {
        s.fail(failed.step, &failed.memory).unwrap();
        s.audit().unwrap();
        let Some(behind) = steps.front() else { break };
        let refused = s.commit(behind.step, &outcomes(behind, 7));
        assert_eq!(refused, Err(CommitError::BehindFailure { step: behind.step }));
        assert!(s.plan().is_empty(), "the device still writes to the blocks of {}", behind.step);
        assert!(s.stats().blocks_in_use >= 7, "the blocks of the prompt are written by {}", behind.step);
        s.abort(RequestId(2));
    }
    assert_eq!((s.stats().blocks_in_use, s.stats().num_waiting, s.stats().num_in_flight), (0, 4, 0));
    assert_eq!(s.cached_prefixes(0).len(), cached.len(), "only what the committed step computed is cached");
    let again = s.plan();
    assert_eq!((requests(&again), again.spans[0].cached), (vec![0], 32));
}

#[test]
fn a_request_is_swapped_out_after_the_last_of_several_steps_that_write_to_it() {
    let swapping = SchedConfig { host_blocks: 20, preemption_mode: PreemptionMode::Swap, ..pipeline(4) };
    let sizes = SchedConfig { policy: Policy::Priority, num_blocks: 8, block_size: 4, ..swapping };
    let mut s = Scheduler::new(SchedConfig { max_num_seqs: 4, max_num_batched_tokens: 8, ..sizes }).unwrap();
    s.submit(request(0, 8, 3)).unwrap();
    s.submit(Request { priority: 1, ..request(1, 24, 3) }).unwrap();
    let next = |s: &mut Scheduler| {
        let plan = s.plan();
        s.submitted(plan.step).unwrap();
        let swapped_out = plan.memory.iter().filter(|op| matches!(op, MemOp::SwapOut { .. })).count();
        (spans(&plan), swapped_out, plan)
    };
    let prompts = [0, 1, 2, 3].map(|_| next(&mut s));
    assert_eq!(prompts.each_ref().map(|(spans, ..)| spans[0]), [(0, 8), (1, 8), (1, 8), (1, 8)]);
    commit_all(&mut s, &prompts[0].2, 7);
    // Request 0 needs a third block.
    let (computed, swapped_out, plan) = next(&mut s);
    assert_eq!((computed, swapped_out, plan.preempted), (vec![], 0, vec![RequestId(1)]));
    for prompt in &prompts[1..3] {
        commit_all(&mut s, &prompt.2, 7);
        let (computed, swapped_out, _) = next(&mut s);
        assert_eq!((computed, swapped_out, s.stats().host_blocks_in_use), (vec![], 0, 0), "a step still writes");
    }
    commit_all(&mut s, &prompts[3].2, 7);
    let (computed, swapped_out, plan) = next(&mut s);
    assert_eq!((computed, swapped_out), (vec![(0, 1)], 6));
    commit_all(&mut s, &plan, 7);
    let (_, _, plan) = next(&mut s);
    commit_all(&mut s, &plan, 7);
    let (computed, _, plan) = next(&mut s);
    assert_eq!((computed, plan.spans[0].start, plan.spans[0].tokens[0]), (vec![(1, 1)], 24, 7), "no token was lost");
}
