//! One sequence's tokens as final text: detokenised, and cut at its stop strings.

use std::sync::Arc;

use models::Tokenizer;

use super::{Detokenizer, StopScanner};
use crate::api::GenerationParams;

/// What a token added to the text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextDelta {
    /// Text that is final; it may belong to earlier tokens, and this token's own may come later.
    pub text: String,
    /// Where the token's text begins in the sequence's text, in characters.
    pub offset: usize,
    /// The stop string that ended the sequence; nothing comes after it.
    pub stop: Option<String>,
}

/// Text of one sequence of a request.
///
/// Offsets never decrease and the first is 0. A token inside of a character has the offset of that character, and a stop string
/// counts although it is not shown.
#[derive(Clone)]
pub struct TextStream {
    detokenizer: Detokenizer,
    scanner: StopScanner,
    /// Tokens whose text is not searched: a sequence must not end before them.
    unsearched: usize,
    characters: usize,
}

impl TextStream {
    /// The stream of what follows on `prompt`; of `params` it heeds `stop`, `include_stop_str_in_output`,
    /// `skip_special_tokens` and `sampling.min_tokens` (stop strings are looked for behind so many tokens, as in vLLM).
    pub fn new(tokenizer: Arc<Tokenizer>, prompt: &[u32], params: &GenerationParams) -> Self {
        TextStream {
            detokenizer: Detokenizer::new(tokenizer, prompt, params.skip_special_tokens),
            scanner: StopScanner::new(&params.stop, params.include_stop_str_in_output),
            unsearched: params.sampling.min_tokens,
            characters: 0,
        }
    }

    /// Takes the next token. Not to be called with an end or stop token whose text is not to show; its offset is
    /// [`TextStream::offset`].
    pub fn push(&mut self, token: u32) -> TextDelta {
        let offset = self.characters;
        let text = self.detokenizer.push(token);
        self.characters += text.chars().count();
        if self.unsearched > 0 {
            self.unsearched -= 1;
            return TextDelta { text, offset, stop: None };
        }
        let scanned = self.scanner.push(&text);
        TextDelta { text: scanned.text, offset, stop: scanned.stop }
    }

    /// Where the text of the next token will begin, in characters.
    pub fn offset(&self) -> usize {
        self.characters
    }

    /// Everything that was held back, when the sequence ends for another reason than a stop string.
    pub fn finish(&mut self) -> String {
        let unfinished = self.detokenizer.finish();
        self.characters += unfinished.chars().count();
        self.scanner.push(&unfinished).text + &self.scanner.finish()
    }
}
