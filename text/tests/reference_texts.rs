//! The texts of the reference checkpoints: tokenizer and chat template, as transformers has them.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use serde_json::{Map, Value, json};
use testkit::reference::{CASES, folder};
use text::{ChatInput, ChatTemplate, TemplateError, Tokenizer};

use crate::checkpoints::{expected, ids, list, text};

/// Names of all reference checkpoints.
fn cases() -> Vec<String> {
    let folders = fs::read_dir(folder("")).unwrap().map(Result::unwrap).filter(|entry| entry.path().is_dir());
    let mut cases: Vec<String> = folders.map(|entry| entry.file_name().into_string().unwrap()).collect();
    cases.sort();
    assert_eq!(cases.len(), CASES.len());
    cases
}

fn read(folder: &Path, file: &str) -> Value {
    serde_json::from_slice(&fs::read(folder.join(file)).unwrap()).unwrap()
}

/// Number of rows of a checkpoint's embedding, which may be more than its tokenizer has tokens.
fn vocab_size(case: &str) -> usize {
    read(&folder(case), "config.json")["vocab_size"].as_u64().unwrap() as usize
}

#[test]
fn texts_encode_to_the_reference_ids() {
    for case in cases() {
        let tokenizer = Tokenizer::load(&*folder(&case)).unwrap();
        let expected = expected(&case);
        let prompts = list(&expected["prompts"]).iter();
        for entry in prompts.chain(list(&expected["encode"])) {
            let text = text(&entry["text"]);
            let encoded = tokenizer.encode(text, entry["add_special_tokens"].as_bool().unwrap()).unwrap();
            assert_eq!(encoded, ids(&entry["ids"]), "{case}: {text:?}");
            assert!(tokenizer.least_tokens(text.len()) <= encoded.len(), "{case}: {text:?}");
        }
    }
}

/// All of `tokenizer.json` but its tokens: what decides where a text is split.
fn kind(folder: &Path) -> String {
    let mut json = read(folder, "tokenizer.json");
    let strips = |token: &Value| token["lstrip"] == true || token["rstrip"] == true;
    json["added_tokens"] = list(&json["added_tokens"]).iter().any(strips).into();
    json["post_processor"] = Value::Null;
    for key in ["vocab", "merges"] {
        json["model"][key] = Value::Null;
    }
    json.to_string()
}

#[test]
fn a_long_text_has_the_same_ids_in_pieces_as_whole() {
    let demo = testkit::workspace::root().join("models/demo");
    let mut seen = HashSet::new();
    for (name, files) in cases().into_iter().map(|case| (case.clone(), folder(&case))).chain([("demo".into(), demo)]) {
        if !seen.insert(kind(&files)) && !testkit::everything() {
            continue;
        }
        let tokenizer = Tokenizer::load(&*files).unwrap();
        let whole = tokenizers::Tokenizer::from_file(files.join("tokenizer.json")).unwrap();
        let parts = [
            "The",
            " quick",
            "brown ",
            "\n",
            "\r\n\n",
            "   ",
            " ",
            "\t",
            "it's",
            "1234567",
            " 42",
            "é",
            "e\u{301}",
            "世界",
            "🦀",
            "<|im_start|>",
            "<|endoftext|>",
            "<s>",
            "!?",
            "…",
            "don't",
            "\u{a0}",
            "{\"a\": [1, 2]}",
        ];
        for seed in 0..if testkit::everything() { 3 } else { 1_u64 } {
            let mut state = seed;
            let mut text = String::new();
            // Cut twice.
            while text.len() < 70_000 {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let draw = (state >> 33) as usize;
                // Now and then a run that is longer than any margin.
                let times = if draw.is_multiple_of(97) { 400 } else { 1 };
                text += &parts[draw / 97 % parts.len()].repeat(times);
            }
            for special in [false, true] {
                let expected = whole.encode_fast(text.as_str(), special).unwrap();
                assert!(tokenizer.encode(&text, special).unwrap() == expected.get_ids(), "{name}, seed {seed}");
            }
            assert!(
                tokenizer.least_tokens(text.len()) <= whole.encode_fast(text.as_str(), false).unwrap().len(),
                "{name}"
            );
        }
        let ascii = "The quick brown fox, 42 times. ".repeat(4000);
        let mut asked = 0;
        let stopped = tokenizer.encode_while(&ascii, true, usize::MAX, |_| {
            asked += 1;
            false
        });
        assert_eq!((stopped.is_err(), asked), (true, 1), "{name}");
        let is_byte_level = matches!(whole.get_decoder(), Some(tokenizers::DecoderWrapper::ByteLevel(_)));
        assert!(tokenizer.least_tokens(ascii.len()) > 1000 || !is_byte_level, "{name}");
        // A megabyte is tokenized in parts of bounded size, also if its first character is composed or there are no spaces in it.
        for text in [format!("e\u{301}{}", ascii.repeat(9)), "世界你好、".repeat(24_000)] {
            let mut parts = 0;
            let ids = tokenizer.encode_while(&text, false, 256 << 10, |_| {
                parts += 1;
                true
            });
            ids.unwrap_or_else(|error| panic!("{name}: {error}"));
            assert!((text.len() >> 18..=text.len() >> 12).contains(&parts), "{name}: {parts} parts");
        }
    }
    assert!(seen.len() >= 9, "only {} kinds", seen.len());
}

#[test]
fn ids_decode_to_the_reference_texts() {
    for case in cases() {
        let tokenizer = Tokenizer::load(&*folder(&case)).unwrap();
        for entry in list(&expected(&case)["detok"]) {
            let ids = ids(&entry["ids"]);
            assert_eq!(
                tokenizer.decode(&ids, true).unwrap(),
                text(&entry["skip_special_tokens"]),
                "{case} {}",
                entry["name"]
            );
            assert_eq!(
                tokenizer.decode(&ids, false).unwrap(),
                text(&entry["keep_special_tokens"]),
                "{case} {}",
                entry["name"]
            );
        }
    }
}

#[test]
fn the_bytes_of_the_tokens_add_up_to_the_decoded_text() {
    for case in cases() {
        let tokenizer = Tokenizer::load(&*folder(&case)).unwrap();
        // With byte fallback, broken sequences decode by rules of their own.
        let by_fallback = tokenizer.token_to_id("<0x0A>").is_some();
        let expected = expected(&case);
        let greedy = list(&expected["prompts"]).iter().map(|prompt| &prompt["greedy"]);
        let mut compared = 0;
        for entry in greedy.chain(list(&expected["detok"])).chain(list(&expected["encode"])) {
            let ids = ids(&entry["ids"]);
            let bytes: Vec<u8> = ids.iter().flat_map(|id| tokenizer.token_bytes(*id)).collect();
            if by_fallback && std::str::from_utf8(&bytes).is_err() {
                continue;
            }
            let text = String::from_utf8_lossy(&bytes);
            let decoded = tokenizer.decode(&ids, false).unwrap();
            // SentencePiece decoders drop the space that the tokenizer put before the text.
            let shorter = text.strip_prefix(' ').filter(|_| by_fallback);
            assert!(decoded == text || Some(&*decoded) == shorter, "{case}: {decoded:?} {text:?}");
            compared += 1;
        }
        assert!(compared > 30, "{case}: only {compared} sequences were whole");
    }
}

#[test]
fn p31_templates_of_every_family_render_as_transformers_renders_them() {
    let (mut rendered_with_tools, mut refused) = (0, 0);
    for case in cases() {
        let tokenizer = Tokenizer::load(&*folder(&case)).unwrap();
        let template = ChatTemplate::load(&*folder(&case)).unwrap().unwrap();
        for entry in list(&expected(&case)["chat"]) {
            let kwargs = entry["template_kwargs"].as_object().cloned().unwrap_or_default();
            let rendered = template.render(&ChatInput {
                messages: list(&entry["messages"]),
                tools: Some(&entry["tools"]).filter(|tools| !tools.is_null()),
                add_generation_prompt: entry["add_generation_prompt"].as_bool().unwrap(),
                continue_final_message: false,
                kwargs: &kwargs,
            });
            if let Some(error) = entry.get("error") {
                let words = text(error).strip_prefix("TemplateError: ").unwrap();
                assert!(matches!(rendered, Err(TemplateError::Refused(said)) if said == words), "{case}: {words}");
                refused += 1;
                continue;
            }
            let rendered = rendered.unwrap();
            assert_eq!(rendered, text(&entry["text"]), "{case} {}", entry["name"]);
            assert_eq!(tokenizer.encode(&rendered, false).unwrap(), ids(&entry["ids"]), "{case} {}", entry["name"]);
            rendered_with_tools += usize::from(!entry["tools"].is_null());
        }
    }
    assert_eq!((rendered_with_tools, refused), (42, 10));
}

#[test]
fn a_continued_message_ends_the_prompt_in_every_template() {
    let messages = [
        json!({"role": "user", "content": "Where is the river stone?"}),
        json!({"role": "assistant", "content": "Under the old"}),
    ];
    for case in cases() {
        let template = ChatTemplate::load(&*folder(&case)).unwrap().unwrap();
        let prompt = template.render(&ChatInput {
            messages: &messages,
            tools: None,
            add_generation_prompt: false,
            continue_final_message: true,
            kwargs: &Map::new(),
        });
        let prompt = prompt.unwrap();
        assert!(prompt.ends_with("Under the old"), "{case}: {prompt:?}");
        assert!(prompt.contains("Where is the river stone?"), "{case}: {prompt:?}");
    }
}

#[test]
fn the_tokenizer_fits_its_model_and_knows_its_special_tokens() {
    for case in cases() {
        let tokenizer = Tokenizer::load(&*folder(&case)).unwrap();
        tokenizer.check(vocab_size(&case)).unwrap();

        for eos in ids(&expected(&case)["eos_token_ids"]) {
            assert!(tokenizer.is_special(eos), "{case}");
            let spelled = tokenizer.id_to_token(eos).unwrap();
            assert_eq!(tokenizer.token_to_id(&spelled), Some(eos), "{case}");
            assert_eq!(tokenizer.token_bytes(eos), spelled.as_bytes(), "{case}");
            assert_eq!(tokenizer.decode(&[eos], true).unwrap(), "", "{case}");
        }
        // A model may choose a row of its embedding for which there is no token.
        for beyond in [tokenizer.vocab_size(), vocab_size(&case)].map(|id| id as u32) {
            assert_eq!((tokenizer.id_to_token(beyond), tokenizer.token_bytes(beyond)), (None, Vec::new()), "{case}");
            assert_eq!(tokenizer.decode(&[beyond], false).unwrap(), "", "{case}");
        }
    }
    // An added token that is not special stays in the text.
    let tokenizer = Tokenizer::load(&*folder("qwen3")).unwrap();
    let think = tokenizer.token_to_id("<think>").unwrap();
    assert!(!tokenizer.is_special(think));
    assert_eq!(tokenizer.decode(&[think], true).unwrap(), "<think>");
}

#[test]
fn special_tokens_are_put_around_texts_and_pairs_as_the_tokenizer_does() {
    let (mut singles, mut pairs) = (0, 0);
    for folder in cases().iter().map(|case| folder(case)).chain(testkit::reference::encoders()) {
        let tokenizer = Tokenizer::load(&*folder).unwrap();
        let expected = read(&folder, "expected.json");
        let (frame, pair) = (tokenizer.frame().unwrap(), tokenizer.pair_frame().unwrap());
        for entry in list(&expected["encode"]) {
            let text = text(&entry["text"]);
            let bare = tokenizer.encode(text, false).unwrap();
            assert_eq!(frame.single(&bare), tokenizer.encode(text, true).unwrap(), "{}: {text:?}", folder.display());
            singles += 1;
        }
        let inputs = expected["inputs"].as_array().into_iter().flatten();
        for input in inputs.filter(|input| input["text_pair"].is_string() && input["formatted"].is_null()) {
            let [first, second] = ["text", "text_pair"].map(|key| tokenizer.encode(text(&input[key]), false).unwrap());
            let (found, kind) = pair.pair(&first, &second);
            assert_eq!((found, kind), (ids(&input["ids"]), None), "{}", input["name"]);
            pairs += 1;
        }
    }
    assert!(singles > 100 && pairs >= 12, "{singles} texts, {pairs} pairs");
    // BERT tells the second text from the first.
    let tokenizer = Tokenizer::load(&*testkit::reference::folder("bert-embed")).unwrap();
    let [cls, sep] = ["[CLS]", "[SEP]"].map(|token| tokenizer.token_to_id(token).unwrap());
    let pair = tokenizer.pair_frame().unwrap();
    assert_eq!(pair.pair(&[7, 8], &[9]), (vec![cls, 7, 8, sep, 9, sep], Some(4)));
}
