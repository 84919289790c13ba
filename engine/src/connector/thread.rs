//! The thread that calls the connector, so that no step waits for a file.
//!
//! Both directions are bounded: what waits to be stored takes at most [`MAX_BYTES`], and more is dropped; at most [`MAX_FETCHES`]
//! requests wait for blocks, and others are computed at once; while more than [`MAX_BYTES`] are loaded and not taken, no further
//! request's blocks are loaded.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::{BlockName, Connector, ConnectorError};

const MAX_BYTES: usize = 256 << 20;
const MAX_FETCHES: usize = 1024;
/// Time between two looks for blocks that are not there yet.
const POLL: Duration = Duration::from_millis(10);

/// A block to load, with its index in the prompt and its cache group.
pub(crate) struct Wanted {
    pub block: usize,
    pub group: usize,
    pub name: BlockName,
    pub tokens: Vec<u32>,
}

/// Contents of loaded blocks by index and group.
pub(crate) type Fetched = BTreeMap<(usize, usize), Vec<u8>>;

struct Fetch {
    /// In the order of the prompt.
    blocks: Vec<Wanted>,
    /// The block that is stored last, for which the request waits until the deadline; `None`: it does not wait.
    last: Option<BlockName>,
    deadline: Instant,
    done: Box<dyn FnOnce(Fetched) + Send>,
}

enum Job {
    Store { name: BlockName, tokens: Vec<u32>, contents: Vec<u8> },
    Fetch(Fetch),
}

/// See the [module](self). The thread ends when this is dropped, after it has stored what was handed over.
pub(crate) struct TransferThread {
    jobs: Option<Sender<Job>>,
    stored_bytes: Arc<AtomicUsize>,
    loaded_bytes: Arc<AtomicUsize>,
    num_fetches: Arc<AtomicUsize>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl TransferThread {
    /// Starts the thread, for blocks of `block_bytes` bytes.
    pub fn start(connector: Box<dyn Connector>, block_bytes: usize) -> std::io::Result<TransferThread> {
        let (jobs, receiver) = channel();
        let counts = || Arc::new(AtomicUsize::new(0));
        let (stored_bytes, loaded_bytes, num_fetches) = (counts(), counts(), counts());
        let state = State {
            connector,
            block_bytes,
            fetches: Vec::new(),
            stored: stored_bytes.clone(),
            loaded: loaded_bytes.clone(),
            waiting: num_fetches.clone(),
        };
        let thread =
            std::thread::Builder::new().name("quire-kv-transfer".to_string()).spawn(move || state.run(&receiver))?;
        Ok(TransferThread { jobs: Some(jobs), stored_bytes, loaded_bytes, num_fetches, thread: Some(thread) })
    }

    /// Hands over a block to store. Never waits; drops the block if too many wait.
    pub fn store(&self, name: BlockName, tokens: Vec<u32>, contents: Vec<u8>) {
        let bytes = contents.len();
        if self.stored_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > MAX_BYTES {
            self.stored_bytes.fetch_sub(bytes, Ordering::Relaxed);
            tracing::warn!("a block is not stored for other replicas: {MAX_BYTES} bytes wait to be stored");
        } else {
            self.send(Job::Store { name, tokens, contents });
        }
    }

    /// The blocks that were passed to a call of `done` are no longer needed.
    pub fn taken(&self, found: &Fetched) {
        self.loaded_bytes.fetch_sub(found.values().map(Vec::len).sum(), Ordering::Relaxed);
    }

    /// Loads blocks, and calls `done` on the thread with those that were found. With `last`, waits for this one at most until
    /// the deadline.
    pub fn fetch(
        &self,
        blocks: Vec<Wanted>,
        last: Option<BlockName>,
        deadline: Instant,
        done: impl FnOnce(Fetched) + Send + 'static,
    ) {
        if self.num_fetches.fetch_add(1, Ordering::Relaxed) >= MAX_FETCHES {
            self.num_fetches.fetch_sub(1, Ordering::Relaxed);
            return done(Fetched::new());
        }
        self.send(Job::Fetch(Fetch { blocks, last, deadline, done: Box::new(done) }));
    }

    fn send(&self, job: Job) {
        // The thread ends only after this was dropped. A fetch that is dropped tells its caller by that.
        let _ = self.jobs.as_ref().map(|jobs| jobs.send(job));
    }
}

impl Drop for TransferThread {
    fn drop(&mut self) {
        self.jobs = None;
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

struct State {
    connector: Box<dyn Connector>,
    block_bytes: usize,
    /// Requests that wait for blocks.
    fetches: Vec<Fetch>,
    stored: Arc<AtomicUsize>,
    loaded: Arc<AtomicUsize>,
    waiting: Arc<AtomicUsize>,
}

impl State {
    fn run(mut self, jobs: &Receiver<Job>) {
        loop {
            let job = match self.fetches.is_empty() {
                true => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
                false => jobs.recv_timeout(POLL),
            };
            match job {
                Ok(Job::Store { name, tokens, contents }) => {
                    if let Err(error) = self.connector.store(&name, &tokens, &contents) {
                        tracing::warn!("block {name} was not stored for other replicas: {error}");
                    }
                    self.stored.fetch_sub(contents.len(), Ordering::Relaxed);
                }
                Ok(Job::Fetch(fetch)) => self.fetches.push(fetch),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.serve();
        }
    }

    /// Loads the blocks of requests that need not wait any longer.
    fn serve(&mut self) {
        let (now, mut at) = (Instant::now(), 0);
        while at < self.fetches.len() && self.loaded.load(Ordering::Relaxed) <= MAX_BYTES {
            let Fetch { last, deadline, .. } = &self.fetches[at];
            if last.is_some_and(|last| now < *deadline && !self.connector.lookup(&last)) {
                at += 1;
                continue;
            }
            let fetch = self.fetches.remove(at);
            let found = self.load(&fetch.blocks);
            self.loaded.fetch_add(found.values().map(Vec::len).sum(), Ordering::Relaxed);
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            (fetch.done)(found);
        }
    }

    /// Loads blocks up to the first of which no group's is found.
    fn load(&self, blocks: &[Wanted]) -> Fetched {
        let mut found = Fetched::new();
        for of_block in blocks.chunk_by(|a, b| a.block == b.block) {
            let before = found.len();
            for Wanted { block, group, name, tokens } in of_block {
                let mut contents = vec![0; self.block_bytes];
                match self.connector.load(name, tokens, &mut contents) {
                    Ok(()) => drop(found.insert((*block, *group), contents)),
                    Err(ConnectorError::NotFound) => {}
                    Err(error) => tracing::warn!("block {name} of another replica is ignored: {error}"),
                }
            }
            if found.len() == before {
                break;
            }
        }
        found
    }
}
