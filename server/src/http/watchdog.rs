//! Says so when the engine has work and completes no step for too long: one dump for each time that it gets stuck.

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
