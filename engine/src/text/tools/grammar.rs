//! Required tool calls: the format of a model as a grammar that includes the schema of each function's arguments.

use models::Tokenizer;
use serde_json::Value;

use super::{ToolFormat, hermes, mistral};
use crate::grammar::{Grammar, with_bounded_whitespace};

/// A function that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Name of the function.
    pub name: String,
    /// JSON schema of its arguments; `None` accepts any object.
    pub parameters: Option<Value>,
}

impl ToolFormat {
    /// Returns a grammar that allows only calls of these functions: at least one, and exactly one unless `parallel`.
    ///
    /// ```
    /// use engine::text::{Tool, ToolFormat};
    ///
    /// # let llm = engine::Llm::new(engine::EngineConfig::default())?;
    /// let tools = [Tool { name: "now".into(), parameters: None }];
    /// let grammar = ToolFormat::Hermes.grammar(&tools, false, llm.tokenizer());
    /// assert!(matches!(grammar, engine::Grammar::Lark(text) if text.contains("<tool_call>")));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn grammar(self, tools: &[Tool], parallel: bool, tokenizer: &Tokenizer) -> Grammar {
        let (open, between, close, arguments) = match self {
            ToolFormat::Hermes => (String::new(), "\n", "", "arguments"),
            ToolFormat::Llama3Json => (String::new(), "; ", "", "parameters"),
            ToolFormat::Mistral => {
                // A special token is not text, so a grammar names it by its id.
                let token = self.special_marker(tokenizer).map(|id| format!("<[{id}]>"));
                (token.unwrap_or_else(|| quote(mistral::MARKER)) + " \"[\"", ", ", "]", "arguments")
            }
        };
        let more = if parallel { format!(" ({} call)*", quote(between)) } else { String::new() };
        let close = if close.is_empty() { String::new() } else { format!(" {}", quote(close)) };
        let mut lines = vec![format!("start: {open} call{more}{close}")];
        lines.push(match self {
            ToolFormat::Hermes => {
                format!("call: {} body {}", quote(&format!("{}\n", hermes::OPEN)), quote("\n</tool_call>"))
            }
            ToolFormat::Llama3Json | ToolFormat::Mistral => "call: body".to_string(),
        });
        let names: Vec<String> = (0..tools.len()).map(|i| format!("f{i}")).collect();
        lines.push(format!("body: {}", names.join(" | ")));
        for (name, tool) in names.iter().zip(tools) {
            let head = format!("{{\"name\": {}, \"{arguments}\": ", Value::from(tool.name.as_str()));
            lines.push(format!("{name}: {} {name}_arguments {}", quote(&head), quote("}")));
            let schema = tool.parameters.clone().unwrap_or_else(|| serde_json::json!({"type": "object"}));
            lines.push(format!("{name}_arguments: %json {}", with_bounded_whitespace(schema)));
        }
        Grammar::Lark(lines.join("\n"))
    }
}

/// Quotes a text as a Lark string, which has the syntax of JSON.
fn quote(text: &str) -> String {
    Value::from(text).to_string()
}
