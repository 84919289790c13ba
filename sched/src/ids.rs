//! A hash map for ids. The engine assigns the ids, so an attacker cannot choose them and the hash needs no key. Lookups
//! are the most frequent operation of a plan.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map keyed by request or sequence ids.
pub(crate) type IdMap<K, V> = HashMap<K, V, BuildHasherDefault<IdHasher>>;

/// Multiplies and folds, so that the hashes of neighbouring ids differ in high and low bits.
#[derive(Default)]
pub(crate) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|b| self.write_u64(u64::from(*b)));
    }

    fn write_u32(&mut self, id: u32) {
        self.write_u64(u64::from(id));
    }

    fn write_u64(&mut self, id: u64) {
        // 2^64 / golden ratio, as in Knuth's multiplicative hashing (The Art of Computer Programming, 6.4).
        let product = u128::from(self.0.rotate_left(32) ^ id) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
