//! Random histories, checked against a naive model and against simulated memory.
//!
//! The test has an array per block and per host block. The "key" written to a slot is a hash of everything that the
//! real one depends on: group, salt, adapter, media, all tokens up to it. Every copy, swap and poison that the pool
//! orders is applied in order, every computed token is written to its slot, and after each operation every live
//! sequence and every cached block is read back. A block that is shared wrongly, reused too early, copied too late or
//! found under another prompt's prefix shows as wrong contents.
//!
//! The naive model stores which prefix each block caches. It predicts hits, block counts, failures and the order of
//! eviction without hashes or links. `KVBLOCK_CASES` sets the number of histories (default 5,000), each of 200
//! operations.

mod keys;
mod machine;
mod naive;

use machine::{STEP, drive};
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

/// Returns the names of the public methods in the `impl BlockPool` blocks of a source file.
fn public_methods(source: &str) -> Vec<String> {
    let mut names = Vec::new();
    let mut is_pool = false;
    for line in source.lines() {
        if line.starts_with("impl") {
            is_pool = line == "impl BlockPool {";
        }
        is_pool &= line != "}";
        let signature = line.strip_prefix("    pub fn ").filter(|_| is_pool);
        names.extend(signature.and_then(|rest| rest.split(['(', '<']).next()).map(str::to_owned));
    }
    names
}

#[test]
fn the_machine_calls_every_public_method_of_the_pool() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut methods = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            methods.extend(public_methods(&std::fs::read_to_string(path).unwrap()));
        }
    }
    methods.sort_unstable();
    assert!(methods.len() > 35 && methods.contains(&"forget_contents".to_string()), "{methods:?}");
    let machine = include_str!("machine.rs");
    let is_called =
        |name: &&String| machine.contains(&format!(".{name}(")) || machine.contains(&format!("BlockPool::{name}("));
    let missing: Vec<&String> = methods.iter().filter(|name| !is_called(name)).collect();
    assert!(missing.is_empty(), "tests/model/machine.rs does not call {missing:?}");
}
