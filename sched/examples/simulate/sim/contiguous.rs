//! Continuous batching with contiguous reservations: requests join and leave at every step (Orca, Yu et al. 2022), but
//! each reserves the longest possible context contiguously. All reservations are equal, so there is no fragmentation.

use std::collections::VecDeque;

use super::cost::{CostModel, Work};
use super::measure::{Occupancy, Run};
use super::trace::Arrival;

struct Running {
    arrival: Arrival,
    num_outputs: usize,
}

/// Runs a trace with at most `batch` requests at once. Each prompt is computed in the step of its admission.
pub fn run(trace: &[Arrival], cost: &CostModel, batch: usize) -> Run {
    let mut run = Run::default();
    let slots = batch.min(cost.kv_capacity / cost.max_model_len).max(1);
    let mut waiting: VecDeque<Arrival> = trace.iter().copied().collect();
    let mut running: Vec<Running> = Vec::new();
    let mut clock = trace.first().map_or(0.0, |a| a.at);
    let start = clock;
    while let Some(next) = waiting.front().map(|a| a.at).or(running.first().map(|_| clock)) {
        if running.is_empty() {
            clock = clock.max(next);
        }
        while running.len() < slots
            && let Some(&arrival) = waiting.front().filter(|a| a.at <= clock)
        {
            waiting.pop_front();
            run.queueing.push(clock - arrival.at);
            running.push(Running { arrival, num_outputs: 0 });
        }
        let mut work = Work::default();
        for Running { arrival, num_outputs } in &running {
            match num_outputs {
                0 => work.add_span(0, arrival.prompt),
                _ => work.add_span(arrival.prompt + num_outputs - 1, 1),
            }
        }
        let seconds = cost.device_seconds(work);
        clock += seconds + cost.host_seconds;
        let occupancy = Occupancy {
            batch: running.len(),
            wanted: running.len(),
            kv_used: running.iter().map(|r| r.arrival.prompt + r.num_outputs).sum(),
            kv_reserved: running.len() * cost.max_model_len,
        };
        run.step(seconds, occupancy);
        running.retain_mut(|r| {
            r.num_outputs += 1;
            let goes_on = r.num_outputs < r.arrival.output;
            if !goes_on {
                run.end_to_end.push(clock - r.arrival.at);
                run.output_tokens += r.num_outputs;
            }
            goes_on
        });
    }
    run.elapsed = clock - start;
    run
}
