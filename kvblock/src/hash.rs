//! The name of a prefix: a chained, keyed 128-bit hash.
//!
//! `name(block k) = SipHash-1-3-128(key, name(block k-1), key of block k, tokens of block k)`, where the key of a block
//! is its part of the sequence's [`PrefixKey`](crate::PrefixKey). Every field is written as a tag, its length and its
//! bytes, so that no two different lists of fields are the same input.
//! The key is random per process unless a seed is given, so a client cannot search for colliding prompts.
//! The name only *finds* candidates; [`crate::prefix`] compares what they hold.

use std::cell::Cell;
use std::hash::{BuildHasher, Hasher, RandomState};

use siphasher::sip128::{Hasher128, SipHasher13};

use crate::ids::PrefixHash;
use crate::key::BlockKey;

/// Kinds of field in the hashed input.
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
    /// Calls of [`PrefixHasher::name`].
    pub hashed: Cell<u64>,
}

impl PrefixHasher {
    /// `bits` (1 to 128) of hash under a key made from `seed`, or from the process's randomness.
    pub fn new(seed: Option<u64>, bits: u32) -> PrefixHasher {
        let seed = seed.unwrap_or_else(|| RandomState::new().build_hasher().finish());
        PrefixHasher { seed, mask: u128::MAX >> (128 - bits), hashed: Cell::new(0) }
    }

    /// The seed in use.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Name of the prefix that ends with the block of these tokens and this key; `parent` is the name of what stands
    /// before.
    pub fn name(&self, parent: Option<PrefixHash>, key: BlockKey<'_>, tokens: &[u32]) -> PrefixHash {
        self.hashed.set(self.hashed.get() + 1);
        // SipHash wants 128 bits of key; the second word only has to be another function of the seed.
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
        // In pieces of a cache line: the hasher is much slower with four bytes at a time.
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

    /// The media have one placeholder token each, one after the other.
    fn key(salt: Option<&str>, adapter: Option<&str>, media: &[&[u8]]) -> PrefixKey {
        let media = media.iter().enumerate().map(|(start, m)| Media { digest: m.to_vec(), start, len: 1 }).collect();
        PrefixKey { salt: salt.map(str::to_owned), adapter: adapter.map(str::to_owned), media }
    }

    const NONE: BlockKey<'static> = BlockKey::none();

    fn first(key: &PrefixKey) -> BlockKey<'_> {
        BlockKey::new(Some(key), 0..4)
    }

    #[test]
    fn equal_seeds_name_alike_and_the_reported_seed_is_the_one_in_use() {
        let random = PrefixHasher::new(None, 128);
        let replica = PrefixHasher::new(Some(random.seed()), 128);
        let other = PrefixHasher::new(Some(random.seed() ^ 1), 128);
        assert_eq!(random.name(None, NONE, &[1, 2]), replica.name(None, NONE, &[1, 2]));
        assert_ne!(random.name(None, NONE, &[1, 2]), other.name(None, NONE, &[1, 2]));
        assert_ne!(random.seed(), PrefixHasher::new(None, 128).seed());
    }

    #[test]
    fn kinds_of_field_never_alias() {
        let hasher = PrefixHasher::new(Some(7), 128);
        let text = "sixteen bytes ab";
        let parent = PrefixHash(u128::from_le_bytes(*b"sixteen bytes ab"));
        let tokens: Vec<u32> =
            b"sixteen bytes ab".chunks(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let halves: [&[u8]; 2] = [b"sixteen ", b"bytes ab"];
        let keys = [
            key(Some(""), None, &[]),
            key(None, Some(""), &[]),
            key(None, None, &[b""]),
            key(Some(text), None, &[]),
            key(None, Some(text), &[]),
            key(None, None, &[text.as_bytes()]),
            PrefixKey { media: vec![Media { digest: text.into(), start: 0, len: 2 }], ..key(None, None, &[]) },
            PrefixKey { media: vec![Media { digest: text.into(), start: 1, len: 1 }], ..key(None, None, &[]) },
            key(None, None, &halves),
            key(Some("sixteen "), Some("bytes ab"), &[]),
            key(Some("sixteen"), Some(" bytes ab"), &[]),
            key(Some("sixteen "), None, &[b"bytes ab"]),
        ];
        let mut names: Vec<PrefixHash> = keys.iter().map(|k| hasher.name(None, first(k), &tokens)).collect();
        names.push(hasher.name(None, first(&keys[3]), &[]));
        names.push(hasher.name(None, NONE, &tokens));
        names.push(hasher.name(Some(parent), NONE, &tokens));
        names.push(hasher.name(Some(PrefixHash(0)), NONE, &tokens));
        names.push(hasher.name(Some(parent), NONE, &[]));
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn long_blocks_depend_on_every_token_and_their_order() {
        let hasher = PrefixHasher::new(Some(7), 128);
        let tokens: Vec<u32> = (0..50).collect();
        let name = hasher.name(None, NONE, &tokens);
        for i in 0..49 {
            let mut other = tokens.clone();
            other.swap(i, i + 1);
            assert_ne!(hasher.name(None, NONE, &other), name);
        }
        assert_ne!(hasher.name(None, NONE, &tokens[..49]), name);
    }

    #[test]
    fn a_narrow_hash_stays_within_its_bits() {
        let hasher = PrefixHasher::new(Some(1), 4);
        assert!((0..100).all(|t| hasher.name(None, NONE, &[t]).0 < 16));
    }

    #[test]
    fn a_block_depends_on_the_media_that_have_placeholders_in_it() {
        let media = |start, len| Media { digest: b"image".to_vec(), start, len };
        let with = |media: &[Media]| PrefixKey { salt: None, adapter: None, media: media.to_vec() };
        let one = with(&[media(3, 3)]);
        fn part(key: &PrefixKey, k: usize) -> BlockKey<'_> {
            BlockKey::new(Some(key), 4 * k..4 * k + 4)
        }
        assert!(part(&one, 2).is_empty() && !part(&one, 0).is_empty() && !part(&one, 1).is_empty());
        assert!(part(&one, 2) == BlockKey::none() && part(&one, 1) != BlockKey::none());
        let longer = with(&[media(3, 9), media(13, 1)]);
        assert!(part(&one, 0) == part(&longer, 0), "the first block holds one placeholder of either");
        assert!(part(&one, 1) != part(&longer, 1));
        assert!(part(&one, 1) != part(&with(&[media(4, 2)]), 1), "other rows of the image");
        assert!(part(&with(&[media(4, 0)]), 1).is_empty());
        let salted = PrefixKey { salt: Some("s".into()), ..one.clone() };
        assert!(part(&salted, 0) != part(&one, 0) && part(&salted, 1) == part(&one, 1), "the chain knows the salt");
    }
}
