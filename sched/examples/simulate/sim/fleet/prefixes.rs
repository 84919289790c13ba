//! The prefixes that a coarse replica caches and nobody uses: an LRU list in which the end of the oldest goes first.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

const NONE: u32 = u32::MAX;

/// Keys are numbers of conversations, so one multiplication spreads them enough.
#[derive(Default)]
struct Multiply(u64);

impl Hasher for Multiply {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    }
}

struct Entry {
    key: u64,
    tokens: u32,
    older: u32,
    newer: u32,
}

/// Prefixes by key. All operations are O(1), apart from what `trim` removes.
pub struct Prefixes {
    entries: Vec<Entry>,
    unused: Vec<u32>,
    by_key: HashMap<u64, u32, BuildHasherDefault<Multiply>>,
    oldest: u32,
    newest: u32,
    /// Tokens of all entries.
    pub tokens: u64,
}

impl Default for Prefixes {
    fn default() -> Prefixes {
        let (entries, unused, by_key) = (Vec::new(), Vec::new(), HashMap::default());
        Prefixes { entries, unused, by_key, oldest: NONE, newest: NONE, tokens: 0 }
    }
}

impl Prefixes {
    /// Number of tokens cached under a key.
    pub fn get(&self, key: u64) -> Option<u32> {
        self.by_key.get(&key).map(|at| self.entries[*at as usize].tokens)
    }

    /// Adds a prefix as the newest. Replaces what the key had.
    pub fn insert(&mut self, key: u64, tokens: u32) {
        self.take(key);
        let entry = Entry { key, tokens, older: self.newest, newer: NONE };
        let at = match self.unused.pop() {
            Some(at) => {
                self.entries[at as usize] = entry;
                at
            }
            None => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
        };
        match self.newest {
            NONE => self.oldest = at,
            newest => self.entries[newest as usize].newer = at,
        }
        self.newest = at;
        self.by_key.insert(key, at);
        self.tokens += u64::from(tokens);
    }

    /// Removes a prefix, and returns its tokens.
    pub fn take(&mut self, key: u64) -> Option<u32> {
        let at = self.by_key.remove(&key)?;
        let Entry { tokens, older, newer, .. } = self.entries[at as usize];
        match older {
            NONE => self.oldest = newer,
            older => self.entries[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.entries[newer as usize].older = older,
        }
        self.unused.push(at);
        self.tokens -= u64::from(tokens);
        Some(tokens)
    }

    /// Removes tokens until at most `most` are left.
    pub fn trim(&mut self, most: u64) {
        while self.tokens > most {
            let excess = self.tokens - most;
            let entry = &mut self.entries[self.oldest as usize];
            if u64::from(entry.tokens) > excess {
                entry.tokens -= excess as u32;
                self.tokens -= excess;
            } else {
                let key = entry.key;
                self.take(key);
            }
        }
    }
}
