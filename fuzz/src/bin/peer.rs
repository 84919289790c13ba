//! Any bytes from a peer: libFuzzer searches for those that cause a panic, are not bounded, or subscribe to what they should not.
#![no_main]

#[path = "../../../kvevents/tests/fuzzed.rs"]
mod fuzzed;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzzed::peer(bytes));
