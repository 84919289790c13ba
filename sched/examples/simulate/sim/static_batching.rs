//! Static batching: runs the waiting requests together until the longest is done, then the next batch.
//!
//! Prompts are padded to the longest of the batch, and requests that have finished continue to compute unwanted tokens.

use super::cost::{CostModel, Work};
use super::measure::{Occupancy, Run};
use super::trace::Arrival;

/// The cache that each request of a batch reserves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reserve {
    /// The longest possible context.
    Longest,
    /// The longest prompt and the longest output of the batch. They are not known in advance, so this is optimistic.
    Oracle,
}

/// Runs a trace in batches of at most `batch`.
pub fn run(trace: &[Arrival], cost: &CostModel, batch: usize, reserve: Reserve) -> Run {
    let mut run = Run::default();
    let mut clock = trace.first().map_or(0.0, |a| a.at);
    let start = clock;
    let mut rest = trace;
    while let Some(first) = rest.first() {
        clock = clock.max(first.at);
        let (members, others) = rest.split_at(batch_size(rest, clock, cost, batch, reserve));
        rest = others;
        let (prompt, output) = shape(members);
        let reserved = members.len() * reserved_tokens(members, cost, reserve);
        run.queueing.extend(members.iter().map(|a| clock - a.at));
        for step in 0..output {
            let mut work = Work::default();
            let (before, rows) = if step == 0 { (0, prompt) } else { (prompt + step - 1, 1) };
            members.iter().for_each(|_| work.add_span(before, rows));
            let seconds = cost.device_seconds(work);
            clock += seconds + cost.host_seconds;
            let unfinished = || members.iter().filter(|a| step < a.output);
            let occupancy = Occupancy {
                batch: members.len(),
                wanted: unfinished().count(),
                kv_used: unfinished().map(|a| a.prompt + step).sum(),
                kv_reserved: reserved,
            };
            run.step(seconds, occupancy);
            run.end_to_end.extend(members.iter().filter(|a| step + 1 == a.output).map(|a| clock - a.at));
        }
        run.output_tokens += members.iter().map(|a| a.output).sum::<usize>();
    }
    run.elapsed = clock - start;
    run
}

/// Number of waiting requests in the next batch, at least one.
fn batch_size(rest: &[Arrival], now: f64, cost: &CostModel, batch: usize, reserve: Reserve) -> usize {
    let fits = |count: &usize| {
        let members = &rest[..*count];
        members[count - 1].at <= now && count * reserved_tokens(members, cost, reserve) <= cost.kv_capacity
    };
    (1..=batch.min(rest.len())).take_while(fits).last().unwrap_or(1)
}

/// Number of tokens of cache per request.
fn reserved_tokens(members: &[Arrival], cost: &CostModel, reserve: Reserve) -> usize {
    match reserve {
        Reserve::Longest => cost.max_model_len,
        Reserve::Oracle => {
            let (prompt, output) = shape(members);
            prompt + output
        }
    }
}

fn shape(members: &[Arrival]) -> (usize, usize) {
    let longest = |of: fn(&Arrival) -> usize| members.iter().map(of).max().unwrap_or(0);
    (longest(|a| a.prompt), longest(|a| a.output))
}
