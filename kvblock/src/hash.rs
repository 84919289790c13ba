//! The hash of a prefix: chained, keyed, 128 bits.
//!
//! `hash(block k) = SipHash-1-3-128(key, hash(block k-1), key of block k, tokens of block k)`, where the key of a block
//! is its part of the sequence's [`PrefixKey`](crate::PrefixKey). Every field is written as a tag, its length and its
//! bytes, so that different lists of fields are different inputs. The hash key is random unless a seed is configured,
//! so a client cannot search for colliding prompts. The hash only *finds* candidates; [`crate::prefix`] compares their
//! contents.

use std::cell::Cell;
use std::hash::{BuildHasher, Hasher, RandomState};

use siphasher::sip128::{Hasher128, SipHasher13};

use crate::ids::PrefixHash;
use crate::key::BlockKey;

/// Kinds of field in the input.
#[repr(u8)]
enum Tag {
    Parent = 1,
    Salt = 2,
    Tokens = 3,
    Adapter = 4,
    Media = 5,
    MediaPositions = 6,
}

/// The keyed hash of one pool.
pub(crate) struct PrefixHasher {
    seed: u64,
    mask: u128,
    /// Number of calls of [`PrefixHasher::hash`].
    pub num_hashed: Cell<u64>,
}

impl PrefixHasher {
    /// Creates a hasher of `bits` bits (1 to 128) with a key derived from `seed`, or from a random number.
    pub fn new(seed: Option<u64>, bits: u32) -> PrefixHasher {
        let seed = seed.unwrap_or_else(|| RandomState::new().build_hasher().finish());
        PrefixHasher { seed, mask: u128::MAX >> (128 - bits), num_hashed: Cell::new(0) }
    }

    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Returns the hash of the prefix that ends with a block of these tokens and this key. `parent` is the hash of the
    /// prefix before the block.
    pub fn hash(&self, parent: Option<PrefixHash>, key: BlockKey<'_>, tokens: &[u32]) -> PrefixHash {
        self.num_hashed.set(self.num_hashed.get() + 1);
        // SipHash takes 128 bits of key. The second word only has to be another function of the seed.
        let mut hasher = SipHasher13::new_with_keys(self.seed, self.seed.rotate_left(32) ^ 0x9e37_79b9_7f4a_7c15);
        if let Some(parent) = parent {
            write_field(&mut hasher, Tag::Parent, &parent.0.to_le_bytes());
        }
        for (tag, text) in [Tag::Salt, Tag::Adapter].into_iter().zip(key.texts()) {
            if let Some(text) = text {
                write_field(&mut hasher, tag, text.as_bytes());
            }
        }
        for (digest, start, end) in key.media() {
            write_field(&mut hasher, Tag::Media, digest);
            open_field(&mut hasher, Tag::MediaPositions, 16);
            hasher.write(&(start as u64).to_le_bytes());
            hasher.write(&(end as u64).to_le_bytes());
        }
        open_field(&mut hasher, Tag::Tokens, 4 * tokens.len());
        // Write 64 bytes at a time: the hasher is much slower with four.
        for piece in tokens.chunks(16) {
            let mut bytes = [0; 64];
            for (to, token) in bytes.chunks_exact_mut(4).zip(piece) {
                to.copy_from_slice(&token.to_le_bytes());
            }
            hasher.write(&bytes[..4 * piece.len()]);
        }
        PrefixHash(hasher.finish128().as_u128() & self.mask)
    }
}

fn write_field(hasher: &mut SipHasher13, tag: Tag, bytes: &[u8]) {
    open_field(hasher, tag, bytes.len());
    hasher.write(bytes);
}

/// Writes a field's tag and its length in bytes; the bytes follow.
fn open_field(hasher: &mut SipHasher13, tag: Tag, bytes: usize) {
    hasher.write(&[tag as u8]);
    hasher.write(&(bytes as u64).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Media, PrefixKey};

    #[test]
    fn a_parent_never_aliases_another_field() {
        let text = "sixteen bytes ab";
        let parent = PrefixHash(u128::from_le_bytes(*b"sixteen bytes ab"));
        let plain = PrefixKey { salt: None, adapter: None, media: vec![] };
        let salt = PrefixKey { salt: Some(text.into()), ..plain.clone() };
        let adapter = PrefixKey { adapter: Some(text.into()), ..plain.clone() };
        let media = PrefixKey { media: vec![Media { digest: text.into(), start: 0, len: 1 }], ..plain.clone() };
        let tokens: Vec<u32> = text.as_bytes().as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let hasher = PrefixHasher::new(Some(7), 128);
        let hash = |parent, key, tokens: &[u32]| hasher.hash(parent, BlockKey::new(Some(key), 0..4), tokens);
        let parents = [Some(parent), Some(PrefixHash(0))].map(|parent| hash(parent, &plain, &tokens));
        let others = [&plain, &salt, &adapter, &media].map(|key| hash(None, key, &tokens));
        let without_tokens = [hash(Some(parent), &plain, &[]), hash(None, &salt, &[])];
        let mut hashes = [&parents[..], &others, &without_tokens].concat();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), 8);
    }
}
