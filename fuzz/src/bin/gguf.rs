//! Any bytes as a GGUF file: libFuzzer searches for those that cause a panic.
#![no_main]

#[path = "../../../device/tests/support/allocations.rs"]
mod counter;
#[path = "../../../models/tests/gguf/fuzzed.rs"]
mod fuzzed;
#[path = "../../../engine/src/start/texts.rs"]
mod texts;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    fuzzed::read(bytes);
    fuzzed::load(bytes);
});
