//! Log probabilities in three formats: OpenAI's completions, OpenAI's chat completions, and vLLM's prompts.
//!
//! They are by far the largest part of a response. So they become JSON when the response is written, directly into its
//! text, and are never held as JSON of their own.

use std::sync::Arc;

use engine::{TokenLogprobs, TokenOutput};
use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};
use serde_json::{Map, Value, json};
use text::Tokenizer;

use crate::http::json::Items;

/// JSON has no infinity: vLLM writes this number for an impossible token.
const LOWEST: f32 = -9999.0;

/// A number as JSON.
pub fn number(logprob: f32) -> f64 {
    // `max` also replaces NaN.
    logprob.max(LOWEST).into()
}

/// Text of a token. Bytes that are not UTF-8 are written as `bytes:\xf0\x9f`, as OpenAI does, so that different tokens
/// have different texts.
pub fn token_text(tokenizer: &Tokenizer, id: u32) -> String {
    String::from_utf8(tokenizer.token_bytes(id)).unwrap_or_else(|error| {
        let escaped = error.as_bytes().iter().map(|byte| format!("\\x{byte:02x}"));
        "bytes:".to_string() + &escaped.collect::<String>()
    })
}

/// Number of characters that begin in these bytes of UTF-8.
fn characters(bytes: &[u8]) -> usize {
    bytes.iter().filter(|&&byte| !is_continuation(byte)).count()
}

fn is_continuation(byte: u8) -> bool {
    byte & 0b1100_0000 == 0b1000_0000
}

/// A prompt, and its log probabilities once the engine has computed them.
#[derive(Default)]
pub struct Prompt {
    /// Token ids.
    pub ids: Vec<u32>,
    /// One per token; the first has none.
    pub logprobs: Option<Vec<Option<TokenLogprobs>>>,
}

impl Prompt {
    fn tokens(&self) -> impl Iterator<Item = (u32, Option<&TokenLogprobs>)> {
        let known = self.logprobs.as_deref().unwrap_or_default();
        self.ids.iter().enumerate().map(|(i, &id)| (id, known.get(i).and_then(Option::as_ref)))
    }
}

/// `logprobs` of a choice, with `k` alternatives per token.
pub enum Logprobs<'a> {
    /// `{"content": [...]}`.
    Chat { tokenizer: Arc<Tokenizer>, tokens: &'a [TokenOutput], k: usize },
    /// Four lists.
    Completion(Completion<'a>),
}

impl Serialize for Logprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Logprobs::Chat { tokenizer, tokens, k } => {
                let content = tokens.iter().filter_map(|token| ChatToken::new(tokenizer, token, *k));
                serializer.collect_map([("content", Items::new(content))])
            }
            Logprobs::Completion(lists) => lists.serialize(serializer),
        }
    }
}

/// A token of a chat.
#[derive(Serialize)]
struct ChatToken<T> {
    token: String,
    logprob: f64,
    bytes: Vec<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    top_logprobs: Option<T>,
}

impl<T> ChatToken<T> {
    fn of(tokenizer: &Tokenizer, id: u32, logprob: f32, top_logprobs: Option<T>) -> ChatToken<T> {
        let (token, bytes) = (token_text(tokenizer, id), tokenizer.token_bytes(id));
        ChatToken { token, logprob: number(logprob), bytes, top_logprobs }
    }
}

impl ChatToken<()> {
    fn new<'a>(tokenizer: &'a Tokenizer, token: &'a TokenOutput, k: usize) -> Option<ChatToken<impl Serialize + 'a>> {
        let found = token.logprobs.as_ref()?;
        let top = found.top.iter().take(k).map(|&(id, logprob)| ChatToken::<()>::of(tokenizer, id, logprob, None));
        Some(ChatToken::of(tokenizer, token.id, found.logprob, Some(Items::new(top))))
    }
}

/// JSON of each token of a chat with `k` alternatives, for a response that repeats it.
pub fn token_texts(tokenizer: &Tokenizer, tokens: &[TokenOutput], k: usize) -> impl Iterator<Item = String> {
    tokens.iter().filter_map(move |token| serde_json::to_string(&ChatToken::new(tokenizer, token, k)?).ok())
}

/// `logprobs` of a completion choice.
pub struct Completion<'a> {
    /// Tokenizer of the model.
    pub tokenizer: Arc<Tokenizer>,
    /// The prompt, if the choice echoes it.
    pub prompt: Option<Arc<Prompt>>,
    /// Number of characters of the choice's text before the output.
    pub shift: usize,
    /// Whether the echo lacks special tokens.
    pub skip_special: bool,
    /// Generated tokens.
    pub tokens: &'a [TokenOutput],
    /// Number of alternatives per token.
    pub k: usize,
}

impl Completion<'_> {
    fn all(&self) -> impl Iterator<Item = (u32, Option<&TokenLogprobs>)> {
        let output = self.tokens.iter().map(|token| (token.id, token.logprobs.as_ref()));
        self.prompt.iter().flat_map(|prompt| prompt.tokens()).chain(output)
    }

    /// Offset of each token in the choice's text, in characters.
    fn offsets(&self) -> impl Iterator<Item = usize> {
        let (tokenizer, skip) = (&*self.tokenizer, self.skip_special);
        let shown = move |id| if skip && tokenizer.is_special(id) { Vec::new() } else { tokenizer.token_bytes(id) };
        let ids = self.prompt.as_deref().map_or(&[][..], |prompt| &prompt.ids);
        let total: usize = ids.iter().map(|&id| characters(&shown(id))).sum();
        // The first token of some tokenizers has a space that the prompt does not have.
        let surplus = total.saturating_sub(self.shift);
        let of_prompt = ids.iter().scan(0_usize, move |before, &id| {
            let text = shown(id);
            // A token that continues a character has the offset of that character.
            let inside = usize::from(text.first().is_some_and(|&byte| is_continuation(byte)));
            let offset = before.saturating_sub(inside + surplus);
            *before += characters(&text);
            Some(offset)
        });
        of_prompt.chain(self.tokens.iter().map(|token| token.text_offset + self.shift))
    }
}

impl Serialize for Completion<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let tokenizer = &*self.tokenizer;
        let top = |(id, found): (u32, Option<&TokenLogprobs>)| {
            let found = found?;
            let likeliest = found.top.iter().take(self.k).copied().chain([(id, found.logprob)]);
            // Two tokens may have the same text: the more likely one comes first and is kept.
            let mut kept = Map::new();
            for (id, logprob) in likeliest {
                kept.entry(token_text(tokenizer, id)).or_insert_with(|| number(logprob).into());
            }
            Some(kept)
        };
        let mut map = serializer.serialize_map(Some(4))?;
        map.serialize_entry("tokens", &Items::new(self.all().map(|(id, _)| token_text(tokenizer, id))))?;
        let logprobs = Items::new(self.all().map(|(_, found)| found.map(|found| number(found.logprob))));
        map.serialize_entry("token_logprobs", &logprobs)?;
        map.serialize_entry("top_logprobs", &Items::new(self.all().map(top)))?;
        map.serialize_entry("text_offset", &Items::new(self.offsets()))?;
        map.end()
    }
}

/// vLLM's `prompt_logprobs`: per prompt token `null`, or a map from token ids to their log probability, rank and text.
pub struct PromptLogprobs {
    /// Tokenizer of the model.
    pub tokenizer: Arc<Tokenizer>,
    /// The prompt.
    pub prompt: Arc<Prompt>,
    /// Number of alternatives per token.
    pub k: usize,
}

impl Serialize for PromptLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let ranked = |(id, found): (u32, Option<&TokenLogprobs>)| {
            let found = found?;
            let top = found.top.iter().take(self.k).enumerate().map(|(i, &(id, logprob))| (id, logprob, i + 1));
            let all = [(id, found.logprob, found.rank)].into_iter().chain(top.filter(move |top| top.0 != id));
            let item = |(id, logprob, rank): (u32, f32, usize)| {
                let text = token_text(&self.tokenizer, id);
                (id.to_string(), json!({"logprob": number(logprob), "rank": rank, "decoded_token": text}))
            };
            Some(all.map(item).collect::<Map<String, Value>>())
        };
        serializer.collect_seq(self.prompt.tokens().map(ranked))
    }
}

#[cfg(test)]
#[path = "../../tests/unit/logprobs.rs"]
mod tests;
