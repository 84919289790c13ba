//! Random histories, checked against a naive model and against simulated memory.
//!
//! The test has an array per block and per host block. The "key" written to a slot is a hash of everything that the
//! real one depends on: group, salt, adapter, media, all tokens up to it. Every copy, swap and poison that the pool
//! orders is applied in order, some of them several calls later; every computed token is written to its slot, and after
//! each operation every live sequence and every cached block is read back. A block that is shared wrongly, reused too early, copied too late or
//! found under another prompt's prefix shows as wrong contents.
//!
//! The naive model stores which prefix each block caches. It predicts hits, block counts, failures and the order of
//! eviction without hashes or links. `KVBLOCK_CASES` sets the number of histories (default 5,000), each of 200
//! operations.

mod keys;
mod machine;
mod naive;

use machine::{CALLED, STEP, drive};
use proptest::prelude::*;

/// Operations of a history.
const STEPS: usize = 200;

fn cases() -> u32 {
    std::env::var("KVBLOCK_CASES").ok().and_then(|cases| cases.parse().ok()).unwrap_or(5000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_history_keeps_metadata_and_contents_consistent(
        pool in any::<[u8; STEP]>(),
        history in prop::collection::vec(any::<[u8; STEP]>(), STEPS),
    ) {
        drive(&[&pool[..], &history.concat()].concat());
    }
}

/// Inputs of any length, including the empty one, as a fuzzer generates them.
#[test]
fn bytes_of_any_length_are_a_history() {
    for len in 0..5 * STEP {
        drive(&(0..len as u8).map(|byte| byte.wrapping_mul(37)).collect::<Vec<_>>());
    }
}

/// The types whose public methods the machine has to call.
const TYPES: [&str; 5] = ["Admission", "BlockPool", "BlockTable", "GroupTable", "Swapped"];

/// Returns the public methods of these types in a source file, as `Type::method`.
fn public_methods(source: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut kind = None;
    for line in source.lines() {
        if let Some(header) = line.strip_prefix("impl") {
            let header =
                header.strip_prefix('<').and_then(|rest| rest.split_once('>')).map_or(header, |(_, rest)| rest);
            let name = header.trim().split(['<', ' ']).next().unwrap_or_default();
            kind = TYPES.into_iter().find(|kind| *kind == name && !header.contains(" for "));
        }
        kind = kind.filter(|_| line != "}");
        let signature = line.strip_prefix("    pub fn ");
        if let (Some(kind), Some(name)) = (kind, signature.and_then(|rest| rest.split(['(', '<']).next())) {
            names.push(format!("{kind}::{name}"));
        }
    }
    names
}

#[test]
fn histories_call_every_public_method() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut methods = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            methods.extend(public_methods(&std::fs::read_to_string(path).unwrap()));
        }
    }
    assert!(methods.len() > 50 && methods.contains(&"Admission::open".to_string()), "{methods:?}");
    // A fixed sequence of bytes (a multiplicative generator modulo 2^31 - 1).
    let mut state = 1u64;
    let mut byte = || {
        state = state * 48271 % 0x7fff_ffff;
        (state >> 8) as u8
    };
    for _ in 0..100 {
        drive(&std::iter::repeat_with(&mut byte).take((1 + STEPS) * STEP).collect::<Vec<u8>>());
    }
    let called = CALLED.take();
    let missing: Vec<&String> = methods.iter().filter(|name| !called.contains(&name[..])).collect();
    assert!(missing.is_empty(), "no history has called {missing:?}");
}
