//! The prefix cache as one would write it without hashes, lists or reference counts: which block holds which prefix.

use std::collections::BTreeMap;

use kvblock::BlockId;

/// What a cached block holds.
struct Cached {
    salt: usize,
    /// All tokens up to the block's end.
    prefix: Vec<u32>,
    /// The last block of its parent prefix was forgotten: nobody can vouch for it any more.
    orphan: bool,
}

/// All cached blocks.
#[derive(Default)]
pub struct NaiveCache(BTreeMap<BlockId, Cached>);

impl NaiveCache {
    /// Leading blocks of the prompt that the cache would serve.
    pub fn hit(&self, salt: usize, tokens: &[u32], block_size: usize) -> usize {
        let usable = tokens.len().saturating_sub(1) / block_size;
        let holds = |k: usize| {
            let prefix = &tokens[..k * block_size];
            self.0.values().any(|c| !c.orphan && c.salt == salt && c.prefix == prefix)
        };
        (1..=usable).take_while(|k| holds(*k)).count()
    }

    pub fn store(&mut self, block: BlockId, salt: usize, prefix: &[u32]) {
        self.0.insert(block, Cached { salt, prefix: prefix.to_vec(), orphan: false });
    }

    pub fn forget(&mut self, block: BlockId) {
        let Some(gone) = self.0.remove(&block) else {
            return;
        };
        let same = |c: &Cached| !c.orphan && c.salt == gone.salt && c.prefix == gone.prefix;
        if gone.orphan || self.0.values().any(same) {
            return;
        }
        let extends = |c: &&mut Cached| c.salt == gone.salt && c.prefix.starts_with(&gone.prefix);
        self.0.values_mut().filter(extends).for_each(|c| c.orphan = true);
    }

    pub fn contains(&self, block: BlockId) -> bool {
        self.0.contains_key(&block)
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }
}
