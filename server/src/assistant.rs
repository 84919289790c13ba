//! The text of a sequence becomes an assistant's message, whole or piece by piece.

use std::sync::Arc;

use engine::text::{ReasoningParser, Thought, ToolEvent, ToolFormat, ToolParser};
use serde_json::{Value, json};

use super::app::App;
use super::tools::Tools;

/// Splits one sequence's text.
pub struct Assistant {
    app: Arc<App>,
    reasoning: Option<ReasoningParser>,
    tools: Option<Box<dyn ToolParser>>,
    /// Calls that have begun.
    calls: usize,
    /// Calls that are told of; others are dropped.
    most_calls: usize,
}

/// What a piece of text says.
#[derive(Debug, Default)]
pub struct Said {
    /// Thoughts.
    pub reasoning: String,
    /// Text that is meant for the reader.
    pub content: String,
    /// Calls that begin or go on.
    pub calls: Vec<CallPiece>,
}

/// A call, or more of its arguments.
#[derive(Debug)]
pub struct CallPiece {
    index: usize,
    /// Id and name, with the first piece.
    pub begun: Option<(String, String)>,
    /// More of the arguments' JSON text.
    pub arguments: String,
}

impl Assistant {
    /// In front of a message of a chat with these tools. `reasoning` where thoughts are split off: whether the text begins
    /// within them.
    pub fn new(app: &Arc<App>, tools: &Tools, reasoning: Option<bool>) -> Assistant {
        let parser = tools.are_parsed().then(|| app.tool_format.parser(tools.names()));
        let most_calls = if tools.parallel { usize::MAX } else { 1 };
        let reasoning = reasoning.map(ReasoningParser::new);
        Assistant { app: app.clone(), reasoning, tools: parser, calls: 0, most_calls }
    }

    /// Whether a function has been called.
    pub fn has_called(&self) -> bool {
        self.calls > 0
    }

    /// Takes the next piece of text, the last one if `ended`.
    pub fn hear(&mut self, text: &str, ended: bool) -> Said {
        let Thought { reasoning, content } = self.think(text, ended);
        let mut said = Said { reasoning, ..Said::default() };
        let Some(parser) = &mut self.tools else {
            said.content = content;
            return said;
        };
        let mut events = Vec::new();
        parser.push(&content, &mut events);
        if ended {
            parser.finish(&mut events);
        }
        for event in events {
            match event {
                ToolEvent::Text(text) => said.content += &text,
                ToolEvent::Call { name } => {
                    self.calls += 1;
                    let (index, begun) = (self.calls - 1, Some((call_id(&self.app), name)));
                    said.calls.push(CallPiece { index, begun, arguments: String::new() });
                }
                ToolEvent::Arguments(more) => match said.calls.last_mut() {
                    Some(call) => call.arguments += &more,
                    None => {
                        let index = self.calls.saturating_sub(1);
                        said.calls.push(CallPiece { index, begun: None, arguments: more });
                    }
                },
            }
        }
        said.calls.retain(|call| call.index < self.most_calls);
        said
    }

    /// Splits off the thoughts.
    fn think(&mut self, text: &str, ended: bool) -> Thought {
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

impl Said {
    /// As `message` of a whole answer.
    pub fn message(self) -> Value {
        let calls: Vec<Value> = self.calls.into_iter().map(CallPiece::json).collect();
        let mut message = json!({"role": "assistant", "content": self.content});
        // Calls, or thoughts to the token limit, may be all there is.
        if self.content.is_empty() && !(calls.is_empty() && self.reasoning.is_empty()) {
            message["content"] = Value::Null;
        }
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
        }
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = self.reasoning.into();
        }
        message
    }

    /// As `delta` of a stream; without fields if nothing was said.
    pub fn delta(self) -> Value {
        let mut delta = json!({});
        if !self.reasoning.is_empty() {
            delta["reasoning_content"] = self.reasoning.into();
        }
        if !self.content.is_empty() {
            delta["content"] = self.content.into();
        }
        if !self.calls.is_empty() {
            let piece = |call: CallPiece| {
                let index = call.index;
                let mut json = call.json();
                json["index"] = index.into();
                json
            };
            delta["tool_calls"] = self.calls.into_iter().map(piece).collect();
        }
        delta
    }
}

impl CallPiece {
    fn json(self) -> Value {
        match self.begun {
            None => json!({"function": {"arguments": self.arguments}}),
            Some((id, name)) => {
                json!({"id": id, "type": "function", "function": {"name": name, "arguments": self.arguments}})
            }
        }
    }
}

/// Mistral's templates demand nine letters or digits.
fn call_id(app: &App) -> String {
    let id = app.fresh_id("call").replace('-', "_");
    if app.tool_format == ToolFormat::Mistral { id[id.len() - 9..].to_string() } else { id }
}
