//! Listening, and stopping in order: no new connections, running requests to their end, then the engine.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use axum::serve::ListenerExt;
use tokio::net::TcpListener;
use tokio::sync::Notify;

use super::app::App;
use super::router;

/// Time for streams that were cut to end with an error event.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Serves until `stop` is ready, then lets running requests finish for at most `grace`; what runs longer is cancelled.
/// Returns the number of requests that were.
pub async fn serve(
    listener: TcpListener,
    app: Arc<App>,
    stop: impl Future<Output = ()> + Send + 'static,
    grace: Duration,
) -> std::io::Result<usize> {
    // Tokens are small writes that must not wait for each other; without the option they only come late.
    let listener = listener.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
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
    let server = axum::serve(listener, router(app)).with_graceful_shutdown(stopped).into_future();
    let mut server = std::pin::pin!(server);
    let deadline = async {
        stopping.notified().await;
        tokio::time::sleep(grace).await;
    };
    tokio::select! {
        result = &mut server => {
            engine.shutdown();
            result.map(|()| 0)
        }
        () = deadline => {
            let cancelled = engine.num_unfinished();
            engine.shutdown();
            // Streams that were cut get a moment to say so.
            let _ = tokio::time::timeout(LAST_WORDS, server).await;
            Ok(cancelled)
        }
    }
}
