//! Any grammar in any form: libFuzzer searches for those that end the process or are refused in more than a line.
#![no_main]

#[path = "../../../server/tests/fuzzed/mod.rs"]
mod fuzzed;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| fuzzed::grammar(bytes));
