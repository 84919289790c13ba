//! Chat templates: messages become a prompt through the checkpoint's Jinja template, rendered as by transformers.
//!
//! Templates are untrusted programs. They run without access to files or imports, and with a limit on instructions and on bytes
//! ([`guard`]), so a template that loops or grows ends with an error. They are compiled and tried when the checkpoint loads. A
//! template that uses a feature that does not exist, or exhausts its budget on a short conversation, is refused then.

mod environment;
mod guard;
mod messages;
mod methods;
mod python;
mod rewrite;
mod source;
mod strftime;

use std::path::Path;

use minijinja::{ErrorKind, Value as JinjaValue, context};
use serde_json::{Map, Value, json};

use source::{DEFAULT, TOOL_USE};

use crate::error::{LoadError, one_line};
use crate::files::Files;
use environment::{Raised, Templates};
use messages::Traits;
use source::TemplateSource;

/// Appended to the final message while it is rendered, to find its end whatever the template writes around it.
const END_MARK: &str = "QUIRE_END_OF_FINAL_MESSAGE ";

/// Why a final message cannot be continued.
const NO_TEXT: &str = "the final message has no text";

/// A conversation to render.
#[derive(Clone, Copy, Debug)]
pub struct ChatInput<'a> {
    /// Messages in OpenAI's format. They are adapted to what the template can read.
    pub messages: &'a [Value],
    /// List of tool definitions in OpenAI's format.
    pub tools: Option<&'a Value>,
    /// End the prompt with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// End the prompt after the content of the final message, so that the model continues it.
    pub continue_final_message: bool,
    /// Additional variables for the template.
    pub kwargs: &'a Map<String, Value>,
}

/// Reason why a conversation cannot be rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The template refuses the conversation (`raise_exception`).
    #[error("the chat template refuses these messages: {0}")]
    Refused(String),
    /// The template cannot be used for any conversation.
    #[error("{0}; send a prompt to /v1/completions, or use a checkpoint whose template works")]
    Unusable(String),
    /// The template fails on the conversation.
    #[error("the chat template fails on these messages: {0}")]
    Failed(String),
    /// The checkpoint has a template for tools only.
    #[error("the checkpoint's only chat template is for tools; expected `tools` in the request")]
    ToolsOnly,
    /// Both ways to end a prompt are set.
    #[error("`continue_final_message` and `add_generation_prompt` are both true; expected at most one of them")]
    ConflictingEnds,
    /// There is no text to continue.
    #[error("`continue_final_message` is true, but {0}")]
    NothingToContinue(&'static str),
}

/// A checkpoint's chat template, which threads can share.
#[derive(Default)]
pub struct ChatTemplate {
    templates: Templates,
    /// The file or the name of the template.
    origin: String,
    /// Text of `bos_token`, `eos_token` and so on.
    special_tokens: Map<String, Value>,
    traits: Traits,
}

impl ChatTemplate {
    /// Compiles and tries the template of `chat_template.jinja` or `tokenizer_config.json`; `None` if there is none.
    ///
    /// # Errors
    /// A file is broken, the template is not valid Jinja, or it uses a filter, test, function or method that does not exist.
    pub fn load(files: &(impl Files + ?Sized)) -> Result<Option<Self>, LoadError> {
        ChatTemplate::load_from(files, None)
    }

    fn load_from(files: &(impl Files + ?Sized), template: Option<&Path>) -> Result<Option<Self>, LoadError> {
        let Some(TemplateSource { file, templates, special_tokens }) = TemplateSource::find(files, template)? else {
            return Ok(None);
        };
        let unusable =
            |error: minijinja::Error| LoadError::ChatTemplate { file: file.clone(), problem: one_line(error) };
        let templates = Templates::compile(templates).map_err(unusable)?;
        let mut template = ChatTemplate { templates, origin: file.clone(), special_tokens, traits: Traits::default() };
        template.try_out().map_err(unusable)?;
        let render = |messages: &[Value], tools: Option<&Value>| template.sample(messages, tools).ok();
        template.traits = Traits::of(render, |text| template.mentions(text));
        Ok(Some(template))
    }

    /// Like [`ChatTemplate::load`], but a checkpoint's template that cannot be used does not keep the model from working: every
    /// rendering fails instead. `instead`: a file whose template is used in place of it, with the checkpoint's special tokens, or the
    /// name of a template of the checkpoint or of one that is built in.
    ///
    /// # Errors
    /// A file is broken, or the template of `instead` does not exist or cannot be used.
    pub fn load_for_serving(files: &(impl Files + ?Sized), instead: Option<&Path>) -> Result<Option<Self>, LoadError> {
        match ChatTemplate::load_from(files, instead) {
            Err(error @ LoadError::ChatTemplate { .. }) if instead.is_none() => {
                let templates = Templates::unusable(error.to_string());
                Ok(Some(ChatTemplate { templates, ..ChatTemplate::default() }))
            }
            other => other,
        }
    }

    /// The file or the name of the template.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The source of the template, of several the one without tools.
    pub fn source(&self) -> Option<&str> {
        self.templates.source(DEFAULT).or(self.templates.sources().next())
    }

    /// Why the template cannot be used.
    pub fn problem(&self) -> Option<&str> {
        self.templates.problem.as_deref()
    }

    /// Like [`ChatTemplate::render`], with a template that a client sent. It is compiled for this one conversation.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`]; the template is not valid Jinja.
    pub fn render_with(&self, source: &str, input: &ChatInput) -> Result<String, TemplateError> {
        Traits::default().prompt(input, |input| {
            let (variables, bytes) = self.variables(input);
            Templates::render_source(source, variables, bytes).map_err(failed)
        })
    }

    /// The prompt of a conversation. It includes special tokens as text, so encode it without adding any.
    ///
    /// # Errors
    /// The template refuses the conversation or fails on it, or the input contradicts itself.
    pub fn render(&self, input: &ChatInput) -> Result<String, TemplateError> {
        if let Some(problem) = self.problem() {
            return Err(TemplateError::Unusable(problem.to_string()));
        }
        self.traits.prompt(input, |input| self.evaluate(input).map_err(failed))
    }

    /// Whether the source of a template contains this text, which hints at the formats that the model has learned.
    pub fn mentions(&self, text: &str) -> bool {
        self.templates.sources().any(|source| source.contains(text))
    }

    fn evaluate(&self, input: &ChatInput) -> Result<String, minijinja::Error> {
        let name = if input.tools.is_some() && self.templates.has(TOOL_USE) { TOOL_USE } else { DEFAULT };
        let (variables, bytes) = self.variables(input);
        self.templates.render(name, variables, bytes)
    }

    /// The variables of a rendering, and their size in bytes.
    fn variables(&self, input: &ChatInput) -> (JinjaValue, usize) {
        // A request may override special tokens, but not the messages or tools: names in `context!` take precedence.
        let mut variables = self.special_tokens.clone();
        variables.extend(input.kwargs.clone());
        variables.entry("documents").or_insert(Value::Null);
        let bytes = input.messages.iter().chain(input.tools).chain(variables.values()).map(text_bytes).sum();
        let variables = context! {
            messages => input.messages,
            tools => input.tools,
            add_generation_prompt => input.add_generation_prompt,
            ..JinjaValue::from_serialize(&variables)
        };
        (variables, bytes)
    }

    /// Renders a conversation of the tests at load.
    fn sample(&self, messages: &[Value], tools: Option<&Value>) -> Result<String, minijinja::Error> {
        let kwargs = &Map::new();
        self.evaluate(&ChatInput {
            messages,
            tools,
            add_generation_prompt: true,
            continue_final_message: false,
            kwargs,
        })
    }

    /// Renders conversations of several kinds. Fails if the template uses a filter, test, function or method that does not exist, or
    /// exhausts its budget. Other failures depend on the conversation and are ignored, and so is the rendered text.
    fn try_out(&self) -> Result<(), minijinja::Error> {
        let user = json!({"role": "user", "content": "Hello"});
        let call = json!({"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}});
        let conversations = [
            json!([user]),
            json!([{"role": "system", "content": "Be brief."}, user, {"role": "assistant", "content": "Hello!"}, user]),
            json!([
                user,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "2"},
            ]),
        ];
        let function =
            json!({"name": "f", "description": "A function", "parameters": {"type": "object", "properties": {}}});
        let tools = json!([{"type": "function", "function": function}]);
        for messages in conversations.iter().filter_map(Value::as_array) {
            for tools in [None, Some(&tools)] {
                match self.sample(messages, tools) {
                    Err(error) if is_unsupported(&error) => return Err(error),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

impl Traits {
    /// The prompt of a conversation that is adapted to the template which `run` renders.
    fn prompt(
        self,
        input: &ChatInput,
        run: impl Fn(&ChatInput) -> Result<String, TemplateError>,
    ) -> Result<String, TemplateError> {
        let mut messages = input.messages.to_vec();
        self.adapt(&mut messages);
        if !input.continue_final_message {
            return run(&ChatInput { messages: &messages, ..*input });
        }
        if input.add_generation_prompt {
            return Err(TemplateError::ConflictingEnds);
        }
        if input.messages.last().is_some_and(|last| last["content"].is_null()) {
            return Err(TemplateError::NothingToContinue(NO_TEXT));
        }
        let ending = final_text(&mut messages)?;
        let content = ending.trim().to_string();
        ending.push_str(END_MARK);
        let rendered = run(&ChatInput { messages: &messages, ..*input })?;

        let end = rendered.rfind(END_MARK.trim_end()).filter(|_| rendered.contains(&content));
        let end = end.ok_or(TemplateError::NothingToContinue("the chat template omits the final message"))?;
        let (prompt, rest) = rendered.split_at(end);
        // If the template trimmed the mark's space, it trims messages, and would have trimmed the end of the content too.
        Ok(if rest.starts_with(END_MARK) { prompt } else { prompt.trim_end() }.to_string())
    }
}

fn failed(error: minijinja::Error) -> TemplateError {
    match Raised::within(&error) {
        Some(Raised(message)) => TemplateError::Refused(one_line(message)),
        None if error.kind() == ErrorKind::TemplateNotFound => TemplateError::ToolsOnly,
        None => TemplateError::Failed(one_line(error)),
    }
}

/// Size of a value: bytes of all texts plus a constant per part.
fn text_bytes(value: &Value) -> usize {
    const PART: usize = 16;
    match value {
        Value::String(text) => PART + text.len(),
        Value::Array(items) => PART + items.iter().map(text_bytes).sum::<usize>(),
        Value::Object(fields) => {
            PART + fields.iter().map(|(name, value)| name.len() + text_bytes(value)).sum::<usize>()
        }
        _ => PART,
    }
}

/// Whether a template used a feature that this environment does not have, or exhausted its budget.
fn is_unsupported(error: &minijinja::Error) -> bool {
    use ErrorKind::{OutOfFuel, UnknownFilter, UnknownFunction, UnknownMethod, UnknownTest};
    matches!(error.kind(), OutOfFuel | UnknownFilter | UnknownFunction | UnknownMethod | UnknownTest)
}

/// The text at the end of the final message: its content, or its last text part.
fn final_text(messages: &mut [Value]) -> Result<&mut String, TemplateError> {
    let last = messages.last_mut().ok_or(TemplateError::NothingToContinue("there are no messages"))?;
    let text = match last.get_mut("content") {
        Some(Value::String(text)) => Some(text),
        Some(Value::Array(parts)) => parts.iter_mut().rev().find_map(|part| match part.get_mut("text") {
            Some(Value::String(text)) => Some(text),
            _ => None,
        }),
        _ => None,
    };
    text.ok_or(TemplateError::NothingToContinue(NO_TEXT))
}
