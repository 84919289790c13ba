//! Python's `str(x)`, `repr(x)` and `json.dumps(x)` of template values. Maps keep the order of their keys.

use std::borrow::Cow;
use std::fmt::Write as _;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

use super::guard;

/// Greatest nesting depth of a value, so that the recursion cannot overflow the stack. JSON from a request is at most this deep.
const MAX_DEPTH: usize = 128;

/// Spelling of leaves.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Notation {
    /// `True`, `None`, `'text'`.
    Repr,
    /// `true`, `null`, `"text"`.
    Json {
        /// Write non-ASCII characters as `\uXXXX`.
        ensure_ascii: bool,
    },
}

pub(super) struct Style {
    pub notation: Notation,
    pub sort_keys: bool,
    /// Write one entry per line, indented by this text per level.
    pub indent: Option<String>,
    /// Separator of entries.
    pub item: String,
    /// Separator of key and value.
    pub key: String,
}

/// `str(value)`: a text unchanged, an undefined value as the empty text, anything else as `repr(value)`.
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
    /// Fails on values that are nested too deeply, and in JSON on those without a JSON representation.
    pub fn text(&self, value: &Value) -> Result<String, Error> {
        let mut out = String::new();
        self.write(value, 0, &mut out)?;
        Ok(out)
    }

    fn write(&self, value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(ErrorKind::BadSerialization, "the value is nested too deeply"));
        }
        // Separators and indents may be long.
        guard::check_text(out.len())?;
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

    /// Writes entries between brackets, one per line if `indent` is set.
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

    /// Writes a key; in JSON, keys of other types become texts.
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
                    format!("tojson: a value of type {kind} has no JSON representation"),
                ));
            }
        }
        Ok(())
    }
}

/// Writes the shortest digits that parse back to `value`: without an exponent from 1e-4 up to 1e16, otherwise with one of at least
/// two digits.
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

/// Writes a Python string literal: in single quotes, unless the text contains single quotes and no double quotes.
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

fn write_json(text: &str, ensure_ascii: bool, out: &mut String) {
    for character in serde_json::Value::from(text).to_string().chars() {
        if ensure_ascii && !character.is_ascii() {
            for unit in character.encode_utf16(&mut [0; 2]) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        } else {
            out.push(character);
        }
    }
}
