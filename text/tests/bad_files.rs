//! Files of checkpoints that cannot be used: each error is one line that says which, why and what to do.

use serde_json::{Value, json};
use testkit::reference::folder;
use text::{ChatTemplate, Tokenizer};

use crate::checkpoints::{Copy, message};

#[test]
fn broken_json_names_the_file_and_the_place() {
    for broken in ["", "{", "[1, 2]", "\"text\"", "{\"a\": }", "\u{0}", "{\n\"a\": tru\n}"] {
        let copy = |file: &str| Copy::of("llama").write(file, broken);
        for file in ["tokenizer_config.json", "special_tokens_map.json"] {
            message(ChatTemplate::load(copy(file).folder()), &[file, "JSON", "line"]);
        }
        message(Tokenizer::load(copy("tokenizer.json").folder()), &["tokenizer.json", "cannot be used"]);
    }
    let missing = Copy::of("llama").remove("tokenizer.json");
    message(Tokenizer::load(missing.folder()), &["tokenizer.json", "not found"]);
}

#[test]
fn a_checkpoint_without_a_tokenizer_names_the_files_that_would_do() {
    let copy = Copy::of("llama").remove("tokenizer.json");
    message(
        Tokenizer::load(copy.folder()),
        &["tokenizer.json: not found", "tokenizer.model", "tekken.json", "vocab.txt"],
    );
}

#[test]
fn the_tokens_around_texts_are_those_that_the_class_states() {
    let ids = |case: &str, class: &str, keys: Value| {
        let copy = Copy::of(case)
            .set("tokenizer_config.json", json!({"tokenizer_class": class}))
            .set("tokenizer_config.json", keys);
        Tokenizer::load(copy.folder()).unwrap().encode("the", true).unwrap()
    };
    let (on, off) = (json!({"add_bos_token": true}), json!({"add_bos_token": false}));
    let with = ids("llama", "LlamaTokenizer", on.clone());
    assert_eq!(ids("llama", "LlamaTokenizer", off.clone()), with[1..]);
    assert_eq!(ids("llama", "PreTrainedTokenizerFast", off), with, "this class does not read it");
    let both = json!({"add_bos_token": true, "add_eos_token": true, "eos_token": {"content": "</s>"}});
    assert_eq!(ids("llama", "LlamaTokenizerFast", both), [&with[..], &[2]].concat());
    let unknown = Copy::of("llama")
        .set("tokenizer_config.json", json!({"tokenizer_class": "LlamaTokenizer", "bos_token": "<none>"}));
    message(Tokenizer::load(unknown.folder()), &["tokenizer_config.json", "`bos_token` is \"<none>\""]);
}

#[test]
fn a_tokenizer_of_another_model_is_an_error() {
    let tokenizer = Tokenizer::load(&*folder("qwen2")).unwrap();
    assert_eq!(tokenizer.vocab_size(), 592);
    tokenizer.check(592).unwrap();
    message(tokenizer.check(591), &["tokenizer.json", "token id 591", "below 591", "another model"]);
}

#[test]
fn a_tokenizer_that_cannot_be_built_is_an_error() {
    let load = |copy: Copy| Tokenizer::load(copy.folder());
    let parts = ["tokenizer.json", "cannot be used", "tokenizers"];
    message(load(Copy::of("llama").edit("tokenizer.json", |json| json["model"]["type"] = json!("Nope"))), &parts);
    message(
        load(Copy::of("llama").edit("tokenizer.json", |json| json["model"]["merges"] = json!([["no", "pe"]]))),
        &parts,
    );
    message(load(Copy::of("llama").set("tokenizer.json", json!({"decoder": {"type": "Nope"}}))), &parts);
    let empty = |json: &mut Value| {
        *json = json!({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}});
    };
    message(load(Copy::of("llama").edit("tokenizer.json", empty)), &["tokenizer.json", "no tokens"]);
}

#[test]
fn a_decoder_step_that_would_be_skipped_is_an_error_that_names_it() {
    let load =
        |decoder: Value| Tokenizer::load(Copy::of("llama").set("tokenizer.json", json!({"decoder": decoder})).folder());
    let sequence = |steps: &[&Value]| json!({"type": "Sequence", "decoders": steps});
    let replace = json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "});
    let strip = |stop: usize| json!({"type": "Strip", "content": " ", "start": 1, "stop": stop});
    let (fallback, fuse) = (json!({"type": "ByteFallback"}), json!({"type": "Fuse"}));
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let regex = json!({"type": "Replace", "pattern": {"Regex": "a+"}, "content": " "});
    load(sequence(&[&replace, &fallback, &fuse, &strip(0)])).unwrap();
    load(sequence(&[&byte_level, &fuse])).unwrap();
    load(Value::Null).unwrap();
    load(json!({"type": "WordPiece", "prefix": "##", "cleanup": true})).unwrap();
    load(json!({"type": "BPEDecoder", "suffix": "</w>"})).unwrap();
    for (decoder, named) in [
        (json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true}), "CTC"),
        (sequence(&[&regex, &fuse]), "Regex"),
        (strip(1), "Strip"),
        (sequence(&[&replace, &byte_level]), "Replace"),
    ] {
        message(load(decoder), &["tokenizer.json", named, "not supported"]);
    }
}

#[test]
fn a_file_that_cannot_be_read_is_named() {
    // A folder where a file should be counts as no file.
    let copy = Copy::of("llama").remove("tokenizer.json").write("tokenizer.json/inside", "");
    message(Tokenizer::load(copy.folder()), &["tokenizer.json", "not found"]);
}
