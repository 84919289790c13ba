//! The chat templates of a checkpoint and the special tokens that they refer to, from its files.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::LoadError;
use crate::files::{Files, object, read};
use crate::tokenizer::special_text;

/// Name of the template for plain conversations.
pub(super) const DEFAULT: &str = "default";
/// Name of the template for conversations with tools.
pub(super) const TOOL_USE: &str = "tool_use";

const TEMPLATE_FILE: &str = "chat_template.jinja";
const TOOL_TEMPLATE_FILE: &str = "additional_chat_templates/tool_use.jinja";
/// The older name of the file in multimodal checkpoints: an object with `chat_template`.
const PROCESSOR_FILE: &str = "chat_template.json";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";

/// Special tokens that transformers passes to a template.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The uncompiled templates of a checkpoint.
pub(super) struct TemplateSource {
    /// The file that contains them, for error messages.
    pub file: String,
    /// Names and Jinja sources.
    pub templates: Vec<(String, String)>,
    /// Text of the special tokens by name.
    pub special_tokens: Map<String, Value>,
}

impl TemplateSource {
    /// Finds the templates of a checkpoint. `chat_template.jinja` takes precedence over `tokenizer_config.json`, that over
    /// `chat_template.json`, and `instead` over all.
    pub fn find(files: &(impl Files + ?Sized), instead: Option<&Path>) -> Result<Option<Self>, LoadError> {
        let config = object(files, TOKENIZER_CONFIG)?;
        let (file, templates) = if let Some(path) = instead {
            let file = path.display().to_string();
            let problem =
                |error: std::io::Error| LoadError::ChatTemplate { file: file.clone(), problem: error.to_string() };
            let template = std::fs::read_to_string(path).map_err(problem)?;
            (file, vec![(DEFAULT.to_string(), template)])
        } else if let Some(template) = template_file(files, DEFAULT, TEMPLATE_FILE)? {
            let for_tools = template_file(files, TOOL_USE, TOOL_TEMPLATE_FILE)?;
            (files.locate(TEMPLATE_FILE), [template].into_iter().chain(for_tools).collect())
        } else {
            let processor = object(files, PROCESSOR_FILE)?;
            let stated = [(TOKENIZER_CONFIG, &config), (PROCESSOR_FILE, &processor)];
            let found = stated
                .into_iter()
                .find_map(|(file, map)| Some((file, map.get("chat_template").filter(|value| !value.is_null())?)));
            let templates = match found {
                None => return Ok(None),
                Some((file, value)) => named_templates(value).ok_or_else(|| {
                    let found = "`chat_template` is of another type".to_string();
                    let expected = "a string, or a list of objects with `name` and `template`";
                    LoadError::file(files.locate(file), found, expected)
                })?,
            };
            (files.locate(found.map_or(TOKENIZER_CONFIG, |(file, _)| file)), templates)
        };
        let fallback = object(files, SPECIAL_TOKENS_MAP)?;
        let token = |name: &&str| {
            let text = special_text(config.get(*name)).or_else(|| special_text(fallback.get(*name)))?;
            Some((name.to_string(), Value::from(text)))
        };
        let special_tokens = SPECIAL_TOKENS.iter().filter_map(token).collect();
        Ok(Some(TemplateSource { file, templates, special_tokens }))
    }
}

/// A file that is one template, with its name.
fn template_file(files: &(impl Files + ?Sized), name: &str, file: &str) -> Result<Option<(String, String)>, LoadError> {
    let Some(bytes) = read(files, file)? else { return Ok(None) };
    let text = std::str::from_utf8(&bytes)
        .map_err(|error| LoadError::ChatTemplate { file: files.locate(file), problem: error.to_string() })?;
    Ok(Some((name.to_string(), text.to_string())))
}

/// Parses `chat_template` of `tokenizer_config.json`: a string, or a list of `{name, template}`.
fn named_templates(value: &Value) -> Option<Vec<(String, String)>> {
    let text = |value: &Value| value.as_str().map(str::to_string);
    match value {
        Value::String(template) => Some(vec![(DEFAULT.to_string(), template.clone())]),
        Value::Array(list) => {
            list.iter().map(|entry| Some((text(entry.get("name")?)?, text(entry.get("template")?)?))).collect()
        }
        _ => None,
    }
}
