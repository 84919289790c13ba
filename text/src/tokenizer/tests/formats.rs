//! Vocabularies in formats other than `tokenizer.json`: the ids are those of the libraries that they belong to.
#![cfg(test)]

use std::fs;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::json;
use tempfile::TempDir;

use super::*;

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tokenizers")
}

fn expected() -> Value {
    serde_json::from_slice(&fs::read(data().join("expected.json")).unwrap()).unwrap()
}

/// A checkpoint with these files.
fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let folder = TempDir::new().unwrap();
    for (name, bytes) in files {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

/// The tokenizer of a file of the test data under the name that checkpoints have, with this configuration.
fn tokenizer(file: &str, config: &Value) -> Tokenizer {
    let name = match file.rsplit_once('.') {
        Some((_, "json")) => "tekken.json",
        Some((_, "tiktoken")) => "tiktoken.model",
        _ => "tokenizer.model",
    };
    let bytes = fs::read(data().join(file)).unwrap();
    let folder = folder(&[(name, &bytes), (CONFIG, config.to_string().as_bytes())]);
    Tokenizer::load(folder.path()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// The configuration of the `number`th case of a file.
fn config(case: &Value, number: usize) -> Value {
    // A pattern that splits at Han characters, and one that does not.
    let class = if number.is_multiple_of(2) { "ChatGLM4Tokenizer" } else { "TikTokenTokenizer" };
    let special = case["special_tokens"].as_object().into_iter().flatten();
    let added: serde_json::Map<_, _> =
        special.map(|(text, id)| (id.to_string(), json!({"content": text, "special": true}))).collect();
    json!({"tokenizer_class": class, "added_tokens_decoder": added})
}

#[test]
fn ids_are_those_of_the_library_of_the_format() {
    let expected = expected();
    for (number, case) in expected["cases"].as_array().unwrap().iter().enumerate() {
        let file = case["file"].as_str().unwrap();
        let mut tokenizer = tokenizer(file, &config(case, number));
        // The file has five tokens more than the model.
        assert!(file != "tiny-tekken.json" || tokenizer.vocab_size() == 523);
        let texts: Vec<&str> =
            expected["texts"].as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect();
        for pair in case["ids_with_special"].as_array().into_iter().flatten() {
            let text = texts[pair[0].as_u64().unwrap() as usize];
            assert_eq!(tokenizer.encode(text, false).unwrap(), ids(&pair[1]), "{file}: {text:?}");
        }
        // The libraries make special tokens of no text unless they are asked to.
        tokenizer.inner.set_encode_special_tokens(true);
        for (index, text) in texts.iter().enumerate() {
            let found = tokenizer.encode(text, false).unwrap();
            assert_eq!(found, ids(&case["ids"][index]), "{file}: {text:?}");
            assert!(tokenizer.least_tokens(text.len()) <= found.len(), "{file}: {text:?}");
            // A run of unknown characters is one token, whose text is lost.
            if let Some(decoded) = case["decode_of_ids"][index].as_str().filter(|text| !text.contains('⁇')) {
                assert_eq!(tokenizer.decode(&found, true).unwrap(), decoded, "{file}: {text:?}");
            }
        }
        for case in case["decode"].as_array().unwrap() {
            // As in transformers, one byte that is wrong replaces its whole run of bytes in a vocabulary of texts.
            let is_run = tokenizer.has_byte_fallback() && case["name"] == "bytes cut";
            if !is_run && !case["text"].as_str().unwrap().contains('⁇') {
                assert_eq!(tokenizer.decode(&ids(&case["ids"]), true).unwrap(), case["text"], "{file}: {case}");
            }
        }
    }
}

/// A field of a message.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let (low, high) = (bytes.len() as u8 | 0x80, (bytes.len() >> 7) as u8);
    [&[number << 3 | 2, low, high], bytes].concat()
}

fn piece(text: &str, score: f32, kind: u8) -> Vec<u8> {
    let score = [&[2 << 3 | 5], &score.to_le_bytes()[..]].concat();
    field(1, &[field(1, text.as_bytes()), score, vec![3 << 3, kind]].concat())
}

/// A `tokenizer.model` of these pieces behind `<unk>`, `<s>` and `</s>`. `kind` is 1 for unigram, 2 for BPE.
fn message(kind: u8, pieces: &[(&str, f32, u8)], normaliser: &[u8]) -> Vec<u8> {
    let special = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)];
    let pieces = special.iter().chain(pieces).flat_map(|(text, score, kind)| piece(text, *score, *kind));
    pieces.chain(field(2, &[3 << 3, kind])).chain(field(3, normaliser)).collect()
}

/// No space before texts, and none is removed.
const AS_IS: &[u8] = &[3 << 3, 0, 4 << 3, 0];

fn load(files: &[(&str, &[u8])]) -> Result<Tokenizer, LoadError> {
    Tokenizer::load(folder(files).path())
}

/// The one line of an error, which names the file and these parts.
fn refused(name: &str, bytes: &[u8], parts: &[&str]) {
    let error = load(&[(name, bytes)]).err().unwrap_or_else(|| panic!("{name} {parts:?} loads")).to_string();
    assert!(!error.contains('\n') && error.len() < 400, "{error:?}");
    for part in [name].iter().chain(parts) {
        assert!(error.contains(part), "{error:?} does not say {part:?}");
    }
}

#[test]
fn hostile_files_are_refused_in_one_line() {
    let model = |pieces: &[(&str, f32, u8)]| message(2, pieces, AS_IS);
    // A length of many exabytes, a cut message, a number without an end, and a type that does not exist.
    for broken in [
        &[0x0A, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x7F][..],
        &[0x0A, 5, 1],
        &[0x0A; 40],
        &[0x0A, 0, 0x0B],
    ] {
        refused("tokenizer.model", broken, &["broken message", "download it again"]);
    }
    refused("tokenizer.model", &model(&[("a", f32::NAN, 1)]), &["score NaN", "\"a\""]);
    refused("tokenizer.model", &model(&[("a", 1e30, 1)]), &["score", "1e9"]);
    refused("tokenizer.model", &model(&[("a", 0.0, 9)]), &["broken message"]);
    refused("tokenizer.model", &model(&[("a", 0.0, 1), ("a", 1.0, 1)]), &["\"a\" as 3 and 4"]);
    refused("tokenizer.model", &model(&[("", 0.0, 1)]), &["0 bytes", "the id 3"]);
    refused("tokenizer.model", &model(&[(&"a".repeat(2000), 0.0, 1)]), &["2000 bytes", "1024"]);
    refused("tokenizer.model", &message(3, &[("a", 0.0, 1)], AS_IS), &["words or characters", "BPE or unigram"]);
    refused("tokenizer.model", &message(2, &[], &field(2, &[9, 9, 9, 9, 9])), &["broken message"]);
    let bytes = fs::read(data().join("tiny.tiktoken")).unwrap();
    let more = |line: &str| [&bytes[..], line.as_bytes()].concat();
    refused("tiktoken.model", &more("YWFh 5\n"), &["rank 5 twice", "line 513"]);
    refused("tiktoken.model", &more("YWFh 99999999999\n"), &["line 513", "1048576"]);
    refused("tiktoken.model", &more("?!? 512\n"), &["line 513", "base64"]);
    refused("tiktoken.model", b"YWFh 0\n", &["no token for the byte 0"]);
    refused("tokenizer.model", &bytes, &["512 ranks", "ChatGLM4Tokenizer"]);
    let tekken = |change: &dyn Fn(&mut Value)| {
        let mut json: Value = serde_json::from_slice(&fs::read(data().join("tiny-tekken.json")).unwrap()).unwrap();
        change(&mut json);
        json.to_string().into_bytes()
    };
    refused(
        "tekken.json",
        &tekken(&|json| json["config"]["default_num_special_tokens"] = json!(u64::MAX >> 1)),
        &["special tokens"],
    );
    refused("tekken.json", &tekken(&|json| json["vocab"][3]["rank"] = json!(7)), &["rank 7 twice"]);
    refused("tekken.json", &tekken(&|json| json["special_tokens"][3]["rank"] = json!(1)), &["special token 1 twice"]);
    refused("vocab.txt", b"a\nb\na\n", &["\"a\" as 0 and 2"]);
    refused("vocab.txt", b"a\nb\n", &["[UNK]"]);
    let added = json!({"added_tokens_decoder": {"4000000000": {"content": "x"}}}).to_string();
    let error = load(&[("tokenizer.model", &model(&[])), (CONFIG, added.as_bytes())]).err().unwrap().to_string();
    assert!(error.contains("token id 4000000000"), "{error}");
}

#[test]
fn added_tokens_and_the_tokens_around_texts_are_those_of_the_configuration() {
    let model = message(2, &[("a", 0.0, 1), ("[UNUSED_1]", -1.0, 4), ("b", 0.0, 1)], AS_IS);
    let ids = |config: Value, added: &[u8], text: &str| {
        let config = config.to_string();
        let files = [("tokenizer.model", &model[..]), (CONFIG, config.as_bytes()), ("added_tokens.json", added)];
        load(&files).unwrap().encode(text, true).unwrap()
    };
    // Token 4 gets another text, and 9 lies behind ids without a token.
    let decoder =
        json!({"4": {"content": "<|im_start|>", "special": true}, "9": {"content": "<tool>", "special": false}});
    let config = json!({"added_tokens_decoder": decoder, "add_bos_token": false});
    assert_eq!(ids(config, b"{}", "a<|im_start|>b<tool>"), [3, 4, 5, 9]);
    assert_eq!(ids(json!({}), br#"{"<x>": 7}"#, "a<x>"), [1, 3, 7], "the first token of the file is before texts");
    assert_eq!(ids(json!({"add_eos_token": true}), b"{}", "a"), [1, 3, 2]);
    assert_eq!(ids(json!({"tokenizer_class": "T5Tokenizer"}), b"{}", "a"), [3, 2]);
    let error = load(&[("tokenizer.model", &model), (CONFIG, br#"{"add_bos_token": true, "bos_token": "<none>"}"#)]);
    assert!(error.err().unwrap().to_string().contains("`bos_token` is \"<none>\""));
}

#[test]
fn a_space_is_put_before_each_text_or_only_before_the_first() {
    let spaced = [3 << 3, 1, 4 << 3, 0];
    let model = message(2, &[("a", 0.0, 1), ("▁", -1.0, 1), ("▁a", -2.0, 1)], &spaced);
    let ids = |legacy: bool| {
        let config = json!({"legacy": legacy, "add_bos_token": false}).to_string();
        load(&[("tokenizer.model", &model), (CONFIG, config.as_bytes())]).unwrap().encode("a</s>a", false).unwrap()
    };
    assert_eq!(ids(true), [5, 2, 5]);
    assert_eq!(ids(false), [5, 2, 3]);
}

#[test]
fn published_tokenizers_of_tiktoken_have_their_special_tokens() {
    let ranks = fs::read(data().join("tiny.tiktoken")).unwrap();
    let load = |class: &str| {
        let config =
            json!({"tokenizer_class": class, "auto_map": {"AutoTokenizer": [format!("tokenization.{class}"), null]}});
        load(&[("tokenizer.model", &ranks), (CONFIG, config.to_string().as_bytes())]).unwrap()
    };
    let glm = load("ChatGLM4Tokenizer");
    assert_eq!(glm.encode("<|user|>\n", true).unwrap(), [514, 516, 519, 10]);
    let qwen = load("QWenTokenizer");
    assert_eq!((qwen.token_to_id("<|im_end|>"), qwen.token_to_id("<|extra_204|>")), (Some(514), Some(719)));
    let phi = load("Phi3SmallTokenizer");
    let id = |text| phi.token_to_id(text);
    assert_eq!(
        ["<|endoftext|>", "<|end|>", "<|endofprompt|>", "<|dummy_id_86|>", "<|dummy_id_2|>"].map(id),
        [100257, 100266, 100276, 100351, 100256].map(Some)
    );
}

#[test]
fn a_vocabulary_of_words_is_read_as_bert_has_it() {
    let vocab = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nqu\n##ick\n,\n";
    let tokenizer = load(&[("vocab.txt", vocab)]).unwrap();
    assert_eq!(tokenizer.encode("The QUICK, [MASK] fox", true).unwrap(), [2, 5, 6, 7, 8, 4, 1, 3]);
    assert_eq!(tokenizer.decode(&[2, 5, 6, 7, 3], true).unwrap(), "the quick");
    assert_eq!(tokenizer.token_bytes(7), b"ick");
    let cased = load(&[("vocab.txt", vocab), (CONFIG, br#"{"do_lower_case": false}"#)]).unwrap();
    assert_eq!(cased.encode("The the", false).unwrap(), [1, 5]);
}

/// The tokens of a text by trying every pair again after each join, as SentencePiece and tiktoken define it.
fn naive_bpe(text: &str, pieces: &[(String, f32)]) -> Vec<String> {
    let score = |text: &str| pieces.iter().find(|(piece, _)| piece == text).map(|(_, score)| *score);
    let mut parts: Vec<String> = text.chars().map(String::from).collect();
    loop {
        let joined = parts.windows(2).enumerate().filter_map(|(at, pair)| Some((score(&pair.concat())?, at)));
        let best = joined.fold(
            None,
            |best: Option<(f32, usize)>, next| {
                if best.is_none_or(|best| next.0 > best.0) { Some(next) } else { best }
            },
        );
        let Some((_, at)) = best else { return parts };
        let right = parts.remove(at + 1);
        parts[at] += &right;
    }
}

/// The greatest sum of scores over all ways to cut a text.
fn naive_unigram(text: &str, pieces: &[(String, f32)]) -> f64 {
    if text.is_empty() {
        return 0.0;
    }
    let least = pieces.iter().map(|(_, score)| *score).fold(f32::MAX, f32::min);
    let one = text.chars().next().map_or(0, char::len_utf8);
    let known = pieces.iter().any(|(piece, _)| piece.len() == one && text.starts_with(piece.as_str()));
    let unknown = (!known).then(|| f64::from(least - 10.0) + naive_unigram(&text[one..], pieces));
    let cuts = pieces.iter().filter(|(piece, _)| text.starts_with(piece.as_str()));
    let sums = cuts.map(|(piece, score)| f64::from(*score) + naive_unigram(&text[piece.len()..], pieces));
    sums.chain(unknown).fold(f64::MIN, f64::max)
}

fn vocabulary() -> impl Strategy<Value = Vec<(String, f32)>> {
    let piece =
        prop::collection::vec(prop::sample::select(&["a", "b", "é", "▁"][..]), 1..5).prop_map(|parts| parts.concat());
    // Few scores, so that many are equal.
    let pieces = prop::collection::btree_map(piece, (-8..0_i8).prop_map(f32::from), 1..20);
    pieces.prop_map(|pieces| pieces.into_iter().collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]
    #[test]
    fn ids_are_those_of_a_naive_implementation(pieces in vocabulary(), text in "[ab é]{0,12}") {
        let written = text.replace(' ', "▁");
        let all: Vec<(&str, f32, u8)> = pieces.iter().map(|(text, score)| (text.as_str(), *score, 1)).collect();
        let ids = |kind: u8| {
            let tokenizer = load(&[("tokenizer.model", &message(kind, &all, AS_IS))]).unwrap();
            tokenizer.encode(&text, false).unwrap()
        };
        let id = |text: &String| pieces.iter().position(|(piece, _)| piece == text).map_or(0, |at| at as u32 + 3);
        let mut expected: Vec<u32> = naive_bpe(&written, &pieces).iter().map(id).collect();
        // A run of unknown characters is one token.
        expected.dedup_by(|a, b| *a == 0 && *b == 0);
        prop_assert_eq!(ids(2), expected);
        let found = ids(1);
        if !found.contains(&0) {
            let sum: f64 = found.iter().map(|id| f64::from(pieces[*id as usize - 3].1)).sum();
            let spelled: String = found.iter().map(|id| pieces[*id as usize - 3].0.as_str()).collect();
            prop_assert_eq!((sum, spelled), (naive_unigram(&written, &pieces), written));
        } else {
            let characters = written.chars().filter(|c| !pieces.iter().any(|(piece, _)| *piece == c.to_string()));
            prop_assert!(characters.count() > 0, "{} has tokens for every character", written);
        }
    }
}

/// The rules of normalisation of a file: the third field of its message.
fn normaliser(model: &[u8]) -> Vec<u8> {
    let mut rest = model;
    loop {
        let (key, mut length, mut place) = (rest[0], 0, 1);
        while rest[place] & 0x80 != 0 || place == 1 && length == 0 && rest[place] == 0 {
            length |= usize::from(rest[place] & 0x7F) << (7 * (place - 1));
            place += 1;
        }
        length |= usize::from(rest[place]) << (7 * (place - 1));
        let end = place + 1 + length;
        if key == 3 << 3 | 2 {
            return rest[..end].to_vec();
        }
        rest = &rest[end..];
    }
}

#[test]
fn the_longest_text_of_the_map_of_characters_is_replaced() {
    let rules = normaliser(&fs::read(data().join("tiny-unigram.model")).unwrap());
    let pieces = [("▁", -1.0, 1), ("ガ", -1.0, 1), ("1", -1.0, 1), ("é", -1.0, 1)];
    let model = [message(1, &pieces, &[]), rules].concat();
    let tokenizer = load(&[("tokenizer.model", &model)]).unwrap();
    // Half-width kana with a mark, a digit in a circle, and a letter with an accent of its own.
    assert_eq!(tokenizer.encode(" ｶﾞ \t ①e\u{301} ", false).unwrap(), [3, 4, 3, 5, 6]);
}

#[test]
fn of_two_ways_with_equal_sums_unigram_keeps_the_one_with_the_earlier_token() {
    let pieces = [("a", -1.0, 1), ("b", -1.0, 1), ("ab", -2.0, 1)];
    let tokenizer = load(&[("tokenizer.model", &message(1, &pieces, AS_IS))]).unwrap();
    assert_eq!(tokenizer.encode("abab", false).unwrap(), [5, 5]);
}

#[test]
fn an_unused_token_is_replaced_by_the_tokens_that_it_was_joined_of() {
    let pieces = [("a", -9.0, 1), ("b", -9.0, 1), ("ab", -1.0, 5), ("abb", -2.0, 5), ("<t>", 0.0, 4)];
    let tokenizer = load(&[("tokenizer.model", &message(2, &pieces, AS_IS))]).unwrap();
    assert_eq!(tokenizer.encode("abb<t>ab", false).unwrap(), [3, 4, 4, 7, 3, 4]);
}

#[test]
fn long_texts_have_the_ids_of_the_whole_text_in_pieces() {
    let expected = expected();
    let text: String =
        expected["texts"].as_array().unwrap().iter().map(|text| format!("{} ", text.as_str().unwrap())).collect();
    let long = text.repeat(4);
    for (number, case) in expected["cases"].as_array().unwrap().iter().enumerate() {
        let file = case["file"].as_str().unwrap();
        let tokenizer = tokenizer(file, &config(case, number));
        let mut pieces = 0;
        let found = tokenizer
            .encode_while(&long, true, 4096, |_| {
                pieces += 1;
                true
            })
            .unwrap();
        assert_eq!(found, tokenizer.encode_whole(&long, true).unwrap(), "{file}");
        assert!(pieces > 3, "{file}: {pieces} pieces");
    }
}
