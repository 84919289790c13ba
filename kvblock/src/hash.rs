//! The name of a prefix: a chained, keyed 128-bit hash.
//!
//! `name(block k) = SipHash-1-3-128(key, name(block k-1), salt if k = 0, tokens of block k)`. Every field is
//! written as a tag, its length and its bytes, so that no two different lists of fields are the same input.
//! The key is random per process unless a seed is given, so a client can not search for colliding prompts.
//! The name only *finds* candidates; [`crate::prefix`] compares what they hold.

use std::hash::{BuildHasher, Hasher, RandomState};

use siphasher::sip128::{Hasher128, SipHasher13};

/// Kinds of field in the hashed input.
#[repr(u8)]
enum Tag {
    Parent = 1,
    Salt = 2,
    Tokens = 3,
}

/// The keyed hash of one pool.
pub(crate) struct PrefixHasher {
    seed: u64,
    mask: u128,
}

impl PrefixHasher {
    /// `bits` (1 to 128) of hash under a key made from `seed`, or from the process's randomness.
    pub fn new(seed: Option<u64>, bits: u32) -> PrefixHasher {
        let seed = seed.unwrap_or_else(|| RandomState::new().build_hasher().finish());
        PrefixHasher { seed, mask: u128::MAX >> (128 - bits) }
    }

    /// The seed in use.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Name of the prefix that ends with `tokens`; `parent` is the name of what stands before, and only a
    /// first block has a salt.
    pub fn name(&self, parent: Option<u128>, salt: Option<&str>, tokens: &[u32]) -> u128 {
        // SipHash wants 128 bits of key; the second word only has to be another function of the seed.
        let mut hasher = SipHasher13::new_with_keys(self.seed, self.seed.rotate_left(32) ^ 0x9e37_79b9_7f4a_7c15);
        if let Some(parent) = parent {
            open_field(&mut hasher, Tag::Parent, 16);
            hasher.write(&parent.to_le_bytes());
        }
        if let Some(salt) = salt {
            open_field(&mut hasher, Tag::Salt, salt.len());
            hasher.write(salt.as_bytes());
        }
        open_field(&mut hasher, Tag::Tokens, 4 * tokens.len());
        for token in tokens {
            hasher.write(&token.to_le_bytes());
        }
        hasher.finish128().as_u128() & self.mask
    }
}

/// Writes a field's tag and its length in bytes; the bytes follow.
fn open_field(hasher: &mut SipHasher13, tag: Tag, bytes: usize) {
    hasher.write(&[tag as u8]);
    hasher.write(&(bytes as u64).to_le_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_seeds_name_alike_and_the_reported_seed_is_the_one_in_use() {
        let random = PrefixHasher::new(None, 128);
        let replica = PrefixHasher::new(Some(random.seed()), 128);
        let other = PrefixHasher::new(Some(random.seed() ^ 1), 128);
        assert_eq!(random.name(None, None, &[1, 2]), replica.name(None, None, &[1, 2]));
        assert_ne!(random.name(None, None, &[1, 2]), other.name(None, None, &[1, 2]));
        assert_ne!(random.seed(), PrefixHasher::new(None, 128).seed());
    }

    #[test]
    fn kinds_of_field_never_alias() {
        let hasher = PrefixHasher::new(Some(7), 128);
        let parent = u128::from_le_bytes(*b"sixteen bytes ab");
        let tokens = [0x6162_6364, 0x6566_6768];
        let bytes: Vec<u8> = tokens.iter().flat_map(|t: &u32| t.to_le_bytes()).collect();
        let text = std::str::from_utf8(&bytes).unwrap_or_default();
        let mut names = vec![
            hasher.name(None, None, &tokens),
            hasher.name(None, Some(""), &tokens),
            hasher.name(None, Some(text), &[]),
            hasher.name(None, Some(text), &tokens),
            hasher.name(Some(parent), None, &tokens),
            hasher.name(None, Some("sixteen bytes ab"), &tokens),
            hasher.name(Some(0), None, &tokens),
        ];
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 7);
    }

    #[test]
    fn a_narrow_hash_stays_within_its_bits() {
        let hasher = PrefixHasher::new(Some(1), 4);
        assert!((0..100).all(|t| hasher.name(None, None, &[t]) < 16));
    }
}
