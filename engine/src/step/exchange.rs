//! Exchange of blocks with other replicas: what is stored after a request, and what is loaded before one.
//!
//! Storing begins when a request has ended: copies of its prompt's blocks to the host are ordered with the next plan, and read when
//! no step up to that plan is in flight. A host block that was taken for something else in between is not stored.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::Engine;
use super::check::check;
use super::kv_transfer::{Export, Fetch, KvTransfers, TransferSource};
use crate::api::GenerationRequest;
use crate::connector::{Fetched, Wanted};

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

    /// Loads blocks, and calls `done` on another thread with what was found. [`Engine::import`] has to follow.
    pub(crate) fn fetch(&mut self, fetch: Fetch, done: impl FnOnce(TransferSource, Fetched) + Send + 'static) {
        let Fetch { source, blocks, last } = fetch;
        let Some(transfers) = &mut self.kv_transfers else { return done(source, Fetched::new()) };
        transfers.num_fetching += 1;
        let deadline = Instant::now() + Duration::from_secs_f64(transfers.config.wait_seconds);
        transfers.thread.fetch(blocks, last, deadline, move |found| done(source, found));
    }

    /// Takes blocks that were loaded into the host tier, where the request then finds them.
    pub(crate) fn import(&mut self, source: &TransferSource, found: &Fetched) {
        if let Some(transfers) = &mut self.kv_transfers {
            transfers.num_fetching = transfers.num_fetching.saturating_sub(1);
            transfers.thread.taken(found);
        }
        let blocks: BTreeSet<(usize, usize)> = found.keys().copied().collect();
        for copy in self.scheduler.insert_on_host(source.prompt(), &blocks) {
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

    /// Orders copies of the blocks of requests that have ended.
    pub(super) fn order_exports(&mut self) {
        let Engine { kv_transfers: Some(transfers), requests, scheduler, .. } = self else { return };
        if transfers.sources.is_empty() {
            return;
        }
        for (_, source) in transfers.sources.extract_if(|id, _| !requests.contains_key(id)) {
            let copies = scheduler.copy_to_host(source.prompt());
            transfers.exports.push(Export { source, copies, step: None });
        }
    }

    /// Reads the copies that have been made, and hands them over to be stored.
    pub(super) fn finish_exports(&mut self) {
        let Engine { kv_transfers: Some(transfers), in_flight, scheduler, worker, .. } = self else { return };
        let oldest = in_flight.front().map(|step| step.plan().step);
        let KvTransfers { exports, naming, thread, block_size, .. } = transfers;
        let is_over = |export: &mut Export| export.step.is_some_and(|step| oldest.is_none_or(|oldest| oldest > step));
        for Export { source, copies, .. } in exports.extract_if(.., is_over) {
            let chain = source.chain(naming);
            for copy in copies {
                let Some(name) = chain.name(copy.block, copy.group).filter(|_| scheduler.has_copy(&copy)) else {
                    continue;
                };
                match worker.read_host_block(copy.host) {
                    Ok(contents) => {
                        thread.store(name, source.tokens[copy.block * *block_size..][..*block_size].to_vec(), contents);
                    }
                    Err(error) => tracing::error!("a block is not stored for other replicas: {error}"),
                }
            }
        }
    }
}
