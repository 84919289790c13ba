//! The PUB socket and the replay socket, on the publisher thread's runtime.
//!
//! A subscriber has a queue of its own, bounded in messages ([`KvEventsConfig::hwm`](crate::KvEventsConfig::hwm)) and in bytes
//! ([`MOST_BYTES`]). What does not fit is dropped for this subscriber, which finds a gap in the sequence numbers. One that reads
//! nothing for a minute is disconnected. The replay socket has no queues: a connection's task writes an answer before it reads
//! the next request.

use std::net::TcpListener as StdListener;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, BufWriter};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::{sleep, timeout};

use crate::buffer::Message;
use crate::endpoint::Endpoint;
use crate::zmtp::{self, Received};

/// Greatest size in bytes of what waits for one subscriber.
const MOST_BYTES: usize = 64 << 20;

/// Greatest number of connections of a socket. Further ones are closed.
const MOST_PEERS: usize = 256;

/// Greatest number of topics of a subscriber.
const MOST_TOPICS: usize = 1024;

/// Time for a handshake, and for a peer to read a replayed message.
const PATIENCE: Duration = Duration::from_secs(10);

/// Time after which a subscriber that reads nothing is disconnected. It may be gone without a trace.
const STALL: Duration = Duration::from_secs(60);

/// Longest time between two attempts to connect.
const RETRY: Duration = Duration::from_secs(5);

/// A connected subscriber.
struct Peer {
    queue: mpsc::Sender<Outgoing>,
    /// Size of the queue in bytes.
    bytes: AtomicUsize,
    /// Whether one of its topics is a prefix of ours.
    subscribed: AtomicBool,
}

enum Outgoing {
    Message(Message),
    Pong(Vec<u8>),
}

/// The PUB socket.
pub struct PubSocket {
    topic: String,
    hwm: usize,
    peers: Mutex<Vec<Arc<Peer>>>,
    dropped: AtomicUsize,
}

impl PubSocket {
    pub fn new(topic: String, hwm: usize) -> PubSocket {
        let hwm = hwm.clamp(1, Semaphore::MAX_PERMITS);
        PubSocket { topic, hwm, peers: Mutex::new(Vec::new()), dropped: AtomicUsize::new(0) }
    }

    /// Number of peers that subscribe to the topic.
    pub fn num_subscribers(&self) -> usize {
        self.lock().iter().filter(|peer| peer.subscribed.load(Ordering::Acquire)).count()
    }

    /// Number of messages dropped because a subscriber's queue was full.
    pub fn num_dropped(&self) -> usize {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Queues a message for every subscriber. Never waits.
    pub fn send(&self, message: &Message) {
        let len = message.1.len();
        for peer in self.lock().iter().filter(|peer| peer.subscribed.load(Ordering::Acquire)) {
            let fits = peer.bytes.load(Ordering::Acquire) <= MOST_BYTES.saturating_sub(len);
            if fits && peer.queue.try_send(Outgoing::Message(message.clone())).is_ok() {
                peer.bytes.fetch_add(len, Ordering::AcqRel);
            } else {
                self.dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Peer>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves one subscriber until it disconnects.
    async fn serve(&self, mut stream: TcpStream) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        timeout(PATIENCE, zmtp::handshake(&mut stream, "PUB", &["SUB", "XSUB"])).await??;
        let (queue, messages) = mpsc::channel(self.hwm);
        let peer = Arc::new(Peer { queue, bytes: AtomicUsize::new(0), subscribed: AtomicBool::new(false) });
        self.lock().push(peer.clone());
        let (reader, writer) = stream.split();
        let served = tokio::select! {
            ended = self.read(BufReader::new(reader), &peer) => ended,
            ended = self.write(BufWriter::new(writer), messages, &peer) => ended,
        };
        self.lock().retain(|other| !Arc::ptr_eq(other, &peer));
        served
    }

    /// Reads subscriptions.
    async fn read(&self, mut from: impl AsyncReadExt + Unpin, peer: &Peer) -> std::io::Result<()> {
        let mut topics: Vec<Vec<u8>> = Vec::new();
        loop {
            let (adds, topic) = match zmtp::receive(&mut from).await? {
                Received::Message(frames) => match frames.first().and_then(|frame| frame.split_first()) {
                    Some((1, topic)) => (true, topic.to_vec()),
                    Some((0, topic)) => (false, topic.to_vec()),
                    _ => continue,
                },
                Received::Command(name, topic) if name == "SUBSCRIBE" => (true, topic),
                Received::Command(name, topic) if name == "CANCEL" => (false, topic),
                Received::Command(name, data) => {
                    if name == "PING" {
                        // A subscriber that does not read gets no answer either.
                        let _ = peer.queue.try_send(Outgoing::Pong(data.get(2..).unwrap_or_default().to_vec()));
                    }
                    continue;
                }
            };
            if !adds {
                if let Some(at) = topics.iter().position(|known| *known == topic) {
                    topics.remove(at);
                }
            } else if topics.len() < MOST_TOPICS {
                topics.push(topic);
            }
            let matches = topics.iter().any(|topic| self.topic.as_bytes().starts_with(topic));
            peer.subscribed.store(matches, Ordering::Release);
        }
    }

    /// Writes queued messages.
    async fn write(
        &self,
        mut to: impl AsyncWrite + Unpin,
        mut messages: mpsc::Receiver<Outgoing>,
        peer: &Peer,
    ) -> std::io::Result<()> {
        while let Some(outgoing) = messages.recv().await {
            match outgoing {
                Outgoing::Message(message) => {
                    let frames = (self.topic.as_bytes(), message.0, &message.1[..]);
                    timeout(STALL, write_message(&mut to, &[], frames)).await??;
                    peer.bytes.fetch_sub(message.1.len(), Ordering::AcqRel);
                }
                Outgoing::Pong(context) => to.write_all(&zmtp::command("PONG", &context)).await?,
            }
            if messages.is_empty() {
                to.flush().await?;
            }
        }
        Ok(())
    }

    /// Connects to a subscriber, and again whenever the connection ends.
    pub async fn connect(self: Arc<PubSocket>, endpoint: Endpoint) {
        let mut wait = Duration::from_millis(100);
        loop {
            match TcpStream::connect(endpoint.address()).await {
                Ok(stream) => {
                    wait = Duration::from_millis(100);
                    log_end(self.serve(stream).await);
                }
                Err(error) => tracing::debug!("KV events: cannot connect to {}: {error}", endpoint.host),
            }
            sleep(wait).await;
            wait = (wait * 2).min(RETRY);
        }
    }

    /// Accepts subscribers.
    pub async fn listen(self: Arc<PubSocket>, listener: TcpListener) {
        accept(listener, |stream| {
            let socket = self.clone();
            async move { log_end(socket.serve(stream).await) }
        })
        .await;
    }
}

/// Accepts connections for ever and spawns a task for each.
async fn accept<F: Future<Output = ()> + Send + 'static>(listener: TcpListener, serve: impl Fn(TcpStream) -> F) {
    let places = Arc::new(Semaphore::new(MOST_PEERS));
    loop {
        match listener.accept().await {
            Ok((stream, _)) => match places.clone().try_acquire_owned() {
                Ok(place) => {
                    let served = serve(stream);
                    drop(tokio::spawn(async move {
                        served.await;
                        drop(place);
                    }));
                }
                Err(_) => tracing::warn!("KV events: closed a connection, because {MOST_PEERS} are open"),
            },
            Err(error) => {
                tracing::warn!("KV events: cannot accept a connection: {error}");
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

fn log_end(served: std::io::Result<()>) {
    if let Err(error) = served {
        tracing::debug!("KV events: a peer disconnected: {error}");
    }
}

/// Answers replay requests: `answer` returns the messages from a sequence number on.
pub async fn serve_replay<A>(listener: TcpListener, topic: String, answer: A)
where
    A: Fn(u64) -> Vec<Message> + Clone + Send + Sync + 'static,
{
    accept(listener, move |stream| {
        let (topic, answer) = (topic.clone(), answer.clone());
        async move { log_end(replay(stream, &topic, &answer).await) }
    })
    .await;
}

async fn replay(mut stream: TcpStream, topic: &str, answer: &impl Fn(u64) -> Vec<Message>) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    timeout(PATIENCE, zmtp::handshake(&mut stream, "ROUTER", &["DEALER", "REQ", "ROUTER"])).await??;
    let (reader, writer) = stream.split();
    let (mut from, mut to) = (BufReader::new(reader), BufWriter::new(writer));
    loop {
        match zmtp::receive(&mut from).await? {
            Received::Message(frames) => {
                let Some(first) = frames.last().and_then(|frame| frame.as_slice().try_into().ok()) else {
                    tracing::debug!("KV events: a replay request is not a sequence number of 8 bytes");
                    continue;
                };
                for (seq, payload) in answer(u64::from_be_bytes(first)) {
                    let message = (topic.as_bytes(), seq, &payload[..]);
                    timeout(PATIENCE, write_message(&mut to, &[&[]], message)).await??;
                }
                timeout(PATIENCE, write_message(&mut to, &[&[]], (&[], u64::MAX, &[]))).await??;
            }
            Received::Command(name, data) if name == "PING" => {
                let pong = zmtp::command("PONG", data.get(2..).unwrap_or_default());
                timeout(PATIENCE, to.write_all(&pong)).await??;
            }
            Received::Command(..) => {}
        }
        timeout(PATIENCE, to.flush()).await??;
    }
}

/// Writes the frames `before`, then topic, sequence number and payload.
async fn write_message(
    to: &mut (impl AsyncWrite + Unpin),
    before: &[&[u8]],
    (topic, seq, payload): (&[u8], u64, &[u8]),
) -> std::io::Result<()> {
    let mut head = Vec::new();
    before.iter().for_each(|frame| zmtp::push_frame(&mut head, frame, true));
    zmtp::push_frame(&mut head, topic, true);
    zmtp::push_frame(&mut head, &seq.to_be_bytes(), true);
    zmtp::push_head(&mut head, payload.len(), 0);
    to.write_all(&head).await?;
    to.write_all(payload).await
}

/// Opens a listening socket. Fails at once if the port is in use.
pub fn bind(endpoint: &Endpoint) -> std::io::Result<StdListener> {
    let listener = StdListener::bind(endpoint.address())?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
