//! Stop strings in a stream of text.
//!
//! ```text
//!   text so far   ... the quick bro          stop string "brown"
//!                 final ───────┘└── held: the longest end of the text that begins a stop string
//! ```
//!
//! The result is that of a scan character by character: the match that is complete first wins, and the longest of several that
//! end at the same character. So it does not depend on how the text is split, and no text is held back longer than necessary.

use std::sync::Arc;

/// The result of scanning a piece of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scanned {
    /// Final text: it contains no stop string, and its end does not begin one.
    pub text: String,
    /// The stop string that was found and ends the text.
    pub stop: Option<String>,
}

/// Finds the first of several stop strings in a text that arrives in pieces.
///
/// Holds back fewer bytes than the longest stop string has. Returns nothing after a match. Clones share the stop strings.
///
/// ```
/// use text::StopScanner;
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
    /// Creates a scanner for `stops`. It leaves the match in the text if `include_stop`. Empty strings never match.
    pub fn new(stops: &[String], include_stop: bool) -> Self {
        StopScanner { stops: stops.into(), include_stop, held: String::new(), matched: false }
    }

    /// Reads the next piece of text and returns what has become final.
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
        self.held = text.split_off(text.len() - self.held_length(&text));
        Scanned { text, stop: None }
    }

    /// Ends the text, and returns what was held back.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The match that ends first, or the longest of those: its start and the stop string.
    fn first_match(&self, text: &str) -> Option<(usize, &str)> {
        let stops = self.stops.iter().map(String::as_str).filter(|stop| !stop.is_empty());
        let matches = stops.filter_map(|stop| Some((text.find(stop)?, stop)));
        matches.min_by_key(|(start, stop)| (start + stop.len(), *start))
    }

    /// Length of the longest end of `text` that is the beginning of a stop string. It begins with the first character of that
    /// string, so `text` can be cut there.
    fn held_length(&self, text: &str) -> usize {
        let text = text.as_bytes();
        let longest = |stop: &String| {
            let most = stop.len().saturating_sub(1).min(text.len());
            (1..=most).rev().find(|&length| text.ends_with(&stop.as_bytes()[..length]))
        };
        self.stops.iter().filter_map(longest).max().unwrap_or(0)
    }
}
