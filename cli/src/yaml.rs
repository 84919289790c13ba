//! Settings files in YAML, as vLLM has them. Plain words mean what Python's `yaml.safe_load` reads: `yes`, `on` and `true` are true.
//!
//! Anchors, tags and several documents are refused; nesting is limited.

use saphyr_parser::{Event, Parser, ScalarStyle, ScanError};
use toml::{Table, Value};

/// Greatest depth of lists and maps.
const MAX_DEPTH: usize = 32;

/// Parses a map. The error is one line.
pub fn parse(text: &str) -> Result<Table, String> {
    let mut events = Events { parser: Parser::new_from_str(text) };
    loop {
        match events.next()? {
            Event::StreamStart | Event::DocumentStart(_) => {}
            // An empty file.
            Event::StreamEnd => return Ok(Table::new()),
            first => {
                let document = events.value(first, 0)?;
                return match (document, events.next()?, events.next()?) {
                    (_, Event::DocumentEnd, Event::DocumentStart(_)) => {
                        Err(events.here("found a second document, expected one"))
                    }
                    (Some(Value::Table(table)), ..) => Ok(table),
                    (None, ..) => Ok(Table::new()),
                    (Some(other), ..) => Err(format!("found {}, expected keys and values", other.type_str())),
                };
            }
        }
    }
}

struct Events<'a> {
    parser: Parser<'a, saphyr_parser::StrInput<'a>>,
}

impl<'a> Events<'a> {
    fn next(&mut self) -> Result<Event<'a>, String> {
        let wrong = |error: ScanError| format!("line {}: {}", error.marker().line(), error.info());
        match self.parser.next_event() {
            None => Ok(Event::StreamEnd),
            Some(event) => event.map(|(event, _)| event).map_err(wrong),
        }
    }

    fn here(&mut self, problem: &str) -> String {
        match self.parser.peek() {
            Some(Ok((_, span))) => format!("line {}: {problem}", span.start.line()),
            _ => problem.to_string(),
        }
    }

    /// The value that begins with this event; `None` is null.
    fn value(&mut self, first: Event<'a>, depth: usize) -> Result<Option<Value>, String> {
        if depth > MAX_DEPTH {
            return Err(self.here(&format!("found more than {MAX_DEPTH} levels of lists and maps, expected fewer")));
        }
        match first {
            Event::Scalar(text, style, 0, None) => Ok(scalar(&text, style)),
            Event::SequenceStart(0, None) => {
                let mut items = Vec::new();
                loop {
                    match self.next()? {
                        Event::SequenceEnd => return Ok(Some(Value::Array(items))),
                        event => items.extend(self.value(event, depth + 1)?),
                    }
                }
            }
            Event::MappingStart(0, None) => {
                let mut table = Table::new();
                loop {
                    let key = match self.next()? {
                        Event::MappingEnd => return Ok(Some(Value::Table(table))),
                        Event::Scalar(key, _, 0, None) => key.into_owned(),
                        _ => return Err(self.here("found a key that is no word, expected the name of a flag")),
                    };
                    let event = self.next()?;
                    if table.contains_key(&key) {
                        return Err(self.here(&format!("found {key} twice, expected it once")));
                    }
                    if let Some(value) = self.value(event, depth + 1)? {
                        table.insert(key, value);
                    }
                }
            }
            _ => Err(self.here("found an anchor, an alias or a tag, expected plain values")),
        }
    }
}

/// A word that is not quoted may be a number or another value.
fn scalar(text: &str, style: ScalarStyle) -> Option<Value> {
    if style != ScalarStyle::Plain {
        return Some(Value::String(text.to_string()));
    }
    if let Ok(number) = text.parse() {
        return Some(Value::Integer(number));
    }
    let is_number = text.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
    if let Some(number) = text.parse().ok().filter(|number: &f64| is_number && number.is_finite()) {
        return Some(Value::Float(number));
    }
    match text.to_lowercase().as_str() {
        "" | "~" | "null" => None,
        "true" | "yes" | "on" => Some(Value::Boolean(true)),
        "false" | "no" | "off" => Some(Value::Boolean(false)),
        _ => Some(Value::String(text.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_reads_as_python_reads_it() {
        let text = "# settings\nmodel: org/name\nport: 8_000\nseed: 1\nrate: 0.5\nenable-lora: yes\na: on\nb: Off\nc: TRUE\nnothing: ~\nquoted: \"on\"\n\
                    list: [a, 2]\nmap:\n  method: ngram\n  inner: {n: 4}\nfolded: >\n  a\n  b\nversion: 1.2.3\n";
        let table = parse(text).unwrap();
        let expected = "model = 'org/name'\nport = '8_000'\nseed = 1\nrate = 0.5\nenable-lora = true\na = true\nb = false\nc = true\nquoted = 'on'\n\
                        list = ['a', 2]\nfolded = \"a b\\n\"\nversion = '1.2.3'\n[map]\nmethod = 'ngram'\ninner = {n = 4}\n";
        assert_eq!(table, toml::from_str(expected).unwrap());
        assert!(parse("").unwrap().is_empty() && parse("# only\n").unwrap().is_empty());
    }

    #[test]
    fn what_is_no_plain_map_is_one_line() {
        let deep = format!("a: {}1{}", "[".repeat(40), "]".repeat(40));
        for (text, part) in [
            ("- a\n- b\n", "found array"),
            ("a: 1\nb: [1\n", "line "),
            ("a: 1\na: 2\n", "found a twice"),
            ("a: &x 1\nb: *x\n", "anchor"),
            ("a: !!python/object:os.system x\n", "tag"),
            ("a: 1\n---\nb: 2\n", "second document"),
            ("[a, b]: 1\n", "no word"),
            ("text", "found string"),
            (&deep, "more than 32 levels"),
            ("a: \"x\n", "line "),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(part) && error.lines().count() == 1, "{text:?}: {error}");
        }
    }
}
