//! The prefixes that a lookup can reach, for observers that missed events.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use super::{Entry, PrefixId, PrefixIndex};
use crate::ids::{PrefixHash, Tier};
use crate::key::PrefixKey;

/// A cached prefix that a lookup can reach.
pub(crate) struct Reachable<'a> {
    pub tier: Tier,
    /// Hash of the prefix before the block.
    pub parent: Option<PrefixHash>,
    pub hash: PrefixHash,
    /// Tokens of the block.
    pub tokens: &'a [u32],
    /// Key of the first block in front that has one, or of this block.
    pub key: Option<&'a Arc<PrefixKey>>,
}

impl PrefixIndex {
    /// Returns the prefixes of a group that a lookup can reach from the start of a sequence, parents first, each once in
    /// each tier that has it. With `has_holes`, another group's block counts as a parent.
    pub fn reachable(&self, group: usize, has_holes: bool) -> Vec<Reachable<'_>> {
        let is_of_group = |entry: &Entry| usize::from(entry.list) % self.groups == group;
        let mut children: BTreeMap<Option<PrefixId>, Vec<u32>> = BTreeMap::new();
        for (slot, entry) in (0..).zip(&self.entries) {
            if let Some(entry) = entry.as_ref().filter(|entry| has_holes || is_of_group(entry)) {
                children.entry(entry.parent).or_default().push(slot);
            }
        }
        let (mut found, mut seen) = (Vec::new(), BTreeSet::new());
        let mut parents = VecDeque::from([(None, None, None)]);
        while let Some((id, parent, parent_key)) = parents.pop_front() {
            for slot in children.remove(&id).unwrap_or_default() {
                let Some(entry) = self.entry(slot) else { continue };
                let key = entry.key.as_ref().or(parent_key);
                let tier = self.place(slot).tier();
                if is_of_group(entry) && seen.insert((entry.id, tier)) {
                    found.push(Reachable { tier, parent, hash: entry.hash, tokens: self.tokens_of(slot), key });
                }
                if children.contains_key(&Some(entry.id)) {
                    parents.push_back((Some(entry.id), Some(entry.hash), key));
                }
            }
        }
        found
    }
}
