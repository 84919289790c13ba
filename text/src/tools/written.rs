//! JSON text as decoders write it, and their progress.

/// Progress of a decoder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The arguments go on.
    More,
    /// The arguments have ended. Holds text after them that has been read.
    Done(String),
}

/// Appends a character of a JSON string.
pub(super) fn escape(c: char, json: &mut String) {
    match c {
        '"' => json.push_str("\\\""),
        '\\' => json.push_str("\\\\"),
        '\n' => json.push_str("\\n"),
        '\r' => json.push_str("\\r"),
        '\t' => json.push_str("\\t"),
        c if c < ' ' => json.push_str(&format!("\\u{:04x}", u32::from(c))),
        c => json.push(c),
    }
}

/// Appends a JSON string.
pub(super) fn quote(text: &str, json: &mut String) {
    json.push('"');
    text.chars().for_each(|c| escape(c, json));
    json.push('"');
}
