//! Random and damaged files.

use proptest::prelude::*;

use super::fuzzed::{load, read};
use super::made::{small, text_value, u32_value};
use super::made_vocabulary::{CONTROL, byte_level, sentence_piece};
use crate::counter::largest_allocation;

/// Reads a file and checks that no allocation is larger than a small multiple of it.
fn bounded(bytes: &[u8]) -> bool {
    largest_allocation(); // forgets earlier ones
    let accepted = read(bytes);
    let largest = largest_allocation();
    assert!(largest <= 64 * bytes.len() + 4096, "{largest} bytes for a file of {}", bytes.len());
    accepted
}

#[test]
fn the_file_to_be_damaged_is_accepted() {
    assert!(bounded(&small().bytes()));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes_never_panic(body in proptest::collection::vec(any::<u8>(), 0..400), counts in any::<[u8; 2]>()) {
        bounded(&body);
        let header = [&b"GGUF\x03\0\0\0"[..], &u64::from(counts[0] % 4).to_le_bytes(), &u64::from(counts[1] % 4).to_le_bytes()];
        bounded(&[&header.concat()[..], &body].concat());
    }

    #[test]
    fn damaged_files_never_panic(
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..8_u32), 1..6),
        cut in any::<prop::sample::Index>(),
        cuts in any::<bool>(),
    ) {
        let mut bytes = small().bytes();
        for (at, byte, bit) in changes {
            let at = at.index(bytes.len());
            bytes[at] = if byte < 128 { bytes[at] ^ 1 << bit } else { byte.wrapping_mul(3) };
        }
        if cuts {
            let cut = cut.index(bytes.len());
            bytes.truncate(cut);
        }
        bounded(&bytes);
    }
}

/// Small files with a vocabulary of each kind.
fn vocabularies() -> [Vec<u8>; 2] {
    let pieces = [("a", 0.0), ("▁", 0.0), ("▁a", 1.0), ("<0x0A>", 0.0), ("<|im_end|>", 0.0)];
    let (mut pieces, mut bytes) =
        (sentence_piece(&pieces), byte_level(Some("gpt-2"), &[("<|im_end|>", CONTROL)], &["a b", "ab c"]));
    for vocab in [&mut pieces, &mut bytes] {
        vocab.more.push(("tokenizer.ggml.eos_token_id", u32_value(3)));
        vocab.more.push(("tokenizer.chat_template", text_value("{{ messages[0].content }}{{ eos_token }}")));
        vocab.more.push(("general.sampling.top_k", u32_value(20)));
    }
    [pieces, bytes].map(|vocab| vocab.made().bytes())
}

#[test]
fn the_vocabularies_to_be_damaged_are_accepted() {
    assert!(vocabularies().iter().all(|bytes| load(bytes)));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn damaged_vocabularies_never_panic(
        which in 0..2_usize,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..8_u32), 1..4),
    ) {
        let mut bytes = vocabularies()[which].clone();
        for (at, byte, bit) in changes {
            // Damage in the second half spares the counts and the sizes.
            let at = bytes.len() - 1 - at.index(bytes.len() * 3 / 4);
            bytes[at] = if byte < 128 { bytes[at] ^ 1 << bit } else { byte.wrapping_mul(3) };
        }
        load(&bytes);
    }
}
