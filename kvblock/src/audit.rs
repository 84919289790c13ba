//! The audit: rebuilds the pool's metadata from the live tables and compares.
//!
//! Intended for tests and for diagnosis. Takes a pass over the pool and over all tokens of the tables.

use crate::prefix::PrefixIndex;
use crate::sequence::parent_of;
use crate::{AuditError, BlockId, BlockPool, BlockTable, HostBlockId, Swapped};

impl BlockPool {
    /// Checks reference counts, free list, gauges and prefix index against `tables`, which must be all live tables. A dropped table shows as references without an owner; call
    /// [`take_leaks`](BlockPool::take_leaks) to find it.
    pub fn audit<'a>(&self, tables: impl IntoIterator<Item = &'a BlockTable>) -> Result<(), AuditError> {
        let mut owners = vec![0u32; self.num_blocks()];
        for table in tables {
            self.audit_table(table)?;
            for block in table.groups.iter().flat_map(|g| g.blocks()) {
                owners[block.index()] += 1;
            }
        }
        let mut free = vec![0u32; self.num_blocks()];
        let (mut free_count, mut cached) = (0, 0);
        for block in self.free.iter() {
            free[block.index()] += 1;
            free_count += 1;
            if free[block.index()] > 1 {
                return Err(AuditError::FreeList {
                    block,
                    count: free[block.index()],
                    references: owners[block.index()],
                });
            }
            if self.is_cached(block) {
                cached += 1;
            } else if cached > 0 {
                return Err(AuditError::EvictionOrder { block });
            }
        }
        for id in 0..self.num_blocks() as u32 {
            let block = BlockId(id);
            let (counted, found, count) = (self.references(block), owners[block.index()], free[block.index()]);
            if counted != found {
                return Err(AuditError::References { block, counted, found });
            }
            if (count == 1) != (counted == 0) {
                return Err(AuditError::FreeList { block, count, references: counted });
            }
        }
        let in_use = owners.iter().filter(|o| **o > 0).count();
        let gauges = self.gauges();
        if (gauges.in_use, gauges.cached, gauges.free) != (in_use, cached, free_count - cached) {
            return Err(AuditError::Gauges {
                found: gauges.in_use + gauges.cached + gauges.free,
                total: self.num_blocks(),
            });
        }
        if let Some(&block) = self.invalid.iter().find(|b| self.is_cached(**b)) {
            return Err(AuditError::Prefix { block, what: "its contents are invalid" });
        }
        match &self.index {
            Some(index) => index.audit().map_err(|(block, what)| AuditError::Prefix { block, what }),
            None => Ok(()),
        }
    }

    /// Checks the host pool against `swapped`, which must be all swapped requests.
    pub fn audit_host<'a>(&self, swapped: impl IntoIterator<Item = &'a Swapped>) -> Result<(), AuditError> {
        let mut blocks: Vec<_> = swapped.into_iter().flat_map(Swapped::blocks).collect();
        let owned = blocks.len();
        blocks.sort_unstable();
        blocks.dedup();
        let (counted, found) = (self.host_gauges().in_use, blocks.len());
        if (counted, owned) != (found, found) {
            return Err(AuditError::Host { counted, found });
        }
        let is_cached = |block: &HostBlockId| self.host_prefix_of(*block).is_some();
        let cached: Vec<HostBlockId> = (0..self.host.num_blocks as u32).map(HostBlockId).filter(is_cached).collect();
        let evicted_first = self.host.free.iter().skip_while(|block| !is_cached(block)).count();
        if let Some(&block) = cached.iter().find(|block| !self.host.free.contains(**block)) {
            return Err(AuditError::HostCache { block, what: "it is cached and in use" });
        }
        if cached.len() != self.host.num_cached || evicted_first != cached.len() {
            let block = cached.first().copied().unwrap_or(HostBlockId(0));
            return Err(AuditError::HostCache { block, what: "the cached blocks are not the last of the free list" });
        }
        Ok(())
    }

    fn audit_table(&self, table: &BlockTable) -> Result<(), AuditError> {
        if !self.owns(table) {
            return Err(AuditError::ForeignTable);
        }
        let (len, block_size) = (table.len(), self.block_size);
        for (kind, group) in self.groups.iter().zip(table.groups()) {
            let blocks = group.num_entries();
            let most_holes = kind.holes(table.committed(), block_size);
            if blocks != len.div_ceil(block_size) || table.committed() > len || group.holes() > most_holes {
                return Err(AuditError::TableLength { len, blocks, block_size });
            }
        }
        match &self.index {
            Some(index) => {
                let valid = table.num_valid.min(self.first_invalid(table).unwrap_or(usize::MAX));
                let full = valid.min(table.committed() / block_size);
                (0..full).try_for_each(|k| audit_block(index, table, k))
            }
            None => Ok(()),
        }
    }
}

/// Checks the index entries of the `k`th block of a table, which must be full, committed and valid.
fn audit_block(index: &PrefixIndex, table: &BlockTable, k: usize) -> Result<(), AuditError> {
    let Some(parent) = parent_of(index, table, k) else {
        let block = table.groups().iter().find_map(|g| g.entry(k)).unwrap_or(BlockId(0));
        return Err(AuditError::Prefix { block, what: "the block before it is not indexed" });
    };
    let content = table.content(k, parent);
    for (g, group) in table.groups().iter().enumerate() {
        if let Some(block) = group.entry(k) {
            index.verify(g, block, content).map_err(|what| AuditError::Prefix { block, what })?;
        }
    }
    Ok(())
}
