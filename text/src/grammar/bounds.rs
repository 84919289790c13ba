//! What is refused before a grammar is compiled: definitions whose compilation would take too much stack, memory or time.
//!
//! llguidance recurses once per rule, bracket and negation of a Lark grammar and once per level and reference of a JSON schema, and
//! its budgets count neither that nor the steps before a lexer exists. The bounds here are counts of characters and of JSON values,
//! so no spelling of a definition evades them. They take one pass over the definition, and recurse only as deep as JSON may nest.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::Grammar;

/// Greatest nesting of brackets in a regular expression or a grammar. JSON is bounded by its parser.
pub(super) const MAX_NESTING: usize = 100;

/// Greatest number of rules, brackets and negations in a Lark grammar. Each may be a level of recursion of about 2 KiB.
const MAX_LEVELS: usize = 20_000;

/// Greatest number of repetitions and character classes in a regular expression, or of all in a grammar. The time of some grows with
/// their square, and a class of Unicode takes up to 20 KiB.
const MAX_OPERATORS: usize = 10_000;

/// Greatest nesting of a JSON schema, with that of each schema that it refers to. A level takes up to about 8 KiB of stack.
const MAX_SCHEMA_LEVELS: usize = 10_000;

/// Greatest number of names in `properties` and `required` of one schema, and of all its parts.
const MAX_NAMES: (usize, usize) = (5_000, 10_000);

/// Greatest number of values that are read to compute the nesting of schemas.
const MAX_VISITS: usize = 4_000_000;

/// Refuses a grammar without parsing it: its size, its nesting, and empty choices.
pub(super) fn check(grammar: &Grammar, max_bytes: usize) -> Result<(), String> {
    let found = grammar.num_bytes();
    if found > max_bytes {
        return Err(format!("found a grammar of {found} bytes, expected at most {max_bytes} (--max-schema-bytes)"));
    }
    match grammar.of_answer() {
        Grammar::Regex(text) => nesting(text).and_then(|()| operators(text)),
        Grammar::Ebnf(text) => nesting(text),
        Grammar::Lark(text) => nesting(text).and_then(|()| lark(text)),
        Grammar::Choice(choices) if choices.is_empty() || choices.iter().any(String::is_empty) => {
            Err("expected at least one choice, none of them empty".to_string())
        }
        _ => Ok(()),
    }
}

fn at_most(found: usize, most: usize, what: &str) -> Result<(), String> {
    if found > most { Err(format!("found {found} {what}, expected at most {most}")) } else { Ok(()) }
}

/// Bounds the number of brackets that are open at the same time. Quoted brackets count.
fn nesting(text: &str) -> Result<(), String> {
    let (mut open, mut most) = (0usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => open += 1,
            b')' | b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
        most = most.max(open);
    }
    if most > MAX_NESTING {
        return Err(format!("found brackets nested {most} deep, expected at most {MAX_NESTING}"));
    }
    Ok(())
}

/// Bounds the parts of a Lark grammar outside of its JSON schemas. Quoted ones count.
pub(super) fn lark(text: &str) -> Result<(), String> {
    let (mut levels, mut from) = (0, 0);
    let mut count = |part: &str| {
        levels += part.bytes().filter(|byte| b":([{~".contains(byte)).count();
        operators(part)
    };
    for (at, _) in schemas(text) {
        count(&text[from..at.start])?;
        from = at.end;
    }
    count(&text[from..])?;
    at_most(levels, MAX_LEVELS, "rules, brackets and negations in a grammar")
}

/// Bounds the operators of regular expressions in a text. Quoted ones count.
fn operators(text: &str) -> Result<(), String> {
    let bytes = text.as_bytes();
    let is_class = |at: usize| b"dDwWsSpP".contains(&bytes[at]) && at > 0 && bytes[at - 1] == b'\\';
    let is_operator = |at: &usize| b"?*+{".contains(&bytes[*at]) || is_class(*at);
    let found = (0..bytes.len()).filter(is_operator).count();
    at_most(found, MAX_OPERATORS, "repetitions and character classes")
}

/// The JSON schemas in a Lark grammar, and where they are.
pub(super) fn schemas(text: &str) -> Vec<(std::ops::Range<usize>, Value)> {
    const MARKER: &str = "%json";
    let (mut found, mut from) = (Vec::new(), 0);
    while let Some(at) = text[from..].find(MARKER) {
        let start = from + at + MARKER.len();
        from = start;
        let mut values = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
        if let Some(Ok(schema)) = values.next() {
            from = start + values.byte_offset();
            found.push((start..from, schema));
        }
    }
    found
}

/// Bounds the recursion over a JSON schema whose references all begin with `#/`, and its names and patterns.
pub(super) fn schema(root: &Value) -> Result<(), String> {
    let mut found = Found::default();
    let mut levels = found.levels(root, true)?;
    let mut known = HashSet::new();
    // A reference is followed once. What follows it may be the deepest part of any other.
    while let Some(reference) = found.references.pop() {
        if known.insert(reference) {
            let target = reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer));
            levels += target.map_or(Ok(1), |target| found.levels(target, false))?;
            at_most(levels, MAX_SCHEMA_LEVELS, "levels in a schema and the schemas that it refers to")?;
        }
    }
    at_most(found.most_names, MAX_NAMES.0, "names in properties and required of a schema")?;
    at_most(found.names, MAX_NAMES.1, "names in properties and required of a schema and its parts")?;
    at_most(found.operators, MAX_OPERATORS, "repetitions and character classes in the patterns of a schema")
}

/// What a schema contains.
#[derive(Default)]
struct Found<'a> {
    references: Vec<&'a str>,
    names: usize,
    most_names: usize,
    operators: usize,
    visits: usize,
}

impl<'a> Found<'a> {
    /// Returns the nesting of a value, and counts its parts if it `is_whole`.
    fn levels(&mut self, value: &'a Value, is_whole: bool) -> Result<usize, String> {
        self.visits += 1;
        at_most(self.visits, MAX_VISITS, "values in the schemas that a schema refers to")?;
        let mut most = 0;
        match value {
            Value::Array(values) => {
                for value in values {
                    most = most.max(self.levels(value, is_whole)?);
                }
            }
            Value::Object(fields) => {
                if is_whole {
                    self.count(fields)?;
                }
                for value in fields.values() {
                    most = most.max(self.levels(value, is_whole)?);
                }
            }
            _ => {}
        }
        Ok(most + 1)
    }

    fn count(&mut self, fields: &'a Map<String, Value>) -> Result<(), String> {
        self.references.extend(fields.get("$ref").and_then(Value::as_str));
        let object = |key: &str| fields.get(key).and_then(Value::as_object);
        let required = fields.get("required").and_then(Value::as_array).map_or(0, Vec::len);
        let names = object("properties").map_or(0, Map::len) + required;
        // The keys of a constant become names too.
        self.most_names = self.most_names.max(names).max(fields.len());
        self.names += names;
        let patterns = object("patternProperties").into_iter().flat_map(Map::keys).map(String::as_str);
        let own = ["pattern", "whitespace_pattern"].into_iter().filter_map(|key| fields.get(key)?.as_str());
        for pattern in patterns.chain(own) {
            let bytes = pattern.bytes();
            self.operators += bytes.filter(|byte| b"?*+{\\".contains(byte)).count();
        }
        Ok(())
    }
}
