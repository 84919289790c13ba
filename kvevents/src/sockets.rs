//! The PUB socket and the replay socket, on the publisher thread's runtime.
//!
//! Both read the messages of the [journal](crate::journal) and hold none. What a peer costs is bounded by [`Limits`]: every write has a
//! deadline, and a place is free again once its peer is gone, does not read, or does not subscribe. The network may lose a peer without
//! a trace, so the system sends probes on idle connections. ZMTP 3.0 has none of its own.

use std::net::TcpListener as StdListener;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncWrite, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use crate::endpoint::Endpoint;
use crate::journal::{Message, Payload, ReaderId, Replay, SharedJournal};
use crate::limits::Limits;
use crate::outbox::Outbox;
use crate::zmtp::{self, Received, Subscriptions};

/// Longest time between two attempts to connect.
const RETRY: Duration = Duration::from_secs(5);

/// Least time between two lines about connections that were not accepted.
const LOG_PERIOD: Duration = Duration::from_secs(60);

/// What both sockets share.
#[derive(Clone)]
pub struct Context {
    pub topic: Arc<str>,
    pub limits: Limits,
    pub journal: SharedJournal,
}

impl Context {
    /// Sets the options of a new connection. A connection without them works too.
    fn prepare(&self, stream: &TcpStream) {
        let socket = SockRef::from(stream);
        let stall = self.limits.stall;
        let keepalive = TcpKeepalive::new().with_time(stall).with_interval(stall / 6);
        let mut set = vec![socket.set_tcp_nodelay(true), socket.set_tcp_keepalive(&keepalive)];
        // Also ends a connection whose peer reads nothing while all that waits for it fits into the send buffer.
        #[cfg(target_os = "linux")]
        set.push(socket.set_tcp_user_timeout(Some(stall)));
        set.extend(self.limits.send_buffer.map(|size| socket.set_send_buffer_size(size)));
        for error in set.into_iter().filter_map(Result::err) {
            tracing::debug!("KV events: an option of a connection cannot be set: {error}");
        }
    }
}

fn closed(why: &str) -> std::io::Error {
    std::io::Error::other(why)
}

/// The PUB socket.
#[derive(Clone)]
pub struct PubSocket {
    context: Context,
    /// Changes with each message.
    news: watch::Receiver<()>,
}

impl PubSocket {
    pub fn new(context: Context, news: watch::Receiver<()>) -> PubSocket {
        PubSocket { context, news }
    }

    /// Serves one subscriber until it disconnects.
    async fn serve(self, mut stream: TcpStream, must_subscribe: bool) -> std::io::Result<()> {
        self.context.prepare(&stream);
        let Limits { patience, stall, .. } = self.context.limits;
        timeout(patience, zmtp::handshake(&mut stream, "PUB", &["SUB", "XSUB"])).await??;
        let reader = self.context.journal.lock().connect();
        let (from, to) = stream.split();
        let (pongs, pending) = mpsc::channel(1);
        let served = tokio::select! {
            ended = self.read(BufReader::new(from), reader, pongs, must_subscribe) => ended,
            ended = self.write(Outbox::new(to, stall), reader, pending) => ended,
        };
        self.context.journal.lock().subscribe(reader, false);
        served
    }

    /// Reads subscriptions.
    async fn read(
        &self,
        mut from: impl AsyncRead + Unpin,
        reader: ReaderId,
        pongs: mpsc::Sender<Vec<u8>>,
        must_subscribe: bool,
    ) -> std::io::Result<()> {
        let Context { topic, limits, journal } = &self.context;
        let mut subscriptions = Subscriptions::new(topic);
        let mut idle_since = Some(Instant::now());
        loop {
            let received = zmtp::receive(&mut from);
            let received = match idle_since.filter(|_| must_subscribe) {
                None => received.await,
                Some(since) => timeout_at(since + limits.patience, received)
                    .await
                    .map_err(|_| closed("it subscribes to nothing that is published here"))?,
            }?;
            if let Received::Command(name, data) = &received
                && name == "PING"
            {
                // One answer may wait. A peer that reads none of them gets no more.
                let _ = pongs.try_send(zmtp::pong(data)?);
            }
            let subscribed = subscriptions.apply(&received);
            journal.lock().subscribe(reader, subscribed);
            idle_since = if subscribed { None } else { idle_since.or_else(|| Some(Instant::now())) };
        }
    }

    /// Writes messages and answers.
    async fn write(
        &self,
        mut outbox: Outbox<impl AsyncWrite + Unpin>,
        reader: ReaderId,
        mut pongs: mpsc::Receiver<Vec<u8>>,
    ) -> std::io::Result<()> {
        let Context { topic, journal, .. } = &self.context;
        let mut news = self.news.clone();
        loop {
            while let Some((seq, payload)) = (!outbox.is_full()).then(|| journal.lock().next(reader)).flatten() {
                outbox.push(&[], topic, seq, &payload);
            }
            if outbox.is_empty() {
                tokio::select! {
                    Some(pong) = pongs.recv() => outbox.push_command(&pong),
                    changed = news.changed() => changed.map_err(|_| closed("the publisher ended"))?,
                }
            } else {
                outbox.flush().await?;
                pongs.try_recv().into_iter().for_each(|pong| outbox.push_command(&pong));
            }
        }
    }

    /// Connects to a subscriber, and again whenever the connection ends.
    pub async fn connect(self, endpoint: Endpoint) {
        let mut wait = Duration::from_millis(100);
        loop {
            match TcpStream::connect(endpoint.address()).await {
                Ok(stream) => {
                    wait = Duration::from_millis(100);
                    log_end(self.clone().serve(stream, false).await);
                }
                Err(error) => tracing::debug!("KV events: cannot connect to {}: {error}", endpoint.host),
            }
            sleep(wait).await;
            wait = (wait * 2).min(RETRY);
        }
    }

    /// Accepts subscribers.
    pub async fn listen(self, listener: TcpListener) {
        accept(listener, self.context.limits, |stream, _| self.clone().serve(stream, true)).await;
    }
}

/// Accepts connections for ever and spawns a task for each. `serve` also gets the places of the socket.
async fn accept<F>(listener: TcpListener, limits: Limits, serve: impl Fn(TcpStream, Arc<Semaphore>) -> F)
where
    F: Future<Output = std::io::Result<()>> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(limits.peers.min(Semaphore::MAX_PERMITS)));
    let address = listener.local_addr().map_or_else(|error| error.to_string(), |address| address.to_string());
    let mut refused = Refused::default();
    loop {
        let error = match listener.accept().await {
            Ok((stream, _)) => match places.clone().try_acquire_owned() {
                Ok(place) => {
                    let served = serve(stream, places.clone());
                    drop(tokio::spawn(async move {
                        log_end(served.await);
                        drop(place);
                    }));
                    continue;
                }
                Err(_) => format!("{} are open", limits.peers),
            },
            Err(error) => {
                sleep(Duration::from_millis(100)).await;
                error.to_string()
            }
        };
        if let Some(count) = refused.count() {
            tracing::warn!("KV events at {address}: connections not accepted: {count}, the last because {error}");
        }
    }
}

/// Counts connections that were not accepted, so that a flood of them is not a flood of lines.
#[derive(Default)]
struct Refused {
    count: u64,
    logged: Option<Instant>,
}

impl Refused {
    /// Counts one. Returns the number since the last line if another line is due.
    fn count(&mut self) -> Option<u64> {
        self.count += 1;
        if self.logged.is_some_and(|logged| logged.elapsed() < LOG_PERIOD) {
            return None;
        }
        self.logged = Some(Instant::now());
        Some(std::mem::take(&mut self.count))
    }
}

fn log_end(served: std::io::Result<()>) {
    if let Err(error) = served {
        tracing::debug!("KV events: a peer disconnected: {error}");
    }
}

/// Answers replay requests.
pub async fn serve_replay(listener: TcpListener, context: Context) {
    accept(listener, context.limits, |stream, places| replay(context.clone(), stream, places)).await;
}

async fn replay(context: Context, mut stream: TcpStream, places: Arc<Semaphore>) -> std::io::Result<()> {
    context.prepare(&stream);
    let Context { topic, limits, journal } = context;
    timeout(limits.patience, zmtp::handshake(&mut stream, "ROUTER", &["DEALER", "REQ", "ROUTER"])).await??;
    let (from, to) = stream.split();
    let (mut from, mut outbox) = (BufReader::new(from), Outbox::new(to, limits.stall));
    let end: Payload = Payload::default();
    loop {
        let received = {
            let mut received = pin!(zmtp::receive(&mut from));
            loop {
                match timeout(limits.patience, &mut received).await {
                    Ok(received) => break received?,
                    Err(_) if places.available_permits() > 0 => {}
                    Err(_) => return Err(closed("it requests nothing, and others need its place")),
                }
            }
        };
        match received {
            Received::Message(frames) => {
                let Some(first) = frames.last().and_then(|frame| frame.as_slice().try_into().ok()) else {
                    tracing::debug!("KV events: a replay request is not a sequence number of 8 bytes");
                    continue;
                };
                let mut answer = Replay::new(u64::from_be_bytes(first), &journal.lock());
                let next = |answer: &mut Replay| -> Option<Message> { answer.next(&mut journal.lock()) };
                while let Some((seq, payload)) = next(&mut answer) {
                    outbox.push(&[&[]], &topic, seq, &payload);
                    drop(payload);
                    if outbox.is_full() {
                        outbox.flush().await?;
                    }
                }
                outbox.push(&[&[]], "", u64::MAX, &end);
            }
            Received::Command(name, data) if name == "PING" => outbox.push_command(&zmtp::pong(&data)?),
            Received::Command(..) => {}
        }
        outbox.flush().await?;
    }
}

/// Opens a listening socket. Fails at once if the port is in use.
pub fn bind(endpoint: &Endpoint) -> std::io::Result<StdListener> {
    let listener = StdListener::bind(endpoint.address())?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
