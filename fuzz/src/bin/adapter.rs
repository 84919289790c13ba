//! Any bytes as a LoRA adapter: libFuzzer searches for those that cause a panic.
#![no_main]

#[path = "../../../models/tests/lora/fuzzed.rs"]
mod fuzzed;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let folder = std::env::temp_dir().join(format!("quire-fuzz-adapter-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    fuzzed::read(&folder, bytes);
});
