//! The final text of one sequence: its tokens detokenised and cut at stop strings.

use std::sync::Arc;

use models::Tokenizer;

use super::{Detokenizer, ReasoningParser, Scanned, StopScanner};
use crate::api::GenerationParams;

/// The text that a token added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextDelta {
    /// Final text. It may belong to earlier tokens, and this token's own text may follow later.
    pub text: String,
    /// Offset of the token's text in the sequence's text, in characters.
    pub offset: usize,
    /// The stop string that ended the sequence.
    pub stop: Option<String>,
}

/// The text of one sequence of a request.
///
/// Offsets never decrease, and the first is 0. A token within a character has the offset of that character. Stop strings count
/// although they are removed from the text.
#[derive(Clone)]
pub struct TextStream {
    detokenizer: Detokenizer,
    scanner: StopScanner,
    /// Finds the answer, if stop strings count only there.
    gate: Option<Gate>,
    /// Number of tokens whose text is still not searched, because a sequence must not end before them, or for want of stop strings.
    unsearched: usize,
    characters: usize,
}

/// Separates the text in which stop strings count from the reasoning.
#[derive(Clone)]
struct Gate {
    parser: ReasoningParser,
    /// Text that is reasoning or answer, depending on what follows.
    held: String,
}

impl TextStream {
    /// Creates the stream of the text after `prompt`. It uses `stop`, `include_stop_str_in_output`, `skip_special_tokens`,
    /// `reasoning` and `sampling.min_tokens` of `params`; stop strings are searched for after that many tokens, as in vLLM.
    pub fn new(tokenizer: Arc<Tokenizer>, prompt: &[u32], params: &GenerationParams) -> Self {
        let parser = params.reasoning.clone().filter(|_| !params.stop.is_empty());
        TextStream {
            gate: parser.map(|parser| Gate { parser, held: String::new() }),
            detokenizer: Detokenizer::new(tokenizer, prompt, params.skip_special_tokens),
            scanner: StopScanner::new(&params.stop, params.include_stop_str_in_output),
            unsearched: if params.stop.is_empty() { usize::MAX } else { params.sampling.min_tokens },
            characters: 0,
        }
    }

    /// Reads the next token. Do not call it for an end or stop token whose text is not shown; its offset is
    /// [`TextStream::offset`].
    pub fn push(&mut self, token: u32) -> TextDelta {
        let offset = self.characters;
        let text = self.detokenizer.push(token);
        self.characters += text.chars().count();
        if self.unsearched > 0 && self.gate.is_none() {
            self.unsearched -= 1;
            return TextDelta { text, offset, stop: None };
        }
        let scanned = self.search(&text);
        self.unsearched = self.unsearched.saturating_sub(1);
        TextDelta { text: scanned.text, offset, stop: scanned.stop }
    }

    /// Searches the part of a text in which stop strings count.
    fn search(&mut self, text: &str) -> Scanned {
        let (scanner, is_searched) = (&mut self.scanner, self.unsearched == 0);
        let mut scan = |text: &str, counts: bool| match counts && is_searched {
            true => scanner.push(text),
            false => Scanned { text: scanner.finish() + text, stop: None },
        };
        let Some(gate) = &mut self.gate else { return scan(text, true) };
        let mut all = Scanned::default();
        for c in text.chars() {
            gate.held.push(c);
            let Some(is_answer) = gate.parser.is_answer(&gate.held) else { continue };
            let Scanned { text, stop } = scan(&std::mem::take(&mut gate.held), is_answer);
            all.text += &text;
            if stop.is_some() {
                return Scanned { stop, ..all };
            }
        }
        if gate.parser.is_over() {
            self.gate = None;
        }
        all
    }

    /// Offset of the next token's text, in characters.
    pub fn offset(&self) -> usize {
        self.characters
    }

    /// Returns the text that was held back, when the sequence ends for another reason than a stop string.
    pub fn finish(&mut self) -> String {
        let unfinished = self.detokenizer.finish();
        self.characters += unfinished.chars().count();
        let found = self.search(&unfinished).text;
        let held = self.gate.take().map(|gate| gate.held).unwrap_or_default();
        found + &self.scanner.push(&held).text + &self.scanner.finish()
    }
}
