//! The search for a marker such as `<tool_call>`, and the text in front of it.

/// Greatest number of bytes that are held back. More white space in front of a marker is text.
pub(super) const MAX_HELD: usize = 256;

/// Markers of the harmony format that end a message; the last two begin another one.
pub(super) const HARMONY: [&str; 5] = ["<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>"];

/// Holds back text that may be the beginning of a marker, with the white space in front of it, which belongs to the marker.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Marker {
    marker: &'static str,
    held: String,
}

impl Marker {
    /// Starts a search for `marker`.
    pub fn new(marker: &'static str) -> Marker {
        Marker { marker, held: String::new() }
    }

    /// Reads the next character and appends what is certainly text to `text`. Returns `true` with the marker's last character:
    /// then [`Marker::take`] returns the marker with the white space in front of it.
    pub fn push(&mut self, c: char, text: &mut String) -> bool {
        self.held.push(c);
        loop {
            let inner = self.held.trim_start();
            if inner == self.marker {
                return true;
            }
            if self.marker.starts_with(inner) && self.held.len() <= MAX_HELD {
                return false;
            }
            let first = self.held.remove(0);
            text.push(first);
        }
    }

    /// Takes the text that is held back: the beginning of a marker, or a whole marker.
    pub fn take(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}
