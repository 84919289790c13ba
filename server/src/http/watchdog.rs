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

/// How often memory is given back at most.
const GIVE_BACK: Duration = Duration::from_millis(500);

/// Gives freed memory back to the system after large requests, for as long as it is polled.
pub async fn give_back(app: Arc<App>) {
    loop {
        sleep(GIVE_BACK).await;
        if app.budget.was_freed() {
            // What the request held is dropped about now.
            sleep(GIVE_BACK).await;
            // Nothing waits for it, and a panic is impossible.
            let _ = tokio::task::spawn_blocking(engine::allocator::give_back).await;
        }
    }
}
