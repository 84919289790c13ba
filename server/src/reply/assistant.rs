//! Parses the text of a sequence into an assistant message: reasoning, content and tool calls, whole or in pieces.

use serde_json::{Value, json};
use text::{ReasoningParser, Thought, ToolEvent, ToolFormat, ToolParser};

use crate::app::App;
use crate::http::call;
use crate::request::Tools;

/// Parser for the text of one sequence.
pub struct Assistant {
    format: ToolFormat,
    reasoning: Option<ReasoningParser>,
    shows_reasoning: bool,
    tools: Option<ToolParser>,
    /// Number of tool calls so far.
    calls: usize,
    /// Number of tool calls in earlier messages.
    earlier_calls: usize,
    /// Number of tool calls to return; further ones are dropped.
    most_calls: usize,
}

/// A part of a message, in the order of the text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Reasoning before the answer.
    Reasoning(String),
    /// Text of the answer.
    Text(String),
    /// A new tool call.
    Call {
        /// Index among the calls of the message.
        index: usize,
        /// Its id.
        id: String,
        /// Name of the function.
        name: String,
    },
    /// A piece of the JSON text of a call's arguments.
    Arguments {
        /// Index of the call.
        index: usize,
        /// The piece.
        text: String,
    },
}

/// A parsed piece of text.
#[derive(Debug, Default)]
pub struct Piece {
    /// Reasoning before the answer.
    pub reasoning: String,
    /// Text of the answer.
    pub content: String,
    /// New tool calls, and further arguments of the last one.
    pub calls: Vec<CallPiece>,
}

/// A new tool call, or more arguments of the last one.
#[derive(Debug)]
pub struct CallPiece {
    /// Index among the calls of the message.
    pub index: usize,
    /// Id and name, in the first piece of a call.
    pub begun: Option<(String, String)>,
    /// A piece of the arguments' JSON text.
    pub arguments: String,
}

impl Assistant {
    /// Parser for a message. `reasoning` is `None` if it is not parsed; it is dropped unless `shows_reasoning`.
    pub fn new(app: &App, tools: &Tools, mut reasoning: Option<ReasoningParser>, shows_reasoning: bool) -> Assistant {
        let parser = tools.are_parsed().then(|| app.tool_format.parser(tools.functions.clone()));
        let most_calls = if tools.parallel { usize::MAX } else { 1 };
        if let (None, Some(reasoning)) = (&parser, &mut reasoning) {
            reasoning.ignore_calls();
        }
        Assistant {
            format: app.tool_format,
            reasoning,
            shows_reasoning,
            tools: parser,
            calls: 0,
            earlier_calls: tools.earlier_calls,
            most_calls,
        }
    }

    /// Whether the text has a tool call.
    pub fn has_called(&self) -> bool {
        self.calls > 0
    }

    /// Parses the next piece of text, which is the last one if `ended`.
    pub fn push(&mut self, text: &str, ended: bool) -> Piece {
        let mut piece = Piece::default();
        self.read(text, ended, |part| piece.add(part));
        piece
    }

    /// Like [`Assistant::push`], with the parts in the order of the text.
    pub fn read(&mut self, text: &str, ended: bool, mut each: impl FnMut(Part)) {
        let Thought { reasoning, content } = self.split_reasoning(text, ended);
        if self.shows_reasoning && !reasoning.is_empty() {
            each(Part::Reasoning(reasoning));
        }
        let Some(parser) = &mut self.tools else {
            if !content.is_empty() {
                each(Part::Text(content));
            }
            return;
        };
        let mut events = Vec::new();
        parser.push(&content, &mut events);
        if ended {
            parser.finish(&mut events);
        }
        for event in events {
            let part = match event {
                ToolEvent::Text(text) => Part::Text(text),
                ToolEvent::Call { name } => {
                    self.calls += 1;
                    let index = self.calls - 1;
                    Part::Call { index, id: call_id(self.format, &name, self.earlier_calls + index), name }
                }
                ToolEvent::Arguments(text) => Part::Arguments { index: self.calls.saturating_sub(1), text },
            };
            match &part {
                Part::Call { index, .. } | Part::Arguments { index, .. } if *index >= self.most_calls => {}
                _ => each(part),
            }
        }
    }

    fn split_reasoning(&mut self, text: &str, ended: bool) -> Thought {
        let Some(parser) = &mut self.reasoning else {
            return Thought { content: text.to_string(), ..Thought::default() };
        };
        let mut thought = parser.push(text);
        if ended {
            let Thought { reasoning, content } = parser.finish();
            thought.reasoning += &reasoning;
            thought.content += &content;
        }
        thought
    }
}

/// The arguments of a call as an object. A model may write anything: other text is its field `INVALID_JSON`, as in the documentation
/// of Anthropic's API.
pub fn arguments_object(text: &str) -> Value {
    let object = serde_json::from_str(text).ok().filter(Value::is_object);
    object.unwrap_or_else(|| json!({"INVALID_JSON": text}))
}

impl Piece {
    fn add(&mut self, part: Part) {
        match part {
            Part::Reasoning(text) => self.reasoning += &text,
            Part::Text(text) if self.content.is_empty() => self.content = text,
            Part::Text(text) => self.content += &text,
            Part::Call { index, id, name } => {
                self.calls.push(CallPiece { index, begun: Some((id, name)), arguments: String::new() });
            }
            Part::Arguments { index, text } => match self.calls.last_mut() {
                Some(call) => call.arguments += &text,
                None => self.calls.push(CallPiece { index, begun: None, arguments: text }),
            },
        }
    }

    /// Whether nothing was parsed.
    pub fn is_empty(&self) -> bool {
        self.content.is_empty() && self.calls.is_empty() && self.reasoning.is_empty()
    }
}

/// Returns an id for call number `index` of the conversation. Mistral's templates require nine letters or digits, and those of Kimi
/// write the id where the model writes the name and the number of a call; all others get a unique id.
fn call_id(format: ToolFormat, name: &str, index: usize) -> String {
    let id = call::fresh_id("call").replace('-', "_");
    match format {
        ToolFormat::Mistral => id[id.len() - 9..].to_string(),
        ToolFormat::KimiK2 => format!("functions.{name}:{index}"),
        _ => id,
    }
}
