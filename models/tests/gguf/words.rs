//! Vocabularies of encoders and of Gemma 4 in GGUF files: the ids of the `tokenizer.json` from which they were converted, also of pairs of
//! texts; and what a file says about pooling.

use models::{ModelConfig, Pooler, Pooling, Task, Weights};
use serde_json::Value;
use text::Tokenizer;
use tokenizers::Tokenizer as Reference;

use super::made::{Made, array_value, string, text_value, u32_value};
use super::made_vocabulary::{CONTROL, NORMAL, UNKNOWN, Vocab, files, sized, truth};
use crate::common::{list, message, text};
use crate::texts::TextFiles;

/// Words of the reference vocabularies and others, one space between them.
const TEXTS: [&str; 9] = [
    "the river and the stone",
    "The Lantern, WE'LL go (x) -> y!",
    "naïve café Über 12 4567",
    "你好 世界。",
    "unbelievableness unknownword xyzzy",
    "a",
    "İstanbul ﬁne ① Ⅳ",
    "привет 한국 🙂 ok",
    "er es ing # ##x [unused] _",
];

/// `tokenizer.json` of a reference case, as JSON and as the library reads it.
fn reference(folder: &str) -> (Value, Reference) {
    let bytes =
        std::fs::read(testkit::workspace::root().join("models/tests").join(folder).join("tokenizer.json")).unwrap();
    (serde_json::from_slice(&bytes).unwrap(), Reference::from_bytes(&bytes).unwrap())
}

/// Texts of all tokens by id, and whether each is an added one.
fn tokens(json: &Value) -> Vec<(String, i32)> {
    let mut tokens: Vec<(String, i32)> = match &json["model"]["vocab"] {
        Value::Array(pieces) => pieces.iter().map(|piece| (text(&piece[0]).to_string(), NORMAL)).collect(),
        vocab => {
            let vocab = vocab.as_object().unwrap();
            let mut tokens = vec![(String::new(), NORMAL); vocab.len()];
            vocab.iter().for_each(|(text, id)| tokens[id.as_u64().unwrap() as usize].0.clone_from(text));
            tokens
        }
    };
    for added in list(&json["added_tokens"]) {
        let (id, content) = (added["id"].as_u64().unwrap() as usize, text(&added["content"]).to_string());
        tokens.resize(tokens.len().max(id + 1), (String::new(), NORMAL));
        tokens[id] = (content.clone(), if content == "<unk>" { UNKNOWN } else { CONTROL });
    }
    tokens
}

/// The bytes of a text of base64.
fn bytes_of_base64(text: &str) -> Vec<u8> {
    const DIGITS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits: Vec<u32> = text.trim_end_matches('=').chars().map(|c| DIGITS.find(c).unwrap() as u32).collect();
    let bytes = |four: &[u32]| {
        let bits = four.iter().fold(0, |bits, digit| bits << 6 | digit) << (6 * (4 - four.len()));
        bits.to_be_bytes()[1..four.len()].to_vec()
    };
    digits.chunks(4).flat_map(bytes).collect()
}

/// Checks the ids of texts and of pairs.
fn check(vocab: &Vocab, want: &Reference, pairs: bool) {
    let found = vocab.tokenizer();
    for text in TEXTS {
        for special in [false, true] {
            let ids = found.encode(text, special).unwrap();
            assert_eq!(ids, want.encode_fast(text, special).unwrap().get_ids(), "{text:?}");
        }
        let ids = found.encode(text, false).unwrap();
        assert_eq!(found.decode(&ids, true).unwrap(), want.decode(&ids, true).unwrap(), "{text:?}");
    }
    if !pairs {
        return;
    }
    let frame = found.pair_frame().unwrap();
    let (a, b) = (TEXTS[0], TEXTS[3]);
    let [first, second] = [a, b].map(|text| found.encode(text, false).unwrap());
    let (ids, start) = frame.pair(&first, &second);
    let pair = want.encode((a, b), true).unwrap();
    assert_eq!(ids, pair.get_ids());
    let types: Vec<u32> = (0..ids.len()).map(|at| u32::from(start.is_some_and(|start| at >= start))).collect();
    assert_eq!(types, pair.get_type_ids());
}

fn vocab(architecture: &'static str, model: &'static str, tokens: Vec<(String, i32, f32)>) -> Vocab {
    Vocab { architecture, model, pre: None, tokens, merges: Vec::new(), more: Vec::new() }
}

#[test]
fn word_piece_with_spaces_in_front_of_words_is_that_of_bert() {
    for upper in [false, true] {
        let (mut json, _) = reference("encoders/bert-embed");
        if upper {
            // A vocabulary with an upper letter is of texts that are not lowered.
            let vocab = json["model"]["vocab"].as_object_mut().unwrap();
            let id = vocab.len();
            vocab.insert("The".to_string(), id.into());
            json["normalizer"]["lowercase"] = false.into();
        }
        let want = Reference::from_bytes(json.to_string()).unwrap();
        let phantom = |(text, kind): (String, i32)| match (kind, text.strip_prefix("##")) {
            (CONTROL, _) => (text, kind, 0.0),
            (_, Some(rest)) => (rest.to_string(), kind, 0.0),
            (_, None) => (format!("▁{text}"), kind, 0.0),
        };
        let tokens: Vec<_> = tokens(&json).into_iter().map(phantom).collect();
        let id = |text: &str| u32_value(tokens.iter().position(|token| token.0 == text).unwrap() as u32);
        let made = vocab("bert", "bert", tokens.clone())
            .with("tokenizer.ggml.cls_token_id", id("[CLS]"))
            .with("tokenizer.ggml.seperator_token_id", id("[SEP]"))
            .with("tokenizer.ggml.unknown_token_id", id("[UNK]"))
            .with("tokenizer.ggml.padding_token_id", id("[PAD]"));
        check(&made, &want, true);
    }
}

#[test]
fn a_unigram_vocabulary_with_a_map_of_characters_is_that_of_xlm_roberta() {
    let (json, want) = reference("encoders/xlm-roberta-rerank");
    let scores: Vec<f32> =
        list(&json["model"]["vocab"]).iter().map(|piece| piece[1].as_f64().unwrap() as f32).collect();
    let mut tokens: Vec<_> = tokens(&json).into_iter().map(|(text, kind)| (text, kind, 0.0)).collect();
    tokens.iter_mut().zip(scores).for_each(|(token, score)| token.2 = score);
    let id = |text: &str| u32_value(tokens.iter().position(|token| token.0 == text).unwrap() as u32);
    let map = text(&json["normalizer"]["normalizers"][0]["precompiled_charsmap"]);
    let map = bytes_of_base64(map);
    let made = vocab("bert", "t5", tokens.clone())
        .with("tokenizer.ggml.add_space_prefix", truth(true))
        .with("tokenizer.ggml.remove_extra_whitespaces", truth(true))
        .with("tokenizer.ggml.bos_token_id", id("<s>"))
        .with("tokenizer.ggml.eos_token_id", id("</s>"))
        .with("tokenizer.ggml.unknown_token_id", id("<unk>"))
        .with("tokenizer.ggml.precompiled_charsmap", array_value(0, map.len() as u64, &map));
    check(&made, &want, true);
    // A broken map is one line.
    let broken =
        vocab("bert", "t5", tokens.clone()).with("tokenizer.ggml.precompiled_charsmap", array_value(0, 3, &[9, 9, 9]));
    let files = files(&broken.made()).unwrap();
    message(Tokenizer::load(&TextFiles(&files)).map(|_| ()), &["precompiled_charsmap", "broken"]);
}

#[test]
fn a_vocabulary_of_gemma_4_joins_characters_as_its_tokenizer_does() {
    let (json, want) = reference("reference/gemma3-text");
    let tokens: Vec<_> = tokens(&json).into_iter().map(|(text, kind)| (text, kind, 0.0)).collect();
    let id = |text: &str| u32_value(tokens.iter().position(|token| token.0 == text).unwrap() as u32);
    let pair = |merge: &Value| match merge.as_str() {
        Some(text) => text.to_string(),
        None => format!("{} {}", text(&merge[0]), text(&merge[1])),
    };
    let mut made = vocab("gemma3", "gemma4", tokens.clone())
        .with("tokenizer.ggml.bos_token_id", id("<bos>"))
        .with("tokenizer.ggml.eos_token_id", id("<eos>"))
        .with("tokenizer.ggml.unknown_token_id", id("<unk>"))
        .with("tokenizer.ggml.add_bos_token", truth(true));
    made.merges = list(&json["model"]["merges"]).iter().map(pair).collect();
    check(&made, &want, false);
}

/// A file of an encoder with this pooling.
fn pooled(kind: u32) -> Made {
    let tokens: Vec<u8> = ["[CLS]", "[SEP]", "▁a"].iter().flat_map(string).collect();
    sized("bert")
        .key("bert.pooling_type", u32_value(kind))
        .key("tokenizer.ggml.model", text_value("bert"))
        .key("tokenizer.ggml.tokens", array_value(8, 3, &tokens))
        .floats("token_embd.weight", &[64, 3], &[0.0; 192])
        .floats("token_types.weight", &[64, 2], &[0.0; 128])
}

#[test]
fn a_file_says_how_its_encoder_pools() {
    for (kind, pooling) in [(0, Pooling::Cls), (1, Pooling::Mean), (2, Pooling::Cls), (3, Pooling::Last)] {
        let files = files(&pooled(kind)).unwrap();
        let (config, weights) = (ModelConfig::load(&files).unwrap(), Weights::open(&files).unwrap());
        let pooler = Pooler::load(&files, &config, &weights, None).unwrap();
        assert_eq!((pooler.pooling, pooler.task), (Some(pooling), Task::Embed { normalised: true }), "{kind}");
    }
    for (kind, expected) in [(4, "a reranker of BERT"), (9, "0 (none)")] {
        message(files(&pooled(kind)), &["m.gguf", "bert.pooling_type", expected]);
    }
}

#[test]
fn a_classifier_without_its_first_layer_is_refused() {
    let made = pooled(4).floats("cls.output.weight", &[64, 1], &[0.0; 64]);
    message(files(&made), &["m.gguf", "cls.output.weight without cls.weight", "both"]);
}
