//! Streams of text compared with the texts that the reference tokenizers decode at once.
//!
//! The tokenizers are those of five reference checkpoints, each of another kind (byte fallback with and without a metaspace
//! pre-tokenizer, byte-level as Llama 3 and Qwen have it). `text_reference/<case>/texts.json` has
//! continuations of prompts and lists of ids, both with their texts.

use std::sync::Arc;

use crate::counter::{allocations, largest_allocation};
use proptest::prelude::*;
use serde_json::Value;
use testkit::reference::FIRST as CASES;
use text::{Detokenizer, ReasoningFormat, StreamOptions, TextStream, Tokenizer};

/// Without special tokens.
const SHOWN: StreamOptions<'_> =
    StreamOptions { stop: &[], include_stop: false, min_tokens: 0, reasoning: None, skip_special: true };

const BROKEN: char = char::REPLACEMENT_CHARACTER;

struct Case {
    tokenizer: Arc<Tokenizer>,
    texts: Value,
    byte_level: bool,
}

fn load(case: &str) -> Case {
    let folder = testkit::workspace::root().join("text/tests/text_reference").join(case);
    let texts = std::fs::read_to_string(folder.join("texts.json")).unwrap();
    let checkpoint = testkit::reference::folder(case);
    let tokenizer = Tokenizer::load(&*checkpoint).unwrap();
    let byte_level = tokenizer.token_to_id("<0x0A>").is_none();
    Case { tokenizer: Arc::new(tokenizer), texts: serde_json::from_str(&texts).unwrap(), byte_level }
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

/// The deltas of `output` after `prompt`; the last one is from the end of the stream.
fn deltas(tokenizer: &Arc<Tokenizer>, prompt: &[u32], output: &[u32], skip_special: bool) -> Vec<String> {
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), prompt, skip_special);
    let mut deltas: Vec<String> = output.iter().map(|&id| detokenizer.push(id)).collect();
    deltas.push(detokenizer.finish());
    deltas
}

#[test]
fn deltas_add_up_to_the_text_behind_the_prompt() {
    let mut compared = 0;
    for name in CASES {
        let case = load(name);
        for run in list(&case.texts["continuations"]) {
            // Byte fallback replaces whole runs of bytes, but a stream cannot take text back.
            let Some(text) = run["text"].as_str().filter(|text| case.byte_level || !text.contains(BROKEN)) else {
                continue;
            };
            let (prompt, output) = (ids(&run["prompt"]), ids(&run["ids"]));
            assert_eq!(deltas(&case.tokenizer, &prompt, &output, true).concat(), text, "{name}");
            compared += 1;
        }
    }
    // The two clean runs of each case, and the four greedy ones of the byte-level cases.
    assert!(compared >= 20, "only {compared} runs compared");
}

#[test]
fn deltas_add_up_to_the_decoded_text() {
    let mut compared = 0;
    for name in CASES {
        let case = load(name);
        for decoded in list(&case.texts["decode"]) {
            for (skip_special, key) in [(true, "skip_special_tokens"), (false, "keep_special_tokens")] {
                let text = decoded[key].as_str().unwrap();
                if case.byte_level || !text.contains(BROKEN) {
                    let found = deltas(&case.tokenizer, &[], &ids(&decoded["ids"]), skip_special).concat();
                    assert_eq!(found, text, "{name}, {}, skip special: {skip_special}", decoded["name"]);
                    compared += 1;
                }
            }
        }
    }
    assert!(compared >= 150, "only {compared} texts compared");
}

#[test]
fn an_unfinished_character_is_replaced_as_the_library_does() {
    for name in CASES {
        let case = load(name);
        let euro: Vec<u32> = "\u{20AC}".bytes().map(|byte| token_of_byte(&case, byte)).collect();
        let word = case.tokenizer.encode("a", false).unwrap();
        for output in [&euro[..1], &euro[..2], &[&euro[..2], &word[..]].concat(), &[&word[..], &euro[..1]].concat()] {
            let whole = case.tokenizer.decode(output, true).unwrap();
            assert!(whole.contains(BROKEN));
            assert_eq!(deltas(&case.tokenizer, &[], output, true).concat(), whole, "{name}: {output:?}");
        }
    }
}

/// The token that stands for exactly this byte.
fn token_of_byte(case: &Case, byte: u8) -> u32 {
    (0..case.tokenizer.vocab_size() as u32).find(|&id| case.tokenizer.token_bytes(id) == [byte]).unwrap()
}

#[test]
fn a_character_that_the_prompt_began_is_given_whole() {
    for name in CASES {
        let case = load(name);
        let smile: Vec<u32> = "🙂".bytes().map(|byte| token_of_byte(&case, byte)).collect();
        let deltas = deltas(&case.tokenizer, &smile[..3], &[&smile[3..], &smile[..]].concat(), true);
        assert_eq!(deltas, ["🙂", "", "", "", "🙂", ""], "{name}");
    }
}

#[test]
fn stop_strings_end_the_text_where_the_reference_says() {
    let mut compared = 0;
    for name in CASES {
        let case = load(name);
        for run in list(&case.texts["continuations"]) {
            for expected in list(&run["stops"]) {
                for (include_stop, key) in [(false, "text"), (true, "text_including_stop")] {
                    let stop = expected["stop"].as_str().unwrap().to_owned();
                    let options = StreamOptions { stop: std::slice::from_ref(&stop), include_stop, ..SHOWN };
                    let mut stream = TextStream::new(case.tokenizer.clone(), &ids(&run["prompt"]), options);
                    let mut text = String::new();
                    let mut tokens = 0;
                    for id in ids(&run["ids"]) {
                        let delta = stream.push(id);
                        text += &delta.text;
                        tokens += 1;
                        if let Some(found) = delta.stop {
                            assert_eq!(found, stop);
                            break;
                        }
                    }
                    assert_eq!(text, expected[key].as_str().unwrap(), "{name}: {stop:?}");
                    assert_eq!(tokens, expected["tokens_until_stop"].as_u64().unwrap(), "{name}: {stop:?}");
                    assert_eq!(stream.finish(), "");
                    compared += 1;
                }
            }
        }
    }
    assert!(compared >= 10, "only {compared} stop strings compared");
}

#[test]
fn stop_strings_are_looked_for_behind_min_tokens() {
    let case = load("qwen2");
    let output = [b'a', b'b', b'c'].map(|byte| token_of_byte(&case, byte));
    let stopped_at = |min_tokens| {
        let options = StreamOptions { stop: &["b".into()], min_tokens, ..SHOWN };
        let mut stream = TextStream::new(case.tokenizer.clone(), &[], options);
        output.iter().position(|&id| stream.push(id).stop.is_some())
    };
    assert_eq!([0, 1, 2].map(stopped_at), [Some(1), Some(1), None]);
}

#[test]
fn stop_strings_count_in_the_answer_alone_if_the_reasoning_is_known() {
    let case = load("qwen2");
    let (qwen, deepseek, harmony) = (ReasoningFormat::Qwen3, ReasoningFormat::DeepseekR1, ReasoningFormat::GptOss);
    let header = "<|channel|>analysis<|message|>END<|end|><|start|>assistant<|channel|>END<|message|>";
    let cases = [
        (qwen, "<think>END</think>\n\nan END.".to_string(), Some("<think>END</think>\n\nan ".to_string())),
        (qwen, "an END.".into(), Some("an ".into())),
        (qwen, "<thEND".into(), Some("<th".into())),
        (qwen, "<thi".into(), None),
        (qwen, "<think>an END".into(), None),
        (deepseek, "END</think>E END".into(), Some("END</think>E ".into())),
        (harmony, format!("{header}EN<|end|>"), None),
        (harmony, format!("{header}an END"), Some(format!("{header}an "))),
    ];
    for (format, text, stopped) in cases {
        for min_tokens in [0, 3] {
            let parser = format.parser("");
            let options = StreamOptions { stop: &["END".into()], reasoning: parser.as_ref(), min_tokens, ..SHOWN };
            let mut stream = TextStream::new(case.tokenizer.clone(), &[], options);
            let (mut found, mut stop) = (String::new(), None);
            for byte in text.bytes() {
                if stop.is_some() {
                    break;
                }
                let delta = stream.push(token_of_byte(&case, byte));
                found += &delta.text;
                stop = delta.stop;
            }
            found += &stream.finish();
            assert_eq!(
                (found.as_str(), stop.is_some()),
                (stopped.as_ref().unwrap_or(&text).as_str(), stopped.is_some()),
                "{text:?}"
            );
        }
    }
}

#[test]
fn text_that_was_held_back_is_returned_at_the_end() {
    for name in CASES {
        let case = load(name);
        let options = StreamOptions { stop: &["ab".into()], ..SHOWN };
        let mut stream = TextStream::new(case.tokenizer.clone(), &[token_of_byte(&case, b'x')], options);
        for byte in [b'a', 0xF0] {
            assert_eq!(stream.push(token_of_byte(&case, byte)).text, "", "{name}");
        }
        assert_eq!(stream.finish(), "a\u{FFFD}", "{name}");
        assert_eq!(stream.offset(), 2);
    }
}

#[test]
fn the_offset_of_a_token_is_the_length_of_the_text_before_it() {
    for name in CASES {
        let case = load(name);
        // Held back by the stop strings or not, offsets count all text.
        for stop in [vec![], vec!["hold me".to_owned(), " x".to_owned()]] {
            let options = StreamOptions { stop: &stop, ..SHOWN };
            let prompt = case.tokenizer.encode("A river", true).unwrap();
            let output = case.tokenizer.encode("the winter garden hol", false).unwrap();
            let mut stream = TextStream::new(case.tokenizer.clone(), &prompt, options);
            let mut length = 0;
            for &id in &output {
                assert_eq!(stream.push(id).offset, length, "{name}");
                length += case.tokenizer.token_bytes(id).len();
            }
            assert_eq!(stream.offset(), length);
        }

        let smile: Vec<u32> = "🙂".bytes().map(|byte| token_of_byte(&case, byte)).collect();
        let mut stream = TextStream::new(case.tokenizer.clone(), &smile, SHOWN);
        let offsets: Vec<usize> = smile.iter().chain(&smile[..2]).map(|&id| stream.push(id).offset).collect();
        assert_eq!(offsets, [0, 0, 0, 0, 1, 1], "{name}: offsets inside of a character are that character's");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_tokens_behind_any_prompt_add_up_to_the_decoded_text(
        picks in prop::collection::vec((0u32..1000, 0u8..4), 0..24),
        split in 0usize..24,
        skip_special: bool,
    ) {
        thread_local! {
            static LOADED: Vec<Case> = CASES.iter().map(|name| load(name)).collect();
        }
        LOADED.with(|cases| {
            for case in cases {
                let all: Vec<u32> = picks.iter().flat_map(|&(pick, kind)| pieces(case, pick, kind)).collect();
                let (prompt, output) = all.split_at(split.min(all.len()));
                let whole = case.tokenizer.decode(&all, skip_special).unwrap();
                let before = case.tokenizer.decode(prompt, skip_special).unwrap();
                // A prompt that ends inside of a character has no text that this continues.
                let Some(text) = whole.strip_prefix(&before) else { continue };
                if !case.byte_level && whole.contains(BROKEN) {
                    continue;
                }
                let deltas = deltas(&case.tokenizer, prompt, output, skip_special);
                prop_assert_eq!(deltas.concat(), text);
            }
            Ok(())
        })?;
    }
}

/// Some tokens: any single one, or the bytes of a character as tokens of their own.
fn pieces(case: &Case, pick: u32, kind: u8) -> Vec<u32> {
    let characters = ["é", "世", "🙂", " "];
    match kind {
        0 => characters[pick as usize % 4].bytes().map(|byte| token_of_byte(case, byte)).collect(),
        // In a byte-level vocabulary stray bytes are welcome; with byte fallback they make a case that is left out.
        1 if case.byte_level => vec![token_of_byte(case, 0x80 + (pick % 0x40) as u8)],
        _ => {
            let id = pick % (case.tokenizer.vocab_size() as u32 + 2);
            let bytes = case.tokenizer.token_bytes(id);
            if case.byte_level || std::str::from_utf8(&bytes).is_ok() { vec![id] } else { vec![] }
        }
    }
}

/// The deltas of pieces of bytes, each byte a token, and the text from the end of the stream.
fn deltas_of_bytes(case: &Case, prompt: &[u8], pieces: &[&[u8]]) -> Vec<String> {
    let tokens = |bytes: &[u8]| bytes.iter().map(|&byte| token_of_byte(case, byte)).collect::<Vec<u32>>();
    let mut detokenizer = Detokenizer::new(case.tokenizer.clone(), &tokens(prompt), true);
    let piece = |piece: &&[u8]| tokens(piece).into_iter().map(|id| detokenizer.push(id)).collect::<String>();
    let mut deltas: Vec<String> = pieces.iter().map(piece).collect();
    deltas.push(detokenizer.finish());
    deltas
}

/// A tokenizer that writes one U+FFFD for each maximal part of a character, and one that writes one for each byte.
const BY_PART_AND_BY_BYTE: [&str; 2] = ["qwen2", "mistral-sliding"];

#[test]
fn broken_bytes_are_replaced_as_soon_as_they_cannot_become_a_character() {
    let [by_part, by_byte] = BY_PART_AND_BY_BYTE.map(load);
    let pieces: [&[u8]; 3] = [b"\xF0\x9F", b"x\xFF\xE4", b"\xBD"];
    assert_eq!(deltas_of_bytes(&by_part, b"a", &pieces), ["", "\u{FFFD}x\u{FFFD}", "", "\u{FFFD}"]);
    let twice = "\u{FFFD}\u{FFFD}";
    assert_eq!(deltas_of_bytes(&by_byte, b"a", &pieces), ["", &format!("{twice}x\u{FFFD}"), "", twice]);
}

#[test]
fn a_character_that_the_prompt_began_is_never_returned_in_part() {
    for (name, cut) in BY_PART_AND_BY_BYTE.into_iter().zip(["", "\u{FFFD}"]) {
        let case = load(name);
        let deltas = |output: &[u8]| deltas_of_bytes(&case, b"ab\xF0\x9F", &[output]);
        assert_eq!(deltas(b"\x99\x82"), ["🙂", ""]);
        assert_eq!(deltas(b"x\xFF"), ["x\u{FFFD}", ""]);
        assert_eq!(deltas(b"\x99x"), [&format!("{cut}x"), ""]);
        assert_eq!(deltas(b"\x99"), ["", cut]);
    }
}

#[test]
fn a_token_costs_the_same_at_the_end_of_a_long_answer_as_at_its_beginning() {
    let tokenizer = load(CASES[0]).tokenizer;
    let stops = ["never", "\n\nnever", "e e e never"].map(str::to_string);
    let ids = tokenizer.encode("the one e e e and the next \u{1f642} ", false).unwrap();
    let mut stream = TextStream::new(tokenizer, &ids, StreamOptions { stop: &stops, ..SHOWN });
    let mut cost = |tokens: usize| {
        largest_allocation();
        let before = allocations();
        (0..tokens).for_each(|at| drop(stream.push(ids[at % ids.len()])));
        (allocations() - before, largest_allocation())
    };
    cost(100 * ids.len());
    let early = cost(10 * ids.len());
    cost(4_000 * ids.len());
    assert_eq!(cost(10 * ids.len()), early);
}
