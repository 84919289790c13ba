//! Stop strings in a stream of text.
//!
//! ```text
//!   text so far   ... the quick bro          stop string "brown"
//!                 final ───────┘└── held: the longest end of the text that begins a stop string
//! ```
//!
//! Text is scanned as if it came one character at a time: the match that is complete first wins, and of several that end
//! together the longest. So the result does not depend on how the text is split, and nothing waits longer than it must.

use std::sync::Arc;

/// What a piece of text added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scanned {
    /// Text that is final: neither a stop string nor the beginning of one.
    pub text: String,
    /// The stop string that was found; the text ends there.
    pub stop: Option<String>,
}

/// Finds the first of several stop strings in a text that comes in pieces.
///
/// Clones share the stop strings. Holds back less than the longest stop string, in bytes. After a match it gives nothing any more.
///
/// ```
/// use engine::text::StopScanner;
///
/// let mut scanner = StopScanner::new(&["END".to_owned()], false);
/// assert_eq!(scanner.push("one E").text, "one ");
/// assert_eq!(scanner.push("two E").text, "Etwo ");
/// let last = scanner.push("ND three");
/// assert_eq!((last.text.as_str(), last.stop.as_deref()), ("", Some("END")));
/// ```
#[derive(Clone, Debug)]
pub struct StopScanner {
    stops: Arc<[String]>,
    include_stop: bool,
    held: String,
    matched: bool,
}

impl StopScanner {
    /// A scanner for `stops`, which leaves the match in the text if `include_stop`. Empty strings never match.
    pub fn new(stops: &[String], include_stop: bool) -> Self {
        StopScanner { stops: stops.into(), include_stop, held: String::new(), matched: false }
    }

    /// Takes the next piece of text and gives what has become final.
    pub fn push(&mut self, piece: &str) -> Scanned {
        if self.matched {
            return Scanned::default();
        }
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        if let Some((start, stop)) = self.first_match(&text) {
            let stop = stop.to_owned();
            text.truncate(if self.include_stop { start + stop.len() } else { start });
            self.matched = true;
            return Scanned { text, stop: Some(stop) };
        }
        self.held = text.split_off(text.len() - self.beginning_at_end(&text));
        Scanned { text, stop: None }
    }

    /// The text that was held back: no more comes, so it is no stop string.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The match that ends first, of those the one that starts first: where it starts, and what it is.
    fn first_match(&self, text: &str) -> Option<(usize, &str)> {
        let stops = self.stops.iter().map(String::as_str).filter(|stop| !stop.is_empty());
        let matches = stops.filter_map(|stop| Some((text.find(stop)?, stop)));
        matches.min_by_key(|(start, stop)| (start + stop.len(), *start))
    }

    /// Length of the longest end of `text` that is the beginning of a stop string. It starts with that string's first
    /// character, so `text` may be cut there.
    fn beginning_at_end(&self, text: &str) -> usize {
        let text = text.as_bytes();
        let longest = |stop: &String| {
            let most = stop.len().saturating_sub(1).min(text.len());
            (1..=most).rev().find(|&length| text.ends_with(&stop.as_bytes()[..length]))
        };
        self.stops.iter().filter_map(longest).max().unwrap_or(0)
    }
}
