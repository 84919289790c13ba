//! The Jinja environment of chat templates: minijinja configured to behave like the Jinja2 of transformers.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::SystemTime;

use minijinja::machinery::{CodeGenerator, Instructions, Vm, WhitespaceConfig, make_string_output, parse};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

use super::guard;
use super::python::{self, Notation, Style};
use super::rewrite;
use super::strftime::strftime;

/// Greatest number of instructions in one rendering. Hundreds of messages need tens of thousands.
const INSTRUCTION_BUDGET: u64 = 20_000_000;

/// Message of a template's `raise_exception`, stored as the source of the error that ends the rendering.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub String);

impl Raised {
    /// The message in an error that `raise_exception` caused; `None` for other errors.
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

/// The compiled templates of a checkpoint, which threads can share.
pub(super) struct Templates {
    environment: Environment<'static>,
    by_name: BTreeMap<String, Template>,
}

struct Template {
    source: &'static str,
    instructions: Instructions<'static>,
    blocks: BTreeMap<&'static str, Instructions<'static>>,
}

impl Templates {
    /// Parses and compiles named templates, rewritten to render within a budget.
    pub fn compile(templates: Vec<(String, String)>) -> Result<Templates, Error> {
        let mut by_name = BTreeMap::new();
        for (name, template) in templates {
            by_name.insert(name, Template::compile(&template)?);
        }
        Ok(Templates { environment: environment(), by_name })
    }

    pub fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    pub fn sources(&self) -> impl Iterator<Item = &str> {
        self.by_name.values().map(|template| template.source)
    }

    /// Renders a template. `input` is the size of the variables in bytes, which sets the budget.
    pub fn render(&self, name: &str, variables: Value, input: usize) -> Result<String, Error> {
        let found = self.by_name.get(name);
        let Template { instructions, blocks, .. } =
            found.ok_or_else(|| Error::new(ErrorKind::TemplateNotFound, "no such template"))?;
        let mut text = String::new();
        let mut out = make_string_output(&mut text);
        let vm = Vm::new(&self.environment);
        let render = || vm.eval(instructions, variables, blocks, &mut out, AutoEscape::None).map(drop);
        guard::with_budget(input, render)?;
        Ok(text)
    }
}

impl Template {
    fn compile(template: &str) -> Result<Template, Error> {
        // Compiled instructions borrow from the source. A process loads few models and keeps their templates until it ends.
        let source: &'static str = Box::leak(without_generation_tags(template).into_boxed_str());
        let mut whitespace = WhitespaceConfig::default();
        (whitespace.trim_blocks, whitespace.lstrip_blocks) = (true, true);
        let parsed = parse(source, "chat template", SyntaxConfig, whitespace)?;
        let mut generator = CodeGenerator::new("chat template", source);
        generator.compile_stmt(&rewrite::stmt(&parsed)?);
        let (instructions, blocks) = generator.finish();
        Ok(Template { source, instructions, blocks })
    }
}

/// An environment that behaves like the Jinja2 of transformers.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_fuel(Some(INSTRUCTION_BUDGET));
    guard::install(&mut environment);
    // Prompts are not HTML, and values print as in Python.
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_formatter(|out, _, value| {
        let text = python::str(value)?;
        guard::charge_text(text.len())?;
        out.write_str(&text).map_err(Error::from)
    });
    environment.add_filter("string", |value: Value| python::str(&value).map(Cow::into_owned));
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", |format: Cow<str>| strftime(SystemTime::now(), &format));
    environment
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
            .map_err(|_| Error::new(ErrorKind::InvalidOperation, "tojson: `separators` must be a pair of strings"))?,
        // Python writes no space at the end of a line.
        None if indent.is_some() => [",", ": "].map(String::from),
        None => [", ", ": "].map(String::from),
    };
    let flag = |name: &str| arguments.get::<Option<bool>>(name).map(|flag| flag.unwrap_or(false));
    let ensure_ascii = flag("ensure_ascii")? || ensure_ascii.unwrap_or(false);
    let style = Style { notation: Notation::Json { ensure_ascii }, sort_keys: flag("sort_keys")?, indent, item, key };
    arguments.assert_all_used()?;
    style.text(&value)
}

/// Replaces the block `{% generation %}…{% endgeneration %}` of transformers, which marks the assistant's text for training and
/// prints its body, by `{% if true %}…{% endif %}`.
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
