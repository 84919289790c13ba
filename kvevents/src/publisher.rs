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
//! A replay request for messages that are gone is answered by a snapshot too ([`journal`](crate::journal)).

use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use tokio::net::TcpListener;
use tokio::sync::{Notify, Semaphore, mpsc, watch};

use crate::change::{Change, Layout};
use crate::config::KvEventsConfig;
use crate::endpoint::{Endpoint, EndpointError};
use crate::journal::{Journal, SharedJournal, Sizes, now};
use crate::limits::Limits;
use crate::sockets::{Context, PubSocket, bind, serve_replay};

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
    /// Messages that a subscriber did not get because it read too slowly.
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
    journal: SharedJournal,
    /// Tells the subscribers' tasks that there is a message.
    news: watch::Sender<()>,
    handed: AtomicU64,
    processed: AtomicU64,
    dropped_steps: AtomicU64,
    dropped_messages: AtomicU64,
    /// Number of times that the queue overflowed.
    losses: AtomicU64,
    lost: Notify,
    closing: AtomicBool,
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
    limits: Limits,
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
        Ok(Sockets { config: config.clone(), limits: Limits::default(), events, replay: replay.transpose()? })
    }

    /// Replaces the deadlines and sizes.
    pub fn with_limits(self, limits: Limits) -> Sockets {
        Sockets { limits, ..self }
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
        let Sockets { config, limits, events, replay } = sockets;
        let address = match &events {
            Opened::Listens(listener) => listener.local_addr().ok(),
            Opened::Connects(_) => None,
        };
        let replay_address = replay.as_ref().and_then(|listener| listener.local_addr().ok());
        let sizes = Sizes { replayed: config.buffer_steps, hwm: config.hwm, bytes: limits.bytes };
        let shared = Arc::new(Shared {
            journal: SharedJournal::new(Journal::new(layout, config.format, &sizes)),
            news: watch::Sender::new(()),
            handed: AtomicU64::new(0),
            processed: AtomicU64::new(0),
            dropped_steps: AtomicU64::new(0),
            dropped_messages: AtomicU64::new(0),
            losses: AtomicU64::new(0),
            lost: Notify::new(),
            closing: AtomicBool::new(false),
        });
        let (queue, steps) = mpsc::channel(config.max_queue_size.clamp(1, Semaphore::MAX_PERMITS));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(StartError::Thread)?;
        let context = Context { topic: config.topic.into(), limits, journal: shared.journal.clone() };
        let of_thread = shared.clone();
        let body = move || runtime.block_on(of_thread.run(steps, events, replay, context));
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
        let Shared { dropped_steps, dropped_messages, .. } = &*self.shared;
        (dropped_steps.load(Ordering::Relaxed), dropped_messages.load(Ordering::Relaxed))
    }

    /// Numbers since the start. May wait for the publisher thread to encode a message, so a step should not ask.
    pub fn stats(&self) -> Stats {
        let Shared { handed, processed, journal, .. } = &*self.shared;
        let (dropped_steps, dropped_messages) = self.num_dropped();
        let (handed, processed) = (handed.load(Ordering::Acquire), processed.load(Ordering::Acquire));
        let journal = journal.lock();
        Stats {
            handed,
            processed,
            messages: journal.next_seq(),
            dropped_steps,
            dropped_messages,
            subscribers: journal.num_subscribers(),
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
    /// The thread's work, until the publisher is dropped.
    async fn run(
        self: Arc<Shared>,
        mut steps: mpsc::Receiver<Step>,
        events: Opened,
        replay: Option<StdListener>,
        context: Context,
    ) {
        let listener = |listener: StdListener| {
            TcpListener::from_std(listener).inspect_err(|error| tracing::error!("KV events: no socket: {error}")).ok()
        };
        let publishing = PubSocket::new(context.clone(), self.news.subscribe());
        match events {
            Opened::Listens(socket) => {
                if let Some(socket) = listener(socket) {
                    drop(tokio::spawn(publishing.listen(socket)));
                }
            }
            Opened::Connects(endpoint) => drop(tokio::spawn(publishing.connect(endpoint))),
        }
        if let Some(socket) = replay.and_then(listener) {
            drop(tokio::spawn(serve_replay(socket, context)));
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
                        self.publish(now(), &[Change::Cleared], false);
                    }
                }
            }
        }
    }

    fn process(&self, step: Step, healed: &mut u64) {
        *healed = step.heals.max(*healed);
        self.publish(step.timestamp, &step.changes, step.heals > 0);
        self.processed.fetch_add(1, Ordering::AcqRel);
    }

    /// Publishes one message, unless the changes are no news.
    fn publish(&self, timestamp: f64, changes: &[Change], is_snapshot: bool) {
        let lost = self.journal.lock().append(timestamp, changes, is_snapshot);
        if let Some(lost) = lost {
            self.dropped_messages.fetch_add(lost, Ordering::Relaxed);
            self.news.send_replace(());
        }
    }
}
