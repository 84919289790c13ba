//! The integration tests of texts, in one program.
#![allow(clippy::unwrap_used)]

mod bad_files;
mod chat_templates;
#[path = "../../models/tests/common/checkpoints.rs"]
mod checkpoints;
#[path = "../../device/tests/support/allocations.rs"]
mod counter;
mod ebnf;
mod grammar_bounds;
mod grammars;
mod hostile_templates;
mod reasoning;
mod reference_texts;
mod schema_keywords;
mod stop_scanner;
mod stream;
mod structural_tags;
mod token_bytes;
mod tool_formats;
mod tool_grammars;
mod tools;
