//! Translates the arguments of a command, word by word.

use std::collections::VecDeque;
use std::ffi::OsString;

use clap::{Arg, ArgAction, Command};
use serde_json::{Map, Value};

use super::notation::{self, Spelled, is_flag, merge, parse_value};
use super::{Dialect, Fate, Foreign, Kind, is_switch, own};
use crate::error::CliError;
use crate::values;

/// Arguments of this program, and a line for each flag without effect.
#[derive(Debug)]
pub struct Translation {
    pub arguments: Vec<OsString>,
    pub notes: Vec<String>,
}

/// Translates the arguments that follow the name of a command.
pub fn translate(dialect: &Dialect, command: &Command, arguments: Vec<OsString>) -> Result<Translation, CliError> {
    let mut words = Words { given: arguments.into() };
    // The port of the other program, if it is another than ours. A flag that follows counts instead.
    let first = dialect.get("port").and_then(|port| port.default).filter(|port| *port != "8000");
    let mut translator = Translator::new(dialect, command, words.names_a_model());
    translator.done.arguments.extend(first.map(|port| format!("--port={port}").into()));
    while let Some(word) = words.given.pop_front() {
        let Some(spelled) = word.to_str().and_then(|text| Spelled::read(dialect, text)) else {
            if word == "--" {
                translator.finish()?;
                translator.done.arguments.push(word);
                translator.done.arguments.extend(words.given);
                return Ok(translator.done);
            }
            translator.has_model = true;
            translator.done.arguments.push(word);
            continue;
        };
        translator.flag(spelled, word, &mut words)?;
    }
    translator.finish()?;
    Ok(translator.done)
}

/// The words that are not read yet.
struct Words {
    given: VecDeque<OsString>,
}

impl Words {
    /// Whether a flag or a word after `--` names the model.
    fn names_a_model(&self) -> bool {
        let is_model = |word: &OsString| word.to_str().is_some_and(|text| text.split('=').next() == Some("--model"));
        let after = self.given.iter().skip_while(|word| *word != "--").count();
        after > 1 || self.given.iter().any(is_model)
    }

    /// The next word, if it is a value.
    fn value(&mut self) -> Option<OsString> {
        self.given.front().filter(|word| !is_flag(word))?;
        self.given.pop_front()
    }

    fn values(&mut self) -> Vec<OsString> {
        std::iter::from_fn(|| self.value()).collect()
    }
}

struct Translator<'a> {
    dialect: &'a Dialect,
    command: &'a Command,
    done: Translation,
    /// Values of flags that are JSON objects, in the order in which they began.
    objects: Map<String, Value>,
    /// A word names the model, so that further words do not.
    has_model: bool,
    revision: Option<String>,
    tokenizer_revision: Option<String>,
}

impl<'a> Translator<'a> {
    fn new(dialect: &'a Dialect, command: &'a Command, has_model: bool) -> Translator<'a> {
        Translator {
            dialect,
            command,
            done: Translation { arguments: Vec::new(), notes: Vec::new() },
            objects: Map::new(),
            has_model,
            revision: None,
            tokenizer_revision: None,
        }
    }

    /// The flag of this program or of the other one, and whether its name begins with `no-`.
    fn flag(&mut self, spelled: Spelled, word: OsString, words: &mut Words) -> Result<(), CliError> {
        let Spelled { name, path, value } = spelled;
        let positive = name.strip_prefix("no-").unwrap_or(&name);
        if let Some(arg) = own(self.command, &name) {
            return self.own(arg, path, value, words);
        }
        if let Some(foreign) = self.dialect.get(&name).filter(|flag| flag.fate != Fate::Ours) {
            return self.foreign(foreign, false, path, value, words);
        }
        if positive != name {
            if let Some(arg) = own(self.command, positive).filter(|arg| is_switch(arg)) {
                no_value(&name, value)?;
                self.push(arg, Some("false"));
                return Ok(());
            }
            if let Some(foreign) = self.dialect.get(positive).filter(|flag| flag.kind == Kind::Switch) {
                return self.foreign(foreign, true, path, value, words);
            }
        }
        match self.dialect.unique(positive) {
            Some(flag) if self.dialect.get(&name).is_none() => {
                let whole = if positive == name { flag.name.to_string() } else { format!("no-{}", flag.name) };
                self.flag(Spelled { name: whole, path, value }, word, words)
            }
            // The parser of the command line says what is wrong.
            _ => {
                self.done.arguments.push(word);
                Ok(())
            }
        }
    }

    /// A flag of this program.
    fn own(
        &mut self,
        arg: &Arg,
        path: Option<String>,
        value: Option<String>,
        words: &mut Words,
    ) -> Result<(), CliError> {
        let name = arg.get_long().unwrap_or_default();
        let kind = self.dialect.get(name).filter(|flag| flag.fate == Fate::Ours).map(|flag| flag.kind);
        if is_switch(arg) || !arg.get_action().takes_values() {
            self.push(arg, value.as_deref());
            return Ok(());
        }
        let takes_many = arg.get_num_args().is_some_and(|count| count.max_values() > 1);
        if takes_many || kind.is_none() && path.is_none() {
            self.push(arg, value.as_deref());
            let limit = if takes_many { usize::MAX } else { usize::from(value.is_none()) };
            let given: Vec<OsString> = std::iter::from_fn(|| words.value()).take(limit).collect();
            self.done.arguments.extend(given);
            return Ok(());
        }
        let value = match value {
            Some(value) => value,
            None => match words.value().map(OsString::into_string) {
                Some(Ok(value)) => value,
                // The parser of the command line says what is wrong.
                Some(Err(value)) => {
                    self.done.arguments.extend([format!("--{name}").into(), value]);
                    return Ok(());
                }
                None => {
                    self.push(arg, None);
                    return Ok(());
                }
            },
        };
        let is_list = matches!(arg.get_action(), ArgAction::Append);
        match (kind, path) {
            (Some(Kind::Json), path) if !is_list => self.object(name, path.as_deref(), &value)?,
            (_, Some(path)) => {
                let found =
                    format!("--{name}.{path}: found a key, expected --{name} alone: its value is no JSON object");
                return Err(CliError::Usage(found));
            }
            (Some(Kind::Json), None) if value.starts_with('[') => {
                let items: Vec<String> = serde_json::from_str(&value).map_err(|error| {
                    CliError::Usage(format!(
                        "--{name}: found {value:?}, expected a list of texts such as [\"*\"]: {error}"
                    ))
                })?;
                items.iter().for_each(|item| self.push(arg, Some(item)));
            }
            (Some(Kind::List), None) => {
                self.push(arg, Some(&value));
                // With a model elsewhere, the words that follow are further values.
                while let Some(more) = self.has_model.then(|| words.value()).flatten() {
                    self.push(arg, Some(&more.to_string_lossy()));
                }
            }
            (_, None) if value == "None" && name != "model" => {}
            // The other program's word for no value.
            (_, None) if value == "-1" && self.dialect.get(name).is_some_and(|flag| flag.default == Some("-1")) => {}
            // The other program takes more threads than cores.
            (Some(Kind::Whole), None) if name == "threads" && values::cores_below(&value).is_some() => {
                let cores = values::cores_below(&value).unwrap_or(1);
                self.note(&format!("{name} {value}"), &format!("all {cores} cores that this process may use are used"));
            }
            (_, None) => {
                if name == "revision" {
                    self.revision = Some(value.clone());
                }
                self.push(arg, Some(&value));
            }
        }
        Ok(())
    }

    /// Puts a flag of this program into the arguments. The last one of a name counts.
    fn push(&mut self, arg: &Arg, value: Option<&str>) {
        let name = arg.get_long().unwrap_or_default();
        self.done.arguments.push(value.map_or(format!("--{name}"), |value| format!("--{name}={value}")).into());
    }

    /// Sets the value of a flag that is a JSON object, or the value of a key of it.
    fn object(&mut self, name: &str, path: Option<&str>, value: &str) -> Result<(), CliError> {
        let wrong =
            |found: &str, expected: &str| CliError::Usage(format!("--{name}: found {found:?}, expected {expected}"));
        let update = match path {
            Some(path) => notation::nested(path, value).ok_or_else(|| wrong(path, "a key, or keys with dots"))?,
            None if matches!(value, "None" | "") => return Ok(()),
            None => match serde_json::from_str(value) {
                Ok(Value::Object(object)) => {
                    self.objects.insert(name.to_string(), Value::Object(object));
                    return Ok(());
                }
                // The parser of the flag says what is wrong.
                _ => {
                    self.done.arguments.push(format!("--{name}={value}").into());
                    return Ok(());
                }
            },
        };
        merge(self.objects.entry(name).or_insert(Value::Null), update);
        Ok(())
    }

    /// A flag of the other program.
    fn foreign(
        &mut self,
        flag: &Foreign,
        negated: bool,
        path: Option<String>,
        value: Option<String>,
        words: &mut Words,
    ) -> Result<(), CliError> {
        let name = flag.name;
        let problem =
            |found: &str, expected: &str| CliError::Usage(format!("--{name}: found {found:?}, expected {expected}"));
        let (value, is_default) = match flag.kind {
            Kind::Switch => match value.as_deref() {
                None => (String::new(), negated),
                Some("true" | "True") => (String::new(), negated),
                Some("false" | "False") => (String::new(), !negated),
                Some(other) => return Err(problem(other, &format!("--{name} or --no-{name} without a value"))),
            },
            Kind::List => {
                let rest: Vec<String> =
                    words.values().into_iter().map(|word| word.to_string_lossy().into_owned()).collect();
                let all: Vec<String> = value.into_iter().chain(rest).collect();
                (all.join(" "), all.is_empty() || all == ["None"])
            }
            _ => {
                let next = || words.value().map(|word| word.to_string_lossy().into_owned());
                let value =
                    value.or_else(next).ok_or_else(|| CliError::Usage(format!("--{name}: expected a value")))?;
                let unset = matches!(value.as_str(), "None" | "" | "{}" | "[]" | "null");
                (value.clone(), path.is_none() && (unset || flag.default == Some(&value)))
            }
        };
        if !is_default {
            let (is_valid, expected) = match flag.kind {
                Kind::Whole => (value.parse::<i64>().is_ok(), "a whole number"),
                Kind::Number => (value.parse::<f64>().is_ok(), "a number"),
                Kind::Human => (parse_value(&value).is_number() || value == "auto", "a number such as 4096, 4K or 4k"),
                _ => (true, ""),
            };
            if !is_valid {
                return Err(problem(&value, expected));
            }
        }
        match flag.fate {
            Fate::NoEffect(why) => self.note(name, why),
            Fate::Only(values, why) if is_default || values.contains(&value.as_str()) => self.note(name, why),
            Fate::Only(values, why) => {
                let mut all: Vec<&str> = values.to_vec();
                all.extend(flag.default.filter(|default| !values.contains(default)));
                let expected = if all.is_empty() { "no such flag".to_string() } else { all.join(" or ") };
                return Err(problem(&value, &format!("{expected}: {why}")));
            }
            Fate::Refused(_) if is_default => {}
            Fate::Refused(advice) => {
                let advice = format!("--{name}: expected no such flag here: {advice}");
                return Err(CliError::Usage(advice));
            }
            // Defaults of the other program are not those of this one: only a value that is given counts.
            Fate::Renamed(_) | Fate::Part(..) | Fate::SameRevision if matches!(value.as_str(), "None" | "") => {}
            Fate::Renamed(_) | Fate::Part(..) if is_default && matches!(value.as_str(), "-1" | "0") => {}
            Fate::Renamed(ours) => self.done.arguments.push(format!("--{ours}={value}").into()),
            Fate::Part(ours, key) => self.object(ours, Some(key), &value)?,
            Fate::SameRevision => self.tokenizer_revision = Some(value),
            Fate::Pooler | Fate::StructuredOutputs => {
                let object = match path.as_deref() {
                    Some(path) => notation::nested(path, &value),
                    None => Some(serde_json::from_str(&value).unwrap_or(Value::String(value.clone()))),
                };
                let object = object.as_ref().and_then(Value::as_object).filter(|_| !is_default);
                match object {
                    Some(object) => self.settings(flag, object)?,
                    None if is_default => {}
                    None => return Err(problem(&value, "a JSON object")),
                }
            }
            // Not a flag of this command, which its parser says.
            Fate::Ours => self.done.arguments.push(format!("--{name}").into()),
        }
        Ok(())
    }

    fn note(&mut self, name: &str, why: &str) {
        let line = format!("--{name} has no effect: {why}");
        if !self.done.notes.contains(&line) {
            self.done.notes.push(line);
        }
    }

    /// The keys of `--pooler-config` or `--structured-outputs-config`.
    fn settings(&mut self, flag: &Foreign, object: &Map<String, Value>) -> Result<(), CliError> {
        let (name, is_pooler) = (flag.name, flag.fate == Fate::Pooler);
        for (key, value) in object {
            let is_neutral = matches!(value, Value::Null | Value::Bool(false)) || value == "auto" || value == "";
            match (key.as_str(), value.as_str()) {
                (_, _) if is_neutral => {}
                ("pooling_type" | "seq_pooling_type", Some(kind)) if is_pooler => {
                    self.done.arguments.push(format!("--pooling-type={}", kind.to_lowercase()).into());
                }
                // So are embeddings by default, and a request may say otherwise.
                ("normalize" | "use_activation" | "activation" | "softmax", _)
                    if is_pooler && value == &Value::Bool(true) => {}
                ("task", Some("embed" | "classify" | "score")) if is_pooler => {}
                ("backend", Some(_)) if !is_pooler => {
                    self.note(name, "a grammar is compiled by the one backend that there is");
                }
                ("reasoning_parser", Some(parser)) if !is_pooler => {
                    self.done.arguments.push(format!("--reasoning-parser={parser}").into());
                }
                _ => {
                    let known = if is_pooler { "pooling_type" } else { "backend and reasoning_parser" };
                    let problem = format!("--{name}: found {key}: {value}, expected {known} alone; remove the key");
                    return Err(CliError::Usage(problem));
                }
            }
        }
        Ok(())
    }

    /// Writes the flags that are JSON objects, and compares what must be equal.
    fn finish(&mut self) -> Result<(), CliError> {
        for (name, object) in std::mem::take(&mut self.objects) {
            self.done.arguments.push(format!("--{name}={object}").into());
        }
        match self.tokenizer_revision.take() {
            Some(found) if self.revision.as_deref().unwrap_or("main") != found => Err(CliError::Usage(format!(
                "--tokenizer-revision: found {found:?}, expected that of --revision: the tokenizer is that of the model"
            ))),
            _ => Ok(()),
        }
    }
}

fn no_value(name: &str, value: Option<String>) -> Result<(), CliError> {
    match value {
        None => Ok(()),
        Some(found) => Err(CliError::Usage(format!("--{name}: found {found:?}, expected no value"))),
    }
}
