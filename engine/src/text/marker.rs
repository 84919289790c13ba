//! Text in front of a marker such as `<tool_call>`.

/// Most bytes that are held back: so much white space in front of a marker is text.
pub(super) const MOST: usize = 256;

/// Holds back what may be the beginning of a marker, with the white space in front of it: that belongs to the marker.
#[derive(Clone, Debug)]
pub(super) struct Marker {
    marker: &'static str,
    held: String,
}

impl Marker {
    /// In front of `marker`.
    pub fn new(marker: &'static str) -> Marker {
        Marker { marker, held: String::new() }
    }

    /// Takes the next character; what is text for certain goes to `text`. `true` with the marker's last character: until the
    /// next call, [`Marker::take`] returns the marker with the white space in front of it.
    pub fn push(&mut self, c: char, text: &mut String) -> bool {
        self.held.push(c);
        loop {
            let inner = self.held.trim_start();
            if inner == self.marker {
                return true;
            }
            if self.marker.starts_with(inner) && self.held.len() <= MOST {
                return false;
            }
            let first = self.held.remove(0);
            text.push(first);
        }
    }

    /// Returns what is held back: the beginning of a marker, or a whole one.
    pub fn take(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}
