//! The events of a background response as they are kept, and their repetition after a restart.
//!
//! An event is sent only after it is kept. After a restart the request runs again from its beginning and gives the same tokens, but
//! perhaps in other deltas: drafts come by the load. So the sizes of the deltas are kept with the events. The second run is cut at
//! the same places, gives the same events, which are compared with those that are kept, and goes on behind them.

use std::collections::VecDeque;

use engine::Delta;
use serde::{Deserialize, Serialize};

/// Events that were kept together, and the deltas that they came from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Block {
    /// Prompt tokens that were found in the prefix cache.
    pub cached_tokens: u64,
    /// Number of tokens and bytes of text of each delta.
    pub cuts: Vec<(u32, u32)>,
    /// Type and JSON of each event.
    pub events: Vec<(String, String)>,
}

impl Block {
    /// Its form in the store.
    pub fn encode(&self) -> Vec<u8> {
        // Strings and numbers always have a form.
        postcard::to_allocvec(self).unwrap_or_default()
    }

    /// Reads its form in the store.
    pub fn decode(bytes: &[u8]) -> Option<Block> {
        postcard::from_bytes(bytes).ok()
    }
}

/// What a second run must repeat.
#[derive(Default)]
pub struct Replay {
    cuts: VecDeque<(u32, u32)>,
    events: VecDeque<(String, String)>,
    cached_tokens: Option<usize>,
    /// What the second run gave and the first deltas do not cover.
    rest: Delta,
}

/// The second run gives something else.
#[derive(Debug, PartialEq, Eq)]
pub struct Differs;

impl Replay {
    /// Repeats what these blocks have.
    pub fn new(blocks: impl IntoIterator<Item = Block>) -> Replay {
        let mut replay = Replay::default();
        for block in blocks {
            if !block.cuts.is_empty() {
                replay.cached_tokens = Some(block.cached_tokens as usize);
            }
            replay.cuts.extend(block.cuts);
            replay.events.extend(block.events);
        }
        replay
    }

    /// Whether everything is repeated.
    pub fn is_over(&self) -> bool {
        self.cuts.is_empty() && self.events.is_empty()
    }

    /// Number of cached prompt tokens: those of the first run, if it began.
    pub fn cached_tokens(&self, found: usize) -> usize {
        self.cached_tokens.unwrap_or(found)
    }

    /// Cuts what the second run gives as the first was cut. What is behind its end comes as it is. Also returns for each delta whether it
    /// is kept.
    pub fn cut(&mut self, delta: Delta) -> Result<Vec<(Delta, bool)>, Differs> {
        if self.cuts.is_empty() {
            return Ok(vec![(delta, false)]);
        }
        self.rest.extend(delta);
        let mut cut = Vec::new();
        while let Some(&(tokens, bytes)) = self.cuts.front() {
            let (tokens, bytes) = (tokens as usize, bytes as usize);
            if self.rest.tokens.len() < tokens || self.rest.text.len() < bytes {
                // The first run went on where this one ends.
                return if self.rest.finish.is_some() { Err(Differs) } else { Ok(cut) };
            }
            if !self.rest.text.is_char_boundary(bytes) {
                return Err(Differs);
            }
            let behind = self.rest.text.split_off(bytes);
            let text = std::mem::replace(&mut self.rest.text, behind);
            let tokens = self.rest.tokens.drain(..tokens).collect();
            cut.push((Delta { index: self.rest.index, text, tokens, ..Delta::default() }, true));
            self.cuts.pop_front();
        }
        let rest = std::mem::take(&mut self.rest);
        if rest.finish.is_some() || !rest.tokens.is_empty() || !rest.text.is_empty() {
            cut.push((rest, false));
        }
        Ok(cut)
    }

    /// Compares an event with the next that is kept. Returns whether it is new.
    pub fn is_new(&mut self, name: &str, event: &str) -> Result<bool, Differs> {
        match self.events.pop_front() {
            None => Ok(true),
            Some((kept, text)) if kept == name && text == event => Ok(false),
            Some(_) => Err(Differs),
        }
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/replay.rs"]
mod tests;
