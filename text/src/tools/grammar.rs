//! Tool calls as a grammar: the format of a model, with the schema of each function's arguments.

use std::collections::HashSet;

use serde_json::{Value, json};

use super::format::{Encoding, Part, Place, Spec};
use super::{ToolFormat, special_token};
use crate::grammar::lark::{excluding, quote, regex};
use crate::grammar::with_default_options;
use crate::marker::HARMONY;
use crate::{Grammar, Tokenizer};

/// Greatest size of a grammar in bytes. Definitions are repeated for every property that refers to one.
const MAX_BYTES: usize = 16 << 20;

/// A function that may be called.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Name of the function.
    pub name: String,
    /// JSON schema of its arguments, with the options that [`with_schema_options`](crate::with_schema_options) sets; `None` accepts
    /// any object.
    pub parameters: Option<Value>,
}

/// What a [grammar](ToolFormat::grammar) of tool calls allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Calls {
    /// Nothing but one call.
    One,
    /// Nothing but calls, at least one.
    Several,
    /// Any text, in which each call that begins is a valid call. It does not begin with this text, which opens the reasoning, and
    /// spells a marker of a call only where a call begins.
    Optional(Option<&'static str>),
}

impl ToolFormat {
    /// Returns a grammar of calls of these functions.
    ///
    /// With [`Calls::Optional`] the text is free up to a marker of the format, and the grammar then applies up to the end of the
    /// call. In formats without a marker, it applies if the text begins with a call.
    ///
    /// ```
    /// use text::{Calls, Grammar, Tokenizer, Tool, ToolFormat};
    ///
    /// # let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo");
    /// # let tokenizer = Tokenizer::load(std::path::Path::new(demo))?;
    /// let tools = [Tool { name: "now".into(), parameters: None }];
    /// let grammar = ToolFormat::Hermes.grammar(&tools, Calls::One, &tokenizer)?;
    /// assert!(matches!(grammar, Grammar::Lark(text) if text.contains("<tool_call>")));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// One line: the grammar would be too large.
    pub fn grammar(self, tools: &[Tool], calls: Calls, tokenizer: &Tokenizer) -> Result<Grammar, String> {
        let (rules, references) = (Vec::new(), Vec::new());
        let mut writer =
            Writer { spec: self.spec(), tokenizer, rules, bytes: 0, known: HashSet::new(), next: 0, references };
        let start = writer.calls(tools, calls);
        if writer.is_full() {
            let problem = "found schemas whose grammar takes more than";
            return Err(format!("{problem} {MAX_BYTES} bytes; use fewer references to definitions, or smaller ones"));
        }
        let rules = writer.rules.join("\n");
        Ok(Grammar::Lark(format!("start: {start}\n{rules}")))
    }
}

/// A piece of a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    Text(String),
    /// A special token is not text, so a grammar names it by its id.
    Token(u32),
    /// A terminal.
    Terminal(&'static str),
}

/// The head of a function's call, and the grammar of its arguments.
type Body = (Vec<Piece>, String);

/// Writes the rules of a grammar.
pub(super) struct Writer<'a> {
    pub spec: &'static Spec,
    tokenizer: &'a Tokenizer,
    pub rules: Vec<String>,
    /// Size of the rules.
    bytes: usize,
    /// Rules of fixed names that exist.
    pub known: HashSet<&'static str>,
    next: usize,
    /// Definitions that the function being written refers to, and their rules.
    pub references: Vec<(String, String)>,
}

impl Writer<'_> {
    /// Adds a rule and returns its name.
    pub fn rule(&mut self, body: &str) -> String {
        self.rule_with("", body)
    }

    /// Adds a rule with attributes.
    pub fn rule_with(&mut self, attributes: &str, body: &str) -> String {
        let name = self.name();
        self.define(&format!("{name}{attributes}"), body);
        name
    }

    pub fn name(&mut self) -> String {
        self.next += 1;
        format!("r{}", self.next)
    }

    /// Adds a rule of this name, unless it exists.
    pub fn define_once(&mut self, name: &'static str, body: &str) {
        if self.known.insert(name) {
            self.define(name, body);
        }
    }

    fn define(&mut self, name: &str, body: &str) {
        self.bytes += name.len() + body.len();
        if !self.is_full() {
            self.rules.push(format!("{name}: {body}"));
        }
    }

    pub fn is_full(&self) -> bool {
        self.bytes > MAX_BYTES
    }

    /// Adds a rule for JSON of a schema.
    pub fn json(&mut self, schema: Value) -> String {
        self.rule(&format!("%json {}", with_default_options(schema)))
    }

    pub fn text(&self, text: &str) -> Piece {
        special_token(self.tokenizer, text).map_or_else(|| Piece::Text(text.to_string()), Piece::Token)
    }

    /// The usual writing of parts.
    fn parts(&self, parts: &[Part], name: &str) -> Vec<Piece> {
        let piece = |part: &Part| match part {
            Part::Text(text) | Part::Usual(text) | Part::Space(text) | Part::Separator(text) => self.text(text),
            Part::Maybe(_) => Piece::Text(String::new()),
            Part::Name(_) => Piece::Text(name.to_string()),
            Part::Id(_) => Piece::Terminal("/:[0-9]{1,6}/"),
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
                self.define("FREE", &format!("/(?s:.+)/{}", excluding(&[], HARMONY)));
                let answer = [self.text("<|channel|>"), self.text("final"), self.text("<|message|>")];
                format!("{first} {more} {end} | {} FREE?", sequence(answer.to_vec()))
            }
            Calls::Optional(not) => {
                let rest = format!("{more} {end}");
                let names: Vec<String> = tools.iter().map(|tool| tool.name.clone()).collect();
                self.optional((&names, &bodies), not, [&tail, &rest, &first])
            }
        }
    }

    /// The head and the rule of the arguments of a function.
    fn body(&mut self, tool: &Tool) -> Body {
        let mut schema = tool.parameters.clone().filter(Value::is_object).unwrap_or_else(|| json!({}));
        let target = schema["$ref"].as_str().and_then(|path| schema.pointer(path.strip_prefix('#')?)).cloned();
        if let (Some(fields), Some(Value::Object(target))) = (schema.as_object_mut(), target) {
            fields.remove("$ref");
            for (key, value) in target {
                fields.entry(key).or_insert(value);
            }
        }
        if schema["type"].as_array().map_or(schema["type"].is_null(), |types| types.contains(&json!("object"))) {
            schema["type"] = "object".into();
        }
        let mut head = self.parts(self.spec.head, &tool.name);
        let arguments = match self.spec.arguments {
            Encoding::Json => self.json(schema.clone()),
            Encoding::Object { name: name_key, arguments, .. } => {
                let name = json_string(&tool.name);
                head.push(Piece::Text(format!("{{\"{name_key}\": {name}, \"{arguments}\": ")));
                format!("{} \"}}\"", self.json(schema.clone()))
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
        // A definition may refer to others, and to itself.
        let mut written = 0;
        while let Some((path, rule)) = self.references.get(written).cloned() {
            let body = schema.pointer(&path).map_or_else(String::new, |target| self.literal(&schema, target));
            self.define(&rule, &body);
            written += 1;
        }
        self.references.clear();
        (head, self.rule(&arguments))
    }

    /// Free text with calls in it, as the body of the rule `start`.
    fn optional(
        &mut self,
        (names, bodies): (&[String], &[Body]),
        not: Option<&str>,
        [tail, rest, first]: [&str; 3],
    ) -> String {
        let spec = self.spec;
        let lead = self.parts(spec.lead, "");
        // Where no call has a marker, text does not include the white space in front, which may be that of a call.
        let (free, first_character) =
            if spec.place == Place::StartOr(None) { ("SPACE? FREE?", "\\S") } else { ("FREE?", ".") };
        let mut excluded: Vec<String> = not.iter().map(|text| format!("\\s*{}.*", regex(text))).collect();
        let quoted = names.iter().map(|name| regex(&json_string(name))).collect::<Vec<_>>().join("|");
        if spec.place != Place::Anywhere {
            // The text of a call from its first character on.
            let names = names.iter().map(|name| regex(name)).collect::<Vec<_>>().join("|");
            excluded.push(match spec.arguments {
                // Text that begins with an object is no call if the name is none of these, however it is written.
                Encoding::Object { .. } => {
                    let lead: String = spec.markers().map(|text| format!("({}\\s*)?", regex(text))).collect();
                    format!("[\\s,;]*{lead}\\{{.*\"name\"\\s*:\\s*({quoted}|\"[^\"]*\\\\).*")
                }
                Encoding::Json => {
                    let between = spec.between.iter().filter_map(Part::text).map(|text| format!("({})?", regex(text)));
                    let between = between.collect::<Vec<_>>().concat();
                    format!("\\s*{between}({names})[^\\S\\n]*\\n\\s*\\{{.*")
                }
                _ => format!("\\s*\\[\\s*({names})\\s*\\(.*"),
            });
        }
        // Calls without markers are found beside those with markers, at the beginning.
        if spec.variants.iter().any(|variant| variant.place != Place::Anywhere) {
            let name = format!("({quoted}|\"[^\"]*\\\\)");
            excluded.push(format!("\\s*(```(json)?\\s*)?\\{{\\s*\"name\"\\s*:\\s*{name}.*"));
        }
        // A call may begin with the text around the calls, or directly.
        let mut markers: Vec<(&str, usize)> = Vec::new();
        let mut parts = spec.lead.iter().chain(spec.head).enumerate();
        let is_written = |part: &Part| matches!(part, Part::Text(_) | Part::Usual(_) | Part::Name(_));
        let outer = parts.clone().find(|(_, part)| is_written(part));
        let inner = parts.find(|(_, part)| matches!(part, Part::Text(_) | Part::Name(_)));
        for (at, part) in [outer, inner].into_iter().flatten() {
            if let Some(text) = part.text()
                && (spec.place == Place::Anywhere || spec.place == Place::StartOr(Some(text)))
                && markers.iter().all(|(_, known)| *known != at)
            {
                markers.push((text, at));
            }
        }
        let mut segments: Vec<String> = Vec::new();
        for (marker, at) in &markers {
            let (marker, at) = (*marker, *at);
            let continued = match lead.get(at + 1..) {
                Some(rest) => choice(rest, bodies, tail),
                None => {
                    let inner = |(head, arguments): &Body| (head[at + 1 - lead.len()..].to_vec(), arguments.clone());
                    choice(&[], &bodies.iter().map(inner).collect::<Vec<_>>(), tail)
                }
            };
            let continued = self.rule(&continued);
            let before = match self.text(marker) {
                Piece::Token(id) => format!("{free} <[{id}]>"),
                _ => {
                    let others = markers.iter().map(|(other, _)| *other).filter(|other| *other != marker);
                    let until = format!("UNTIL{at}");
                    self.define(&until, &format!("/(?s:.*)/{}", excluding(&excluded, others)));
                    self.rule_with(&format!("[suffix={}]", quote(marker)), &until)
                }
            };
            segments.push(format!("{before} {continued} {rest}"));
        }
        let mut starts: Vec<String> = Vec::new();
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
        for variant in spec.variants.iter().filter(|variant| variant.place == Place::StartOr(None)) {
            starts.push(format!("{} {free}", self.unmarked(variant, (names, bodies))));
        }
        // The parser reads text, so a marker that is a special token must not be spelled with others either.
        let not = excluding(&excluded, markers.iter().map(|(text, _)| *text));
        self.define("FREE", &format!("/(?s:{first_character}.*)/{not}"));
        self.define("SPACE", "/\\s+/");
        if !segments.is_empty() {
            starts.push(format!("({})* {free}", self.rule(&segments.join(" | "))));
        } else {
            starts.push(free.to_string());
        }
        starts.join(" | ")
    }
}

impl Writer<'_> {
    /// Calls without a marker, at the beginning of the text: an object with line breaks or without. What is around its arguments is one
    /// terminal: a shorter one would lose against free text, of which the longest counts.
    fn unmarked(&mut self, variant: &Spec, (names, bodies): (&[String], &[Body])) -> String {
        const GAP: &str = "\\s{0,20}";
        let around = |parts: &[Part]| {
            let written = parts.iter().map(|part| match part {
                Part::Maybe(text) => format!("({})?", regex(text)),
                Part::Space(_) | Part::Separator(_) => GAP.to_string(),
                _ => part.text().map_or_else(String::new, regex),
            });
            written.collect::<String>()
        };
        let Encoding::Object { name: name_key, arguments: arguments_key, .. } = variant.arguments else {
            return String::new();
        };
        let mut terminal = |body: &str| {
            let name = self.name().to_uppercase();
            self.define(&name, body);
            name
        };
        let (lead, more) = (terminal(&format!("/{}/", around(variant.lead))), terminal(&format!("/{GAP}/")));
        let mut rules = [Vec::new(), Vec::new()];
        for (name, (_, arguments)) in names.iter().zip(bodies) {
            let name = regex(&json_string(name));
            // The brace is written by its number, so that it is not counted as an open bracket.
            let object = format!("/\\x7b{GAP}\"{name_key}\": ?{name},{GAP}\"{arguments_key}\": ?/");
            let object = terminal(&object);
            for (before, rules) in [&lead, &more].into_iter().zip(&mut rules) {
                rules.push(format!("{} {arguments}", terminal(&format!("{before} {object}"))));
            }
        }
        let [first, others] = rules.map(|rules| self.rule(&rules.join(" | ")));
        let end = around(variant.end);
        let end = if end.is_empty() { String::new() } else { format!("/{end}/") };
        format!("{first} {others}* {end}")
    }
}

/// A name as JSON writes it.
pub(super) fn json_string(name: &str) -> String {
    Value::from(name).to_string()
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
        Piece::Terminal(terminal) => terminal.to_string(),
    });
    written.collect::<Vec<_>>().join(" ")
}
