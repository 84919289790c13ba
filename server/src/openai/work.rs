//! Tasks that do stored work: one for each record, until its work has ended or is left.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::sleep;

use crate::app::App;
use crate::http::ApiError;
use crate::stored::{Ended, Live, Stored};

/// First and last pause before something is tried again.
const PAUSES: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));

/// Pauses between attempts, each twice as long as the one before.
pub struct Pauses(Duration);

impl Default for Pauses {
    fn default() -> Pauses {
        Pauses(PAUSES.0)
    }
}

impl Pauses {
    /// Waits before the next attempt, unless the work is asked to end meanwhile.
    pub async fn pause(&mut self, live: &Live) {
        let pause = self.0;
        self.0 = (2 * pause).min(PAUSES.1);
        match live.ended() {
            // It was asked before, so that would end every pause.
            Some(_) => sleep(pause).await,
            None => tokio::select! {
                () = sleep(pause) => {}
                _ = live.end() => {}
            },
        }
    }
}

/// What a task works on.
#[derive(Clone)]
pub struct Task {
    /// The server's state.
    pub app: Arc<App>,
    /// What it keeps.
    pub stored: Arc<Stored>,
    /// Id of the record.
    pub id: String,
    /// How it is watched and ended.
    pub live: Arc<Live>,
}

/// Begins the work of a record, unless it runs or the server stops. An error of `attempt` is a reason to try again.
pub fn spawn<F>(app: &Arc<App>, id: &str, mut attempt: impl FnMut(Task) -> F + Send + 'static)
where
    F: Future<Output = Result<(), ApiError>> + Send,
{
    let Ok(stored) = app.stored() else { return };
    let Some(live) = stored.running().begin(id) else { return };
    let task = Task { app: app.clone(), stored: stored.clone(), id: id.to_string(), live };
    tokio::spawn(async move {
        let running = task.stored.running().guard(&task.stored, &task.id);
        let mut pauses = Pauses::default();
        while let Err(error) = attempt(task.clone()).await {
            tracing::debug!("{} waits: {error}", task.id);
            if task.live.ended() == Some(Ended::Stopped) {
                break;
            }
            pauses.pause(&task.live).await;
        }
        drop(running);
    });
}
