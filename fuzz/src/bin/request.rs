//! Any body to any route: libFuzzer searches for those that cause a 5xx or a panic.
#![no_main]

#[path = "../../../server/tests/fuzzed/mod.rs"]
mod fuzzed;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzzed::request(bytes));
