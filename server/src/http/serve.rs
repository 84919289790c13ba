//! Listening, and stopping in order: no new connections, running requests to their end, then the engine.

use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio::time::sleep;

use super::app::App;
use super::connection::Connections;
use super::router;

/// Time for streams that were cut to end with an error event.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A stop ends once nothing has been computed or written for this long, whatever requests are half sent.
const QUIET: Duration = Duration::from_secs(1);

/// How often a stop looks whether all is quiet.
const LOOK: Duration = Duration::from_millis(20);

/// Serves until `stop` is ready, then lets running requests finish for at most `grace`; what runs longer is cancelled.
/// Requests that have not arrived in whole are not waited for. Returns the number of requests that were cancelled.
pub async fn serve(
    listener: TcpListener,
    app: Arc<App>,
    stop: impl Future<Output = ()> + Send + 'static,
    grace: Duration,
) -> std::io::Result<usize> {
    let listener = Connections { listener, activity: app.activity.clone() };
    let engine = app.engine.clone();
    let stopping = Arc::new(Notify::new());
    let stopped = {
        let (engine, stopping) = (engine.clone(), stopping.clone());
        async move {
            stop.await;
            engine.drain();
            stopping.notify_one();
        }
    };
    let server = axum::serve(listener, router(app.clone())).with_graceful_shutdown(stopped).into_future();
    let mut server = std::pin::pin!(server);
    let deadline = async {
        stopping.notified().await;
        tokio::select! {
            () = sleep(grace) => true,
            () = quiet(&app) => false,
        }
    };
    tokio::select! {
        result = &mut server => {
            engine.shutdown();
            result.map(|()| 0)
        }
        in_work = deadline => {
            let cancelled = engine.num_unfinished();
            engine.shutdown();
            // Streams that were cut get a moment to say so.
            if in_work {
                let _ = tokio::time::timeout(LAST_WORDS, server).await;
            }
            Ok(cancelled)
        }
    }
}

/// Waits until nothing has been computed or written for a while.
async fn quiet(app: &App) {
    let mut since = Instant::now();
    while since.elapsed() < QUIET {
        sleep(LOOK).await;
        if app.engine.num_unfinished() > 0 || !app.activity.is_idle() {
            since = Instant::now();
        }
    }
}
