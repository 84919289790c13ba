//! Structural tags: vLLM's grammars of text in which tags may occur, each with a form for what it contains.
//!
//! Both forms are translated to Lark: xgrammar's formats (`{"type": "structural_tag", "format": …}`), and the older list of
//! structures with triggers, which is one of these formats. Text up to a trigger or an end is as short as possible, so it contains none.

use serde_json::{Value, json};

use crate::grammar::lark::{excluding, quote};
use crate::{Grammar, with_schema_options};

/// Translates a structural tag, as an object or as its JSON text.
///
/// ```
/// let tag = serde_json::json!({"type": "structural_tag", "triggers": ["<f>"],
///     "structures": [{"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}]});
/// assert!(matches!(text::structural_tag(&tag), Ok(text::Grammar::Lark(_))));
/// ```
///
/// # Errors
/// One line: a part is malformed or of a type that is not supported.
pub fn structural_tag(tag: &Value) -> Result<Grammar, String> {
    let parsed: Value;
    let tag = match tag {
        Value::String(text) => {
            parsed = serde_json::from_str(text).map_err(|error| format!("found no JSON: {error}"))?;
            &parsed
        }
        other => other,
    };
    let mut writer = Writer { rules: String::new(), next: 0 };
    let start = match (&tag["format"], &tag["structures"]) {
        (Value::Null, Value::Array(structures)) => {
            let of = |one: &Value| {
                let content = json!({"type": "json_schema", "json_schema": one["schema"]});
                json!({"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]})
            };
            let tags: Vec<Value> = structures.iter().map(of).collect();
            writer.format(&json!({"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}))?
        }
        (format, _) => writer.format(format)?,
    };
    Ok(Grammar::Lark(format!("start: {start}\n{}", writer.rules)))
}

struct Writer {
    rules: String,
    next: usize,
}

impl Writer {
    /// Adds a rule, or a terminal if its name begins with a capital letter, and returns its name.
    fn define(&mut self, name: &str, attributes: &str, body: &str) -> String {
        self.next += 1;
        let name = format!("{name}{}", self.next);
        self.rules.push_str(&format!("{name}{attributes}: {body}\n"));
        name
    }

    /// The rule of a format.
    fn format(&mut self, format: &Value) -> Result<String, String> {
        let body = match format["type"].as_str() {
            Some("const_string") => quote(text(format, "value")?),
            Some("any_text") => {
                let any = self.define("ANY", "", "/(?s:.+)/");
                format!("{any}?")
            }
            Some("json_schema") => match &format["json_schema"] {
                schema @ (Value::Object(_) | Value::Bool(_)) => {
                    format!("%json {}", with_schema_options(schema.clone(), false))
                }
                _ => return Err("expected a JSON schema in json_schema of a format".to_string()),
            },
            Some("regex") => format!("/{}/", slashed(text(format, "pattern")?)),
            Some("sequence") => self.all(format, "elements", " ")?,
            Some("or") => self.all(format, "elements", " | ")?,
            Some("tag") => self.tag(format, text(format, "begin")?)?,
            Some("triggered_tags") => self.triggered(format)?,
            Some("tags_with_separator") => {
                let tag = self.all(format, "tags", " | ")?;
                let separator = quote(text(format, "separator")?);
                let is_one = format["stop_after_first"] == true;
                let list = if is_one { tag.clone() } else { format!("{tag} ({separator} {tag})*") };
                if format["at_least_one"] == true { list } else { format!("({list})?") }
            }
            found => {
                let found = found.unwrap_or("no type").chars().take(40).collect::<String>();
                return Err(format!(
                    "found the format {found:?}, expected const_string, any_text, json_schema, regex, sequence, or, tag, \
                     triggered_tags or tags_with_separator"
                ));
            }
        };
        Ok(self.define("r", "", &body))
    }

    /// A list of formats, joined by a text.
    fn all(&mut self, format: &Value, key: &str, by: &str) -> Result<String, String> {
        let list = format[key].as_array().filter(|list| !list.is_empty());
        let list = list.ok_or_else(|| format!("expected a list of formats in {key}"))?;
        let parts: Vec<String> = list.iter().map(|one| self.format(one)).collect::<Result<_, _>>()?;
        Ok(format!("({})", parts.join(by)))
    }

    /// A tag, whose beginning is replaced by `begin`.
    fn tag(&mut self, tag: &Value, begin: &str) -> Result<String, String> {
        let end = text(tag, "end")?;
        let content = match tag["content"]["type"].as_str() {
            Some("any_text") if !end.is_empty() => {
                let text = self.define("r", &format!("[suffix={}]", quote(end)), "/(?s:.*)/");
                return Ok(format!("{} {text}", quote(begin)));
            }
            _ => self.format(&tag["content"])?,
        };
        Ok(format!("{} {content} {}", quote(begin), quote(end)))
    }

    /// Text in which tags begin with triggers.
    fn triggered(&mut self, format: &Value) -> Result<String, String> {
        let list = |key: &str| {
            let list = format[key].as_array().filter(|list| !list.is_empty());
            list.ok_or_else(|| format!("expected a list in {key} of triggered tags"))
        };
        let triggers: Option<Vec<&str>> =
            list("triggers")?.iter().map(|one| one.as_str().filter(|text| !text.is_empty())).collect();
        let triggers = triggers.ok_or("expected texts in triggers")?;
        let mut parts = Vec::new();
        let mut tags: Vec<Vec<String>> = vec![Vec::new(); triggers.len()];
        for tag in list("tags")? {
            let begin = text(tag, "begin")?;
            let at = triggers.iter().position(|trigger| begin.starts_with(trigger));
            let at = at.ok_or_else(|| format!("found the tag {begin:?}, expected that it begins with a trigger"))?;
            let rest = self.tag(tag, &begin[triggers[at].len()..])?;
            tags[at].push(rest);
        }
        for (trigger, tags) in triggers.iter().zip(&tags).filter(|(_, tags)| !tags.is_empty()) {
            let others = triggers.iter().copied().filter(|other| other != trigger);
            let until = self.define("UNTIL", "", &format!("/(?s:.*)/{}", excluding(&[], others)));
            let before = self.define("r", &format!("[suffix={}]", quote(trigger)), &until);
            parts.push(format!("{before} ({})", tags.join(" | ")));
        }
        let part = self.define("r", "", &parts.join(" | "));
        let free = self.define("FREE", "", &format!("/(?s:.+)/{}", excluding(&[], triggers.iter().copied())));
        Ok(match (format["at_least_one"] == true, format["stop_after_first"] == true) {
            (true, true) => part,
            (false, true) => format!("{part} | {free}?"),
            (true, false) => format!("{part}+ {free}?"),
            (false, false) => format!("{part}* {free}?"),
        })
    }
}

fn text<'a>(format: &'a Value, key: &str) -> Result<&'a str, String> {
    format[key].as_str().ok_or_else(|| format!("expected a text in {key} of a structural tag"))
}

/// A regular expression between slashes.
fn slashed(expression: &str) -> String {
    let mut all = String::new();
    let mut is_escaped = false;
    for c in expression.chars() {
        match c {
            '/' if !is_escaped => all.push_str("\\/"),
            '\n' => all.push_str(if is_escaped { "n" } else { "\\n" }),
            c => all.push(c),
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    all
}
