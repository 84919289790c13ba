//! Bytes become a pool and a history, as in the ordinary tests; libFuzzer looks for those that break it.
#![no_main]

#[path = "../../../kvblock/tests/model/keys.rs"]
mod keys;
#[path = "../../../kvblock/tests/model/machine.rs"]
mod machine;
#[path = "../../../kvblock/tests/model/naive.rs"]
mod naive;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| machine::drive(bytes));
