//! Cuts of long texts at white space, for tokenizers that look at words one by one: Unigram with Metaspace, WordPiece, and others.
//!
//! The ids of a text are those of its words, and a word depends on no other. A cut lies in front of white space, behind a character
//! that no supported normaliser drops, turns to white space, or joins with what follows. So all white space between two words is on
//! one side. If ideographs are words of their own, a cut may also lie between two of them.

use serde_json::Value;
use tokenizers::AddedToken;

use super::bytes;
use super::model::Pipeline;

/// See the [module](self).
pub(super) struct Spaces {
    /// Words end at line breaks and tabs too, not only at spaces.
    lines: bool,
    /// Ideographs are words.
    ideographs: bool,
    /// Last characters of added tokens that take the white space behind them.
    edges: Vec<char>,
}

impl Spaces {
    /// `None` for a tokenizer that does not split texts at spaces, or of which a step may reach across a cut.
    pub fn of(tokenizer: &Pipeline) -> Option<Spaces> {
        let normalizers = bytes::steps(tokenizer.get_normalizer());
        let steps = bytes::steps(tokenizer.get_pre_tokenizer());
        let is = |step: &Value, kinds: &[&str]| kinds.iter().any(|kind| step["type"] == *kind);
        let lines = steps.iter().any(|step| is(step, &["WhitespaceSplit", "Whitespace", "BertPreTokenizer"]));
        let is_split = |step: &Value| is(step, &["Metaspace"]) && step["split"] != false;
        let others = ["WhitespaceSplit", "Whitespace", "BertPreTokenizer", "Punctuation", "Digits"];
        let splits =
            (lines || steps.iter().any(is_split)) && steps.iter().all(|step| is_split(step) || is(step, &others));
        // What is removed from the start of a piece is a space that separates words anyway.
        let strips = |step: &Value| is(step, &["Strip"]) && (lines || step["strip_left"] == false);
        let kinds = ["NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Lowercase", "StripAccents", "BertNormalizer"];
        if !splits || !normalizers.iter().all(|step| is(step, &kinds) || strips(step) || replaces_within_words(step)) {
            return None;
        }
        let mut edges = Vec::new();
        for AddedToken { content, lstrip, rstrip, normalized, .. } in tokenizer.get_added_tokens_decoder().values() {
            if content.chars().any(char::is_whitespace) || (*lstrip || *rstrip) && *normalized {
                return None;
            }
            edges.extend(content.chars().last().filter(|_| *rstrip));
        }
        let handles = |step: &Value| is(step, &["BertNormalizer"]) && step["handle_chinese_chars"] == true;
        let ideographs = lines && normalizers.iter().any(handles);
        Some(Spaces { lines, ideographs, edges })
    }

    /// The last place for a cut at least at `least`. `starts_anew` is false for characters that may join what precedes them.
    pub fn place(&self, text: &str, least: usize, starts_anew: impl Fn(char) -> bool) -> Option<usize> {
        let is_plain = |c: char| {
            let is_shown = c.is_ascii_graphic() || starts_anew(c) && !c.is_ascii() && !c.is_whitespace();
            (is_shown || is_letter(c)) && !self.edges.contains(&c)
        };
        let is_space = |c: char| c == ' ' || self.lines && matches!(c, '\n' | '\t');
        let is_ideograph = |c: char| ('\u{4e00}'..='\u{9fff}').contains(&c) && is_plain(c);
        let places = text.char_indices().map(|(at, _)| at).rev().take_while(|at| *at > 0 && *at >= least);
        let mut places = places.filter(|at| {
            let (before, after) = (text[..*at].chars().next_back(), text[*at..].chars().next());
            before.zip(after).is_some_and(|(before, after)| {
                let is_within = self.ideographs && is_ideograph(before) && is_ideograph(after);
                is_space(after) && is_plain(before) || is_within
            })
        });
        places.next()
    }
}

/// Whether a step replaces only what has no white space in it, single spaces, or runs of spaces.
fn replaces_within_words(step: &Value) -> bool {
    let pattern = &step["pattern"];
    let is_word = |text: &str| text == " " || !text.contains(char::is_whitespace);
    step["type"] == "Replace" && (pattern["String"].as_str().is_some_and(is_word) || pattern["Regex"] == " {2,}")
}

/// Whether a character is a letter whose normal forms are letters, and which joins no space.
fn is_letter(character: char) -> bool {
    character.is_alphabetic()
        && matches!(u32::from(character), 0xC0..=0x24F | 0x386..=0x3CE | 0x400..=0x52F | 0x531..=0x586 | 0x5D0..=0x5EA
            | 0x620..=0x64A | 0x904..=0x939)
}

#[cfg(test)]
mod tests {
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
        let pieces: Vec<Value> = ["<unk>"]
            .iter()
            .chain(&words)
            .enumerate()
            .map(|(id, word)| json!([word, -((id % 7) as f64) - 0.1]))
            .collect();
        let unigram = json!({"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": false});
        let parts = [
            "[UNK]", "the", "qui", "##ck", "x", "世", "你", "4", "##2", ".", "`", "'", "#", "e", "бра", "##т",
            "\u{3b5}",
        ];
        let vocab: serde_json::Map<String, Value> =
            parts.iter().zip(0..).map(|(part, id): (_, u32)| (part.to_string(), id.into())).collect();
        let wordpiece = json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": vocab});
        let meta =
            |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": true});
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
}
