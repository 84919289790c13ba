//! The state of the exchange of blocks with other replicas. `exchange.rs` has the engine's part.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Weak};
use std::time::Instant;

use kvblock::{HostCopy, Prompt};
use sched::{CacheGroup, RequestId, SchedConfig, StepId};

use crate::connector::{
    BlockName, Chain, Connector, KvTransfer, KvTransferConfig, Limits, Naming, TransferThread, Wanted,
};

/// A connector, and the names of the blocks of this replica: what [`load`](crate::load) has opened.
pub struct KvTransferParts {
    pub(crate) config: KvTransferConfig,
    pub(crate) naming: Naming,
    pub(crate) connector: Box<dyn Connector>,
    pub(crate) limits: Limits,
}

/// Tokens whose blocks are exchanged, and what else their contents depend on.
#[derive(Clone)]
pub(crate) struct TransferSource {
    pub(super) tokens: Vec<u32>,
    salt: Option<String>,
    /// Digest of the adapter.
    adapter: Option<String>,
}

impl TransferSource {
    pub(super) fn new(tokens: Vec<u32>, salt: Option<String>, adapter: Option<String>) -> TransferSource {
        TransferSource { tokens, salt, adapter }
    }

    pub(super) fn prompt(&self) -> Prompt<'_> {
        Prompt { salt: self.salt.as_deref(), adapter: self.adapter.as_deref(), ..Prompt::new(&self.tokens) }
    }

    pub(super) fn chain(&self, naming: &Naming) -> Chain {
        naming.chain(&self.tokens, self.salt.as_deref(), self.adapter.as_deref())
    }
}

/// What to load for a request.
pub(crate) struct Fetch {
    pub source: TransferSource,
    pub(super) blocks: Vec<Wanted>,
    /// The block that is stored last, if the request waits for it.
    pub(super) last: Option<BlockName>,
}

/// A request that waits for blocks. They are loaded until this is dropped.
pub(crate) struct Waiting {
    pub(super) source: TransferSource,
    /// When the request does not wait any longer.
    pub deadline: Instant,
    pub(super) _is_wanted: Arc<()>,
    /// See [`KvTransfers::generation`].
    pub(super) generation: Weak<()>,
}

impl Waiting {
    /// Whether the prefix cache has been emptied since, so that nothing is taken any more.
    pub fn is_stale(&self) -> bool {
        self.generation.strong_count() == 0
    }
}

/// Blocks of a prompt to store, on their way to host memory or to the connector.
pub(super) struct Export {
    pub tokens: Vec<u32>,
    pub chain: Chain,
    /// Blocks still to be handed over, in the order of the prompt.
    pub copies: VecDeque<HostCopy>,
    /// The plan that has the copies; `None` before it.
    pub step: Option<StepId>,
    /// Number of blocks that were lost before they could be handed over.
    pub num_lost: usize,
}

/// See the [module](self).
pub(super) struct KvTransfers {
    pub config: KvTransferConfig,
    pub naming: Naming,
    pub thread: TransferThread,
    pub block_size: usize,
    pub groups: usize,
    /// The group whose blocks are all stored, if there is one.
    pub full_group: usize,
    pub host_blocks: usize,
    /// Requests whose blocks are stored when they end.
    pub sources: HashMap<RequestId, TransferSource>,
    /// Oldest first.
    pub exports: VecDeque<Export>,
    /// Gone when the prefix cache is emptied: nothing loaded before is taken then, and nothing computed before is stored.
    pub generation: Arc<()>,
}

impl KvTransfers {
    pub fn start(parts: KvTransferParts, sched: &SchedConfig, block_bytes: usize) -> io::Result<KvTransfers> {
        let KvTransferParts { config, naming, connector, limits } = parts;
        Ok(KvTransfers {
            config,
            naming,
            thread: TransferThread::start(connector, block_bytes, limits)?,
            block_size: sched.block_size,
            groups: sched.groups.len(),
            full_group: sched.groups.iter().position(|group| *group == CacheGroup::Full).unwrap_or(0),
            host_blocks: sched.host_blocks,
            sources: HashMap::new(),
            exports: VecDeque::new(),
            generation: Arc::default(),
        })
    }

    /// Remembers a request whose blocks are to be stored.
    pub fn admitted(&mut self, id: RequestId, wish: KvTransfer, source: impl FnOnce() -> TransferSource) {
        if self.config.role.stores() && (wish.store || self.config.always) {
            self.sources.insert(id, source());
        }
    }

    /// The prefix cache has been emptied.
    pub fn reset(&mut self) {
        self.exports.clear();
        self.generation = Arc::default();
    }

    /// A request has been cancelled or has failed.
    pub fn forget(&mut self, id: RequestId) {
        self.sources.remove(&id);
    }
}
