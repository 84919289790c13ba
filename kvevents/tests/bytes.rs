//! Payloads, byte by byte.

use std::sync::Arc;

use kvevents::{BlockHash, Change, Format, KvEventsConfig, Layout, Medium, Publisher, SpecKind};
use testkit::kv_events::{Router, decode};

use super::{config, hash, removed, start, stored, subscriber};

/// The bytes of the events in the first message that these changes lead to. What is around them is checked here.
fn events(format: Format, layout: Layout, changes: Vec<Change>) -> Vec<u8> {
    let mut publisher = Publisher::start(&KvEventsConfig { format, ..config() }, layout).unwrap();
    let mut subscriber = subscriber(&publisher, "");
    publisher.publish(changes, Vec::new);
    let (_, _, payload) = subscriber.message().unwrap();
    // An array of 3: a float, the events, and the rank 0 (B35).
    assert_eq!((payload[0], payload[1], payload.last()), (0x93, 0xcb, Some(&0)));
    payload[10..payload.len() - 1].to_vec()
}

fn bytes(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}

#[test]
fn b24_a_stored_block_is_a_map_with_the_type_first_or_an_array_in_the_order_of_vllm() {
    let change = || vec![stored(None, &[300])];
    let map = bytes(&[
        b"\x91\x88\xa4type\xabBlockStored",
        b"\xacblock_hashes\x91\xcd\x01\x2c",
        b"\xb1parent_block_hash\xc0",
        b"\xa9token_ids\x92\xcd\x01\x2c\x07",
        b"\xaablock_size\x02",
        b"\xa7lora_id\xc0",
        b"\xa6medium\xa3GPU",
        b"\xa9lora_name\xc0",
    ]);
    assert_eq!(events(Format::Map, Layout::new(2), change()), map);
    let array = bytes(&[b"\x91\x98\xabBlockStored", b"\x91\xcd\x01\x2c\xc0\x92\xcd\x01\x2c\x07\x02\xc0\xa3GPU\xc0"]);
    assert_eq!(events(Format::Array, Layout::new(2), change()), array);
}

#[test]
fn b34_adapter_and_salt_are_extra_keys_of_the_blocks_that_depend_on_them() {
    let change = |parent: Option<u64>| Change::Stored {
        medium: Medium::Gpu,
        parent: parent.map(hash),
        hashes: vec![hash(8), hash(9)],
        token_ids: vec![1, 2, 3, 4],
        lora_name: Some(Arc::from("fr")),
        cache_salt: Some(Arc::from("s1")),
    };
    let head = b"\xabBlockStored\x92\x08\x09\xc0\x94\x01\x02\x03\x04\x02\xc0\xa3GPU\xa2fr";
    let first = bytes(&[b"\x91\x99", head, b"\x92\x92\xa2fr\xa2s1\x91\xa2fr"]);
    assert_eq!(events(Format::Array, Layout::new(2), vec![change(None)]), first);

    let mut publisher = start(&config());
    let mut subscriber = subscriber(&publisher, "");
    publisher.publish(vec![stored(None, &[5]), change(Some(5))], Vec::new);
    let payload = subscriber.message().unwrap().2;
    let later = b"\xaaextra_keys\x92\x91\xa2fr\x91\xa2fr";
    assert!(payload.windows(later.len()).any(|bytes| bytes == later), "the salt belongs to the first block alone");
    assert!(payload.windows(12).any(|bytes| bytes == b"lora_name\xa2fr"));
}

#[test]
fn b24_a_salt_without_an_adapter_leaves_the_keys_of_later_blocks_nil() {
    let change = Change::Stored {
        medium: Medium::Gpu,
        parent: None,
        hashes: vec![hash(8), hash(9)],
        token_ids: vec![1, 2, 3, 4],
        lora_name: None,
        cache_salt: Some(Arc::from("s1")),
    };
    let found = events(Format::Map, Layout::new(2), vec![change]);
    assert!(found.ends_with(b"\xa9lora_name\xc0\xaaextra_keys\x92\x91\xa2s1\xc0"));
}

#[test]
fn b24_removals_and_a_cleared_cache_have_both_forms() {
    let changes = || vec![stored(None, &[8]), removed(8), Change::Cleared];
    let map = events(Format::Map, Layout::new(2), changes());
    let expected = bytes(&[
        b"\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91\x08\xa6medium\xa3GPU",
        b"\x81\xa4type\xb0AllBlocksCleared",
    ]);
    assert!(map.starts_with(b"\x93") && map.ends_with(&expected));
    let array = events(Format::Array, Layout::new(2), changes());
    assert!(array.ends_with(b"\x93\xacBlockRemoved\x91\x08\xa3GPU\x91\xb0AllBlocksCleared"));
}

#[test]
fn b32_a_block_in_host_memory_has_the_medium_cpu_beside_the_gpu_and_is_counted_per_medium() {
    let on_host = |change| match change {
        Change::Stored { parent, hashes, token_ids, lora_name, cache_salt, .. } => {
            Change::Stored { medium: Medium::Cpu, parent, hashes, token_ids, lora_name, cache_salt }
        }
        other => other,
    };
    let changes = vec![stored(None, &[8]), on_host(stored(None, &[8])), removed(8)];
    let found = events(Format::Array, Layout::new(2), changes);
    let block = |medium: &[u8]| bytes(&[b"\x98\xabBlockStored\x91\x08\xc0\x92\x08\x07\x02\xc0\xa3", medium, b"\xc0"]);
    let removal = b"\x93\xacBlockRemoved\x91\x08\xa3GPU";
    assert_eq!(found, bytes(&[b"\x93", &block(b"GPU"), &block(b"CPU"), removal]));
}

#[test]
fn blocks_of_windows_name_their_group_so_that_indexers_can_skip_them() {
    let sliding = Layout { group: Some(SpecKind::Sliding { group: 0, window: 4096 }), ..Layout::new(2) };
    let found = events(Format::Map, sliding, vec![stored(Some(6), &[8]), removed(8)]);
    let fields = bytes(&[
        b"\xa9group_idx\x00\xb2kv_cache_spec_kind\xaesliding_window",
        b"\xbckv_cache_spec_sliding_window\xcd\x10\x00",
        b"\x84\xa4type\xacBlockRemoved\xacblock_hashes\x91\x08\xa6medium\xa3GPU\xa9group_idx\x00",
    ]);
    assert!(found.ends_with(&fields), "{}", String::from_utf8_lossy(&found));
    let full = Layout { group: Some(SpecKind::Full { group: 1 }), ..Layout::new(2) };
    let found = events(Format::Array, full, vec![stored(None, &[8])]);
    assert!(found.ends_with(b"\xa3GPU\xc0\xc0\x01\xaefull_attention"), "extra_keys in front of it is nil");
}

#[test]
fn b28_hashes_are_whole_numbers_of_64_bits_and_never_0() {
    let (zero, high) = (BlockHash::new(1 << 64), BlockHash::new(u128::MAX));
    assert_eq!((zero.get(), high.get()), (1, u64::MAX));
    let numbers = [0x7f, 0x80, 0xff, 0x100, 0xffff, 0x1_0000, 0xffff_ffff, 0x1_0000_0000, u64::MAX];
    let found = events(Format::Array, Layout::new(2), vec![stored(None, &numbers)]);
    let hashes = bytes(&[
        b"\x99\x7f\xcc\x80\xcc\xff\xcd\x01\x00\xcd\xff\xff\xce\x00\x01\x00\x00\xce\xff\xff\xff\xff",
        b"\xcf\x00\x00\x00\x01\x00\x00\x00\x00\xcf\xff\xff\xff\xff\xff\xff\xff\xff",
    ]);
    assert!(found[14..].starts_with(&hashes), "{found:x?}");
}

#[test]
fn long_texts_and_arrays_take_the_longer_heads() {
    for (blocks, name) in [(15, 31), (16, 32), (70_000, 300), (20, 70_000)] {
        let lora_name: Arc<str> = "x".repeat(name).into();
        let change = Change::Stored {
            medium: Medium::Gpu,
            parent: None,
            hashes: (1..=blocks).map(hash).collect(),
            token_ids: vec![7; 2 * blocks as usize],
            lora_name: Some(lora_name.clone()),
            cache_salt: None,
        };
        let mut publisher = start(&config());
        let mut subscriber = subscriber(&publisher, "");
        // Names of the blocks are repeated, so the largest case has a short one.
        publisher.publish(vec![change], Vec::new);
        let payload = subscriber.message().unwrap().2;
        if name < 70_000 {
            let mut router = Router::default();
            router.apply(&payload).unwrap();
            assert_eq!(router.known.len(), blocks as usize);
            assert_eq!(router.known[&1].lora_name.as_deref(), Some(&*lora_name));
        } else {
            assert!(payload.windows(5).any(|head| head == b"\xdb\x00\x01\x11\x70"));
        }
    }
}

#[test]
fn b28_b30_a_batch_never_repeats_a_hash_and_has_the_tokens_of_each_block() {
    let mut publisher = start(&config());
    let mut subscriber = subscriber(&publisher, "");
    let own_parent = stored(Some(9), &[9]);
    let twice = stored(None, &[5, 5, 6]);
    publisher.publish(vec![own_parent, twice], Vec::new);
    let batch = decode(&subscriber.message().unwrap().2).unwrap();
    let events = batch[1].as_array().unwrap();
    assert_eq!(events.len(), 2, "5, and 6 behind it");
    assert!(events.iter().all(|event| event["block_hashes"][0].as_u64() != Some(9)));
}
