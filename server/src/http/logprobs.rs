//! Log-probabilities in the three shapes that clients know: OpenAI's completions, OpenAI's chat, vLLM's prompt.

use std::fmt::Write;

use engine::{TokenLogprobs, TokenOutput, Tokenizer};
use serde_json::{Map, Value, json};

/// JSON has no infinity; vLLM writes this for a token that can not come.
const FLOOR: f32 = -9999.0;

fn number(logprob: f32) -> f32 {
    // `max` also turns a NaN into the floor.
    logprob.max(FLOOR)
}

/// A token as text. A token that is part of a character is written `bytes:\xf0\x9f`, as OpenAI does, so that two of
/// them differ.
pub fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    match String::from_utf8(tokenizer.token_bytes(id)) {
        Ok(text) => text,
        Err(error) => error.as_bytes().iter().fold("bytes:".to_string(), |mut text, byte| {
            // Writing to a `String` can not fail.
            let _ = write!(text, "\\x{byte:02x}");
            text
        }),
    }
}

/// Characters that begin in these bytes of UTF-8.
fn characters(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&byte| !is_continuation(byte)).count()
}

fn is_continuation(byte: u8) -> bool {
    byte & 0b1100_0000 == 0b1000_0000
}

/// `logprobs` of a completion choice.
#[derive(Debug, Default)]
pub struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Value>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<usize>,
}

impl CompletionLogprobs {
    /// Adds the tokens of an echoed prompt, whose text is `length` characters long.
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
            |&id: &u32| if skip_special && tokenizer.is_special(id) { Vec::new() } else { tokenizer.token_bytes(id) };
        let texts: Vec<Vec<u8>> = ids.iter().map(shown).collect();
        let total: usize = texts.iter().map(|text| characters(text)).sum();
        // The first token of some tokenizers writes a space that the prompt's text does not have.
        let surplus = total.saturating_sub(length);
        let mut before = 0_usize;
        for (i, (&id, text)) in ids.iter().zip(&texts).enumerate() {
            // A token inside of a character has the offset of that character.
            let inside = usize::from(text.first().is_some_and(|&byte| is_continuation(byte)));
            let known = logprobs.get(i).and_then(Option::as_ref);
            self.push(tokenizer, id, known, k, before.saturating_sub(inside + surplus));
            before += characters(text);
        }
    }

    /// Adds a generated token; `shift` is the number of characters before the output.
    pub fn push_output(&mut self, tokenizer: &Tokenizer, token: &TokenOutput, k: usize, shift: usize) {
        self.push(tokenizer, token.id, token.logprobs.as_ref(), k, token.text_offset + shift);
    }

    fn push(&mut self, tokenizer: &Tokenizer, id: u32, logprobs: Option<&TokenLogprobs>, k: usize, offset: usize) {
        let text = token_text(tokenizer, id);
        self.token_logprobs.push(logprobs.map_or(Value::Null, |found| json!(number(found.logprob))));
        self.top_logprobs.push(logprobs.map_or(Value::Null, |found| {
            let mut top = Map::new();
            for &(alternative, logprob) in found.top.iter().take(k) {
                // Two tokens may read the same; the likelier one comes first and stays.
                top.entry(token_text(tokenizer, alternative)).or_insert(json!(number(logprob)));
            }
            top.entry(text.clone()).or_insert(json!(number(found.logprob)));
            Value::Object(top)
        }));
        self.tokens.push(text);
        self.text_offset.push(offset);
    }

    /// The JSON object.
    pub fn into_json(self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        })
    }
}

/// `logprobs` of a chat choice: `{"content": [...]}` with `k` alternatives each.
pub fn chat(tokenizer: &Tokenizer, tokens: &[TokenOutput], k: usize) -> Value {
    let entry = |id: u32, logprob: f32| {
        let mut map = Map::new();
        map.insert("token".into(), token_text(tokenizer, id).into());
        map.insert("logprob".into(), json!(number(logprob)));
        map.insert("bytes".into(), tokenizer.token_bytes(id).into());
        map
    };
    let content = tokens.iter().filter_map(|token| {
        let found = token.logprobs.as_ref()?;
        let mut map = entry(token.id, found.logprob);
        let top: Vec<Value> = found.top.iter().take(k).map(|&(id, logprob)| entry(id, logprob).into()).collect();
        map.insert("top_logprobs".into(), top.into());
        Some(Value::Object(map))
    });
    json!({"content": content.collect::<Vec<_>>()})
}

/// vLLM's `prompt_logprobs`: per prompt token `null` or a map from token id to what is known of it.
pub fn prompt(tokenizer: &Tokenizer, ids: &[u32], logprobs: &[Option<TokenLogprobs>], k: usize) -> Value {
    let entry = |id: u32, logprob: f32, rank: usize| json!({"logprob": number(logprob), "rank": rank, "decoded_token": token_text(tokenizer, id)});
    let position = |(&id, found): (&u32, &Option<TokenLogprobs>)| match found {
        None => Value::Null,
        Some(found) => {
            let mut map = Map::new();
            map.insert(id.to_string(), entry(id, found.logprob, found.rank));
            for (i, &(id, logprob)) in found.top.iter().take(k).enumerate() {
                map.entry(id.to_string()).or_insert_with(|| entry(id, logprob, i + 1));
            }
            Value::Object(map)
        }
    };
    ids.iter().zip(logprobs).map(position).collect()
}
