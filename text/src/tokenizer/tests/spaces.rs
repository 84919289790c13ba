//! Cuts at white space.
#![cfg(test)]

use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::json;

use super::super::pieces::{Pieces, Rest, starts_anew};
use super::*;

/// Parts of texts: words, white space of all kinds, marks, added tokens, and characters that become or lose white space.
const PARTS: [&str; 40] = [
    "the",
    "quick",
    "Брат",
    "Ελλάς",
    "שלום",
    "مرحبا",
    "हिन्दी",
    "世界",
    "你好",
    "。",
    "、",
    "한국",
    "é",
    "e\u{301}",
    "ﬁ",
    "Ａ",
    "\u{37a}",
    "\u{a8}",
    "\u{3164}",
    "\u{200b}",
    "\u{ad}",
    "\u{301}",
    "x",
    "1",
    "42",
    "##",
    "''",
    "``",
    "▁",
    ".",
    "<s>",
    "[MASK]",
    "<mask>",
    "🙂",
    "\u{3000}",
    "\u{a0}",
    "\t",
    "\n",
    "\r\n",
    "  ",
];

fn text(parts: std::ops::Range<usize>) -> impl Strategy<Value = String> {
    let part = prop::sample::select(&PARTS[..]);
    let times = prop_oneof![12 => 1..2usize, 1 => 2..30usize];
    let end = prop_oneof![4 => Just(" "), 3 => Just(""), 1 => Just("\n")];
    prop::collection::vec((part, times, end), parts)
        .prop_map(|parts| parts.into_iter().map(|(part, times, end)| part.repeat(times) + end).collect())
}

fn ids(tokenizer: &Pipeline, text: &str) -> Vec<u32> {
    tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec()
}

static TOKENIZERS: LazyLock<Vec<(&str, Pipeline)>> = LazyLock::new(tokenizers);

fn tokenizers() -> Vec<(&'static str, Pipeline)> {
    let words = [
        "▁", "▁the", "▁x", "the", "t", "h", "e", "1", "4", "2", "世", "世界", "你", "x", "e▁", "s", "i", "f", "а",
        "▁Б", "é",
    ];
    let pieces: Vec<Value> =
        ["<unk>"].iter().chain(&words).enumerate().map(|(id, word)| json!([word, -((id % 7) as f64) - 0.1])).collect();
    let unigram = json!({"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": false});
    let parts =
        ["[UNK]", "the", "qui", "##ck", "x", "世", "你", "4", "##2", ".", "`", "'", "#", "e", "бра", "##т", "\u{3b5}"];
    let vocab: serde_json::Map<String, Value> =
        parts.iter().zip(0..).map(|(part, id): (_, u32)| (part.to_string(), id.into())).collect();
    let wordpiece = json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100, "vocab": vocab});
    let meta = |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
    let all = |kind: &str, name: &str, steps: &[Value]| json!({"type": kind, name: steps});
    let runs = json!({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"});
    let strip = |left: bool| json!({"type": "Strip", "strip_left": left, "strip_right": true});
    let quotes = json!({"type": "Replace", "pattern": {"String": "``"}, "content": "\""});
    let norm = |steps: &[Value]| all("Sequence", "normalizers", steps);
    let pre = |steps: &[Value]| all("Sequence", "pretokenizers", steps);
    let split = json!({"type": "WhitespaceSplit"});
    let bert = |lowercase: bool, chinese: bool| json!({"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": chinese, "strip_accents": null, "lowercase": lowercase});
    let t5 = norm(&[json!({"type": "Nmt"}), json!({"type": "NFKC"}), strip(false), runs.clone()]);
    let old = norm(&[
        quotes,
        json!({"type": "NFKD"}),
        json!({"type": "StripAccents"}),
        json!({"type": "Lowercase"}),
        strip(true),
    ]);
    let kinds = [
        ("t5", &unigram, t5.clone(), meta("always")),
        ("first", &unigram, t5.clone(), meta("first")),
        ("never", &unigram, t5, meta("never")),
        ("old", &unigram, old, pre(&[split.clone(), meta("always")])),
        ("runs", &unigram, norm(&[json!({"type": "Nmt"}), runs]), meta("never")),
        ("old first", &unigram, Value::Null, pre(&[split, meta("first")])),
        ("bert", &wordpiece, bert(true, true), json!({"type": "BertPreTokenizer"})),
        ("cased", &wordpiece, bert(false, false), json!({"type": "BertPreTokenizer"})),
        (
            "words",
            &wordpiece,
            json!({"type": "NFC"}),
            pre(&[json!({"type": "Whitespace"}), json!({"type": "Digits", "individual_digits": true})]),
        ),
    ];
    let added = |id: usize, content: &str, strips: bool| json!({"id": 100 + id, "content": content, "single_word": false, "lstrip": strips, "rstrip": strips, "normalized": false, "special": true});
    let make = |(name, model, normalizer, pre_tokenizer): (&'static str, &Value, Value, Value)| {
        let file = json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": null, "model": model,
            "added_tokens": [added(0, "<s>", false), added(1, "[MASK]", true), added(2, "<mask>", true)]});
        (name, Pipeline::from_bytes(file.to_string()).unwrap())
    };
    kinds.map(make).into()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() })]
    #[test]
    fn both_sides_of_every_cut_at_white_space_have_the_ids_of_the_whole_text(text in text(3..20)) {
        for (name, tokenizer) in &*TOKENIZERS {
            let spaces = Spaces::of(tokenizer).unwrap();
            let (whole, mut end) = (ids(tokenizer, &text), text.len());
            while let Some(at) = spaces.place(&text[..end], 1, starts_anew) {
                let (before, after) = text.split_at(at);
                let parts = [ids(tokenizer, before), ids(tokenizer, after)].concat();
                prop_assert!(parts == whole, "{name}: {before:?} and {after:?} are {parts:?}, expected {whole:?}");
                // The character in front of a place decides on the next one.
                end = at;
            }
        }
    }
}

#[test]
fn long_texts_of_words_have_the_ids_of_the_whole_text_in_pieces() {
    let text = "the quick 你好 Брат, 42 times.\n".repeat(2000);
    for (name, tokenizer) in &*TOKENIZERS {
        let pieces = Pieces::of(tokenizer).unwrap_or_else(|| panic!("{name} is not cut"));
        let (mut found, mut rest, mut count) = (Vec::new(), Rest::new(&text), 0);
        while let Some(later) = pieces.encode_next(tokenizer, rest, usize::MAX, &mut found).unwrap() {
            (rest, count) = (later, count + 1);
        }
        found.extend(pieces.encode_rest(tokenizer, rest).unwrap());
        assert!(found == ids(tokenizer, &text), "{name}");
        assert!(count > text.len() / 1100, "{name}: {count} pieces");
    }
}

#[test]
fn a_text_is_not_cut_where_a_step_reaches_across_white_space() {
    let cut = |change: &dyn Fn(&mut Value)| {
        let mut file: Value = json!({"version": "1.0", "truncation": null, "padding": null, "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null, "added_tokens": [],
            "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}});
        change(&mut file);
        Spaces::of(&Pipeline::from_bytes(file.to_string()).unwrap()).is_some()
    };
    let added = |content: &str, normalized: bool, rstrip: bool| json!([{"id": 9, "content": content, "single_word": false, "lstrip": false, "rstrip": rstrip, "normalized": normalized, "special": true}]);
    assert!(cut(&|_| {}));
    assert!(cut(&|file| file["added_tokens"] = added("<s>", true, false)));
    assert!(!cut(&|file| file["added_tokens"] = added("a b", false, false)));
    assert!(!cut(&|file| file["added_tokens"] = added("<s>", true, true)));
    assert!(!cut(&|file| file["pre_tokenizer"] = Value::Null));
    let unsplit = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": false});
    assert!(!cut(&|file| file["pre_tokenizer"] = unsplit.clone()));
    for normalizer in [
        json!({"type": "Prepend", "prepend": "▁"}),
        json!({"type": "Replace", "pattern": {"String": "a b"}, "content": "c"}),
        json!({"type": "Replace", "pattern": {"Regex": "a .*"}, "content": "c"}),
    ] {
        assert!(!cut(&|file| file["normalizer"] = normalizer.clone()), "{normalizer}");
    }
}
