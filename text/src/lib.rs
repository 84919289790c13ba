//! Everything that is text: prompts to tokens, tokens to answers, and what an answer must look like.
//!
//! ```text
//! messages ─▶ ChatTemplate ─▶ prompt ─▶ Tokenizer ─▶ ids ─▶ (a model) ─▶ ids ─▶ TextStream ─▶ final text
//!                                          Grammar ─▶ Matcher ─▶ masks ─┘          │
//!                                              reasoning, answer, tool calls ◀─ ReasoningParser, ToolParser
//! ```
//!
//! | module | contents |
//! |---|---|
//! | `tokenizer` | `tokenizer.json`, the vocabularies of GGUF files, of SentencePiece, tiktoken and tekken, and `vocab.txt` |
//! | `chat` | chat templates, which run under limits |
//! | `stream`, `detokenizer`, `utf8`, `stop` | tokens to final text, one sequence at a time |
//! | `reasoning`, `channels`, `marker`, `thinking` | reasoning in front of the answer, and its limit |
//! | `tools` | tool calls: the formats, their parser, their grammars |
//! | `grammar`, `structural_tag` | JSON schemas, regular expressions, Lark, EBNF and structural tags as masks of tokens |
//!
//! This crate knows no tensor and no device. Its files come from a reader ([`Files`]).
//!
//! Invariants: no delta contains a part of a character; the deltas of a sequence add up to the same text however its tokens are
//! distributed over steps; no part of a stop string is ever returned. No content of a file or request makes this crate panic.
//!
//! Costs: a token costs time in proportion to its own text. At most three bytes plus the longest stop string are held back.
//!
//! ```
//! use std::path::Path;
//!
//! use text::{ChatInput, ChatTemplate, Tokenizer};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/tests/reference/qwen3");
//! let files = Path::new(folder);
//! let tokenizer = Tokenizer::load(files)?;
//! let template = ChatTemplate::load(files)?.ok_or("this checkpoint has no chat template")?;
//! let prompt = template.render(&ChatInput {
//!     messages: &[serde_json::json!({"role": "user", "content": "Hello!"})],
//!     tools: None,
//!     add_generation_prompt: true,
//!     continue_final_message: false,
//!     kwargs: &serde_json::Map::new(),
//! })?;
//! assert!(prompt.ends_with("<|im_start|>assistant\n"));
//! let ids = tokenizer.encode(&prompt, false)?;
//! assert_eq!(tokenizer.decode(&ids, false)?, prompt);
//! # Ok(())
//! # }
//! ```

mod channels;
mod chat;
mod detokenizer;
mod error;
mod files;
mod grammar;
mod marker;
mod reasoning;
mod stop;
mod stream;
mod structural_tag;
mod thinking;
mod thought;
mod tokenizer;
mod tools;
mod utf8;

pub use chat::{ChatInput, ChatTemplate, TemplateError};
pub use detokenizer::Detokenizer;
pub use error::LoadError;
pub use files::Files;
pub use grammar::{Grammar, GrammarError, Grammars, Mask, Matcher, with_schema_options, with_white_space};
pub use reasoning::{ReasoningFormat, ReasoningParser};
pub use stop::{Scanned, StopScanner};
pub use stream::{StreamOptions, TextDelta, TextStream};
pub use structural_tag::structural_tag;
pub use thinking::{ThinkingBudget, ThinkingLimit};
pub use thought::Thought;
pub use tokenizer::{Frame, TokenizeError, Tokenizer};
pub use tools::{Calls, Tool, ToolEvent, ToolFormat, ToolParser};
