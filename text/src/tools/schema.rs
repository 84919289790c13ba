//! The arguments of a call as a grammar, for formats whose arguments are not JSON.

use serde_json::{Map, Value, json};

use super::format::{Encoding, TYPED};
use super::grammar::{Piece, Writer, json_string};
use super::types::Types;
use crate::grammar::lark::{excluding, quote};

/// The terminal of a name.
const NAME: (&str, &str) = ("NAME", "/[A-Za-z_][A-Za-z0-9_]{0,63}/");

impl Writer<'_> {
    /// The arguments of [`Encoding::Tags`].
    pub fn tags(&mut self, schema: &Value) -> String {
        let Encoding::Tags { key, key_end, value, value_end, has_lines, typed } = self.spec.arguments else {
            return String::new();
        };
        let line = if has_lines { "\n" } else { "" };
        let gap = if has_lines || !value.is_empty() { "\n" } else { "" };
        let closing = format!("{line}{value_end}");
        // From a key to its value, which is text or JSON.
        let opening = |is_text: bool| {
            let typed = if typed { format!("{TYPED}{is_text}") } else { String::new() };
            format!("{typed}{key_end}{gap}{value}")
        };
        let suffix = format!("[suffix={}]", quote(&closing));
        let free = self.rule_with(&suffix, "/(?s:.*)/");
        self.define_once("PLAIN", "/(?s:.*)/ & ~/(?s:\\s*[\\[\\{].*)/");
        let plain = self.rule_with(&suffix, "PLAIN");
        let Some(properties) = schema["properties"].as_object() else {
            self.define_once(NAME.0, NAME.1);
            let text = format!("{} {free}", quote(&opening(true)));
            let json =
                typed.then(|| format!(" | {} {} {}", quote(&opening(false)), self.json(json!({})), quote(&closing)));
            return format!("({} NAME ({text}{}) \"\\n\")*", quote(key), json.unwrap_or_default());
        };
        let mut all = Vec::new();
        for (name, property) in properties {
            if self.is_full() {
                break;
            }
            let types = Types::of_property(Some(schema), name);
            let mut options: Vec<(bool, String)> = Vec::new();
            match texts_of(property) {
                Some(texts) => {
                    let texts: Vec<String> = texts.iter().map(|text| quote(text)).collect();
                    options.push((true, format!("({}) {}", texts.join(" | "), quote(&closing))));
                }
                None if types.are_text() || property.as_object().is_some_and(Map::is_empty) => {
                    options.push((true, free.clone()));
                }
                None => {
                    options.push((false, format!("{} {}", self.json(part_of(schema, property)), quote(&closing))));
                    // A string has no quotation marks, and what looks like JSON is read as JSON.
                    if types.have_text() {
                        options.push((true, if typed { free.clone() } else { plain.clone() }));
                    }
                }
            }
            let pair = |(is_text, value): &(bool, String)| {
                format!("{} {value} \"\\n\"", quote(&format!("{key}{name}{}", opening(*is_text))))
            };
            let pair = options.iter().map(pair).collect::<Vec<_>>().join(" | ");
            all.push(if is_required(schema, name) { format!("({pair})") } else { format!("({pair})?") });
        }
        all.join(" ")
    }

    /// A value of a schema, which is a part of `root`, as a literal that is not JSON.
    pub fn literal(&mut self, root: &Value, schema: &Value) -> String {
        if self.is_full() {
            return String::new();
        }
        if let Some(values) =
            schema["enum"].as_array().cloned().or_else(|| schema.get("const").map(|one| vec![one.clone()]))
        {
            let values: Vec<String> = values.iter().map(|value| self.constant(value)).collect();
            return format!("({})", values.join(" | "));
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(options) = schema[key].as_array() {
                let options: Vec<String> = options.iter().map(|option| self.literal(root, option)).collect();
                return format!("({})", options.join(" | "));
            }
        }
        if let Some(path) = schema["$ref"].as_str() {
            return self.reference(root, path);
        }
        let mut kinds: Vec<&str> = match &schema["type"] {
            Value::Array(kinds) => kinds.iter().filter_map(Value::as_str).collect(),
            Value::String(kind) => vec![kind],
            _ if schema["properties"].is_object() => vec!["object"],
            _ if schema.get("items").is_some() => vec!["array"],
            _ => Vec::new(),
        };
        kinds.sort_unstable();
        kinds.dedup();
        let options: Vec<String> = kinds.iter().map(|kind| self.literal_of(root, schema, kind)).collect();
        if options.is_empty() { self.any() } else { format!("({})", options.join(" | ")) }
    }

    /// A value of a schema and of this type.
    fn literal_of(&mut self, root: &Value, schema: &Value, kind: &str) -> String {
        let is_python = self.spec.arguments == Encoding::Python;
        match kind {
            "string" if !is_python => self.marked_text(),
            "string" | "integer" | "number" => {
                let mut part = part_of(root, schema);
                part["type"] = kind.into();
                self.json(part)
            }
            "boolean" if is_python => "(\"True\" | \"False\")".to_string(),
            "boolean" => "(\"true\" | \"false\")".to_string(),
            "null" => if is_python { "\"None\"" } else { "\"null\"" }.to_string(),
            "array" => self.list(root, schema),
            "object" if schema["properties"].is_object() => {
                let pairs = self.pairs(root, schema, if is_python { ": " } else { ":" });
                format!("\"{{\" {pairs} \"}}\"")
            }
            "object" => {
                self.any();
                "any_object".to_string()
            }
            _ => self.any(),
        }
    }

    fn list(&mut self, root: &Value, schema: &Value) -> String {
        let item = self.literal(root, &schema["items"]);
        let (item, separator) = (self.rule(&item), quote(self.separator()));
        let least = schema["minItems"].as_u64().unwrap_or(0);
        let optional = if least == 0 { "?" } else { "" };
        let more = match (least.saturating_sub(1), schema["maxItems"].as_u64()) {
            (_, Some(0)) => return "\"[]\"".to_string(),
            (least, Some(most)) => format!("{{{least},{}}}", most - 1),
            (0, None) => "*".to_string(),
            (least, None) => format!("{{{least},}}"),
        };
        format!("\"[\" ({item} ({separator} {item}){more}){optional} \"]\"")
    }

    /// A value of the definition at `path`, which is written later.
    fn reference(&mut self, root: &Value, path: &str) -> String {
        let Some(path) = path.strip_prefix('#').filter(|path| root.pointer(path).is_some()) else { return self.any() };
        if let Some((_, rule)) = self.references.iter().find(|(known, _)| known == path) {
            return rule.clone();
        }
        let rule = self.name();
        self.references.push((path.to_string(), rule.clone()));
        rule
    }

    fn separator(&self) -> &'static str {
        if self.spec.arguments == Encoding::Python { ", " } else { "," }
    }

    /// The properties of an object: those that are required, and any of the others, in the order of the schema.
    pub fn pairs(&mut self, root: &Value, schema: &Value, equals: &str) -> String {
        let separator = quote(self.separator());
        let properties: Vec<(String, Value)> = schema["properties"]
            .as_object()
            .into_iter()
            .flatten()
            .map(|(name, one)| (name.clone(), one.clone()))
            .collect();
        // From the last to the first: the rest of the properties, at the beginning and after another one.
        let (mut first, mut later) = ("\"\"".to_string(), "\"\"".to_string());
        for (name, property) in properties.iter().rev() {
            let value = self.literal(root, property);
            let key = if equals == ": " { json_string(name) } else { name.clone() };
            let pair = self.rule(&format!("{} {value}", quote(&format!("{key}{equals}"))));
            let is_required = is_required(schema, name);
            let next = if is_required { String::new() } else { format!(" | {first}") };
            let new_first = self.rule(&format!("{pair} {later}{next}"));
            let next = if is_required { String::new() } else { format!(" | {later}") };
            later = self.rule(&format!("{separator} {pair} {later}{next}"));
            first = new_first;
        }
        first
    }

    /// A string between two markers.
    fn marked_text(&mut self) -> String {
        let Encoding::Bare(mark) = self.spec.arguments else { return String::new() };
        match self.text(mark) {
            Piece::Token(id) => {
                self.define_once("MARKED", &format!("/(?s:.*)/{}", excluding(&[], [mark])));
                format!("<[{id}]> MARKED? <[{id}]>")
            }
            _ => {
                let text = self.rule_with(&format!("[suffix={}]", quote(mark)), "/(?s:.*)/");
                format!("{} {text}", quote(mark))
            }
        }
    }

    /// A constant, as a literal.
    fn constant(&self, value: &Value) -> String {
        match (self.spec.arguments, value) {
            (Encoding::Python, Value::Bool(true)) => quote("True"),
            (Encoding::Python, Value::Bool(false)) => quote("False"),
            (Encoding::Python, Value::Null) => quote("None"),
            (Encoding::Bare(mark), Value::String(text)) => match self.text(mark) {
                Piece::Token(id) => format!("<[{id}]> {} <[{id}]>", quote(text)),
                _ => quote(&format!("{mark}{text}{mark}")),
            },
            _ => quote(&value.to_string()),
        }
    }

    /// Any value, as a literal.
    pub fn any(&mut self) -> String {
        if self.known.contains("any") {
            return "any".to_string();
        }
        self.define_once(NAME.0, NAME.1);
        let number = "/-?[0-9]{1,18}(\\.[0-9]{1,18})?/";
        let (text, words, key) = if self.spec.arguments == Encoding::Python {
            let text = self.json(json!({"type": "string"}));
            (text.clone(), "\"True\" | \"False\" | \"None\"", format!("{text} \": \""))
        } else {
            (self.marked_text(), "\"true\" | \"false\" | \"null\"", "NAME \":\"".to_string())
        };
        let separator = quote(self.separator());
        self.define_once("any", &format!("{text} | {number} | {words} | any_list | any_object"));
        self.define_once("any_list", &format!("\"[\" (any ({separator} any)*)? \"]\""));
        self.define_once("any_object", &format!("\"{{\" ({key} any ({separator} {key} any)*)? \"}}\""));
        "any".to_string()
    }
}

/// The strings that a schema lists, if it lists only strings.
fn texts_of(schema: &Value) -> Option<Vec<String>> {
    let texts = |values: &[Value]| values.iter().map(|value| value.as_str().map(str::to_string)).collect();
    match (&schema["enum"], schema.get("const")) {
        (Value::Array(values), _) => texts(values),
        (_, Some(one)) => texts(std::slice::from_ref(one)),
        _ => None,
    }
}

fn is_required(schema: &Value, name: &str) -> bool {
    schema["required"].as_array().is_some_and(|names| names.iter().any(|one| one == name))
}

/// A part of a schema as a schema of its own, with the definitions that it may refer to.
fn part_of(root: &Value, part: &Value) -> Value {
    let mut part = part.clone();
    for key in ["$defs", "definitions", "x-guidance"] {
        if let (Some(fields), Some(found)) = (part.as_object_mut(), root.get(key)) {
            fields.entry(key).or_insert_with(|| found.clone());
        }
    }
    part
}
