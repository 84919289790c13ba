//! The forms of records and parts in the file.
#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::{Kind, OWNER_BYTES, Record, decode_part, encode_part};

fn record(body: Vec<u8>) -> Record {
    Record { kind: Kind::File, owner: [7; OWNER_BYTES], is_open: true, created: 5, expires: 6, serial: 7, body }
}

proptest! {
    /// A file system or a cable that changes bytes is found, also where redb has checked its pages already.
    #[test]
    fn a_changed_byte_of_a_record_or_a_part_is_found(body in prop::collection::vec(any::<u8>(), 0..200), at in any::<prop::sample::Index>(), flip in 1..=255_u8) {
        let (whole, part) = (record(body.clone()).encode("id"), encode_part("id", 1, 2, &body));
        prop_assert_eq!(Record::decode("id", &whole).unwrap(), record(body.clone()));
        prop_assert_eq!(decode_part("id", 1, 2, &part).unwrap(), body);
        for (bytes, is_record) in [(whole, true), (part, false)] {
            let mut changed = bytes.clone();
            changed[at.index(bytes.len())] ^= flip;
            let cut = &bytes[..at.index(bytes.len())];
            for wrong in [&changed[..], cut] {
                let is_found = if is_record { Record::decode("id", wrong).is_err() } else { decode_part("id", 1, 2, wrong).is_err() };
                prop_assert!(is_found);
            }
        }
    }
}

#[test]
fn an_entry_under_another_key_is_found() {
    assert!(Record::decode("other", &record(Vec::new()).encode("id")).is_err());
    let part = encode_part("id", 1, 2, b"x");
    for (id, list, number) in [("i", 1, 2), ("id", 0, 2), ("id", 1, 3)] {
        assert!(decode_part(id, list, number, &part).is_err());
    }
}
