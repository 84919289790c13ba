//! Static batching: take who waits, run them together until the longest is done, take the next.
//!
//! Prompts are padded to the longest of the batch, and whoever has finished goes on computing tokens that
//! nobody wants, as in a loop over one tensor.

use super::cost::{CostModel, Work};
use super::measure::{Occupancy, Run};
use super::trace::Arrival;

/// What each member of a batch reserves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reserve {
    /// The longest possible context.
    Longest,
    /// The longest prompt and the longest answer of the batch; nobody knows that in advance, so it flatters.
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
        let (members, others) = rest.split_at(take(rest, clock, cost, batch, reserve));
        rest = others;
        let (prompt, output) = shape(members);
        let reserved = members.len() * each(members, cost, reserve);
        run.queueing.extend(members.iter().map(|a| clock - a.at));
        for step in 0..output {
            let mut work = Work::default();
            let (before, rows) = if step == 0 { (0, prompt) } else { (prompt + step - 1, 1) };
            members.iter().for_each(|_| work.add_span(before, rows));
            let seconds = cost.device_seconds(work);
            clock += seconds + cost.host_seconds;
            let wanting = || members.iter().filter(|a| step < a.output);
            let occupancy = Occupancy {
                batch: members.len(),
                wanted: wanting().count(),
                kv_used: wanting().map(|a| a.prompt + step).sum(),
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

/// How many of those who wait form the next batch: at least one.
fn take(rest: &[Arrival], now: f64, cost: &CostModel, batch: usize, reserve: Reserve) -> usize {
    let fits = |count: &usize| {
        let members = &rest[..*count];
        members[count - 1].at <= now && count * each(members, cost, reserve) <= cost.kv_capacity
    };
    (1..=batch.min(rest.len())).take_while(fits).last().unwrap_or(1)
}

/// Tokens of cache per member.
fn each(members: &[Arrival], cost: &CostModel, reserve: Reserve) -> usize {
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
