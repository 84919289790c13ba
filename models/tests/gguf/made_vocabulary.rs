//! Vocabularies in GGUF files made by the tests.

use std::sync::Arc;

use models::gguf::{Gguf, GgufModel};
use models::{LoadError, ModelFiles};
use text::Tokenizer;

use super::made::{Made, array_value, string, text_value, u32_value};
use crate::texts::TextFiles;

pub const NORMAL: i32 = 1;
pub const UNKNOWN: i32 = 2;
pub const CONTROL: i32 = 3;
pub const USER_DEFINED: i32 = 4;
pub const UNUSED: i32 = 5;

pub fn strings<T: AsRef<str>>(texts: &[T]) -> Vec<u8> {
    let bytes: Vec<u8> = texts.iter().flat_map(|text| string(text.as_ref())).collect();
    array_value(8, texts.len() as u64, &bytes)
}

pub fn integers(numbers: &[i32]) -> Vec<u8> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    array_value(5, numbers.len() as u64, &bytes)
}

pub fn floats(numbers: &[f32]) -> Vec<u8> {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    array_value(6, numbers.len() as u64, &bytes)
}

pub fn truth(flag: bool) -> Vec<u8> {
    [&7_u32.to_le_bytes()[..], &[u8::from(flag)]].concat()
}

/// A file with the sizes of a model and nothing else.
pub fn sized(architecture: &str) -> Made {
    let keys = ["context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"];
    let made = Made::new().key("general.architecture", text_value(architecture));
    let size = |key: &str| if key == "embedding_length" { 64 } else { 4 };
    keys.iter().fold(made, |made, key| made.key(&format!("{architecture}.{key}"), u32_value(size(key))))
}

/// The keys of a vocabulary.
#[derive(Clone)]
pub struct Vocab {
    pub architecture: &'static str,
    pub model: &'static str,
    pub pre: Option<&'static str>,
    pub tokens: Vec<(String, i32, f32)>,
    pub merges: Vec<String>,
    pub more: Vec<(&'static str, Vec<u8>)>,
}

impl Vocab {
    pub fn made(&self) -> Made {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let texts: Vec<&str> = self.tokens.iter().map(|(text, ..)| text.as_str()).collect();
        let mut made = sized(self.architecture)
            .key(&key("model"), text_value(self.model))
            .key(&key("tokens"), strings(&texts))
            .key(&key("token_type"), integers(&self.tokens.iter().map(|(_, kind, _)| *kind).collect::<Vec<_>>()));
        match self.model {
            "llama" | "t5" => {
                made = made.key(&key("scores"), floats(&self.tokens.iter().map(|token| token.2).collect::<Vec<_>>()))
            }
            "bert" => {}
            _ => made = made.key(&key("merges"), strings(&self.merges)),
        }
        if let Some(pre) = self.pre {
            made = made.key(&key("pre"), text_value(pre));
        }
        self.more.iter().cloned().fold(made, |made, (name, value)| made.key(name, value))
    }

    pub fn with(mut self, name: &'static str, value: Vec<u8>) -> Vocab {
        self.more.push((name, value));
        self
    }

    pub fn tokenizer(&self) -> Tokenizer {
        Tokenizer::load(&TextFiles(&files(&self.made()).unwrap())).unwrap()
    }
}

pub fn files(made: &Made) -> Result<ModelFiles, LoadError> {
    let gguf = Gguf::from_bytes("m.gguf", Arc::from(made.bytes()))?;
    Ok(ModelFiles::Gguf { path: "m.gguf".into(), model: Arc::new(GgufModel::new(gguf)?) })
}

/// A SentencePiece vocabulary of these tokens after `<unk>`, `<s>` and `</s>`.
pub fn sentence_piece(tokens: &[(&str, f32)]) -> Vocab {
    let special = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)];
    let special = special.map(|(text, kind)| (text.to_string(), kind, 0.0));
    let tokens = tokens.iter().map(|(text, score)| (text.to_string(), NORMAL, *score));
    Vocab {
        architecture: "llama",
        model: "llama",
        pre: None,
        tokens: special.into_iter().chain(tokens).collect(),
        merges: Vec::new(),
        more: vec![("tokenizer.ggml.add_space_prefix", truth(false)), ("tokenizer.ggml.add_bos_token", truth(false))],
    }
}

/// A byte-level vocabulary of the 256 bytes, further tokens, and merges.
pub fn byte_level(pre: Option<&'static str>, more: &[(&str, i32)], merges: &[&str]) -> Vocab {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let others = (0..256).filter(|byte| !printable(*byte)).count() as u32;
    let bytes = (0..256).filter(|byte| printable(*byte)).chain(256..256 + others);
    let bytes = bytes.map(|code| (char::from_u32(code).unwrap().to_string(), NORMAL, 0.0));
    let merged = merges.iter().map(|merge| (merge.replace(' ', ""), NORMAL, 0.0));
    let more = more.iter().map(|(text, kind)| (text.to_string(), *kind, 0.0));
    let tokens = bytes.chain(merged).chain(more).collect();
    let merges = merges.iter().map(|merge| merge.to_string()).collect();
    Vocab { architecture: "qwen2", model: "gpt2", pre, tokens, merges, more: Vec::new() }
}
