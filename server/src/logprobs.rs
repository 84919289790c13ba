//! Log probabilities in three formats: OpenAI's completions, OpenAI's chat completions, and vLLM's prompts.
//!
//! They are by far the largest part of a response, so that they are written as JSON text directly: a tree of values
//! would take ten times the memory.

use std::collections::HashSet;
use std::fmt::Write;

use engine::{TokenLogprobs, TokenOutput, Tokenizer};
use serde_json::Value;

use super::json::Json;

/// JSON has no infinity: vLLM writes this number for an impossible token.
const LOWEST: f32 = -9999.0;

/// A number as JSON.
fn number(logprob: f32) -> Value {
    // `max` also replaces NaN.
    logprob.max(LOWEST).into()
}

/// Appends to a text. Writing to a `String` cannot fail.
fn put(text: &mut String, more: std::fmt::Arguments<'_>) {
    let _ = text.write_fmt(more);
}

/// Appends a comma unless `text` ends with the start of a list or object.
fn comma(text: &mut String) {
    if !text.ends_with(['[', '{']) {
        text.push(',');
    }
}

/// Text of a token. Bytes that are not UTF-8 are written as `bytes:\xf0\x9f`, as OpenAI does, so that different tokens
/// have different texts.
pub fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    match String::from_utf8(tokenizer.token_bytes(id)) {
        Ok(text) => text,
        Err(error) => error.as_bytes().iter().fold("bytes:".to_string(), |mut text, byte| {
            put(&mut text, format_args!("\\x{byte:02x}"));
            text
        }),
    }
}

/// Number of characters that begin in these bytes of UTF-8.
fn characters(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&byte| !is_continuation(byte)).count()
}

fn is_continuation(byte: u8) -> bool {
    byte & 0b1100_0000 == 0b1000_0000
}

/// `logprobs` of a completion choice: four JSON lists under construction.
#[derive(Debug)]
pub struct CompletionLogprobs {
    tokens: String,
    token_logprobs: String,
    top_logprobs: String,
    text_offset: String,
}

impl CompletionLogprobs {
    /// Empty lists.
    pub fn new() -> CompletionLogprobs {
        let list = || "[".to_string();
        CompletionLogprobs { tokens: list(), token_logprobs: list(), top_logprobs: list(), text_offset: list() }
    }

    /// Appends the tokens of an echoed prompt, whose text has `length` characters.
    pub fn push_prompt(
        &mut self,
        tokenizer: &Tokenizer,
        ids: &[u32],
        logprobs: &[Option<TokenLogprobs>],
        k: usize,
        skip_special: bool,
        length: usize,
    ) {
        let shown =
            |id: u32| if skip_special && tokenizer.is_special(id) { Vec::new() } else { tokenizer.token_bytes(id) };
        let total: usize = ids.iter().map(|&id| characters(&shown(id))).sum();
        // The first token of some tokenizers has a space that the prompt does not have.
        let surplus = total.saturating_sub(length);
        let mut before = 0_usize;
        for (i, &id) in ids.iter().enumerate() {
            let text = shown(id);
            // A token that continues a character has the offset of that character.
            let inside = usize::from(text.first().is_some_and(|&byte| is_continuation(byte)));
            let known = logprobs.get(i).and_then(Option::as_ref);
            self.push(tokenizer, id, known, k, before.saturating_sub(inside + surplus));
            before += characters(&text);
        }
    }

    /// Appends a generated token; `shift` is the number of characters before the output.
    pub fn push_output(&mut self, tokenizer: &Tokenizer, token: &TokenOutput, k: usize, shift: usize) {
        self.push(tokenizer, token.id, token.logprobs.as_ref(), k, token.text_offset + shift);
    }

    fn push(&mut self, tokenizer: &Tokenizer, id: u32, logprobs: Option<&TokenLogprobs>, k: usize, offset: usize) {
        let lists = [&mut self.tokens, &mut self.token_logprobs, &mut self.top_logprobs, &mut self.text_offset];
        lists.into_iter().for_each(comma);
        let text = token_text(tokenizer, id);
        put(&mut self.tokens, format_args!("{}", Value::from(text.as_str())));
        put(&mut self.text_offset, format_args!("{offset}"));
        let Some(found) = logprobs else {
            self.token_logprobs += "null";
            self.top_logprobs += "null";
            return;
        };
        put(&mut self.token_logprobs, format_args!("{}", number(found.logprob)));
        // Two tokens may have the same text: the more likely one comes first and is kept.
        let mut seen = HashSet::new();
        let likeliest = found.top.iter().take(k).map(|&(id, logprob)| (token_text(tokenizer, id), logprob));
        self.top_logprobs.push('{');
        for (text, logprob) in likeliest.chain([(text, found.logprob)]) {
            if seen.contains(&text) {
                continue;
            }
            comma(&mut self.top_logprobs);
            put(&mut self.top_logprobs, format_args!("{}:{}", Value::from(text.as_str()), number(logprob)));
            seen.insert(text);
        }
        self.top_logprobs.push('}');
    }

    /// The JSON object.
    pub fn into_json(self) -> Json {
        let CompletionLogprobs { tokens, token_logprobs, top_logprobs, text_offset } = self;
        Json::text(format!(
            r#"{{"tokens":{tokens}],"token_logprobs":{token_logprobs}],"top_logprobs":{top_logprobs}],"text_offset":{text_offset}]}}"#
        ))
    }
}

/// Appends a token of a chat, as fields of an object.
fn put_entry(text: &mut String, tokenizer: &Tokenizer, id: u32, logprob: f32) {
    let bytes = Value::from(tokenizer.token_bytes(id));
    let (token, logprob) = (Value::from(token_text(tokenizer, id)), number(logprob));
    put(text, format_args!(r#""token":{token},"logprob":{logprob},"bytes":{bytes}"#));
}

/// Tokens of a chat with `k` alternatives each.
pub fn tokens(tokenizer: &Tokenizer, tokens: &[TokenOutput], k: usize) -> Vec<Json> {
    let entry = |token: &TokenOutput| {
        let found = token.logprobs.as_ref()?;
        let mut text = String::from("{");
        put_entry(&mut text, tokenizer, token.id, found.logprob);
        text += r#","top_logprobs":["#;
        for &(id, logprob) in found.top.iter().take(k) {
            comma(&mut text);
            text.push('{');
            put_entry(&mut text, tokenizer, id, logprob);
            text.push('}');
        }
        text += "]}";
        Some(Json::text(text))
    };
    tokens.iter().filter_map(entry).collect()
}

/// `logprobs` of a chat choice: `{"content": [...]}` with `k` alternatives each.
pub fn chat(tokenizer: &Tokenizer, generated: &[TokenOutput], k: usize) -> Json {
    Json::Object(vec![("content".to_string(), tokens(tokenizer, generated, k).into())])
}

/// vLLM's `prompt_logprobs`: per prompt token `null`, or a map from token ids to their log probability, rank and text.
pub fn prompt(tokenizer: &Tokenizer, ids: &[u32], logprobs: &[Option<TokenLogprobs>], k: usize) -> Json {
    let mut text = String::from("[");
    for (&id, found) in ids.iter().zip(logprobs) {
        comma(&mut text);
        let Some(found) = found else {
            text += "null";
            continue;
        };
        let ranked = found.top.iter().take(k).enumerate().map(|(i, &(id, logprob))| (id, logprob, i + 1));
        text.push('{');
        for (id, logprob, rank) in [(id, found.logprob, found.rank)].into_iter().chain(ranked.filter(|top| top.0 != id))
        {
            comma(&mut text);
            let (logprob, token) = (number(logprob), Value::from(token_text(tokenizer, id)));
            put(&mut text, format_args!(r#""{id}":{{"logprob":{logprob},"rank":{rank},"decoded_token":{token}}}"#));
        }
        text.push('}');
    }
    text.push(']');
    Json::text(text)
}
