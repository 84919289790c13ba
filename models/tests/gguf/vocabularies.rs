//! Tokenizers made from metadata: the same ids as the `tokenizer.json` from which the metadata were made, SentencePiece's order of
//! joins, special tokens, end tokens, templates and sampling; and metadata that cannot be used.

use std::collections::HashMap;
use std::fmt::Write as _;

use models::{GenerationDefaults, ModelConfig, ModelFiles};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use text::{ChatInput, ChatTemplate, Tokenizer};

use super::made::{Made, array_value, f32_value, i32_value, string, text_value, u16_value, u32_value};
use super::made_vocabulary::{
    CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Vocab, byte_level, files, floats, integers, sentence_piece,
    strings, truth,
};
use crate::common::{files as folder_files, list, message, text};
use crate::texts::TextFiles;

/// The vocabulary of a `tokenizer.json` as a converter writes it, and the tokenizer that it must equal: SentencePiece joins a token
/// however it can, so there every pair that makes a token becomes a merge.
fn converted(case: &str, model: &'static str, pre: Option<&'static str>) -> (Vocab, tokenizers::Tokenizer) {
    let mut json: Value = folder_files(case).read_json("tokenizer.json").unwrap();
    let vocab: HashMap<String, usize> = serde_json::from_value(json["model"]["vocab"].clone()).unwrap();
    let pair = |merge: &Value| match merge.as_str() {
        Some(text) => text.split_once(' ').map(|(left, right)| (left.to_string(), right.to_string())).unwrap(),
        None => (text(&merge[0]).to_string(), text(&merge[1]).to_string()),
    };
    let merges: Vec<(String, String)> = list(&json["model"]["merges"]).iter().map(pair).collect();
    if case == "phi3-longrope" {
        // The published tokenizers of the family strip after this token too.
        json["added_tokens"][2]["rstrip"] = true.into();
    }
    let added = list(&json["added_tokens"]).clone();
    let len = vocab.values().copied().chain(added.iter().map(|token| token["id"].as_u64().unwrap() as usize)).max();
    let mut tokens: Vec<_> = (0..=len.unwrap()).map(|id| (format!("[PAD{id}]"), UNUSED, 0.0)).collect();
    for (text, id) in &vocab {
        let is_byte = text.len() == 6 && text.starts_with("<0x");
        tokens[*id] = (text.clone(), if is_byte { 6 } else { NORMAL }, 0.0);
    }
    for (rank, (left, right)) in merges.iter().enumerate() {
        tokens[vocab[&format!("{left}{right}")]].2 = -(rank as f32);
    }
    for token in &added {
        let kind = match (text(&token["content"]), token["special"].as_bool().unwrap()) {
            ("<unk>", _) => UNKNOWN,
            (_, true) => CONTROL,
            (_, false) => USER_DEFINED,
        };
        tokens[token["id"].as_u64().unwrap() as usize] = (text(&token["content"]).to_string(), kind, -1000.0);
    }
    if model == "llama" {
        let all = merges.iter().flat_map(|(left, right)| {
            let union = format!("{left}{right}");
            let splits: Vec<_> = union
                .char_indices()
                .skip(1)
                .map(|(at, _)| (union[..at].to_string(), union[at..].to_string()))
                .collect();
            splits.into_iter().filter(|(left, right)| vocab.contains_key(left) && vocab.contains_key(right))
        });
        json["model"]["merges"] = json!(all.collect::<Vec<_>>());
    }
    let id = |text: &str| tokens.iter().position(|(known, ..)| known == text).map(|id| u32_value(id as u32));
    let architecture = if case.starts_with("phi3") { "phi3" } else { "llama" };
    let merges = merges.iter().map(|(left, right)| format!("{left} {right}")).collect();
    let special = [
        ("tokenizer.ggml.bos_token_id", ["<s>", "<bos>", "<|begin_of_text|>"]),
        ("tokenizer.ggml.eos_token_id", ["</s>", "<eos>", "<|eot_id|>"]),
    ];
    let more =
        special.iter().filter_map(|(key, texts)| Some((*key, texts.iter().find_map(|text| id(text))?))).collect();
    (
        Vocab { architecture, model, pre, tokens, merges, more },
        tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap(),
    )
}

/// Texts with words of the vocabularies, of other scripts, digits, white space and special tokens.
fn texts() -> impl Iterator<Item = String> {
    const PARTS: [&str; 40] = [
        "the",
        " river",
        "stone",
        "lantern",
        " and",
        "er",
        "es",
        " b",
        "I'm",
        "WE'LL",
        "don’t",
        "'s",
        "1",
        "23",
        "4567",
        "½",
        "٣",
        " ",
        "  ",
        "    ",
        "\t",
        "\n",
        "\n\n",
        "\r\n",
        "!",
        "?!",
        "...",
        "(x)",
        " ->",
        "_",
        "▁",
        "é",
        "n\u{303}",
        "你好",
        "世界。",
        "한국",
        "привет",
        "🙂",
        "👩‍💻",
        "\u{200b}",
    ];
    const SPECIAL: [&str; 10] = [
        "<s>",
        "</s>",
        "<unk>",
        "<bos>",
        "<|end|>",
        "<|user|>",
        "<|im_end|>",
        "<think>",
        "<|eot_id|>",
        "<|endoftext|>",
    ];
    let mut state = 7_u64;
    (0..200).map(move |_| {
        let mut draw = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let mut text = String::new();
        for _ in 0..=draw(24) {
            match draw(12) {
                0 => text.push_str(SPECIAL[draw(SPECIAL.len())]),
                1 => text.push(char::from_u32(draw(0xd000) as u32).unwrap_or('?')),
                2 => text.push(char::from(draw(128) as u8)),
                _ => text.push_str(PARTS[draw(PARTS.len())]),
            }
        }
        text
    })
}

#[test]
fn a_converted_vocabulary_encodes_and_decodes_as_the_tokenizer_it_was_made_from() {
    let cases = [
        ("llama", "llama", None, true),
        ("phi3-longrope", "llama", None, true),
        ("gemma2", "llama", None, false),
        ("gemma3-text", "llama", None, false),
        ("llama31-rope", "gpt2", Some("llama-bpe"), true),
        ("qwen2", "gpt2", Some("qwen2"), true),
        ("gpt2", "gpt2", Some("gpt-2"), true),
    ];
    for (case, model, pre, prefix) in cases {
        let (mut vocab, want) = converted(case, model, pre);
        if !prefix {
            vocab = vocab.with("tokenizer.ggml.add_space_prefix", truth(false));
        }
        let found = vocab.tokenizer();
        for text in texts() {
            for special in [false, true] {
                let want = want.encode_fast(text.as_str(), special).unwrap();
                let ids = found.encode(&text, special).unwrap();
                assert_eq!(ids, want.get_ids(), "{case}: {text:?}");
            }
            let ids = found.encode(&text, true).unwrap();
            for skip in [false, true] {
                assert_eq!(found.decode(&ids, skip).unwrap(), want_text(&want, &ids, skip), "{case}: {text:?}");
            }
        }
    }
}

fn want_text(tokenizer: &tokenizers::Tokenizer, ids: &[u32], skip: bool) -> String {
    tokenizer.decode(ids, skip).unwrap()
}

/// Joins the best two neighbours until none can be joined.
fn joined(vocab: &HashMap<&str, f32>, text: &str) -> Vec<String> {
    let mut pieces: Vec<String> = text.chars().map(String::from).collect();
    loop {
        let mut best: Option<(usize, f32)> = None;
        for at in 1..pieces.len() {
            let score = vocab.get(format!("{}{}", pieces[at - 1], pieces[at]).as_str());
            if let Some(score) = score
                && best.is_none_or(|(_, before)| *score > before)
            {
                best = Some((at, *score));
            }
        }
        let Some((at, _)) = best else { return pieces };
        let right = pieces.remove(at);
        pieces[at - 1].push_str(&right);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn sentence_piece_joins_the_highest_score_and_of_equal_ones_the_leftmost(
        tokens in proptest::collection::btree_map("[ab]{2,5}", 0..4_i32, 1..16),
        text in "[abc]{0,40}",
    ) {
        // Few scores, so that many are equal.
        let mut scores: Vec<(&str, f32)> = tokens.iter().map(|(text, score)| (text.as_str(), *score as f32)).collect();
        scores.extend([("a", 0.0), ("b", 0.0), ("c", 0.0)]);
        let tokenizer = sentence_piece(&scores).tokenizer();
        let found: Vec<String> = tokenizer.encode(&text, false).unwrap().iter().map(|id| tokenizer.id_to_token(*id).unwrap()).collect();
        prop_assert_eq!(found, joined(&scores.into_iter().collect(), &text));
    }
}

#[test]
fn characters_without_tokens_become_bytes_or_the_unknown_token() {
    let with_bytes = sentence_piece(&[("a", 0.0), ("<0xC3>", 0.0), ("<0xA9>", 0.0)]).tokenizer();
    assert_eq!(with_bytes.encode("aé", false).unwrap(), [3, 4, 5]);
    assert_eq!(with_bytes.decode(&[3, 4, 5], false).unwrap(), "aé");
    // ñ is C3 B1, and B1 has no token.
    assert_eq!(with_bytes.encode("ñ", false).unwrap(), [4, 0]);
    // A token that a key names exists, whatever its type.
    let mut unused = sentence_piece(&[("a", 0.0)]);
    unused.tokens[0].1 = UNUSED;
    assert_eq!(unused.tokenizer().encode("ñ", false).unwrap(), [0, 0]);
    // The text of a byte is not the byte.
    assert!(!with_bytes.encode("<0xC3>", false).unwrap().contains(&4));
}

#[test]
fn the_keys_say_which_tokens_surround_a_text_and_whether_a_space_precedes_it() {
    let base = || {
        let mut vocab = sentence_piece(&[("▁", 0.0), ("a", 0.0), ("▁a", 1.0)]);
        vocab.more.clear();
        vocab
    };
    let encode = |vocab: Vocab| vocab.tokenizer().encode("a", true).unwrap();
    assert_eq!(encode(base()), [1, 5]);
    assert_eq!(encode(base().with("tokenizer.ggml.add_bos_token", truth(false))), [5]);
    assert_eq!(encode(base().with("tokenizer.ggml.add_space_prefix", truth(false))), [1, 4]);
    let ends = base().with("tokenizer.ggml.add_eos_token", truth(true));
    assert_eq!(encode(ends.clone()), [1, 5, 2]);
    assert_eq!(encode(ends.with("tokenizer.ggml.eos_token_id", u32_value(4))), [1, 5, 4]);
    // A space is put after special tokens too, and taken away only at the start of a text.
    let tokenizer = base().tokenizer();
    assert_eq!(tokenizer.encode("a</s>a", false).unwrap(), [5, 2, 5]);
    assert_eq!(tokenizer.decode(&[5, 5], false).unwrap(), "a a");
}

#[test]
fn tokens_of_the_user_are_found_in_texts_and_stay_in_them() {
    let vocab =
        byte_level(Some("qwen2"), &[("<tool>", USER_DEFINED), ("<|im_end|>", CONTROL), ("[PAD]", UNUSED)], &["a b"]);
    let tokenizer = vocab.tokenizer();
    let (merged, tool, end, pad) = (256, 257, 258, 259);
    assert_eq!(tokenizer.encode("ab<tool>ab<|im_end|>", false).unwrap(), [merged, tool, merged, end]);
    assert_eq!(tokenizer.decode(&[tool, end, merged, pad], true).unwrap(), "<tool>ab");
    assert_eq!(tokenizer.decode(&[tool, end, merged, pad], false).unwrap(), "<tool><|im_end|>ab");
    assert_eq!((tokenizer.id_to_token(pad), tokenizer.vocab_size()), (None, 259));
}

#[test]
fn a_piece_in_the_vocabulary_is_taken_whole_only_where_the_pre_tokenizer_says_so() {
    for (pre, want) in [("llama-bpe", vec![256]), ("dbrx", vec![64, 65, 66])] {
        let tokenizer = byte_level(Some(pre), &[("abc", NORMAL)], &[]).tokenizer();
        assert_eq!(tokenizer.encode("abc", false).unwrap(), want, "{pre}");
    }
}

#[test]
fn tokens_that_end_a_text_are_known_by_their_keys_and_texts() {
    let ends = |more: &[(&str, i32)], keys: &[(&'static str, u32)]| {
        let mut vocab = byte_level(Some("gpt-4o"), more, &[]);
        vocab.more.extend(keys.iter().map(|(key, id)| (*key, u32_value(*id))));
        let files = files(&vocab.made().floats("token_embd.weight", &[64, 300], &[0.0; 19200])).unwrap();
        let ids = GenerationDefaults::load(&files, &[]).unwrap().eos_token_ids;
        assert_eq!(ModelConfig::load(&files).unwrap().eos_token_ids, ids);
        ids
    };
    let three = [("<|x|>", CONTROL), ("<|end|>", CONTROL), ("<|endoftext|>", CONTROL), ("<|return|>", CONTROL)];
    assert!(ends(&three[..1], &[]).is_empty());
    assert_eq!(ends(&three[..1], &[("tokenizer.ggml.eos_token_id", 256)]), [256]);
    assert_eq!(
        ends(&three[..3], &[("tokenizer.ggml.eot_token_id", 5), ("tokenizer.ggml.eom_token_id", 6)]),
        [5, 6, 257, 258]
    );
    // A message of Harmony ends with <|end|>, the reply with the others.
    let harmony = [&three[..], &[("<|call|>", CONTROL)]].concat();
    assert_eq!(ends(&harmony, &[("tokenizer.ggml.eos_token_id", 259)]), [258, 259, 260]);
    // What is no control token is text, unless a key names it: Gemma has the HTML tag, and Qwen a word that no merge makes.
    let text = [("</s>", USER_DEFINED), ("<|im_end|>", NORMAL), ("<eos>", CONTROL)];
    assert_eq!(ends(&text, &[]), [258]);
    assert_eq!(ends(&text, &[("tokenizer.ggml.eot_token_id", 257)]), [257, 258]);
}

#[test]
fn a_token_like_an_end_that_is_text_is_read_and_written_as_text() {
    let merges = ["< /", "s >"];
    let plain = byte_level(Some("qwen2"), &[], &merges).tokenizer();
    let with_text = byte_level(Some("qwen2"), &[("</s>", NORMAL)], &merges).tokenizer();
    let want = plain.encode("<s>old</s> new", false).unwrap();
    assert_eq!(with_text.encode("<s>old</s> new", false).unwrap(), want);
    assert!(!want.contains(&258) && !with_text.is_special(258));
    assert_eq!(with_text.decode(&[258], true).unwrap(), "</s>");
    let stated =
        byte_level(Some("qwen2"), &[("</s>", NORMAL)], &merges).with("tokenizer.ggml.eos_token_id", u32_value(258));
    assert_eq!(stated.tokenizer().encode("a</s>", false).unwrap(), [64, 258]);
}

#[test]
fn tokens_of_several_spaces_are_found_after_spaces_are_replaced() {
    // The vocabulary of Gemma: tokens of 2 to 4 spaces, written as spaces in the file, and a word with its space.
    let mut vocab = sentence_piece(&[("▁", -1.0), ("a", -2.0), ("▁a", 5.0), ("\n", -3.0)]);
    let spaces = ["  ", "   ", "    "].map(|text| (text.to_string(), USER_DEFINED, -1000.0));
    vocab.tokens.extend(spaces);
    let tokenizer = vocab.tokenizer();
    let [space, a, word, line, two, three, four] = [3, 4, 5, 6, 7, 8, 9];
    for (text, ids) in [
        ("▁▁", vec![two]),
        ("  ", vec![two]),
        ("▁ ▁", vec![three]),
        (" ▁", vec![two]),
        ("     ", vec![four, space]),
        // A run is taken before the word behind it; a space that is left over joins the word.
        ("a    a", vec![a, four, a]),
        ("a     a", vec![a, four, word]),
        ("a a", vec![a, word]),
        ("\n   a", vec![line, three, a]),
    ] {
        assert_eq!(tokenizer.encode(text, false).unwrap(), ids, "{text:?}");
    }
    assert_eq!(tokenizer.decode(&[a, four, word], false).unwrap(), "a     a");
}

#[test]
fn templates_and_sampling_defaults_come_from_the_file() {
    let mut vocab = byte_level(Some("qwen2"), &[("<s>", CONTROL)], &[]);
    vocab.more = vec![
        ("tokenizer.ggml.bos_token_id", u32_value(256)),
        ("tokenizer.chat_template", text_value("{{ bos_token }}{{ messages[0].content }}")),
        ("tokenizer.chat_template.tool_use", text_value("{{ tools|length }} tools")),
        ("tokenizer.chat_templates", strings(&["tool_use"])),
        ("general.sampling.temp", f32_value(0.7)),
        ("general.sampling.top_p", f32_value(0.8)),
        ("general.sampling.top_k", i32_value(-1)),
        ("general.sampling.min_p", f32_value(0.05)),
        ("general.sampling.penalty_repeat", f32_value(1.05)),
    ];
    let opened = files(&vocab.made()).unwrap();
    let template = ChatTemplate::load(&TextFiles(&opened)).unwrap().unwrap();
    let messages = [json!({"role": "user", "content": "Hi"})];
    let tools = json!([{}, {}]);
    let render = |tools: Option<&Value>| {
        let kwargs = Map::new();
        let input = ChatInput {
            messages: &messages,
            tools,
            add_generation_prompt: false,
            continue_final_message: false,
            kwargs: &kwargs,
        };
        template.render(&input).unwrap()
    };
    assert_eq!((render(None).as_str(), render(Some(&tools)).as_str()), ("<s>Hi", "2 tools"));
    let found = GenerationDefaults::load(&opened, &[]).unwrap();
    let want = GenerationDefaults {
        eos_token_ids: vec![],
        temperature: Some(0.7),
        top_p: Some(0.8),
        top_k: Some(0),
        min_p: Some(0.05),
        repetition_penalty: Some(1.05),
        max_new_tokens: None,
    };
    assert_eq!(found, want);
    vocab.more.retain(|(key, _)| *key != "general.sampling.temp");
    let broken = |key, value, parts: &[&str]| {
        let files = files(&vocab.clone().with(key, value).made()).unwrap();
        message(GenerationDefaults::load(&files, &[]), &[&["m.gguf (as generation_config.json)"], parts].concat());
    };
    broken("general.sampling.temp", f32_value(f32::NAN), &["temperature", "NaN", "a number, at least 0"]);
    broken("general.sampling.temp", text_value("hot"), &["temperature", "hot"]);
    vocab.more.retain(|(key, _)| !key.starts_with("tokenizer.chat_template"));
    assert!(ChatTemplate::load(&TextFiles(&files(&vocab.made()).unwrap())).unwrap().is_none());
    let number = vocab.with("tokenizer.chat_template", u32_value(3));
    message(ChatTemplate::load(&TextFiles(&files(&number.made()).unwrap())).map(|_| ()), &["m.gguf", "chat_template"]);
}

#[test]
fn files_beside_a_gguf_file_are_not_read_and_the_first_part_has_the_metadata() {
    let folder = tempfile::TempDir::new().unwrap();
    let path = |name: &str| folder.path().join(name);
    let first = byte_level(Some("qwen2"), &[("<|im_end|>", CONTROL)], &[]).made();
    std::fs::write(path("m-00001-of-00002.gguf"), first.key("split.count", u16_value(2)).bytes()).unwrap();
    let second = Made::new().key("split.no", u16_value(1)).key("split.count", u16_value(2));
    std::fs::write(path("m-00002-of-00002.gguf"), second.bytes()).unwrap();
    for (name, text) in [
        ("tokenizer.json", "{}"),
        ("generation_config.json", "{\"eos_token_id\": 3}"),
        ("tokenizer_config.json", "{\"chat_template\": \"other\"}"),
        ("chat_template.jinja", "other"),
    ] {
        std::fs::write(path(name), text).unwrap();
    }
    for part in ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"] {
        let files = ModelFiles::open(&path(part)).unwrap();
        assert_eq!(Tokenizer::load(&TextFiles(&files)).unwrap().encode("<|im_end|>", false).unwrap(), [256]);
        assert_eq!(GenerationDefaults::load(&files, &[]).unwrap().eos_token_ids, [256]);
        assert!(ChatTemplate::load(&TextFiles(&files)).unwrap().is_none());
        assert!(!files.exists("chat_template.jinja"));
    }
}

/// Checks that the metadata are refused in one line that names the file and these parts.
fn refused(made: &Made, parts: &[&str]) {
    let parts = [&["m.gguf: "], parts].concat();
    let load = |files: &ModelFiles| Tokenizer::load(&TextFiles(files)).err().map(|error| error.to_string());
    let error = files(made).map_or_else(|error| Some(error.to_string()), |files| load(&files));
    message(error.map_or(Ok(()), Err), &parts);
}

#[test]
fn vocabularies_that_cannot_be_used_say_why() {
    let bpe = || byte_level(Some("qwen2"), &[], &["a b"]);
    let piece = || sentence_piece(&[("a", 0.0)]);
    let model = |model| refused(&Vocab { model, ..bpe() }.made(), &["tokenizer.ggml.model", model, "gpt2", "llama"]);
    ["plamo2", "rwkv"].into_iter().for_each(model);
    refused(
        &Vocab { pre: Some("granite-9"), ..bpe() }.made(),
        &["ggml.pre", "granite-9", "llama-bpe", "qwen35", "tekken", "default"],
    );
    let replaced = |vocab: &Vocab, key: &str, value: Option<Vec<u8>>| {
        let mut made = vocab.made();
        made.keys.retain(|(name, _)| name != &format!("tokenizer.ggml.{key}"));
        match value {
            Some(value) => made.key(&format!("tokenizer.ggml.{key}"), value),
            None => made,
        }
    };
    /// A vocabulary, the key to replace, its value, and parts of the message.
    type Case = (Vocab, &'static str, Option<Vec<u8>>, &'static [&'static str]);
    let cases: Vec<Case> = vec![
        (bpe(), "tokens", None, &["`tokenizer.ggml.tokens` is missing"]),
        (bpe(), "tokens", Some(u32_value(1)), &["tokens", "an array"]),
        (bpe(), "tokens", Some(strings::<&str>(&[])), &["tokens", "an array of 0", "1 to"]),
        (bpe(), "tokens", Some(integers(&[1])), &["tokens", "1 at index 0", "UTF-8"]),
        (bpe(), "tokens", Some(array_value(8, 1, &string([0xff, 0xfe]))), &["tokens", "index 0", "UTF-8"]),
        (bpe(), "tokens", Some(strings(&["a", "b", "a\n"])), &["token_type", "an array of 257", "3 elements"]),
        (piece(), "tokens", Some(strings(&["x", "<s>", "</s>", "x"])), &["tokens", "\"x\" again at index 3", "once"]),
        (
            piece(),
            "tokens",
            Some(strings(&["x", "<s>", "</s>", &"x".repeat(70_000)])),
            &["tokens", "70000 bytes at index 3"],
        ),
        (piece(), "token_type", Some(integers(&[1, 1, 1, 9])), &["token_type", "9 at index 3", "types 0 to 6"]),
        (piece(), "token_type", Some(integers(&[1, 1, 1, -1])), &["token_type", "-1 at index 3"]),
        (piece(), "scores", None, &["`tokenizer.ggml.scores` is missing", "4 elements"]),
        (piece(), "scores", Some(floats(&[0.0; 3])), &["scores", "an array of 3", "4 elements"]),
        (piece(), "scores", Some(floats(&[0.0, 0.0, 0.0, f32::NAN])), &["scores", "NaN at index 3", "finite"]),
        (bpe(), "merges", None, &["merges", "missing"]),
        (bpe(), "merges", Some(strings(&["ab"])), &["merges", "\"ab\" at index 0", "space"]),
        (bpe(), "merges", Some(strings(&["a zz"])), &["merges", "zz"]),
        (bpe(), "merges", Some(strings(&["a c"])), &["merges", "ac"]),
        (bpe(), "pre", Some(u32_value(1)), &["ggml.pre", "one of"]),
        (piece(), "add_bos_token", Some(u32_value(1)), &["add_bos_token", "true or false"]),
        (piece(), "eos_token_id", Some(u32_value(4)), &["eos_token_id", "is 4", "below 4"]),
        (piece(), "bos_token_id", Some(u32_value(u32::MAX)), &["bos_token_id", "below 4"]),
    ];
    for (vocab, key, value, parts) in cases {
        refused(&replaced(&vocab, key, value), parts);
    }
    // Some converters state ids that do not exist for what models lack.
    let padded = replaced(&piece(), "padding_token_id", Some(u32_value(u32::MAX)));
    Tokenizer::load(&TextFiles(&files(&padded).unwrap())).unwrap();
}

#[test]
fn too_many_control_tokens_are_refused_before_they_are_searched() {
    let mut vocab = sentence_piece(&[("a", 0.0)]);
    for id in 0..70_000 {
        let mut name = String::new();
        write!(name, "<|{id}|>").unwrap();
        vocab.tokens.push((name, CONTROL, 0.0));
    }
    refused(&vocab.made(), &["token_type", "70003 control and user-defined tokens", "at most 65536"]);
    // Few and long ones.
    let mut vocab = sentence_piece(&[("a", 0.0)]);
    vocab.tokens.extend((0..50).map(|id| (format!("<|{id}|>").repeat(10_000), CONTROL, 0.0)));
    refused(&vocab.made(), &["token_type", "53 control and user-defined tokens", "of 2097152 bytes"]);
}
