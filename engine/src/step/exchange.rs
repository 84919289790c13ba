//! Exchange of blocks with other replicas: what is stored after a request, and what is loaded before one.
//!
//! Storing begins when a request has ended: copies of its prompt's blocks to the host are part of the next plan, and read when no
//! step up to that plan is in flight, as fast as the connector stores them. A host block that was taken for something else in between
//! is not stored. An engine has work until all are handed over.
//!
//! Emptying the prefix cache discards both: what is loaded and not taken, and what is not stored yet.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sched::{RequestId, StepId};

use super::Engine;
use super::check::check;
use super::kv_transfer::{Export, Fetch, KvTransfers, TransferSource, Waiting};
use crate::api::GenerationRequest;
use crate::connector::{self, Fetched, Wanted};

/// Greatest number of prompts whose blocks wait to be handed over.
const MOST_EXPORTS: usize = 1024;

impl Engine {
    /// What to load for a request before it is submitted; `None` if nothing is. A request that will be refused loads nothing.
    pub(crate) fn to_fetch(&self, request: &GenerationRequest) -> Option<Fetch> {
        let transfers = self.kv_transfers.as_ref()?;
        let is_wanted = request.kv_transfer.load || transfers.config.always;
        if !transfers.config.role.loads()
            || !is_wanted
            || check(request, self.info.vocab_size, self.max_model_len, &self.eos_token_ids).is_err()
        {
            return None;
        }
        let adapter = request.adapter.as_deref().map(|name| self.adapters.find(name)).transpose().ok()?;
        let digest = adapter.map(|adapter| adapter.digest.clone());
        let source = TransferSource::new(request.prompt.clone(), request.cache_salt.clone(), digest);
        let chain = source.chain(&transfers.naming);
        // The last token is always computed.
        let num_blocks = (request.prompt.len().saturating_sub(1) / transfers.block_size).min(chain.len());
        let all = (0..num_blocks).flat_map(|block| (0..transfers.groups).map(move |group| (block, group)));
        let wanted = |(block, group)| {
            let tokens = request.prompt[block * transfers.block_size..][..transfers.block_size].to_vec();
            Some(Wanted { block, group, name: chain.name(block, group)?, tokens })
        };
        let blocks: Vec<Wanted> = all.take(transfers.host_blocks).filter_map(wanted).collect();
        let last = blocks.iter().rfind(|wanted| wanted.group == transfers.full_group).map(|wanted| wanted.name);
        let last = last.filter(|_| request.kv_transfer.load);
        (!blocks.is_empty()).then_some(Fetch { source, blocks, last })
    }

    /// Loads blocks. `deliver` gets each piece on another thread, and whether it is the last one; [`Engine::import`] has to follow.
    /// `None` if nothing can be loaded.
    pub(crate) fn fetch(
        &mut self,
        fetch: Fetch,
        deliver: impl FnMut(Fetched, bool) + Send + 'static,
    ) -> Option<Waiting> {
        let transfers = self.kv_transfers.as_mut()?;
        let Fetch { source, blocks, last } = fetch;
        let (now, is_wanted) = (Instant::now(), Arc::new(()));
        let wait = Duration::from_secs_f64(transfers.config.wait_seconds);
        transfers.thread.fetch(connector::Fetch {
            blocks,
            // Some time is left to load what is there.
            last: last.map(|last| (last, now + wait / 10 * 9)),
            waiting: Arc::downgrade(&is_wanted),
            deliver: Box::new(deliver),
        });
        let generation = Arc::downgrade(&transfers.generation);
        Some(Waiting { source, deadline: now + wait, _is_wanted: is_wanted, generation })
    }

    /// Takes a piece of the blocks that were loaded for a request into the host tier, where the request then finds them. `None`: it
    /// has not waited for them. Nothing is taken that may have been loaded before the prefix cache was emptied.
    pub(crate) fn import(&mut self, waiting: Option<&Waiting>, found: &Fetched) {
        if let Some(transfers) = &self.kv_transfers {
            transfers.thread.taken(found);
        }
        let Some(Waiting { source, .. }) = waiting.filter(|waiting| !found.is_empty() && !waiting.is_stale()) else {
            return;
        };
        let blocks: BTreeSet<(usize, usize)> = found.keys().copied().collect();
        let taken = self.scheduler.insert_on_host(source.prompt(), &blocks);
        let (loaded, num_taken) = (found.len(), taken.len());
        tracing::debug!("{num_taken} of {loaded} loaded blocks are taken; others are cached already, or have no place");
        for copy in taken {
            let written = match found.get(&(copy.block, copy.group)) {
                Some(contents) => self.worker.write_host_block(copy.host, contents),
                None => continue,
            };
            if let Err(error) = written {
                tracing::error!("a block of another replica is not used: {error}");
                self.scheduler.forget_host_block(copy.host);
            }
        }
    }

    /// Orders copies of the blocks of requests that have ended, for a plan that has to be made next, so that no copy is ordered and
    /// not part of a plan while blocks are imported. Then [`Engine::exports_planned`] follows.
    pub(super) fn order_exports(&mut self) {
        let Engine { kv_transfers: Some(transfers), requests, scheduler, .. } = self else { return };
        let KvTransfers { sources, exports, naming, .. } = transfers;
        for (_, source) in sources.extract_if(|id, _| !requests.contains_key(id)) {
            let copies = scheduler.copy_to_host(source.prompt()).into();
            let chain = source.chain(naming);
            if exports.len() == MOST_EXPORTS {
                exports.pop_front();
                tracing::warn!(
                    "the blocks of a prompt are not stored for other replicas: {MOST_EXPORTS} prompts wait for that"
                );
            }
            exports.push_back(Export { tokens: source.tokens, chain, copies, step: None, num_lost: 0 });
        }
    }

    /// The copies that were ordered are in this plan.
    pub(super) fn exports_planned(&mut self, plan: StepId) {
        let exports = self.kv_transfers.iter_mut().flat_map(|transfers| &mut transfers.exports);
        exports.rev().take_while(|export| export.step.is_none()).for_each(|export| export.step = Some(plan));
    }

    /// Whether requests have ended whose blocks no plan copies yet.
    pub(super) fn has_sources(&self) -> bool {
        let is_over = |id: &RequestId| !self.requests.contains_key(id);
        self.kv_transfers.as_ref().is_some_and(|transfers| transfers.sources.keys().any(is_over))
    }

    /// Whether blocks are yet to be handed over.
    pub(crate) fn has_exports(&self) -> bool {
        self.has_sources() || self.kv_transfers.as_ref().is_some_and(|transfers| !transfers.exports.is_empty())
    }

    /// Reads copies that have been made and hands them over to be stored: at most a piece, and no more than the thread has room for.
    /// What is left follows with the next call.
    pub(super) fn finish_exports(&mut self) {
        let Engine { kv_transfers: Some(transfers), in_flight, scheduler, worker, .. } = self else { return };
        let KvTransfers { exports, thread, block_size, generation, .. } = transfers;
        if worker.is_lost() {
            exports.clear();
        }
        let oldest = in_flight.front().map(|step| step.plan().step);
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
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
