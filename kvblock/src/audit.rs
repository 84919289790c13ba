//! The audit: the pool's books are a cache that the live tables can rebuild, so rebuild them and compare.
//!
//! For tests and for a server that suspects itself; costs a pass over the pool and over all tokens of the tables.

use crate::prefix::Content;
use crate::{AuditError, BlockId, BlockPool, BlockTable};

impl BlockPool {
    /// Compares reference counts, free list, gauges and prefix index with what `tables`, which must be all
    /// live tables, say.
    pub fn audit<'a>(&self, tables: impl IntoIterator<Item = &'a BlockTable>) -> Result<(), AuditError> {
        let mut owners = vec![0u32; self.num_blocks()];
        for table in tables {
            self.audit_table(table)?;
            for block in table.blocks() {
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
        match &self.index {
            Some(index) => index.audit().map_err(|(block, what)| AuditError::Prefix { block, what }),
            None => Ok(()),
        }
    }

    fn audit_table(&self, table: &BlockTable) -> Result<(), AuditError> {
        let (len, blocks) = (table.len(), table.blocks().len());
        if blocks != len.div_ceil(self.block_size) || table.committed() > len {
            return Err(AuditError::TableLength { len, blocks, block_size: self.block_size });
        }
        let Some(index) = &self.index else {
            return Ok(());
        };
        let mut parent = None;
        for k in 0..table.committed() / self.block_size {
            let block = table.blocks()[k];
            let content = Content { parent, salt: table.salt.as_ref(), tokens: table.block_tokens(k) };
            index.verify(block, content).map_err(|what| AuditError::Prefix { block, what })?;
            parent = index.as_parent(block);
        }
        Ok(())
    }
}
