//! Tool calls as a grammar: the format of a model, with the schema of each function's arguments.

use std::fmt::Write;

use models::Tokenizer;
use serde_json::{Value, json};

use super::format::{Encoding, Part, Place, Spec};
use super::{ToolFormat, special_token};
use crate::grammar::{Grammar, with_bounded_whitespace};

/// A function that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Name of the function.
    pub name: String,
    /// JSON schema of its arguments; `None` accepts any object.
    pub parameters: Option<Value>,
}

/// What a [grammar](ToolFormat::grammar) of tool calls allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// Nothing but one call.
    One,
    /// Nothing but calls, at least one.
    Several,
    /// Any text, in which each call that begins is a valid call. It does not begin with this text, which opens the reasoning.
    Optional(Option<&'static str>),
}

impl ToolFormat {
    /// Returns a grammar of calls of these functions.
    ///
    /// With [`Calls::Optional`] the text is free up to a marker of the format, and the grammar then applies up to the end of the
    /// call. In formats without a marker, it applies if the text begins with a call.
    ///
    /// ```
    /// use engine::text::{Calls, Tool, ToolFormat};
    ///
    /// # let llm = engine::Llm::new(engine::EngineConfig::default())?;
    /// let tools = [Tool { name: "now".into(), parameters: None }];
    /// let grammar = ToolFormat::Hermes.grammar(&tools, Calls::One, llm.tokenizer());
    /// assert!(matches!(grammar, engine::Grammar::Lark(text) if text.contains("<tool_call>")));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn grammar(self, tools: &[Tool], calls: Calls, tokenizer: &Tokenizer) -> Grammar {
        let mut writer = Writer { spec: self.spec(), tokenizer, rules: Vec::new(), next: 0 };
        let start = writer.calls(tools, calls);
        let rules = writer.rules.join("\n");
        Grammar::Lark(format!("start: {start}\n{rules}"))
    }
}

/// A piece of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Piece {
    Text(String),
    /// A special token is not text, so a grammar names it by its id.
    Token(u32),
}

/// The head of a function's call, and the grammar of its arguments.
type Body = (Vec<Piece>, String);

/// Writes the rules of a grammar.
struct Writer<'a> {
    spec: &'static Spec,
    tokenizer: &'a Tokenizer,
    rules: Vec<String>,
    next: usize,
}

impl Writer<'_> {
    /// Adds a rule and returns its name.
    fn rule(&mut self, body: &str) -> String {
        self.rule_with("", body)
    }

    /// Adds a rule with attributes.
    fn rule_with(&mut self, attributes: &str, body: &str) -> String {
        let name = format!("r{}", self.next);
        self.next += 1;
        self.rules.push(format!("{name}{attributes}: {body}"));
        name
    }

    /// Adds a rule for JSON of a schema.
    fn json(&mut self, schema: Value) -> String {
        self.rule(&format!("%json {}", with_bounded_whitespace(schema)))
    }

    fn text(&self, text: &str) -> Piece {
        special_token(self.tokenizer, text).map_or_else(|| Piece::Text(text.to_string()), Piece::Token)
    }

    /// The usual writing of parts.
    fn parts(&self, parts: &[Part], name: &str) -> Vec<Piece> {
        let piece = |part: &Part| match part {
            Part::Text(text) | Part::Usual(text) | Part::Space(text) => self.text(text),
            Part::Maybe(_) => Piece::Text(String::new()),
            Part::Name(_) => Piece::Text(name.to_string()),
            Part::Index => Piece::Text(":0".to_string()),
        };
        parts.iter().map(piece).collect()
    }

    /// The calls, as the body of the rule `start`.
    fn calls(&mut self, tools: &[Tool], calls: Calls) -> String {
        let spec = self.spec;
        let bodies: Vec<_> = tools.iter().map(|tool| self.body(tool)).collect();
        let tail = sequence(self.parts(spec.tail, ""));
        let end = sequence(self.parts(spec.end, ""));
        let first = choice(&self.parts(spec.lead, ""), &bodies, &tail);
        let more = choice(&self.parts(spec.between, ""), &bodies, &tail);
        let first = self.rule(&first);
        let more = format!("({})*", self.rule(&more));
        match calls {
            Calls::One => format!("{first} {end}"),
            Calls::Several => format!("{first} {more} {end}"),
            Calls::Optional(_) if self.spec.format == ToolFormat::Harmony => {
                // Everything is a message: an answer is one too.
                self.rules.push("FREE: /(?s:.+)/".to_string());
                let answer = [self.text("<|channel|>"), self.text("final"), self.text("<|message|>")];
                format!("{first} {more} {end} | {} FREE?", sequence(answer.to_vec()))
            }
            Calls::Optional(not) => {
                let rest = format!("{more} {end}");
                self.optional(&bodies, not, [&tail, &rest, &first])
            }
        }
    }

    /// The head and the rule of the arguments of a function.
    fn body(&mut self, tool: &Tool) -> Body {
        let schema = tool.parameters.clone().unwrap_or_else(|| json!({"type": "object"}));
        let mut head = self.parts(self.spec.head, &tool.name);
        let arguments = match self.spec.arguments {
            Encoding::Json => self.json(schema),
            Encoding::Object(key) => {
                let name = Value::from(tool.name.as_str());
                head.push(Piece::Text(format!("{{\"name\": {name}, \"{key}\": ")));
                format!("{} \"}}\"", self.json(schema))
            }
            Encoding::Tags { .. } => self.tags(&schema),
            Encoding::Bare(_) => self.literal(&schema, &schema),
            Encoding::Python if schema["properties"].is_object() => {
                let pairs = self.pairs(&schema, &schema, "=");
                format!("{pairs} \")\"")
            }
            Encoding::Python => {
                let any = self.any();
                format!("(NAME \"=\" {any} (\", \" NAME \"=\" {any})*)? \")\"")
            }
        };
        (head, arguments)
    }

    /// Free text with calls in it, as the body of the rule `start`.
    fn optional(&mut self, bodies: &[Body], not: Option<&str>, [tail, rest, first]: [&str; 3]) -> String {
        let spec = self.spec;
        let lead = self.parts(spec.lead, "");
        // Where no call has a marker, text does not include the white space in front, which may be that of a call.
        let (free, first_character) =
            if spec.place == Place::StartOr(None) { ("SPACE? FREE?", "\\S") } else { ("FREE?", ".") };
        let mut excluded: Vec<String> = not.iter().map(|text| format!("\\s*{}.*", regex(text))).collect();
        if spec.place != Place::Anywhere {
            // The text of a call from its first character on.
            let beginnings: Vec<String> = match spec.arguments {
                Encoding::Object(_) => vec!["\\s*\\{\\s*\"name\"\\s*:.*".to_string()],
                _ => {
                    let names = bodies.iter().flat_map(|(head, _)| head.first()).map(|name| match name {
                        Piece::Text(name) => regex(name),
                        _ => String::new(),
                    });
                    vec![format!("\\s*\\[\\s*({})\\s*\\(.*", names.collect::<Vec<_>>().join("|"))]
                }
            };
            excluded.extend(beginnings);
        }
        let before = excluding(&excluded);
        self.rules.push(format!("UNTIL: /(?s:.*)/{before}"));
        let mut segments: Vec<String> = Vec::new();
        let mut starts: Vec<String> = Vec::new();
        // A call may begin with the text around the calls, or directly.
        let mut markers: Vec<(Piece, usize)> = Vec::new();
        let mut parts = spec.lead.iter().chain(spec.head).enumerate();
        let is_written = |part: &Part| matches!(part, Part::Text(text) | Part::Usual(text) if !text.is_empty());
        let outer = parts.clone().find(|(_, part)| is_written(part) || matches!(part, Part::Name(_)));
        let inner = parts.find(|(_, part)| matches!(part, Part::Text(_) | Part::Name(_)));
        for (at, part) in [outer, inner].into_iter().flatten() {
            if let Part::Text(text) | Part::Usual(text) = part
                && (spec.place == Place::Anywhere || spec.place == Place::StartOr(Some(text)))
                && markers.iter().all(|(_, known)| *known != at)
            {
                markers.push((self.text(text), at));
            }
        }
        for (marker, at) in markers {
            let continued = match lead.get(at + 1..) {
                Some(rest) => choice(rest, bodies, tail),
                None => {
                    let inner = |(head, arguments): &Body| (head[at + 1 - lead.len()..].to_vec(), arguments.clone());
                    choice(&[], &bodies.iter().map(inner).collect::<Vec<_>>(), tail)
                }
            };
            let continued = self.rule(&continued);
            let before = match &marker {
                Piece::Token(id) => format!("{free} <[{id}]>"),
                Piece::Text(text) => {
                    excluded.push(format!(".*{}.*", regex(text)));
                    self.rule_with(&format!("[suffix={}]", quote(text)), "UNTIL")
                }
            };
            segments.push(format!("{before} {continued} {rest}"));
        }
        if spec.place != Place::Anywhere {
            starts.push(match spec.place {
                // The marker is optional: without it the call begins with the next part.
                Place::StartOr(Some(_)) => {
                    let direct = choice(lead.get(1..).unwrap_or_default(), bodies, tail);
                    format!("{} {rest} {free}", self.rule(&direct))
                }
                _ => format!("SPACE? {first} {rest} {free}"),
            });
        }
        let not = excluding(&excluded);
        self.rules.push(format!("FREE: /(?s:{first_character}.*)/{not}"));
        self.rules.push("SPACE: /\\s+/".to_string());
        if !segments.is_empty() {
            starts.push(format!("({})* {free}", self.rule(&segments.join(" | "))));
        } else {
            starts.push(free.to_string());
        }
        starts.join(" | ")
    }

    /// The arguments of [`Encoding::Tags`].
    fn tags(&mut self, schema: &Value) -> String {
        let Encoding::Tags { key, key_end, value, value_end, has_lines } = self.spec.arguments else {
            return String::new();
        };
        let line = if has_lines { "\n" } else { "" };
        let (opening, closing) = (format!("{key_end}\n{value}"), format!("{line}{value_end}"));
        let free = self.rule_with(&format!("[suffix={}]", quote(&closing)), "/(?s:.*)/");
        let Some(properties) = schema["properties"].as_object() else {
            self.define_name();
            return format!("({} NAME {} {free} \"\\n\")*", quote(key), quote(&opening));
        };
        let mut all = Vec::new();
        for (name, property) in properties {
            let texts = texts_of(property);
            let types = super::types::Types::of_property(Some(schema), name);
            let value = match texts {
                Some(texts) => {
                    let texts: Vec<String> = texts.iter().map(|text| quote(text)).collect();
                    format!("({}) {}", texts.join(" | "), quote(&closing))
                }
                None if types.are_text() => free.clone(),
                None => format!("{} {}", self.json(part_of(schema, property)), quote(&closing)),
            };
            let pair = format!("{} {value} \"\\n\"", quote(&format!("{key}{name}{opening}")));
            all.push(if is_required(schema, name) { pair } else { format!("({pair})?") });
        }
        all.join(" ")
    }

    /// A value of a schema, which is a part of `root`, as a literal that is not JSON.
    fn literal(&mut self, root: &Value, schema: &Value) -> String {
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
        let is_python = self.spec.arguments == Encoding::Python;
        match &schema["type"] {
            Value::Array(types) => {
                let one = |kind: &Value| {
                    let mut schema = schema.clone();
                    schema["type"] = kind.clone();
                    schema
                };
                let options: Vec<String> = types.iter().map(one).map(|option| self.literal(root, &option)).collect();
                format!("({})", options.join(" | "))
            }
            Value::String(kind) => match kind.as_str() {
                "string" if is_python => self.json(part_of(root, schema)),
                "string" => self.marked_text(),
                "integer" | "number" => self.json(part_of(root, schema)),
                "boolean" if is_python => "(\"True\" | \"False\")".to_string(),
                "boolean" => "(\"true\" | \"false\")".to_string(),
                "null" => if is_python { "\"None\"" } else { "\"null\"" }.to_string(),
                "array" if schema.get("items").is_some() => {
                    let item = self.literal(root, &schema["items"]);
                    let item = self.rule(&item);
                    let separator = quote(self.separator());
                    let optional = if schema["minItems"].as_u64().unwrap_or(0) == 0 { "?" } else { "" };
                    format!("\"[\" ({item} ({separator} {item})*){optional} \"]\"")
                }
                "object" if schema["properties"].is_object() => {
                    let pairs = self.pairs(root, schema, if is_python { ": " } else { ":" });
                    format!("\"{{\" {pairs} \"}}\"")
                }
                "object" => {
                    self.any();
                    "any_object".to_string()
                }
                _ => self.any(),
            },
            _ => self.any(),
        }
    }

    fn separator(&self) -> &'static str {
        if self.spec.arguments == Encoding::Python { ", " } else { "," }
    }

    /// The properties of an object: those that are required, and any of the others, in the order of the schema.
    fn pairs(&mut self, root: &Value, schema: &Value, equals: &str) -> String {
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
            let key = if equals == ": " { Value::from(name.as_str()).to_string() } else { name.clone() };
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
            Piece::Token(id) => format!("<[{id}]> /(?s:.*)/ <[{id}]>"),
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
    fn any(&mut self) -> String {
        if self.rules.iter().any(|rule| rule.starts_with("any:")) {
            return "any".to_string();
        }
        self.define_name();
        let number = "/-?[0-9]{1,18}(\\.[0-9]{1,18})?/";
        let (text, words, key) = if self.spec.arguments == Encoding::Python {
            let text = self.json(json!({"type": "string"}));
            (text.clone(), "\"True\" | \"False\" | \"None\"", format!("{text} \": \""))
        } else {
            (self.marked_text(), "\"true\" | \"false\" | \"null\"", "NAME \":\"".to_string())
        };
        let separator = quote(self.separator());
        self.rules.push(format!("any: {text} | {number} | {words} | any_list | any_object"));
        self.rules.push(format!("any_list: \"[\" (any ({separator} any)*)? \"]\""));
        self.rules.push(format!("any_object: \"{{\" ({key} any ({separator} {key} any)*)? \"}}\""));
        "any".to_string()
    }

    fn define_name(&mut self) {
        if self.rules.iter().all(|rule| !rule.starts_with("NAME:")) {
            self.rules.push("NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}/".to_string());
        }
    }
}

/// A call of one of the functions, behind `before`.
fn choice(before: &[Piece], bodies: &[Body], tail: &str) -> String {
    let one = |(head, arguments): &Body| format!("{} {arguments} {tail}", sequence([before, head].concat()));
    bodies.iter().map(one).collect::<Vec<_>>().join(" | ")
}

/// Joins neighbouring texts, and leaves out empty ones.
fn merged(pieces: Vec<Piece>) -> Vec<Piece> {
    let mut all: Vec<Piece> = Vec::new();
    for piece in pieces {
        match (all.last_mut(), piece) {
            (_, Piece::Text(more)) if more.is_empty() => {}
            (Some(Piece::Text(text)), Piece::Text(more)) => text.push_str(&more),
            (_, piece) => all.push(piece),
        }
    }
    all
}

fn sequence(pieces: Vec<Piece>) -> String {
    let written = merged(pieces).into_iter().map(|piece| match piece {
        Piece::Text(text) => quote(&text),
        Piece::Token(id) => format!("<[{id}]>"),
    });
    written.collect::<Vec<_>>().join(" ")
}

/// Restricts a terminal to texts that match none of these regular expressions.
fn excluding(expressions: &[String]) -> String {
    expressions.iter().fold(String::new(), |mut all, one| {
        let _ = write!(all, " & ~/(?s:{one})/");
        all
    })
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

/// Quotes a text as a Lark string, which has the syntax of JSON.
fn quote(text: &str) -> String {
    Value::from(text).to_string()
}

/// A regular expression of exactly this text, between slashes.
fn regex(text: &str) -> String {
    text.chars().fold(String::new(), |mut all, c| {
        if "\\.+*?()|[]{}^$/&~-#".contains(c) {
            all.push('\\');
        }
        all.push(c);
        all
    })
}
