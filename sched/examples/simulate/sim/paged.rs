//! Quire's scheduler with a pool of blocks. The cost model takes the place of an executor.

use std::collections::{HashMap, VecDeque};

use sched::{Outcome, Request, RequestId, SchedConfig, Scheduler, StepPlan};

use super::cost::{CostModel, Work};
use super::measure::{Occupancy, Run};
use super::trace::Arrival;

/// Tokens of a step in addition to one per sequence: vLLM's default budget.
const PREFILL_SHARE: usize = 2048;

struct Live {
    arrival: Arrival,
    num_outputs: usize,
    /// Number of tokens that are cached after the steps in flight.
    cached: usize,
    has_begun: bool,
}

/// A step on the device.
struct InFlight {
    plan: StepPlan,
    seconds: f64,
    /// Time at which the device completes it.
    done: f64,
    occupancy: Occupancy,
}

/// Runs a trace with at most `batch` sequences and blocks of `block_size` tokens, without prefix sharing.
///
/// # Panics
/// If the scheduler refuses a configuration, a request or an outcome, which is a bug.
#[allow(clippy::expect_used)]
pub fn run(trace: &[Arrival], cost: &CostModel, batch: usize, block_size: usize, max_in_flight: usize) -> Run {
    let mut scheduler = Scheduler::new(SchedConfig {
        max_num_seqs: batch,
        max_num_batched_tokens: batch + PREFILL_SHARE,
        max_model_len: cost.max_model_len,
        enable_prefix_caching: false,
        max_in_flight,
        ..SchedConfig::new(cost.kv_capacity / block_size, block_size)
    })
    .expect("a valid configuration");
    let mut run = Run::default();
    let mut live: HashMap<RequestId, Live> = HashMap::new();
    let mut flights: VecDeque<InFlight> = VecDeque::new();
    let mut arrivals = trace.iter().zip(0..).peekable();
    let mut clock = trace.first().map_or(0.0, |a| a.at);
    let (start, mut device_free) = (clock, clock);
    loop {
        while let Some((&arrival, id)) = arrivals.next_if(|(a, _)| a.at <= clock) {
            let request = Request {
                read_prefix_cache: false,
                // The length of the output is not known in advance.
                ..Request::new(RequestId(id), vec![0; arrival.prompt], cost.max_model_len - arrival.prompt)
            };
            scheduler.submit(request).expect("a request that fits");
            live.insert(RequestId(id), Live { arrival, num_outputs: 0, cached: 0, has_begun: false });
        }
        let plan = scheduler.plan();
        scheduler.submitted(plan.step).expect("a plan of this scheduler");
        for id in &plan.preempted {
            run.preemptions += 1;
            live.get_mut(id).expect("a preempted request is live").cached = 0;
        }
        let is_idle = plan.spans.is_empty();
        if !is_idle {
            clock += cost.host_seconds;
            let begin = clock.max(device_free);
            let mut work = Work::default();
            for span in &plan.spans {
                work.add_span(span.start, span.tokens.len());
                let member = live.get_mut(&span.seq.request).expect("a planned request is live");
                if !std::mem::replace(&mut member.has_begun, true) {
                    run.queueing.push(begin - cost.host_seconds - member.arrival.at);
                }
                member.cached = span.start + span.tokens.len();
            }
            let stats = scheduler.stats();
            let occupancy = Occupancy {
                batch: stats.num_running,
                wanted: 0, // known when the step is done
                kv_used: live.values().map(|m| m.cached).sum(),
                kv_reserved: stats.blocks_in_use * block_size,
            };
            let seconds = cost.device_seconds(work);
            device_free = begin + seconds;
            flights.push_back(InFlight { plan, seconds, done: device_free, occupancy });
        }
        if flights.len() == max_in_flight || is_idle {
            if let Some(InFlight { plan, seconds, done, mut occupancy }) = flights.pop_front() {
                clock = clock.max(done);
                occupancy.wanted = plan.spans.iter().filter(|s| live.contains_key(&s.seq.request)).count();
                run.step(seconds, occupancy);
                commit(&mut scheduler, &plan, &mut live, |arrival| {
                    run.end_to_end.push(clock - arrival.at);
                    run.output_tokens += arrival.output;
                });
            } else if let Some((next, _)) = arrivals.peek() {
                clock = next.at;
            } else {
                break;
            }
        }
    }
    run.elapsed = clock - start;
    run
}

/// Commits a step in which each sampled sequence draws a token. Ignores sequences that have ended.
#[allow(clippy::expect_used)]
fn commit(
    scheduler: &mut Scheduler,
    plan: &StepPlan,
    live: &mut HashMap<RequestId, Live>,
    mut ended: impl FnMut(Arrival),
) {
    let mut outcomes = Vec::with_capacity(plan.spans.len());
    for span in plan.spans.iter().filter(|span| !span.sample.is_empty()) {
        let Some(member) = live.get_mut(&span.seq.request) else {
            continue;
        };
        member.num_outputs += 1;
        let finished = member.num_outputs == member.arrival.output;
        outcomes.push(Outcome::token(span.seq, 0, finished));
        if finished {
            ended(member.arrival);
            live.remove(&span.seq.request);
        }
    }
    scheduler.commit(plan.step, &outcomes).expect("outcomes of this plan");
}
