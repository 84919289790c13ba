//! Values as Python writes them: `str(x)`, `repr(x)` and `json.dumps(x)`.
//!
//! One walk over the value; the notations differ in leaves and separators. Maps keep the order of their keys.

use std::borrow::Cow;
use std::fmt::Write as _;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// Deeper values end in an error rather than in a stack overflow; JSON from a request is at most this deep.
const MAX_DEPTH: usize = 128;

/// How leaves are spelled.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Notation {
    /// `True`, `None`, `'text'`.
    Repr,
    /// `true`, `null`, `"text"`.
    Json {
        /// Write everything outside ASCII as `\uXXXX`.
        ensure_ascii: bool,
    },
}

/// How values are written.
pub(super) struct Style {
    pub notation: Notation,
    /// Sort maps by key.
    pub sort_keys: bool,
    /// One entry per line, nested by this text.
    pub indent: Option<String>,
    /// Between entries.
    pub item: String,
    /// Between key and value.
    pub key: String,
}

/// `str(value)`: a text as it is, an undefined value as nothing, all else as `repr` has it.
///
/// # Errors
/// When the value is nested too deeply.
pub(super) fn str(value: &Value) -> Result<Cow<'_, str>, Error> {
    if let Some(text) = value.as_str() {
        return Ok(Cow::Borrowed(text));
    }
    let repr = Style {
        notation: Notation::Repr,
        sort_keys: false,
        indent: None,
        item: ", ".to_string(),
        key: ": ".to_string(),
    };
    repr.text(value).map(Cow::Owned)
}

impl Style {
    /// The whole value as text.
    ///
    /// # Errors
    /// When the value is nested too deeply or, in JSON, a part of it has no JSON form.
    pub fn text(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.write(value, 0, &mut out)?;
        Ok(out)
    }

    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(ErrorKind::BadSerialization, "the value is nested too deeply"));
        }
        match value.kind() {
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.enclose(['{', '}'], keys.into_iter(), depth, out, |key, out| {
                    self.write_key(&key, depth, out)?;
                    out.push_str(&self.key);
                    self.write(&value.get_item(&key)?, depth + 1, out)
                })
            }
            ValueKind::Seq | ValueKind::Iterable => {
                self.enclose(['[', ']'], value.try_iter()?, depth, out, |item, out| self.write(&item, depth + 1, out))
            }
            _ => self.write_leaf(value, out),
        }
    }

    /// Brackets around entries, each on a line of its own where there is an indentation.
    fn enclose(
        &self,
        [open, close]: [char; 2],
        entries: impl Iterator<Item = Value>,
        depth: usize,
        out: &mut String,
        mut write: impl FnMut(Value, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let break_line = |depth: usize, out: &mut String| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(indent.as_str(), depth));
            }
        };
        out.push(open);
        let mut empty = true;
        for entry in entries {
            if !empty {
                out.push_str(&self.item);
            }
            empty = false;
            break_line(depth + 1, out);
            write(entry, out)?;
        }
        if !empty {
            break_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    /// Keys of JSON are texts, whatever they were.
    fn write_key(&self, key: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if self.notation == Notation::Repr || key.as_str().is_some() {
            return self.write(key, depth + 1, out);
        }
        let mut text = String::new();
        self.write_leaf(key, &mut text)?;
        self.write_leaf(&Value::from(text), out)
    }

    fn write_leaf(&self, value: &Value, out: &mut String) -> Result<(), Error> {
        let words = match self.notation {
            Notation::Repr => ["True", "False", "None"],
            Notation::Json { .. } => ["true", "false", "null"],
        };
        match (value.kind(), self.notation) {
            (ValueKind::Bool, _) => out.push_str(if value.is_true() { words[0] } else { words[1] }),
            (ValueKind::None, _) => out.push_str(words[2]),
            (ValueKind::Number, _) if value.is_integer() => out.push_str(&value.to_string()),
            (ValueKind::Number, _) => write_float(f64::try_from(value.clone())?, out),
            (ValueKind::String, Notation::Repr) => write_repr(value.as_str().unwrap_or_default(), out),
            (ValueKind::String, Notation::Json { ensure_ascii }) => {
                write_json(value.as_str().unwrap_or_default(), ensure_ascii, out);
            }
            (_, Notation::Repr) => out.push_str(&value.to_string()),
            (kind, Notation::Json { .. }) => {
                return Err(Error::new(
                    ErrorKind::BadSerialization,
                    format!("tojson: a value of type {kind} has no JSON form"),
                ));
            }
        }
        Ok(())
    }
}

/// The shortest digits that read back as `value`: plain from 1e-4 up to 1e16, else with an exponent of at least two digits.
fn write_float(value: f64, out: &mut String) {
    let scientific = format!("{value:e}");
    let exponent =
        scientific.split_once('e').and_then(|(mantissa, exponent)| Some((mantissa, exponent.parse::<i32>().ok()?)));
    let written = match exponent {
        None => write!(out, "{}", scientific.to_lowercase()),
        Some((_, -4..=15)) => write!(out, "{value:?}"),
        Some((mantissa, exponent)) => {
            write!(out, "{mantissa}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.unsigned_abs())
        }
    };
    debug_assert!(written.is_ok(), "writing to a String does not fail");
}

/// A string literal of Python: in single quotes unless only those occur in it.
fn write_repr(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if c.is_control() => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// A string literal of JSON.
fn write_json(text: &str, ensure_ascii: bool, out: &mut String) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' || (ensure_ascii && !c.is_ascii()) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        let cases = [
            (1.5, "1.5"),
            (2.0, "2.0"),
            (-3.5, "-3.5"),
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.25e-7, "1.25e-07"),
            (123456789012345.6, "123456789012345.6"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.7976931348623157e308, "1.7976931348623157e+308"),
            (0.1 + 0.2, "0.30000000000000004"),
        ];
        for (value, expected) in cases {
            let mut out = String::new();
            write_float(value, &mut out);
            assert_eq!(out, expected);
        }
    }

    #[test]
    fn str_of_a_container_is_its_repr() {
        let value: serde_json::Value =
            serde_json::from_str(r#"{"b": [true, null, 1, 2.5, "it's", "a \"b\"\n"], "a": {}, "c": "é\u0001"}"#)
                .unwrap();
        let expected = r#"{'b': [True, None, 1, 2.5, "it's", 'a "b"\n'], 'a': {}, 'c': 'é\x01'}"#;
        assert_eq!(str(&Value::from_serialize(&value)).unwrap(), expected);
    }

    #[test]
    fn a_value_that_nests_without_end_is_an_error() {
        let deep = (0..MAX_DEPTH + 2).fold(Value::from(1), |inner, _| Value::from(vec![inner]));
        assert!(str(&deep).is_err());
    }
}
