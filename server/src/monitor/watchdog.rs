//! Periodic checks: whether the engine is stuck, which logs a dump once and then ends its group of ranks, and whether the allocator can
//! return memory.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::app::App;

/// Checks the engine while it is polled.
pub async fn watch(app: Arc<App>) {
    let limit = app.options.limits.engine_iteration_timeout;
    let pause = (limit / 4).clamp(Duration::from_millis(10), Duration::from_secs(5));
    // Twice within the limit, so that a rank that hangs is found in time if there are no requests either.
    app.engine.probe_ranks(limit / 2);
    let mut was_stuck = false;
    loop {
        sleep(pause).await;
        let is_stuck = app.engine.step_age().is_some_and(|age| age > limit);
        match (was_stuck, is_stuck) {
            (false, true) => tracing::error!(
                "the engine has completed no step for {} s (--engine-iteration-timeout)\n{}",
                limit.as_secs_f64(),
                app.engine.dump()
            ),
            (true, false) => tracing::warn!("the engine completes steps again"),
            // It has had time to answer the probes that ask for its health.
            (true, true) => {
                let reason = format!("no step was completed in {} s (--engine-iteration-timeout)", limit.as_secs_f64());
                app.engine.end_group(&reason);
            }
            (false, false) => {}
        }
        was_stuck = is_stuck;
    }
}

/// Interval of checks for freed memory.
const TICK: Duration = Duration::from_millis(500);

/// Ticks after the end of a large request at which memory is returned for the last time; before, at each power of two.
const LAST_TICK: u32 = 16;

/// Returns freed memory to the system after large requests, while it is polled. Repeats this because a request frees
/// its memory gradually: the last of it when the client has read the response.
pub async fn return_memory(app: Arc<App>) {
    let mut ticks = LAST_TICK;
    loop {
        sleep(TICK).await;
        ticks = if app.budget.was_freed() { 0 } else { ticks.saturating_add(1) };
        if ticks <= LAST_TICK && ticks.is_power_of_two() {
            // Nothing depends on it, and it cannot panic.
            let _ = tokio::task::spawn_blocking(engine::allocator::trim).await;
        }
    }
}
