//! The Jinja environment of chat templates: minijinja made to behave as transformers sets up Jinja2.

use std::borrow::Cow;
use std::fmt;
use std::time::SystemTime;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::python::{self, Notation, Style};
use super::strftime::strftime;

/// Instructions that one rendering may run: hundreds of messages need some ten thousand.
const INSTRUCTION_BUDGET: u64 = 20_000_000;

/// What a template said with `raise_exception`; the source of the error that ends the rendering.
#[derive(Debug)]
pub(super) struct Raised(pub String);

impl Raised {
    /// The template's own words, if `error` comes from them.
    pub fn within(error: &Error) -> Option<&Raised> {
        let mut source = std::error::Error::source(error);
        while let Some(error) = source {
            if let Some(raised) = error.downcast_ref() {
                return Some(raised);
            }
            source = error.source();
        }
        None
    }
}

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// An environment with these templates, compiled.
pub(super) fn compile(templates: Vec<(String, String)>) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_fuel(Some(INSTRUCTION_BUDGET));
    environment.set_unknown_method_callback(unknown_method_callback);
    // Prompts are no HTML, and values print as Python prints them.
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_formatter(|out, _, value| out.write_str(&python::str(value)?).map_err(Error::from));
    environment.add_filter("string", |value: Value| python::str(&value).map(Cow::into_owned));
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", |format: Cow<str>| strftime(SystemTime::now(), &format));
    for (name, template) in templates {
        environment.add_template_owned(name, without_generation_tags(&template))?;
    }
    Ok(environment)
}

fn raise_exception(message: Value) -> Result<Value, Error> {
    let raised = Raised(message.to_string());
    Err(Error::new(ErrorKind::InvalidOperation, "raised by the template").with_source(raised))
}

/// `tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, which is `json.dumps`.
fn tojson(value: Value, ensure_ascii: Option<bool>, arguments: Kwargs) -> Result<String, Error> {
    let indent = match arguments.get::<Option<Value>>("indent")? {
        None => None,
        Some(text) if text.kind() == ValueKind::String => Some(text.to_string()),
        Some(width) => Some(" ".repeat(usize::from(u8::try_from(width)?))),
    };
    let [item, key] = match arguments.get::<Option<Vec<String>>>("separators")? {
        Some(pair) => pair
            .try_into()
            .map_err(|_| Error::new(ErrorKind::InvalidOperation, "tojson: `separators` is not a pair of texts"))?,
        // Python leaves no space at the end of a line.
        None if indent.is_some() => [",", ": "].map(String::from),
        None => [", ", ": "].map(String::from),
    };
    let flag = |name: &str| arguments.get::<Option<bool>>(name).map(|flag| flag.unwrap_or(false));
    let ensure_ascii = flag("ensure_ascii")? || ensure_ascii.unwrap_or(false);
    let style = Style { notation: Notation::Json { ensure_ascii }, sort_keys: flag("sort_keys")?, indent, item, key };
    arguments.assert_all_used()?;
    style.text(&value)
}

/// transformers knows a block `{% generation %}…{% endgeneration %}` that marks the assistant's words for training and prints its
/// body. Here it becomes a condition that always holds.
fn without_generation_tags(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        let word_at = tag.len() - tag[2..].trim_start_matches(['-', '+']).trim_start().len();
        let (opening, word) = tag.split_at(word_at);
        let length = word.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(word.len());
        let (word, after) = word.split_at(length);
        out.push_str(before);
        out.push_str(opening);
        out.push_str(match word {
            "generation" => "if true",
            "endgeneration" => "endif",
            other => other,
        });
        rest = after;
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use super::without_generation_tags;

    #[test]
    fn generation_tags_become_a_condition_and_nothing_else_changes() {
        let template = "a{%- generation -%}b{%endgeneration%}{% if generation %}{{ generation }}{% endif %}{%";
        let expected = "a{%- if true -%}b{%endif%}{% if generation %}{{ generation }}{% endif %}{%";
        assert_eq!(without_generation_tags(template), expected);
    }
}
