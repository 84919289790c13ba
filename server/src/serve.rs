//! Accepts connections and shuts down: in order, on a stop (new connections get a 503, running requests finish, then
//! the engine stops), or with an error if the engine has died.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::app::App;
use crate::http::{Accepted, Connection, Listener, Waiting, refusal};
use crate::monitor::STOPPING;
use crate::monitor::watchdog;
use crate::router::routes;
use crate::{openai, stored};

/// Time for cancelled streams to send an error event.
const CANCEL_TIME: Duration = Duration::from_secs(1);

/// A shutdown ends after nothing has been computed or written for this time, even if requests are incomplete.
const IDLE_TIME: Duration = Duration::from_secs(1);

/// Interval of a shutdown's checks for activity.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// Pause after a failed `accept`, for example without free file descriptors: other connections have to end first.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Time between two searches for what is over its time.
const SWEEP_INTERVAL: Duration = Duration::from_secs(60);

/// Factor between the limits on request heads and those of hyper: heads in between get an error with their size
/// (`http::head`).
const HEAD_FACTOR: usize = 4;

/// Answers every connection with 503 while it is polled, for a program that listens before its model is loaded.
pub async fn refuse_while_loading(listener: impl Into<Listener>) {
    refuse(&listener.into(), "the model is being loaded; try again later").await;
}

/// Answers every connection with 503 and this message while it is polled.
async fn refuse(listener: &Listener, message: &str) {
    let rejector = refusal::Rejector::new(message.to_string());
    accept(listener, |client| rejector.reject(client)).await;
}

/// Accepts connections while it is polled.
async fn accept(listener: &Listener, mut begin: impl FnMut(Accepted)) {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    loop {
        match listener.accept().await {
            Ok(client) => begin(client),
            // The client is gone.
            Err(error) if matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset) => {}
            Err(error) => {
                let pause = ACCEPT_PAUSE.as_millis();
                tracing::error!("cannot accept connections, next attempt in {pause} ms: {error}");
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Serves until `stop` is ready, then lets running requests finish for at most `grace` and cancels the rest. Meanwhile,
/// every new connection gets a 503, so that a probe sees a server that stops and not one that is gone. Does not wait for
/// requests that have not arrived in full. Returns the number of cancelled requests.
///
/// # Errors
/// If the engine thread has died. Running streams have ended with an error.
pub async fn serve(
    listener: impl Into<Listener>,
    app: Arc<App>,
    stop: impl Future<Output = ()> + Send + 'static,
    grace: Duration,
) -> io::Result<usize> {
    let engine = app.engine.clone();
    let listener = listener.into();
    let server = Server::new(app.clone(), listener.is_local());
    let watchdog = tokio::spawn(watchdog::watch(app.clone()));
    let memory = tokio::spawn(watchdog::return_memory(app.clone()));
    // Ends with the engine.
    tokio::spawn(engine.wake_readers());
    // So that no request waits for it.
    let sized = app.clone();
    tokio::task::spawn_blocking(move || {
        sized.logprob_sizes();
    });
    if let Some(stored) = app.stored_so_far() {
        openai::resume(&app, stored).await.map_err(|error| io::Error::other(error.to_string()))?;
    }
    let sweeper = tokio::spawn(sweep(app.clone()));
    let stop = async {
        stop.await;
        // Stored work is left to the next start instead of being waited for.
        if let Some(stored) = app.stored_so_far() {
            let running = stored.running().stop();
            if running > 0 && !stored.is_durable {
                tracing::warn!(
                    "{running} background responses or batches end with the server: --state-dir would keep them"
                );
            }
        }
        engine.drain();
    };
    let died = {
        let mut accept = std::pin::pin!(accept(&listener, |client| server.begin(client)));
        let died = tokio::select! {
            () = accept.as_mut() => false,
            () = stop => false,
            () = engine.death() => true,
        };
        if died {
            // Streams end with an error, and probes get the reason.
            let _ = timeout(CANCEL_TIME, accept).await;
        }
        died
    };
    watchdog.abort();
    memory.abort();
    sweeper.abort();
    // Connections close after their current response.
    server.finish.send_replace(true);
    if died {
        let _ = timeout(CANCEL_TIME, server.finish.closed()).await;
        return Err(io::Error::other("the engine thread has died; restart the server"));
    }
    let cancelled = tokio::select! {
        () = refuse(&listener, STOPPING) => 0,
        () = server.finish.closed() => 0,
        () = idle(&app) => engine.num_unfinished(),
        () = sleep(grace) => {
            let cancelled = engine.num_unfinished();
            engine.shutdown();
            // Time for cancelled streams to say so.
            let _ = timeout(CANCEL_TIME, server.finish.closed()).await;
            cancelled
        }
    };
    if let Some(stored) = app.stored_so_far() {
        let stored = stored.clone();
        // What has been accepted is on the disk already; this spares the next start a check of the file.
        let _ = tokio::task::spawn_blocking(move || stored.store().close()).await;
    }
    engine.shutdown();
    Ok(cancelled)
}

/// Removes what is stored and over its time, while it is polled.
async fn sweep(app: Arc<App>) {
    loop {
        sleep(SWEEP_INTERVAL).await;
        if let Some(stored) = app.stored_so_far() {
            stored::sweep(stored).await;
        }
    }
}

/// Accepts connections and runs each on its own task.
struct Server {
    app: Arc<App>,
    router: Router,
    waiting: Arc<Waiting>,
    rejector: refusal::Rejector,
    builder: http1::Builder,
    /// Set when connections must close. Each connection holds a receiver.
    finish: watch::Sender<bool>,
}

impl Server {
    fn new(app: Arc<App>, loopback: bool) -> Server {
        let limits = &app.options.limits;
        let mut builder = http1::Builder::new();
        builder
            .timer(TokioTimer::new())
            // A client that closes its sending side counts as gone, as with nginx and uvicorn: its call is dropped.
            .half_close(false)
            .header_read_timeout(limits.header_timeout)
            .max_headers(HEAD_FACTOR * limits.max_header_count)
            .max_buf_size((HEAD_FACTOR * limits.max_header_bytes).max(64 << 10));
        Server {
            router: routes(app.clone(), loopback),
            waiting: Arc::new(Waiting::new(limits.max_connections)),
            rejector: refusal::Rejector::over(limits.max_connections),
            builder,
            finish: watch::Sender::new(false),
            app,
        }
    }

    fn begin(&self, client: Accepted) {
        let Some(place) = self.waiting.admit() else {
            self.app.metrics.rejected("connections");
            return self.rejector.reject(client);
        };
        let (app, builder) = (self.app.clone(), self.builder.clone());
        let (router, own) = (TowerToHyperService::new(self.router.clone()), place.clone());
        let service = service_fn(move |request| {
            let (response, place) = (router.call(place.arriving(request)), place.clone());
            async move { response.await.map(|response| place.leaving(response)) }
        });
        let mut finish = self.finish.subscribe();
        let whole = async move {
            let limits = &app.options.limits;
            let Some(stream) = client.open(limits.header_timeout).await else { return };
            let stream = Connection::new(stream, Arc::downgrade(&app.activity), limits.send_timeout);
            let mut connection = builder.serve_connection(TokioIo::new(stream), service);
            let ended = tokio::select! {
                ended = &mut connection => ended,
                () = async { drop(finish.wait_for(|finish| *finish).await) } => {
                    std::pin::Pin::new(&mut connection).graceful_shutdown();
                    (&mut connection).await
                }
            };
            let parts = connection.into_parts();
            let (stream, suppressed) = parts.io.into_inner().into_parts();
            match ended {
                Ok(()) => {
                    // Everything is answered: a shutdown need not wait.
                    drop(finish);
                    refusal::close(stream).await;
                }
                Err(error) => {
                    tracing::debug!("connection closed: {error}");
                    if let Some(error) = refusal::explain(&error, suppressed, &parts.read_buf, &app.options.limits) {
                        refusal::send(stream, &error).await;
                    }
                }
            }
        };
        tokio::spawn(async move {
            tokio::select! {
                () = whole => {}
                () = own.ended() => tracing::debug!("a connection that waited gave way to a new one (--max-connections)"),
            }
        });
    }
}

/// Waits until nothing has been computed or written for [`IDLE_TIME`].
async fn idle(app: &App) {
    let mut since = Instant::now();
    while since.elapsed() < IDLE_TIME {
        sleep(CHECK_INTERVAL).await;
        if app.engine.num_unfinished() > 0 || Arc::strong_count(&app.activity) > 1 {
            since = Instant::now();
        }
    }
}
