//! The publisher: a bounded queue, a thread behind it, and the sequence of messages.
//!
//! The caller never waits. If the queue is full, the changes of the step are dropped and counted, and the thread tells
//! subscribers that nothing is cached. Once half of the queue is free, the caller hands over a snapshot of its cache, and events
//! continue from there. So subscribers may know too little for a while, but nothing that is wrong, and no gap goes unnoticed.
//!
//! ```text
//! messages   0 1 2 … | AllBlocksCleared | AllBlocksCleared, BlockStored … | …
//!                    ^ changes dropped    ^ snapshot                        changes of later steps
//! ```
//!
//! A replay request for messages that are no longer buffered is answered in the same way: the first message asked for is a
//! snapshot of the current state, and the last one published is empty, so that the subscriber continues after it.

use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use tokio::net::TcpListener;
use tokio::sync::{Notify, Semaphore, mpsc};

use crate::buffer::{Buffer, Message};
use crate::change::{Change, Layout};
use crate::config::{Format, KvEventsConfig};
use crate::endpoint::{Endpoint, EndpointError};
use crate::index::Index;
use crate::sockets::{PubSocket, bind, serve_replay};
use crate::wire::payload;

/// Why a publisher cannot start. Displays as one line.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// An address is malformed.
    #[error("{key}: {error}")]
    Endpoint {
        /// Key of the setting.
        key: &'static str,
        /// What is wrong.
        error: EndpointError,
    },
    /// A socket cannot listen at its address.
    #[error("{key}: cannot listen at {endpoint} ({error}), expected a free port; stop its user or choose another port")]
    Bind {
        /// Key of the setting.
        key: &'static str,
        /// The address.
        endpoint: String,
        /// The system's error.
        error: std::io::Error,
    },
    /// The address to connect to has no port.
    #[error("{key}: found {endpoint}, expected a port from 1 to 65535 to connect to, or * as the host to listen")]
    NoPort {
        /// Key of the setting.
        key: &'static str,
        /// The address.
        endpoint: String,
    },
    /// The thread cannot be started.
    #[error("the thread for KV events cannot be started ({0}), expected one more thread; raise the limit of threads")]
    Thread(std::io::Error),
}

/// Numbers since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Steps handed to the publisher thread.
    pub handed: u64,
    /// Steps that it has processed.
    pub processed: u64,
    /// Messages published, which is the sequence number of the next one.
    pub messages: u64,
    /// Steps dropped because the queue was full.
    pub dropped_steps: u64,
    /// Messages dropped because the queue of a subscriber was full.
    pub dropped_messages: u64,
    /// Peers that subscribe to the topic now.
    pub subscribers: usize,
}

/// The changes of a step.
struct Step {
    timestamp: f64,
    changes: Vec<Change>,
    /// Number of losses that the changes make good, because they begin with a snapshot.
    heals: u64,
}

struct Shared {
    state: Mutex<State>,
    socket: Arc<PubSocket>,
    layout: Layout,
    format: Format,
    handed: AtomicU64,
    processed: AtomicU64,
    dropped_steps: AtomicU64,
    /// Number of times that the queue overflowed.
    losses: AtomicU64,
    lost: Notify,
    closing: AtomicBool,
}

/// What messages and replay are made from.
struct State {
    index: Index,
    buffer: Buffer,
    next_seq: u64,
}

/// Takes changes and publishes them. Dropping it closes the sockets.
pub struct Publisher {
    shared: Arc<Shared>,
    /// `None` once it is dropped.
    queue: Option<mpsc::Sender<Step>>,
    thread: Option<JoinHandle<()>>,
    /// Whether changes were dropped since the last snapshot.
    lost: bool,
    address: Option<SocketAddr>,
    replay_address: Option<SocketAddr>,
}

/// An opened socket.
enum Opened {
    Listens(StdListener),
    Connects(Endpoint),
}

/// The opened sockets of a publisher that has not started yet.
pub struct Sockets {
    config: KvEventsConfig,
    events: Opened,
    replay: Option<StdListener>,
}

impl Sockets {
    /// Opens the sockets. [`KvEventsConfig::enabled`] is ignored.
    ///
    /// # Errors
    /// An address is malformed or in use.
    pub fn open(config: &KvEventsConfig) -> Result<Sockets, StartError> {
        let listen = |key: &'static str, text: &str, endpoint: &Endpoint| {
            bind(endpoint).map_err(|error| StartError::Bind { key, endpoint: text.to_string(), error })
        };
        let parse = |key: &'static str, text: &str| {
            text.parse::<Endpoint>().map_err(|error| StartError::Endpoint { key, error })
        };
        let endpoint = parse("endpoint", &config.endpoint)?;
        let events = match endpoint.binds {
            true => Opened::Listens(listen("endpoint", &config.endpoint, &endpoint)?),
            false if endpoint.port == 0 => {
                return Err(StartError::NoPort { key: "endpoint", endpoint: config.endpoint.clone() });
            }
            false => Opened::Connects(endpoint),
        };
        let replay = config.replay_endpoint.as_ref().map(|text| {
            let key = "replay_endpoint";
            listen(key, text, &parse(key, text)?)
        });
        Ok(Sockets { config: config.clone(), events, replay: replay.transpose()? })
    }

    /// One line for the log of a start.
    pub fn line(&self) -> String {
        let KvEventsConfig { endpoint, replay_endpoint, topic, .. } = &self.config;
        let verb = if matches!(self.events, Opened::Listens(_)) { "published at" } else { "sent to" };
        let replay = replay_endpoint.as_ref().map_or("no replay".to_string(), |at| format!("replay at {at}"));
        format!("KV events: {verb} {endpoint}, topic {topic:?}, {replay}")
    }
}

impl Publisher {
    /// Opens the sockets and starts the thread. [`KvEventsConfig::enabled`] is ignored.
    ///
    /// # Errors
    /// An address is malformed or in use, or the thread cannot be started.
    pub fn start(config: &KvEventsConfig, layout: Layout) -> Result<Publisher, StartError> {
        Publisher::start_on(Sockets::open(config)?, layout)
    }

    /// Like [`Publisher::start`], on opened sockets.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start_on(sockets: Sockets, layout: Layout) -> Result<Publisher, StartError> {
        let Sockets { config, events, replay } = sockets;
        let address = match &events {
            Opened::Listens(listener) => listener.local_addr().ok(),
            Opened::Connects(_) => None,
        };
        let replay_address = replay.as_ref().and_then(|listener| listener.local_addr().ok());
        let state = State { index: Index::new(layout), buffer: Buffer::new(config.buffer_steps), next_seq: 0 };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            socket: Arc::new(PubSocket::new(config.topic.clone(), config.hwm)),
            layout,
            format: config.format,
            handed: AtomicU64::new(0),
            processed: AtomicU64::new(0),
            dropped_steps: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            lost: Notify::new(),
            closing: AtomicBool::new(false),
        });
        let (queue, steps) = mpsc::channel(config.max_queue_size.clamp(1, Semaphore::MAX_PERMITS));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(StartError::Thread)?;
        let (of_thread, topic) = (shared.clone(), config.topic.clone());
        let body = move || runtime.block_on(of_thread.run(steps, events, replay, topic));
        let thread = std::thread::Builder::new().name("quire-kv-events".to_string()).spawn(body);
        let thread = Some(thread.map_err(StartError::Thread)?);
        Ok(Publisher { shared, queue: Some(queue), thread, lost: false, address, replay_address })
    }

    /// Hands over the changes of a step. Call it after every step, also without changes. Never waits. `snapshot` lists all cached
    /// prefixes, parents first; it is called only when an earlier step was dropped and the queue has room again.
    pub fn publish(&mut self, changes: Vec<Change>, snapshot: impl FnOnce() -> Vec<Change>) {
        let Some(queue) = &self.queue else { return };
        let (mut changes, mut heals) = (changes, 0);
        if self.lost {
            if queue.capacity() < queue.max_capacity().div_ceil(2) {
                self.shared.dropped_steps.fetch_add(u64::from(!changes.is_empty()), Ordering::Relaxed);
                return;
            }
            changes = std::iter::once(Change::Cleared).chain(snapshot()).collect();
            heals = self.shared.losses.load(Ordering::Acquire);
            self.lost = false;
        }
        if changes.is_empty() {
            return;
        }
        let timestamp = now();
        // Before the thread can process it.
        self.shared.handed.fetch_add(1, Ordering::AcqRel);
        if queue.try_send(Step { timestamp, changes, heals }).is_err() {
            self.shared.handed.fetch_sub(1, Ordering::AcqRel);
            self.shared.dropped_steps.fetch_add(1, Ordering::Relaxed);
            self.lost = true;
            self.shared.losses.fetch_add(1, Ordering::AcqRel);
            self.shared.lost.notify_one();
        }
    }

    /// Address of the PUB socket, if it listens.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Address of the replay socket, if there is one.
    pub fn replay_address(&self) -> Option<SocketAddr> {
        self.replay_address
    }

    /// Numbers of dropped steps and of dropped messages, as in [`Stats`]. Takes no lock.
    pub fn num_dropped(&self) -> (u64, u64) {
        (self.shared.dropped_steps.load(Ordering::Relaxed), self.shared.socket.num_dropped() as u64)
    }

    /// Numbers since the start. May wait for the publisher thread to encode a message, so a step should not ask.
    pub fn stats(&self) -> Stats {
        let Shared { handed, processed, socket, .. } = &*self.shared;
        let (dropped_steps, dropped_messages) = self.num_dropped();
        Stats {
            handed: handed.load(Ordering::Acquire),
            processed: processed.load(Ordering::Acquire),
            messages: self.shared.lock().next_seq,
            dropped_steps,
            dropped_messages,
            subscribers: socket.num_subscribers(),
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread's work, until the publisher is dropped.
    async fn run(
        self: Arc<Shared>,
        mut steps: mpsc::Receiver<Step>,
        events: Opened,
        replay: Option<StdListener>,
        topic: String,
    ) {
        let listener = |listener: StdListener| {
            TcpListener::from_std(listener).inspect_err(|error| tracing::error!("KV events: no socket: {error}")).ok()
        };
        match events {
            Opened::Listens(socket) => {
                if let Some(socket) = listener(socket) {
                    drop(tokio::spawn(self.socket.clone().listen(socket)));
                }
            }
            Opened::Connects(endpoint) => drop(tokio::spawn(self.socket.clone().connect(endpoint))),
        }
        if let Some(socket) = replay.and_then(listener) {
            let shared = self.clone();
            drop(tokio::spawn(serve_replay(socket, topic, move |first| shared.replay(first))));
        }
        let mut healed = 0;
        loop {
            tokio::select! {
                biased;
                step = steps.recv() => match step {
                    Some(step) if !self.closing.load(Ordering::Acquire) => self.process(step, &mut healed),
                    _ => return,
                },
                () = self.lost.notified() => {
                    // What was queued before the loss comes first.
                    while let Ok(step) = steps.try_recv() {
                        self.process(step, &mut healed);
                    }
                    let losses = self.losses.load(Ordering::Acquire);
                    if losses > healed {
                        healed = losses;
                        tracing::warn!("KV events: the queue overflowed; subscribers get a snapshot with a later step");
                        self.publish(now(), &[Change::Cleared]);
                    }
                }
            }
        }
    }

    fn process(&self, step: Step, healed: &mut u64) {
        *healed = step.heals.max(*healed);
        self.publish(step.timestamp, &step.changes);
        self.processed.fetch_add(1, Ordering::AcqRel);
    }

    /// Publishes one message, unless the changes are no news.
    fn publish(&self, timestamp: f64, changes: &[Change]) {
        let mut state = self.lock();
        let events = state.index.apply(changes);
        if events.is_empty() {
            return;
        }
        let message = (state.next_seq, payload(timestamp, &events, self.layout, self.format));
        state.next_seq += 1;
        state.buffer.push(message.clone());
        self.socket.send(&message);
    }

    /// The messages from `first` on, or a snapshot in their place.
    fn replay(&self, first: u64) -> Vec<Message> {
        let state = self.lock();
        if first >= state.next_seq {
            return Vec::new();
        }
        if let Some(messages) = state.buffer.since(first, state.next_seq) {
            return messages;
        }
        let encode = |events: &[Change]| payload(now(), events, self.layout, self.format);
        let snapshot = (first, encode(&state.index.snapshot()));
        let last = state.next_seq - 1;
        if last == first { vec![snapshot] } else { vec![snapshot, (last, encode(&[]))] }
    }
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
