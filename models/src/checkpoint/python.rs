//! JSON as Python writes it.

use crate::checkpoint::bytes::FileBytes;

/// Words that Python writes for numbers that JSON does not have.
const WORDS: [&str; 3] = ["Infinity", "-Infinity", "NaN"];

/// The same text in standard JSON: infinite numbers are objects `{"__float__": "Infinity"}`, as new versions of transformers write them.
pub(crate) fn standard_json(bytes: FileBytes) -> FileBytes {
    let (mut out, mut copied, mut at, mut in_text) = (Vec::new(), 0, 0, false);
    while let Some(byte) = bytes.get(at) {
        let word = WORDS.iter().find(|word| !in_text && bytes[at..].starts_with(word.as_bytes()));
        if let Some(word) = word {
            out.extend_from_slice(&bytes[copied..at]);
            out.extend_from_slice(format!(r#"{{"__float__": "{word}"}}"#).as_bytes());
            at += word.len();
            copied = at;
            continue;
        }
        match byte {
            b'"' => in_text = !in_text,
            b'\\' if in_text => at += 1,
            _ => {}
        }
        at += 1;
    }
    if copied == 0 {
        return bytes;
    }
    out.extend_from_slice(&bytes[copied..]);
    FileBytes::Memory(out.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_words_become_objects_outside_of_texts_alone() {
        let standard = |text: &str| {
            let found = standard_json(FileBytes::Memory(text.as_bytes().into()));
            String::from_utf8_lossy(&found).into_owned()
        };
        for same in ["", "{}", r#"{"NaN": "Infinity \" NaN \\"}"#, "\"Infinity", "\"\\", "[1, 2]"] {
            assert_eq!(standard(same), same);
        }
        let found = standard(r#"{"Infinity": [0.0, Infinity], "a\"": -Infinity, "b": NaN}"#);
        let float = |word: &str| format!(r#"{{"__float__": "{word}"}}"#);
        let [all, none, not] = WORDS.map(float);
        assert_eq!(found, format!(r#"{{"Infinity": [0.0, {all}], "a\"": {none}, "b": {not}}}"#));
    }
}
