//! The thread that calls the connector, so that no step waits for a file.
//!
//! Both directions are bounded: the engine hands over blocks to store only while less than [`Limits::bytes`] wait to be stored, and no
//! further ones are loaded while as much is loaded and not taken. Blocks of a request are loaded and delivered in pieces, and
//! requests take turns, so none waits for all of those before it. A request that nobody waits for any more is dropped.
//!
//! A panic of the connector counts as a failure of the block that it was called for.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::{BlockName, Connector, ConnectorError};

/// Time between two looks for blocks that are not there yet.
const POLL: Duration = Duration::from_millis(10);

/// Bounds of what is under way.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    /// Bytes that wait to be stored, and bytes that are loaded and not taken.
    pub bytes: usize,
    /// Bytes of a piece, unless a block has more.
    pub piece: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { bytes: 256 << 20, piece: 16 << 20 }
    }
}

/// A block to load, with its index in the prompt and its cache group.
pub(crate) struct WantedBlock {
    pub block: usize,
    pub group: usize,
    pub name: BlockName,
    pub tokens: Vec<u32>,
}

/// Contents of loaded blocks by index and group.
pub(crate) type LoadedBlocks = BTreeMap<(usize, usize), Vec<u8>>;

/// Blocks to load for a request.
pub(crate) struct LoadJob {
    /// In the order of the prompt.
    pub blocks: Vec<WantedBlock>,
    /// The block that is stored last, and until when the request waits for it before the others are loaded; `None`: it does not wait.
    pub last: Option<(BlockName, Instant)>,
    /// Gone when nobody waits for the blocks any more.
    pub is_wanted: Weak<()>,
    /// Called with each piece, and whether it is the last one.
    pub deliver: Box<dyn FnMut(LoadedBlocks, bool) + Send>,
}

enum Job {
    Store { name: BlockName, tokens: Vec<u32>, contents: Vec<u8>, wanted: Weak<()> },
    Load(LoadJob),
}

/// See the [module](self). The thread ends when this is dropped, after it has stored what was handed over.
pub(crate) struct TransferThread {
    limits: Limits,
    jobs: Option<Sender<Job>>,
    stored_bytes: Arc<AtomicUsize>,
    loaded_bytes: Arc<AtomicUsize>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl TransferThread {
    /// Starts the thread, for blocks of `block_bytes` bytes.
    pub fn start(connector: Box<dyn Connector>, block_bytes: usize, limits: Limits) -> std::io::Result<TransferThread> {
        let (jobs, receiver) = channel();
        let (stored_bytes, loaded_bytes) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let (stored, loaded) = (stored_bytes.clone(), loaded_bytes.clone());
        let state = State { connector, block_bytes, limits, loads: Vec::new(), stored, loaded };
        let thread =
            std::thread::Builder::new().name("quire-kv-transfer".to_string()).spawn(move || state.run(&receiver))?;
        Ok(TransferThread { limits, jobs: Some(jobs), stored_bytes, loaded_bytes, thread: Some(thread) })
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Whether a block may be handed over now.
    pub fn has_room(&self) -> bool {
        self.stored_bytes.load(Ordering::Relaxed) < self.limits.bytes
    }

    /// Hands over a block, which is stored unless `wanted` is gone when its turn comes. Never waits.
    pub fn store(&self, name: BlockName, tokens: Vec<u32>, contents: Vec<u8>, wanted: Weak<()>) {
        self.stored_bytes.fetch_add(contents.len(), Ordering::Relaxed);
        self.send(Job::Store { name, tokens, contents, wanted });
    }

    /// The blocks of a piece are no longer needed.
    pub fn taken(&self, blocks: &LoadedBlocks) {
        self.loaded_bytes.fetch_sub(num_bytes(blocks), Ordering::Relaxed);
    }

    /// Begins to load blocks.
    pub fn load(&self, load: LoadJob) {
        self.send(Job::Load(load));
    }

    fn send(&self, job: Job) {
        // The thread ends only after this was dropped.
        let _ = self.jobs.as_ref().map(|jobs| jobs.send(job));
    }
}

impl Drop for TransferThread {
    fn drop(&mut self) {
        self.jobs = None;
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

fn num_bytes(blocks: &LoadedBlocks) -> usize {
    blocks.values().map(Vec::len).sum()
}

struct State {
    connector: Box<dyn Connector>,
    block_bytes: usize,
    limits: Limits,
    /// Requests that wait for blocks.
    loads: Vec<LoadJob>,
    stored: Arc<AtomicUsize>,
    loaded: Arc<AtomicUsize>,
}

impl State {
    fn run(mut self, jobs: &Receiver<Job>) {
        let mut has_loaded = false;
        loop {
            // Between two pieces for each request, one block is stored.
            let wait = if has_loaded { Duration::ZERO } else { POLL };
            let job = match self.loads.is_empty() {
                true => jobs.recv().map_err(|_| RecvTimeoutError::Disconnected),
                false => jobs.recv_timeout(wait),
            };
            match job {
                Ok(Job::Store { name, tokens, contents, wanted }) => {
                    if wanted.strong_count() > 0
                        && let Err(error) = self.call(|connector| connector.store(&name, &tokens, &contents))
                    {
                        tracing::warn!("block {name} was not stored for other replicas: {error}");
                    }
                    self.stored.fetch_sub(contents.len(), Ordering::Relaxed);
                }
                Ok(Job::Load(load)) => self.loads.push(load),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            has_loaded = self.serve();
        }
    }

    /// Loads a piece for each request that need not wait for its blocks. Returns whether there is one.
    fn serve(&mut self) -> bool {
        let mut loads = std::mem::take(&mut self.loads);
        let mut has_loaded = false;
        loads.retain_mut(|load| {
            if load.is_wanted.strong_count() == 0 {
                return false;
            }
            if self.loaded.load(Ordering::Relaxed) > self.limits.bytes {
                return true;
            }
            if let Some((last, until)) = load.last
                && Instant::now() < until
                && !self.call(|connector| Ok(connector.lookup(&last))).unwrap_or(true)
            {
                return true;
            }
            (load.last, has_loaded) = (None, true);
            let (found, is_last) = self.load_piece(&mut load.blocks);
            self.loaded.fetch_add(num_bytes(&found), Ordering::Relaxed);
            (load.deliver)(found, is_last);
            !is_last
        });
        self.loads = loads;
        has_loaded
    }

    /// Removes blocks from the front and loads them, at most a piece and up to the first of which no group's is found. Returns whether no
    /// further ones are to be loaded.
    fn load_piece(&mut self, blocks: &mut Vec<WantedBlock>) -> (LoadedBlocks, bool) {
        let (mut found, mut count, mut is_over) = (LoadedBlocks::new(), 0, false);
        for of_block in blocks.chunk_by(|a, b| a.block == b.block) {
            if found.len() * self.block_bytes >= self.limits.piece {
                break;
            }
            let before = found.len();
            for WantedBlock { block, group, name, tokens } in of_block {
                let mut contents = vec![0; self.block_bytes];
                match self.call(|connector| connector.load(name, tokens, &mut contents)) {
                    Ok(()) => drop(found.insert((*block, *group), contents)),
                    Err(ConnectorError::NotFound) => {}
                    Err(error) => tracing::warn!("block {name} of another replica is ignored: {error}"),
                }
            }
            count += of_block.len();
            is_over = found.len() == before;
            if is_over {
                break;
            }
        }
        drop(blocks.drain(..count));
        (found, is_over || blocks.is_empty())
    }

    /// Calls the connector.
    fn call<T>(
        &mut self,
        work: impl FnOnce(&mut dyn Connector) -> Result<T, ConnectorError>,
    ) -> Result<T, ConnectorError> {
        let connector = &mut *self.connector;
        catch_unwind(AssertUnwindSafe(|| work(connector)))
            .unwrap_or(Err(ConnectorError::Broken("the connector panicked")))
    }
}
