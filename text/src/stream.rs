//! The final text of one sequence: its tokens detokenised and cut at stop strings.

use std::sync::Arc;

use crate::{Detokenizer, ReasoningParser, Scanned, StopScanner, Tokenizer};

/// How the text of a sequence is made from its tokens.
#[derive(Clone, Copy, Debug, Default)]
pub struct StreamOptions<'a> {
    /// Texts before the first of which a sequence ends.
    pub stop: &'a [String],
    /// Keeps the matched stop string in the text.
    pub include_stop: bool,
    /// Number of tokens after which stop strings are searched for, as in vLLM.
    pub min_tokens: usize,
    /// Parser of the reasoning in front of the answer: stop strings count in the answer only. `None`: in the whole text.
    pub reasoning: Option<&'a ReasoningParser>,
    /// Leaves special tokens out of the text.
    pub skip_special: bool,
}

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
    /// Creates the stream of the text after `prompt`.
    pub fn new(tokenizer: Arc<Tokenizer>, prompt: &[u32], options: StreamOptions<'_>) -> Self {
        let parser = options.reasoning.filter(|_| !options.stop.is_empty()).cloned();
        TextStream {
            gate: parser.map(|parser| Gate { parser, held: String::new() }),
            detokenizer: Detokenizer::new(tokenizer, prompt, options.skip_special),
            scanner: StopScanner::new(options.stop, options.include_stop),
            unsearched: if options.stop.is_empty() { usize::MAX } else { options.min_tokens },
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
