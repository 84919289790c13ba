//! Any token ids after any prompt: libFuzzer searches for those whose pieces do not add up to the text.
#![no_main]

#[path = "../../../server/tests/fuzzed/mod.rs"]
mod fuzzed;

libfuzzer_sys::fuzz_target!(|input: (Vec<u16>, Vec<u16>, Vec<String>, bool)| {
    let (prompt, output, stop, skip_special_tokens) = input;
    fuzzed::detokeniser(&prompt, &output, &stop, skip_special_tokens);
});
