//! The state of the exchange of blocks with other replicas. `exchange.rs` has the engine's part.

use std::collections::HashMap;
use std::io;

use kvblock::{HostCopy, Prompt};
use sched::{CacheGroup, RequestId, SchedConfig, StepId};

use crate::connector::{BlockName, Chain, Connector, KvTransfer, KvTransferConfig, Naming, TransferThread, Wanted};

/// A connector, and the names of the blocks of this replica.
pub struct KvTransferParts {
    pub(crate) config: KvTransferConfig,
    pub(crate) naming: Naming,
    pub(crate) connector: Box<dyn Connector>,
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

/// Blocks to store, on their way to host memory.
pub(super) struct Export {
    pub source: TransferSource,
    pub copies: Vec<HostCopy>,
    /// The plan that has the copies; `None` before it.
    pub step: Option<StepId>,
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
    pub exports: Vec<Export>,
    /// Requests that wait for blocks.
    pub num_fetching: usize,
}

impl KvTransfers {
    pub fn start(parts: KvTransferParts, sched: &SchedConfig, block_bytes: usize) -> io::Result<KvTransfers> {
        let KvTransferParts { config, naming, connector } = parts;
        Ok(KvTransfers {
            config,
            naming,
            thread: TransferThread::start(connector, block_bytes)?,
            block_size: sched.block_size,
            groups: sched.groups.len(),
            full_group: sched.groups.iter().position(|group| *group == CacheGroup::Full).unwrap_or(0),
            host_blocks: sched.host_blocks,
            sources: HashMap::new(),
            exports: Vec::new(),
            num_fetching: 0,
        })
    }

    /// Remembers a request whose blocks are to be stored.
    pub fn admitted(&mut self, id: RequestId, wish: KvTransfer, source: impl FnOnce() -> TransferSource) {
        if self.config.role.stores() && (wish.store || self.config.always) {
            self.sources.insert(id, source());
        }
    }

    /// A request has been cancelled or has failed.
    pub fn forget(&mut self, id: RequestId) {
        self.sources.remove(&id);
    }

    /// The copies that were ordered before are in this plan.
    pub fn planned(&mut self, step: StepId) {
        for export in &mut self.exports {
            export.step.get_or_insert(step);
        }
    }

    /// Whether copies wait for a plan.
    pub fn wait_for_plan(&self) -> bool {
        self.exports.iter().any(|export| export.step.is_none())
    }
}
