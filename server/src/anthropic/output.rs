//! Blocks of content, and the events that describe their growth.
//!
//! One block is open at a time. Output of another kind closes it. A whole message is what the blocks of its stream would hold.

use std::sync::Arc;

use engine::{Delta, FinishReason, StopCause};
use serde_json::{Value, json};

use super::error_json;
use super::request::Message;
use crate::app::App;
use crate::http::json::put;
use crate::http::sse::Framing;
use crate::http::{ApiError, call, sse};
use crate::reply::{Assistant, Part, Translator, Usage, arguments_object};

/// A block of content.
enum Block {
    Thinking(String),
    Text(String),
    Call { id: String, name: String, arguments: String },
}

/// Writer of one message, whole or as a stream.
pub struct Writer {
    assistant: Assistant,
    id: String,
    model: String,
    usage: Usage,
    is_cut: bool,
    streams: bool,
    /// Whether the first event has been written.
    begun: bool,
    open: Option<Block>,
    /// Number of blocks that have ended.
    num_blocks: usize,
    /// The blocks that have ended, unless they are streamed.
    content: Vec<Value>,
    /// Why it ended, and by which text.
    stop: Option<(&'static str, Option<String>)>,
    /// Events that have not been sent.
    lines: Vec<u8>,
}

impl Writer {
    /// Writer of the answer to a request.
    pub fn new(app: &Arc<App>, Message { chat, is_cut }: &Message) -> Writer {
        Writer {
            assistant: chat.assistant(app),
            id: call::fresh_id("msg").replacen('-', "_", 1),
            model: chat.options.adapter.as_ref().unwrap_or(&app.model).clone(),
            usage: Usage { prompt_tokens: chat.ids.len(), ..Usage::default() },
            is_cut: *is_cut,
            streams: chat.options.stream,
            begun: false,
            open: None,
            num_blocks: 0,
            content: Vec::new(),
            stop: None,
            lines: Vec::new(),
        }
    }

    /// The message in its current state.
    pub fn message(&self) -> Value {
        let (reason, sequence) = self.stop.clone().unzip();
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": self.content,
            "stop_reason": reason,
            "stop_sequence": sequence.flatten(),
            "usage": self.usage_json(),
        })
    }

    /// Token counts. Those of the prompt add up to its length.
    fn usage_json(&self) -> Value {
        let Usage { prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens, .. } = self.usage;
        json!({
            "input_tokens": prompt_tokens.saturating_sub(cached_tokens),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached_tokens,
            "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
            "output_tokens": completion_tokens,
            "output_tokens_details": {"thinking_tokens": reasoning_tokens},
        })
    }

    fn emit(&mut self, name: &str, mut event: Value) {
        if self.streams {
            event["type"] = name.into();
            sse::event(&mut self.lines, Some(name), |text| put(text, &event));
        }
    }

    fn emit_delta(&mut self, delta: Value) {
        self.emit("content_block_delta", json!({"index": self.num_blocks, "delta": delta}));
    }

    /// Opens a block and closes the previous one.
    fn begin(&mut self, block: Block) {
        self.close();
        let empty = match &block {
            Block::Thinking(_) => json!({"type": "thinking", "thinking": "", "signature": ""}),
            Block::Text(_) => json!({"type": "text", "text": ""}),
            Block::Call { id, name, .. } => json!({"type": "tool_use", "id": id, "name": name, "input": {}}),
        };
        self.open = Some(block);
        self.emit("content_block_start", json!({"index": self.num_blocks, "content_block": empty}));
    }

    fn close(&mut self) {
        let Some(block) = self.open.take() else { return };
        let whole = match block {
            Block::Thinking(text) => {
                // Clients send it back. The text beside it is what counts here.
                let signature = call::fresh_id("thought");
                self.emit_delta(json!({"type": "signature_delta", "signature": signature}));
                json!({"type": "thinking", "thinking": text, "signature": signature})
            }
            Block::Text(text) => json!({"type": "text", "text": text}),
            Block::Call { id, name, arguments } => {
                let input = arguments_object(&arguments);
                json!({"type": "tool_use", "id": id, "name": name, "input": input})
            }
        };
        self.emit("content_block_stop", json!({"index": self.num_blocks}));
        self.num_blocks += 1;
        if !self.streams {
            self.content.push(whole);
        }
    }

    fn add(&mut self, part: Part) {
        match part {
            Part::Reasoning(text) => {
                if !matches!(self.open, Some(Block::Thinking(_))) {
                    self.begin(Block::Thinking(String::new()));
                }
                self.grow(&text);
                self.emit_delta(json!({"type": "thinking_delta", "thinking": text}));
            }
            Part::Text(text) => {
                if !matches!(self.open, Some(Block::Text(_))) {
                    self.begin(Block::Text(String::new()));
                }
                self.grow(&text);
                self.emit_delta(json!({"type": "text_delta", "text": text}));
            }
            Part::Call { id, name, .. } => self.begin(Block::Call { id, name, arguments: String::new() }),
            Part::Arguments { text, .. } => {
                if !text.is_empty() && matches!(self.open, Some(Block::Call { .. })) {
                    self.grow(&text);
                    self.emit_delta(json!({"type": "input_json_delta", "partial_json": text}));
                }
            }
        }
    }

    /// Appends a text to the open block, unless it is streamed.
    fn grow(&mut self, more: &str) {
        if let (false, Some(Block::Thinking(text) | Block::Text(text) | Block::Call { arguments: text, .. })) =
            (self.streams, &mut self.open)
        {
            text.push_str(more);
        }
    }

    fn start(&mut self) {
        if !std::mem::replace(&mut self.begun, true) {
            let message = self.message();
            self.emit("message_start", json!({"message": message}));
        }
    }

    fn finish(&mut self, reason: &FinishReason) {
        if self.open.is_none() && self.num_blocks == 0 {
            self.begin(Block::Text(String::new()));
        }
        self.close();
        self.stop = Some(match reason {
            FinishReason::Length if self.is_cut => ("model_context_window_exceeded", None),
            FinishReason::Length => ("max_tokens", None),
            _ if self.assistant.has_called() => ("tool_use", None),
            FinishReason::Stop(Some(StopCause::Text(text))) => ("stop_sequence", Some(text.clone())),
            _ => ("end_turn", None),
        });
    }
}

impl Translator for Writer {
    const FRAMING: Framing = Framing { keep_alive: "event: ping\ndata: {\"type\": \"ping\"}\n\n", ..Framing::EVENTS };

    fn usage(&mut self) -> &mut Usage {
        &mut self.usage
    }

    fn started(&mut self) {
        self.start();
    }

    fn delta(&mut self, _: usize, delta: &Delta) {
        self.start();
        let mut parts = Vec::new();
        self.assistant.read(&delta.text, delta.finish.is_some(), |part| parts.push(part));
        parts.into_iter().for_each(|part| self.add(part));
        if let Some(reason) = &delta.finish {
            self.finish(reason);
        }
    }

    fn end(&mut self, failure: Option<ApiError>) {
        if let Some(error) = failure {
            return self.emit("error", error_json(&error));
        }
        let (reason, sequence) = self.stop.clone().unzip();
        let (delta, usage) = (json!({"stop_reason": reason, "stop_sequence": sequence.flatten()}), self.usage_json());
        self.emit("message_delta", json!({"delta": delta, "usage": usage}));
        self.emit("message_stop", json!({}));
    }

    fn write(&mut self, lines: &mut Vec<u8>) -> bool {
        let is_empty = self.lines.is_empty();
        lines.append(&mut self.lines);
        !is_empty
    }
}
