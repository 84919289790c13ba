//! Listening, and ending: in order, on a stop (no new connections, running requests to their end, then the engine), or with
//! an error, when the engine has died.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use http_body_util::BodyExt;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::time::{sleep, timeout};

use super::app::App;
use super::connection::{Connection, Exchange};
use super::refusal::{self, Door};
use super::routes;
use super::watchdog;

/// Time for streams that were cut to end with an error event.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A stop ends once nothing has been computed or written for this long, whatever requests are half sent.
const QUIET: Duration = Duration::from_secs(1);

/// How often a stop looks whether all is quiet.
const LOOK: Duration = Duration::from_millis(20);

/// Wait after the system has refused a connection, as for want of file descriptors: others have to end first.
const REFUSED: Duration = Duration::from_millis(100);

/// Heads are read up to so many times the limits, so that most that are too large are told by how much (`limits::check_head`).
const HARD: usize = 4;

/// Serves until `stop` is ready, then lets running requests finish for at most `grace`; what runs longer is cancelled.
/// Requests that have not arrived in whole are not waited for. Returns the number of requests that were cancelled.
///
/// # Errors
/// The engine thread has died: what streamed has been told, and nothing is left to serve with.
pub async fn serve(
    listener: TcpListener,
    app: Arc<App>,
    stop: impl Future<Output = ()> + Send + 'static,
    grace: Duration,
) -> io::Result<usize> {
    let engine = app.engine.clone();
    let loopback = listener.local_addr().is_ok_and(|address| address.ip().to_canonical().is_loopback());
    let (server, running) = Server::new(app.clone(), loopback);
    let watchdog = tokio::spawn(watchdog::watch(app.clone()));
    let memory = tokio::spawn(watchdog::give_back(app.clone()));
    let stop = async {
        stop.await;
        engine.drain();
    };
    let died = {
        let mut accept = std::pin::pin!(server.accept(listener));
        let died = tokio::select! {
            () = accept.as_mut() => false,
            () = stop => false,
            () = engine.death() => true,
        };
        if died {
            // Streams end with an error, and probes are told why.
            let _ = timeout(LAST_WORDS, accept).await;
        }
        died
    };
    watchdog.abort();
    memory.abort();
    server.finish_connections();
    if died {
        let _ = timeout(LAST_WORDS, running.closed()).await;
        return Err(io::Error::other("the engine thread has died, nothing can be served any more"));
    }
    let cancelled = tokio::select! {
        () = running.closed() => 0,
        () = quiet(&app) => engine.num_unfinished(),
        () = sleep(grace) => {
            let cancelled = engine.num_unfinished();
            engine.shutdown();
            // Streams that were cut get a moment to say so.
            let _ = timeout(LAST_WORDS, running.closed()).await;
            cancelled
        }
    };
    engine.shutdown();
    Ok(cancelled)
}

/// What accepts connections and runs each on a task of its own.
struct Server {
    app: Arc<App>,
    router: Router,
    places: Arc<Semaphore>,
    door: Door,
    builder: http1::Builder,
    /// Tells connections to end after the answer under way.
    finish: watch::Sender<bool>,
    /// Every connection holds a receiver.
    running: watch::Receiver<()>,
}

/// Whether connections are left.
struct Running(watch::Sender<()>);

impl Running {
    async fn closed(&self) {
        self.0.closed().await;
    }
}

impl Server {
    fn new(app: Arc<App>, loopback: bool) -> (Server, Running) {
        let limits = &app.limits;
        let mut builder = http1::Builder::new();
        builder
            .timer(TokioTimer::new())
            // Whether a client has gone is seen to by `Connection`.
            .half_close(true)
            .header_read_timeout(limits.header_timeout)
            .max_headers(HARD * limits.max_header_count)
            .max_buf_size((HARD * limits.max_header_bytes).max(64 << 10));
        let (sender, running) = watch::channel(());
        let server = Server {
            router: routes(app.clone(), loopback),
            places: Arc::new(Semaphore::new(limits.max_connections)),
            door: Door::new(),
            builder,
            finish: watch::Sender::new(false),
            running,
            app,
        };
        (server, Running(sender))
    }

    /// Takes connections for as long as it is polled.
    async fn accept(&self, listener: TcpListener) {
        loop {
            match listener.accept().await {
                Ok((stream, _)) => match self.places.clone().try_acquire_owned() {
                    Ok(place) => self.begin(stream, place),
                    Err(_) => {
                        self.app.metrics.rejected("connections");
                        self.door.turn_away(stream);
                    }
                },
                // A client that is gone already is its own affair; for anything else there is nothing to do but wait.
                Err(error) if is_the_clients(&error) => {}
                Err(error) => {
                    tracing::error!("no connection can be taken: {error}");
                    sleep(REFUSED).await;
                }
            }
        }
    }

    fn begin(&self, stream: TcpStream, place: OwnedSemaphorePermit) {
        let (app, exchange) = (self.app.clone(), Exchange::default());
        let stream = Connection::new(stream, app.activity.clone(), exchange.clone(), app.limits.send_timeout);
        let router = TowerToHyperService::new(self.router.clone());
        let service = service_fn(move |request: Request<Incoming>| {
            let (call, answer) = (exchange.begin(), router.call(request));
            // The call ends with the body of its answer.
            async move {
                Ok::<_, std::convert::Infallible>(answer.await?.map(|body| {
                    body.map_frame(move |frame| {
                        let _ = &call;
                        frame
                    })
                }))
            }
        });
        let mut connection = self.builder.serve_connection(TokioIo::new(stream), service);
        let (mut finish, running) = (self.finish.subscribe(), self.running.clone());
        tokio::spawn(async move {
            let ended = tokio::select! {
                ended = &mut connection => ended,
                () = async { drop(finish.wait_for(|finish| *finish).await) } => {
                    std::pin::Pin::new(&mut connection).graceful_shutdown();
                    (&mut connection).await
                }
            };
            if let Err(error) = ended {
                tracing::debug!("a connection ended: {error}");
                let parts = connection.into_parts();
                let (stream, bare) = parts.io.into_inner().into_parts();
                if let Some(error) = refusal::of(&error, bare, &parts.read_buf, &app.limits) {
                    refusal::refuse(stream, &error).await;
                }
            }
            drop((place, running));
        });
    }

    /// From now on, connections end with the answer that they are giving. Nothing listens any more.
    fn finish_connections(self) {
        self.finish.send_replace(true);
    }
}

fn is_the_clients(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
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
