//! Exchange of cached blocks with other replicas, behind the host tier.
//!
//! ```text
//! prefill replica                                                    decode replica
//! pool ─▶ host tier ─▶ thread ─▶ [ connector: a shared folder ] ─▶ thread ─▶ host tier ─▶ pool
//!         after the request                                        before the request is queued
//! ```
//!
//! A [`Connector`] stores whole blocks, as they lie in host memory, under names of their contents ([`BlockName`]). Two replicas give
//! a block the same name only if it has the same bytes: the name covers the model's weights, how it computes and stores keys and
//! values, salt, adapter, and all tokens up to the end of the block.
//!
//! All calls of a connector are made on a thread of its own. A request that wants blocks waits in front of the engine's queue until
//! they are loaded, at most [`KvTransferConfig::wait_seconds`] from its submission, whatever the connector does. Whatever is missing
//! or broken is computed.

mod config;
mod folder;
mod naming;
mod thread;

use std::io;

pub use config::{KvRole, KvTransferConfig};
pub(crate) use folder::SharedFolder;
pub(crate) use naming::BlockName;
pub(crate) use naming::{Chain, Naming};
pub(crate) use thread::{Limits, LoadJob, LoadedBlocks, TransferThread, WantedBlock};

/// What a request exchanges with other replicas: `do_remote_prefill` and `do_remote_decode` of vLLM's `kv_transfer_params`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KvTransfer {
    /// Another replica has computed the prompt: wait for its blocks.
    pub load: bool,
    /// Another replica will continue the request: store the blocks of the prompt.
    pub store: bool,
}

/// Why a block was not stored or loaded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConnectorError {
    /// No block has this name.
    #[error("not found")]
    NotFound,
    /// What has the name is not this block.
    #[error("{0}")]
    Broken(&'static str),
    /// Reading or writing failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A store of blocks that several replicas share. A block never changes, so a name is stored at most once.
pub(crate) trait Connector: Send {
    /// Returns whether a block is stored. It may be gone when it is loaded.
    fn lookup(&self, name: &BlockName) -> bool;

    /// Fills `contents` with a block. `tokens` are those of the block.
    ///
    /// # Errors
    /// There is no such block of this length. `contents` is undefined then.
    fn load(&self, name: &BlockName, tokens: &[u32], contents: &mut [u8]) -> Result<(), ConnectorError>;

    /// Stores a block. Others find it as a whole or not at all.
    ///
    /// # Errors
    /// It could not be stored.
    fn store(&mut self, name: &BlockName, tokens: &[u32], contents: &[u8]) -> Result<(), ConnectorError>;
}
