//! The chat templates of a checkpoint and the special tokens that they refer to, from its files.

use std::path::Path;

use serde::Deserialize;
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

/// Templates that a name chooses. Where there is nothing else, the first is that of its `model_type`, and the second that of checkpoints
/// with a [`TEKKEN`].
const BUILT_IN: [(&str, &str); 3] = [
    ("deepseek_v32", include_str!("templates/deepseek_v32.jinja")),
    ("mistral", include_str!("templates/mistral.jinja")),
    ("chatml", include_str!("templates/chatml.jinja")),
];

/// Mistral's tokenizer, whose version says how conversations are written.
const TEKKEN: &str = "tekken.json";

/// Variable of the template `mistral`.
const TEKKEN_VERSION: &str = "tekken_version";

/// The part of a [`TEKKEN`] that concerns conversations.
#[derive(Deserialize)]
struct Tekken {
    config: TekkenConfig,
}

#[derive(Deserialize)]
struct TekkenConfig {
    version: String,
}

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
    /// `chat_template.json`, and `instead`, a file or a name, over all.
    pub fn find(files: &(impl Files + ?Sized), instead: Option<&Path>) -> Result<Option<Self>, LoadError> {
        let config = object(files, TOKENIZER_CONFIG)?;
        // A name of a file cannot be a template, which needs a brace to say anything about a conversation.
        let source = instead.and_then(Path::to_str).filter(|text| text.contains('{') && !Path::new(text).is_file());
        let instead = instead.filter(|_| source.is_none());
        let found = match instead.filter(|path| path.is_file()) {
            None if source.is_some() => {
                source.map(|text| ("--chat-template".to_string(), vec![(DEFAULT.to_string(), text.to_string())]))
            }
            Some(path) => {
                let file = path.display().to_string();
                let problem =
                    |error: std::io::Error| LoadError::ChatTemplate { file: file.clone(), problem: error.to_string() };
                let template = std::fs::read_to_string(path).map_err(problem)?;
                Some((file, vec![(DEFAULT.to_string(), template)]))
            }
            None => of_checkpoint(files, &config)?,
        };
        let (file, templates) = match (instead.filter(|path| !path.is_file()), found) {
            (None, Some(found)) => found,
            (None, None) => return Ok(None),
            (Some(name), found) => chosen(files, &name.display().to_string(), found)?,
        };
        let fallback = object(files, SPECIAL_TOKENS_MAP)?;
        let token = |name: &&str| {
            let text = special_text(config.get(*name)).or_else(|| special_text(fallback.get(*name)))?;
            Some((name.to_string(), Value::from(text)))
        };
        let mut special_tokens: Map<String, Value> = SPECIAL_TOKENS.iter().filter_map(token).collect();
        if templates.iter().any(|(_, template)| template.contains(TEKKEN_VERSION)) {
            special_tokens.extend(tekken_version(files)?.map(|version| (TEKKEN_VERSION.to_string(), version.into())));
        }
        Ok(Some(TemplateSource { file, templates, special_tokens }))
    }
}

/// The file with the templates of a checkpoint, and their names and sources.
type Found = (String, Vec<(String, String)>);

fn of_checkpoint(files: &(impl Files + ?Sized), config: &Map<String, Value>) -> Result<Option<Found>, LoadError> {
    if let Some(template) = template_file(files, DEFAULT, TEMPLATE_FILE)? {
        let for_tools = template_file(files, TOOL_USE, TOOL_TEMPLATE_FILE)?;
        return Ok(Some((files.locate(TEMPLATE_FILE), [template].into_iter().chain(for_tools).collect())));
    }
    let processor = object(files, PROCESSOR_FILE)?;
    for (file, map) in [(TOKENIZER_CONFIG, config), (PROCESSOR_FILE, &processor)] {
        if let Some(value) = map.get("chat_template").filter(|value| !value.is_null()) {
            let wrong = || {
                let expected = "a string, or a list of objects with `name` and `template`";
                LoadError::file(files.locate(file), "`chat_template` is of another type".to_string(), expected)
            };
            return Ok(Some((files.locate(file), named_templates(value).ok_or_else(wrong)?)));
        }
    }
    let [(deepseek, its), (mistral, other), _] = BUILT_IN;
    let is_deepseek = object(files, "config.json")?.get("model_type").is_some_and(|kind| kind == deepseek);
    let found = |name: &str, template: &str, why: &str| {
        (format!("{name}, which is built in, for {why}"), vec![(DEFAULT.to_string(), template.to_string())])
    };
    Ok(match tekken_version(files)? {
        _ if is_deepseek => Some(found(deepseek, its, "its `model_type`")),
        Some(_) => Some(found(mistral, other, TEKKEN)),
        None => None,
    })
}

/// The version of a [`TEKKEN`] in a checkpoint without another tokenizer.
fn tekken_version(files: &(impl Files + ?Sized)) -> Result<Option<u32>, LoadError> {
    if read(files, "tokenizer.json")?.is_some() {
        return Ok(None);
    }
    let Some(bytes) = read(files, TEKKEN)? else { return Ok(None) };
    let broken = |error| LoadError::json(files.locate(TEKKEN), error);
    let tekken: Tekken = serde_json::from_slice(&bytes).map_err(broken)?;
    Ok(tekken.config.version.trim_start_matches('v').parse().ok())
}

/// The template of this name.
fn chosen(files: &(impl Files + ?Sized), name: &str, found: Option<Found>) -> Result<Found, LoadError> {
    let is_word = name.chars().all(|c| c.is_ascii_alphanumeric() || "_-".contains(c));
    let further =
        if is_word { template_file(files, DEFAULT, &format!("additional_chat_templates/{name}.jinja"))? } else { None };
    let own = found.iter().flat_map(|(_, templates)| templates);
    let names: Vec<&str> = own.clone().map(|(name, _)| name.as_str()).chain(BUILT_IN.map(|(name, _)| name)).collect();
    let template = own.clone().find(|(known, _)| known == name).map(|(_, template)| template.clone());
    let template = template.or(further.map(|(_, template)| template));
    let built_in = || BUILT_IN.iter().find(|(known, _)| *known == name).map(|(_, template)| template.to_string());
    let template = template.or_else(built_in).ok_or_else(|| {
        let expected = format!("an existing file, or one of {}", names.join(", "));
        LoadError::file("--chat-template".to_string(), format!("found {name:?}"), expected)
    })?;
    Ok((format!("the one named {name}"), vec![(DEFAULT.to_string(), template)]))
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
