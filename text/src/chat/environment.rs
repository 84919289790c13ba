//! The Jinja environment of chat templates: minijinja configured to behave like the Jinja2 of transformers.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::time::SystemTime;

use minijinja::machinery::{
    CodeGenerator, Instructions, Token, Vm, WhitespaceConfig, make_string_output, parse, tokenize,
};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

use super::guard;
use super::python::{self, Notation, Style};
use super::rewrite;
use super::strftime::strftime;

/// Greatest number of instructions in one rendering. Hundreds of messages need tens of thousands.
const INSTRUCTION_BUDGET: u64 = 20_000_000;

/// Greatest number of words and signs between `{{` or `{%` and its end. Templates have about a hundred.
const MOST_TOKENS: usize = 4096;

/// Greatest number of `elif` in a template. Templates have tens.
const MOST_BRANCHES: usize = 1024;

/// Stack of the thread that compiles, in bytes: enough for a template of the greatest depth, by an unoptimised compiler.
const COMPILER_STACK: usize = 128 << 20;

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
#[derive(Default)]
pub(super) struct Templates {
    /// Why they cannot be used.
    pub problem: Option<String>,
    environment: Environment<'static>,
    by_name: BTreeMap<String, Template<'static>>,
}

struct Template<'s> {
    source: &'s str,
    instructions: Instructions<'s>,
    blocks: BTreeMap<&'s str, Instructions<'s>>,
}

impl Templates {
    /// Parses and compiles named templates, rewritten to render within a budget.
    pub fn compile(templates: Vec<(String, String)>) -> Result<Templates, Error> {
        let mut by_name = BTreeMap::new();
        for (name, template) in templates {
            check_depth(&template)?;
            // Compiled instructions borrow from the source. A process loads few models and keeps their templates until it ends.
            let source = Box::leak(without_generation_tags(&template).into_boxed_str());
            by_name.insert(name, Template::compile(source)?);
        }
        Ok(Templates { environment: environment(), by_name, problem: None })
    }

    /// Templates that cannot be used.
    pub fn unusable(problem: String) -> Templates {
        Templates { problem: Some(problem), ..Templates::default() }
    }

    pub fn has(&self, name: &str) -> bool {
        self.by_name.contains_key(name)
    }

    pub fn source(&self, name: &str) -> Option<&str> {
        self.by_name.get(name).map(|template| template.source)
    }

    /// The sources of all templates.
    pub fn sources(&self) -> impl Iterator<Item = &str> {
        self.by_name.values().map(|template| template.source)
    }

    /// Renders a template. `input` is the size of the variables in bytes, which sets the budget.
    pub fn render(&self, name: &str, variables: Value, input: usize) -> Result<String, Error> {
        let found = self.by_name.get(name);
        let found = found.ok_or_else(|| Error::new(ErrorKind::TemplateNotFound, "no such template"))?;
        found.render(&self.environment, variables, input)
    }

    /// Compiles and renders a template that is none of these.
    pub fn render_source(source: &str, variables: Value, input: usize) -> Result<String, Error> {
        check_depth(source)?;
        let source = without_generation_tags(source);
        Template::compile(&source)?.render(&environment(), variables, input.saturating_add(source.len()))
    }
}

impl<'s> Template<'s> {
    fn render<'e>(&'e self, environment: &'e Environment<'s>, variables: Value, input: usize) -> Result<String, Error>
    where
        's: 'e,
    {
        let mut text = String::new();
        let mut out = make_string_output(&mut text);
        let vm = Vm::new(environment);
        let render = || vm.eval(&self.instructions, variables, &self.blocks, &mut out, AutoEscape::None).map(drop);
        guard::with_budget(input, render)?;
        Ok(text)
    }

    /// Compiles on a thread of its own, because the compiler recurses as deeply as the template nests.
    fn compile(template: &'s str) -> Result<Template<'s>, Error> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("chat template".to_string()).stack_size(COMPILER_STACK);
            let failed = |problem: String| Error::new(ErrorKind::InvalidOperation, problem);
            let compiler = thread.spawn_scoped(scope, || Template::compile_here(template));
            let compiler =
                compiler.map_err(|error| failed(format!("the compiler's thread does not start: {error}")))?;
            compiler.join().unwrap_or_else(|_| Err(failed("the compiler fails".to_string())))
        })
    }

    fn compile_here(source: &'s str) -> Result<Template<'s>, Error> {
        let mut whitespace = WhitespaceConfig::default();
        (whitespace.trim_blocks, whitespace.lstrip_blocks) = (true, true);
        let parsed = parse(source, "chat template", SyntaxConfig, whitespace)?;
        let mut generator = CodeGenerator::new("chat template", source);
        generator.compile_stmt(&rewrite::stmt(&parsed)?);
        let (instructions, blocks) = generator.finish();
        Ok(Template { source, instructions, blocks })
    }
}

/// Refuses a template that nests more deeply than [`COMPILER_STACK`] allows. The parser limits nested brackets and blocks, but not
/// chains of operators, which nest to the left, and not chains of `elif`.
fn check_depth(template: &str) -> Result<(), Error> {
    let too_deep = |found: &str, most: usize| {
        let problem =
            format!("found more than {most} {found}, expected at most {most}; split the expression or the condition");
        Err(Error::new(ErrorKind::SyntaxError, problem))
    };
    let (mut parts, mut branches) = (0, 0);
    for token in tokenize(template, false, SyntaxConfig, WhitespaceConfig::default()) {
        parts += 1;
        match token?.0 {
            Token::VariableStart | Token::BlockStart => parts = 0,
            Token::Ident("elif") => branches += 1,
            _ => {}
        }
        if parts > MOST_TOKENS {
            return too_deep("words in one tag", MOST_TOKENS);
        }
        if branches > MOST_BRANCHES {
            return too_deep("`elif` in one template", MOST_BRANCHES);
        }
    }
    Ok(())
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
    // It prints the variables, each as often as it has names.
    environment.remove_global("debug");
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
