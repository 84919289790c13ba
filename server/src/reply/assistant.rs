//! Parses the text of a sequence into an assistant message: reasoning, content and tool calls, whole or in pieces.

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
        let Thought { mut reasoning, content } = self.split_reasoning(text, ended);
        if !self.shows_reasoning {
            reasoning.clear();
        }
        let mut piece = Piece { reasoning, ..Piece::default() };
        let Some(parser) = &mut self.tools else {
            piece.content = content;
            return piece;
        };
        let mut events = Vec::new();
        parser.push(&content, &mut events);
        if ended {
            parser.finish(&mut events);
        }
        for event in events {
            match event {
                ToolEvent::Text(text) => piece.content += &text,
                ToolEvent::Call { name } => {
                    self.calls += 1;
                    let index = self.calls - 1;
                    let begun = Some((call_id(self.format, &name, self.earlier_calls + index), name));
                    piece.calls.push(CallPiece { index, begun, arguments: String::new() });
                }
                ToolEvent::Arguments(more) => match piece.calls.last_mut() {
                    Some(call) => call.arguments += &more,
                    None => {
                        let index = self.calls.saturating_sub(1);
                        piece.calls.push(CallPiece { index, begun: None, arguments: more });
                    }
                },
            }
        }
        piece.calls.retain(|call| call.index < self.most_calls);
        piece
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

impl Piece {
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
