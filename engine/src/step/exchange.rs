//! Exchange of blocks with other replicas: the blocks that are loaded before a request, and those that are stored after one.
//!
//! [`Engine::advance_exchange`] does everything that does not belong to a plan, after every command and every step. It takes loaded
//! blocks into the host tier, ends the waits of requests, and hands over blocks to store.
//!
//! **Loading** begins before a request is submitted. Its blocks arrive in pieces. The request's wait ends with the last piece, at its
//! deadline, or when the prefix cache is emptied. The caller then submits the request, which finds the blocks in the host tier.
//!
//! **Storing** begins when a request has ended. Copies of its prompt's blocks to the host are part of the next plan. They are read when
//! no step up to that plan is in flight, as fast as the connector stores them. A host block that was reused in between is not stored.
//! An engine has work until all blocks are handed over.
//!
//! Emptying the prefix cache discards both: what is loaded and not taken, and what is not stored yet.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use kvblock::{HostCopy, Prompt};
use sched::{CacheGroup, RequestId, SchedConfig, Scheduler, StepId};

use super::Engine;
use super::check::check;
use crate::api::GenerationRequest;
use crate::connector::{
    Chain, Connector, KvTransfer, KvTransferConfig, Limits, LoadJob, LoadedBlocks, Naming, TransferThread, WantedBlock,
};
use crate::worker::Worker;

/// Greatest number of prompts whose blocks wait to be handed over.
const MOST_EXPORTS: usize = 1024;
/// Greatest number of requests that wait for blocks; further ones compute theirs.
const MOST_LOADS: usize = 1024;

/// A connector, and the names of the blocks of this replica: what [`load`](crate::load) has opened.
pub struct KvTransferParts {
    pub(crate) config: KvTransferConfig,
    pub(crate) naming: Naming,
    pub(crate) connector: Box<dyn Connector>,
    pub(crate) limits: Limits,
}

/// A prompt whose blocks are exchanged, and what else their contents depend on.
pub(super) struct ExchangedPrompt {
    tokens: Vec<u32>,
    salt: Option<String>,
    /// Digest of the adapter.
    adapter: Option<String>,
}

impl ExchangedPrompt {
    pub fn new(tokens: &[u32], salt: Option<&String>, adapter: Option<&String>) -> ExchangedPrompt {
        ExchangedPrompt { tokens: tokens.to_vec(), salt: salt.cloned(), adapter: adapter.cloned() }
    }

    fn prompt(&self) -> Prompt<'_> {
        Prompt { salt: self.salt.as_deref(), adapter: self.adapter.as_deref(), ..Prompt::new(&self.tokens) }
    }

    fn chain(&self, naming: &Naming) -> Chain {
        naming.chain(&self.tokens, self.salt.as_deref(), self.adapter.as_deref())
    }
}

/// Identifies a request that waits for blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LoadId(u64);

/// A request that waits for blocks.
struct Load {
    prompt: ExchangedPrompt,
    /// When the wait ends in any case.
    deadline: Instant,
    /// The connector's thread loads blocks until this is dropped.
    _is_wanted: Arc<()>,
}

/// Loaded blocks on their way to the host tier.
struct Piece {
    load: LoadId,
    blocks: LoadedBlocks,
    is_last: bool,
}

/// Blocks of a prompt to store, on their way to host memory or to the connector.
pub(super) struct Export {
    tokens: Vec<u32>,
    chain: Chain,
    /// Blocks still to be handed over, in the order of the prompt.
    copies: VecDeque<HostCopy>,
    /// The plan that has the copies; `None` before it.
    step: Option<StepId>,
    /// Number of blocks that were lost before they could be handed over.
    num_lost: usize,
}

/// See the [module](self).
pub(super) struct Exchange {
    config: KvTransferConfig,
    naming: Naming,
    thread: TransferThread,
    block_size: usize,
    groups: usize,
    /// The group whose blocks are all stored, if there is one.
    full_group: usize,
    host_blocks: usize,
    /// Requests that wait, in the order of their arrival.
    loads: BTreeMap<LoadId, Load>,
    /// Number of loads so far.
    num_loads: u64,
    pieces: (Sender<Piece>, Receiver<Piece>),
    /// Loads whose wait has ended and that the caller has not been told of.
    ended_loads: Vec<LoadId>,
    /// Live requests whose blocks are stored when they end.
    pub to_store: HashMap<RequestId, ExchangedPrompt>,
    /// Oldest first.
    pub exports: VecDeque<Export>,
    /// Dropped when the prefix cache is emptied: what was handed over before is then not stored.
    generation: Arc<()>,
}

impl Exchange {
    pub fn start(parts: KvTransferParts, sched: &SchedConfig, block_bytes: usize) -> io::Result<Exchange> {
        let KvTransferParts { config, naming, connector, limits } = parts;
        Ok(Exchange {
            config,
            naming,
            thread: TransferThread::start(connector, block_bytes, limits)?,
            block_size: sched.block_size,
            groups: sched.groups.len(),
            full_group: sched.groups.iter().position(|group| *group == CacheGroup::Full).unwrap_or(0),
            host_blocks: sched.host_blocks,
            loads: BTreeMap::new(),
            num_loads: 0,
            pieces: channel(),
            ended_loads: Vec::new(),
            to_store: HashMap::new(),
            exports: VecDeque::new(),
            generation: Arc::default(),
        })
    }

    /// Takes loaded blocks into the host tier, unless the request waits no longer.
    fn take_piece(&mut self, scheduler: &mut Scheduler, worker: &mut dyn Worker, piece: &Piece) {
        let Piece { load, blocks, is_last } = piece;
        self.thread.taken(blocks);
        let Some(Load { prompt, .. }) = self.loads.get(load) else { return };
        if !blocks.is_empty() {
            let indices: BTreeSet<(usize, usize)> = blocks.keys().copied().collect();
            let taken = scheduler.insert_on_host(prompt.prompt(), &indices);
            let (loaded, num_taken) = (blocks.len(), taken.len());
            tracing::debug!(
                "{num_taken} of {loaded} loaded blocks are taken; others are cached already, or have no place"
            );
            for copy in taken {
                let Some(contents) = blocks.get(&(copy.block, copy.group)) else { continue };
                if let Err(error) = worker.write_host_block(copy.host, contents) {
                    tracing::error!("a block of another replica is not used: {error}");
                    scheduler.forget_host_block(copy.host);
                }
            }
        }
        if *is_last {
            self.loads.remove(load);
            self.ended_loads.push(*load);
        }
    }

    /// Reads copies that have been made and hands them over to be stored: at most a piece, and no more than the thread has room for.
    /// The next call continues with the rest.
    fn hand_over(&mut self, scheduler: &Scheduler, worker: &mut dyn Worker, oldest: Option<StepId>) {
        let Exchange { exports, thread, block_size, generation, .. } = self;
        if worker.is_lost() {
            exports.clear();
        }
        let mut left = thread.limits().piece;
        exports.retain_mut(|Export { tokens, chain, copies, step, num_lost }| {
            if step.is_none_or(|step| oldest.is_some_and(|oldest| oldest <= step)) {
                return true;
            }
            while left > 0
                && thread.has_room()
                && let Some(copy) = copies.pop_front()
            {
                let name = chain.name(copy.block, copy.group).filter(|_| scheduler.has_copy(&copy));
                let Some(name) = name else {
                    *num_lost += 1;
                    continue;
                };
                match worker.read_host_block(copy.host) {
                    Ok(contents) => {
                        left = left.saturating_sub(contents.len());
                        let tokens = tokens[copy.block * *block_size..][..*block_size].to_vec();
                        thread.store(name, tokens, contents, Arc::downgrade(generation));
                    }
                    Err(error) => {
                        *num_lost += 1;
                        tracing::error!("a block is not stored for other replicas: {error}");
                    }
                }
            }
            if copies.is_empty() && *num_lost > 0 {
                tracing::warn!(
                    "{num_lost} blocks of a prompt are not stored for other replicas: host memory was needed for others"
                );
            }
            !copies.is_empty()
        });
    }

    /// Discards what is loaded and not taken, and what is not stored yet: the prefix cache has been emptied.
    pub fn reset(&mut self) {
        self.ended_loads.extend(std::mem::take(&mut self.loads).into_keys());
        self.exports.clear();
        self.generation = Arc::default();
    }
}

impl Engine {
    /// Begins to load blocks for a request that is not submitted yet. Returns `None` if it should be submitted at once: it wants no
    /// blocks, or it will be refused. Otherwise [`Engine::ended_loads`] returns the id when the wait is over. `notify` is called on
    /// another thread whenever the engine should advance the exchange.
    pub(crate) fn begin_load(
        &mut self,
        request: &GenerationRequest,
        notify: impl Fn() + Send + 'static,
    ) -> Option<LoadId> {
        let exchange = self.exchange.as_mut().filter(|exchange| exchange.loads.len() < MOST_LOADS)?;
        let Exchange { config, block_size, groups, full_group, .. } = &*exchange;
        let waits = request.kv_transfer.load;
        if !config.role.loads() || !(waits || config.always) {
            return None;
        }
        check(request, self.info.vocab_size, (self.max_model_len, !self.is_headless), &self.eos_token_ids).ok()?;
        let adapter = request.adapter.as_deref().map(|name| self.adapters.find(name)).transpose().ok()?;
        let digest = adapter.as_ref().map(|adapter| &adapter.digest);
        let prompt = ExchangedPrompt::new(&request.prompt, request.cache_salt.as_ref(), digest);
        let chain = prompt.chain(&exchange.naming);
        // The last token is always computed.
        let num_blocks = (request.prompt.len().saturating_sub(1) / block_size).min(chain.len());
        let all = (0..num_blocks).flat_map(|block| (0..*groups).map(move |group| (block, group)));
        let wanted = |(block, group)| {
            let tokens = request.prompt[block * block_size..][..*block_size].to_vec();
            Some(WantedBlock { block, group, name: chain.name(block, group)?, tokens })
        };
        let blocks: Vec<WantedBlock> = all.take(exchange.host_blocks).filter_map(wanted).collect();
        if blocks.is_empty() {
            return None;
        }
        let last = blocks.iter().rfind(|wanted| waits && wanted.group == *full_group).map(|wanted| wanted.name);
        let (load, now, is_wanted) = (LoadId(exchange.num_loads), Instant::now(), Arc::new(()));
        let wait = Duration::from_secs_f64(config.wait_seconds);
        let pieces = exchange.pieces.0.clone();
        exchange.thread.load(LoadJob {
            blocks,
            // Leaves some time to load what is there.
            last: last.map(|last| (last, now + wait / 10 * 9)),
            is_wanted: Arc::downgrade(&is_wanted),
            deliver: Box::new(move |blocks, is_last| {
                // The engine may be gone.
                let _ = pieces.send(Piece { load, blocks, is_last });
                notify();
            }),
        });
        exchange.num_loads += 1;
        exchange.loads.insert(load, Load { prompt, deadline: now + wait, _is_wanted: is_wanted });
        Some(load)
    }

    /// Cancels the load of a request that will not be submitted.
    pub(crate) fn cancel_load(&mut self, load: LoadId) {
        self.exchange.iter_mut().for_each(|exchange| drop(exchange.loads.remove(&load)));
    }

    /// Advances the exchange. Returns the loads whose wait has ended since the last call.
    pub(crate) fn ended_loads(&mut self) -> Vec<LoadId> {
        self.advance_exchange();
        self.exchange.as_mut().map(|exchange| std::mem::take(&mut exchange.ended_loads)).unwrap_or_default()
    }

    /// Does everything that can be done now. Called after every command and every step.
    pub(super) fn advance_exchange(&mut self) {
        let Engine { exchange: Some(exchange), in_flight, scheduler, worker, .. } = self else { return };
        while let Ok(piece) = exchange.pieces.1.try_recv() {
            exchange.take_piece(scheduler, &mut **worker, &piece);
        }
        if !exchange.loads.is_empty() {
            let (now, ended) = (Instant::now(), &mut exchange.ended_loads);
            exchange.loads.retain(|load, Load { deadline, .. }| {
                let waits = now < *deadline;
                if !waits {
                    ended.push(*load);
                }
                waits
            });
        }
        exchange.hand_over(scheduler, &mut **worker, in_flight.front().map(|step| step.plan().step));
    }

    /// Remembers a submitted request whose blocks are to be stored.
    pub(super) fn store_later(&mut self, id: RequestId, wanted: KvTransfer, prompt: impl FnOnce() -> ExchangedPrompt) {
        let Some(exchange) = &mut self.exchange else { return };
        if exchange.config.role.stores() && (wanted.store || exchange.config.always) {
            exchange.to_store.insert(id, prompt());
        }
    }

    /// Orders copies of the blocks of requests that have ended, for a plan that has to be made next, so that no copy is ordered and
    /// not part of a plan while loaded blocks are taken. Then [`Engine::exports_planned`] follows.
    pub(super) fn order_exports(&mut self) {
        let Engine { exchange: Some(exchange), requests, scheduler, .. } = self else { return };
        let Exchange { to_store, exports, naming, .. } = exchange;
        for (_, prompt) in to_store.extract_if(|id, _| !requests.contains_key(id)) {
            let copies = scheduler.copy_to_host(prompt.prompt()).into();
            let chain = prompt.chain(naming);
            if exports.len() == MOST_EXPORTS {
                exports.pop_front();
                tracing::warn!(
                    "the blocks of a prompt are not stored for other replicas: {MOST_EXPORTS} prompts wait for that"
                );
            }
            exports.push_back(Export { tokens: prompt.tokens, chain, copies, step: None, num_lost: 0 });
        }
    }

    /// The copies that were ordered are in this plan.
    pub(super) fn exports_planned(&mut self, plan: StepId) {
        let exports = self.exchange.iter_mut().flat_map(|exchange| &mut exchange.exports);
        exports.rev().take_while(|export| export.step.is_none()).for_each(|export| export.step = Some(plan));
    }

    /// Whether requests have ended whose blocks no plan copies yet.
    pub(super) fn has_unordered_exports(&self) -> bool {
        let is_over = |id: &RequestId| !self.requests.contains_key(id);
        self.exchange.as_ref().is_some_and(|exchange| exchange.to_store.keys().any(is_over))
    }

    /// Whether blocks are yet to be handed over.
    pub(crate) fn has_exports(&self) -> bool {
        self.has_unordered_exports() || self.exchange.as_ref().is_some_and(|exchange| !exchange.exports.is_empty())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
