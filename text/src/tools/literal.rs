//! Decodes literals that are not JSON to JSON text: keyword arguments of Python, and objects with bare keys.

use super::written::{Step, escape, quote};
use crate::marker::MAX_HELD;

/// Greatest number of open brackets. Where more are opened, the arguments end.
const MAX_DEPTH: usize = 128;

/// How the literals of a format differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dialect {
    Python,
    /// Strings are between two copies of this text.
    Bare(&'static str),
}

/// Whether a character ends a word or the name of an argument.
pub(super) fn ends_word(c: char) -> bool {
    c.is_whitespace() || ",:=()[]{}".contains(c)
}

/// An open bracket.
struct Level {
    is_object: bool,
    has_item: bool,
    /// The next item is a key.
    expects_key: bool,
}

enum State {
    /// Between two items.
    Between,
    /// Within a number, a word or a bare key.
    Word(String),
    /// Within a marker that begins a string, of [`Dialect::Bare`].
    Marker(String),
    /// Within a string of [`Dialect::Bare`], with what may be the marker at its end.
    Marked(String),
    /// After the first quotation marks of a string, which may have three.
    Open(char, usize),
    /// Within a string of Python. The number of quotation marks at its end, and how many have been read.
    Quoted(char, usize, usize),
    /// After a backslash.
    Escape(char, usize),
    /// Within an escaped character code: its text after the backslash, and how long that is.
    Code(char, usize, String, usize),
}

/// See the [module](self).
pub(super) struct Literal {
    dialect: Dialect,
    levels: Vec<Level>,
    state: State,
    started: bool,
}

impl Literal {
    /// Creates a decoder behind the opening bracket of a call.
    pub fn python() -> Literal {
        let call = Level { is_object: true, has_item: false, expects_key: true };
        Literal { dialect: Dialect::Python, levels: vec![call], state: State::Between, started: false }
    }

    /// Creates a decoder in front of the opening bracket of an object.
    pub fn bare(quote: &'static str) -> Literal {
        Literal { dialect: Dialect::Bare(quote), levels: Vec::new(), state: State::Between, started: false }
    }

    /// Reads the next character and appends to the JSON text.
    pub fn push(&mut self, c: char, json: &mut String) -> Step {
        if !std::mem::replace(&mut self.started, true) && self.dialect == Dialect::Python {
            json.push('{');
        }
        match std::mem::replace(&mut self.state, State::Between) {
            State::Between => return self.between(c, json),
            State::Word(mut word) => {
                if !ends_word(c) && !self.begins_string(c) && word.len() <= MAX_HELD {
                    word.push(c);
                    self.state = State::Word(word);
                    return Step::More;
                }
                self.word(&word, json);
                return self.between(c, json);
            }
            State::Marker(mut held) => {
                let Dialect::Bare(marker) = self.dialect else { return Step::More };
                held.push(c);
                if held == marker {
                    self.begin_item(json);
                    json.push('"');
                    self.state = State::Marked(String::new());
                } else if marker.starts_with(held.as_str()) {
                    self.state = State::Marker(held);
                } else {
                    self.state = State::Word(held.chars().next().map(String::from).unwrap_or_default());
                    return held
                        .chars()
                        .skip(1)
                        .map(|c| self.push(c, json))
                        .find(|step| *step != Step::More)
                        .unwrap_or(Step::More);
                }
            }
            State::Marked(mut held) => {
                let Dialect::Bare(marker) = self.dialect else { return Step::More };
                held.push(c);
                while !marker.starts_with(held.as_str()) {
                    escape(held.remove(0), json);
                }
                if held == marker {
                    json.push('"');
                    self.end_item();
                } else {
                    self.state = State::Marked(held);
                }
            }
            State::Open(mark, 1) if c == mark => self.state = State::Open(mark, 2),
            State::Open(mark, 2) if c == mark => self.state = State::Quoted(mark, 3, 0),
            State::Open(_, 2) => {
                json.push('"');
                self.end_item();
                return self.between(c, json);
            }
            State::Open(mark, _) => {
                self.state = State::Quoted(mark, 1, 0);
                return self.push(c, json);
            }
            State::Quoted(mark, marks, read) => {
                if c == mark {
                    if read + 1 == marks {
                        json.push('"');
                        self.end_item();
                    } else {
                        self.state = State::Quoted(mark, marks, read + 1);
                    }
                    return Step::More;
                }
                (0..read).for_each(|_| escape(mark, json));
                if c == '\\' {
                    self.state = State::Escape(mark, marks);
                } else {
                    escape(c, json);
                    self.state = State::Quoted(mark, marks, 0);
                }
            }
            State::Escape(mark, marks) => {
                self.state = State::Quoted(mark, marks, 0);
                let code = |length| State::Code(mark, marks, c.to_string(), length);
                match c {
                    'n' => escape('\n', json),
                    't' => escape('\t', json),
                    'r' => escape('\r', json),
                    'b' => escape('\u{8}', json),
                    'f' => escape('\u{c}', json),
                    'v' => escape('\u{b}', json),
                    'a' => escape('\u{7}', json),
                    '0' => escape('\0', json),
                    '\n' => {}
                    '\\' | '\'' | '"' | '/' => escape(c, json),
                    'x' => self.state = code(3),
                    'u' => self.state = code(5),
                    'U' => self.state = code(9),
                    c => {
                        escape('\\', json);
                        escape(c, json);
                    }
                }
            }
            State::Code(mark, marks, mut text, length) => {
                self.state = State::Quoted(mark, marks, 0);
                if !c.is_ascii_hexdigit() {
                    format!("\\{text}").chars().for_each(|c| escape(c, json));
                    return self.push(c, json);
                }
                text.push(c);
                if text.len() < length {
                    self.state = State::Code(mark, marks, text, length);
                } else {
                    let code = u32::from_str_radix(&text[1..], 16).unwrap_or_default();
                    match char::from_u32(code) {
                        Some(c) => escape(c, json),
                        // Half of a surrogate pair, as JSON writes it.
                        None => json.push_str(&format!("\\u{:04x}", code & 0xffff)),
                    }
                }
            }
        }
        Step::More
    }

    /// Ends the text within the literal. What was held back is part of the JSON text as far as it goes.
    pub fn finish(&mut self, json: &mut String) {
        if !self.started && self.dialect == Dialect::Python {
            json.push('{');
        }
        match std::mem::replace(&mut self.state, State::Between) {
            State::Word(word) => self.word(&word, json),
            State::Marked(held) => held.chars().for_each(|c| escape(c, json)),
            _ => {}
        }
    }

    fn between(&mut self, c: char, json: &mut String) -> Step {
        match c {
            '{' | '[' | '(' => {
                if self.levels.len() == MAX_DEPTH {
                    return Step::Done(c.to_string());
                }
                self.begin_item(json);
                let is_object = c == '{';
                json.push(if is_object { '{' } else { '[' });
                self.levels.push(Level { is_object, has_item: false, expects_key: is_object });
            }
            '}' | ']' | ')' => {
                if let Some(level) = self.levels.pop() {
                    json.push(if level.is_object { '}' } else { ']' });
                }
                self.end_item();
                if self.levels.is_empty() {
                    return Step::Done(String::new());
                }
            }
            c if self.dialect == Dialect::Python && self.begins_string(c) => {
                self.begin_item(json);
                json.push('"');
                self.state = State::Open(c, 1);
            }
            ',' | ':' | '=' => {}
            c if c.is_whitespace() => {}
            c if self.begins_string(c) => {
                self.state = State::Marker(c.to_string());
            }
            c => self.state = State::Word(c.to_string()),
        }
        Step::More
    }

    fn begins_string(&self, c: char) -> bool {
        match self.dialect {
            Dialect::Python => c == '"' || c == '\'',
            Dialect::Bare(marker) => marker.starts_with(c),
        }
    }

    /// Appends what is between an item and the one in front of it.
    fn begin_item(&mut self, json: &mut String) {
        if let Some(level) = self.levels.last_mut() {
            if level.is_object && !level.expects_key {
                json.push_str(": ");
            } else if std::mem::replace(&mut level.has_item, true) {
                json.push_str(", ");
            }
        }
    }

    fn end_item(&mut self) {
        if let Some(level) = self.levels.last_mut() {
            level.expects_key = level.is_object && !level.expects_key;
        }
    }

    /// Appends a number, a word or a bare key.
    fn word(&mut self, word: &str, json: &mut String) {
        let is_key = self.levels.last().is_some_and(|level| level.expects_key);
        self.begin_item(json);
        let digits = word.replace('_', "");
        let number = || digits.parse::<f64>().ok().and_then(serde_json::Number::from_f64);
        match word {
            _ if is_key => quote(word, json),
            "True" | "true" => json.push_str("true"),
            "False" | "false" => json.push_str("false"),
            "None" | "null" => json.push_str("null"),
            _ if !digits.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c)) => quote(word, json),
            _ if serde_json::from_str::<serde_json::Number>(&digits).is_ok() => json.push_str(&digits),
            _ => match number() {
                Some(number) => json.push_str(&number.to_string()),
                None => quote(word, json),
            },
        }
        self.end_item();
    }
}
