//! What is looked at now and then: whether the engine is stuck (one dump for each time that it has work and completes no
//! step for too long), and whether memory can be given back.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use super::app::App;

/// Looks at the engine for as long as it is polled.
pub async fn watch(app: Arc<App>) {
    let limit = app.limits.engine_iteration_timeout;
    let pause = (limit / 4).clamp(Duration::from_millis(10), Duration::from_secs(5));
    let mut was_stuck = false;
    loop {
        sleep(pause).await;
        let is_stuck = app.engine.step_age().is_some_and(|age| age > limit);
        match (was_stuck, is_stuck) {
            (false, true) => tracing::error!("no step has been completed for too long\n{}", app.engine.dump()),
            (true, false) => tracing::warn!("the engine completes steps again"),
            _ => {}
        }
        was_stuck = is_stuck;
    }
}

/// How often it is asked whether memory can be given back.
const TICK: Duration = Duration::from_millis(500);

/// Ticks after the end of a large request at which the last memory is given back; before that, at each power of two.
const LAST_TICK: u32 = 16;

/// Gives freed memory back to the system after large requests, for as long as it is polled. Repeatedly, because what a request held is
/// freed at its own pace: the last of an answer when the client has read it.
pub async fn give_back(app: Arc<App>) {
    let mut ticks = LAST_TICK;
    loop {
        sleep(TICK).await;
        ticks = if app.budget.was_freed() { 0 } else { ticks.saturating_add(1) };
        if ticks <= LAST_TICK && ticks.is_power_of_two() {
            // Nothing waits for it, and a panic is impossible.
            let _ = tokio::task::spawn_blocking(engine::allocator::trim).await;
        }
    }
}
