//! Bytes become a pool and a history, as in the ordinary tests; libFuzzer looks for those that break it.
#![no_main]

#[path = "../../tests/model/keys.rs"]
mod keys;
#[path = "../../tests/model/machine.rs"]
mod machine;
#[path = "../../tests/model/naive.rs"]
mod naive;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| machine::drive(bytes));
