//! The settings file `quire.toml`, or one in YAML as vLLM has them. Precedence: flag, environment variable, file, default.
//!
//! Keys are converted to arguments and parsed by the parser of the command line, so values have the same checks. Keys of other
//! subcommands are ignored, so that one file serves all of them. An unknown key is an error that suggests a similar one. The table
//! `[kernels]` goes to the engine.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches};
use engine::EngineConfig;
use serde_json::json;
use toml::{Table, Value};

use super::error::CliError;
use super::foreign::{self, Dialect};
use super::yaml;

/// Flags that are not allowed as keys.
const NO_KEYS: [&str; 2] = ["config", "help"];

#[derive(Debug)]
pub struct ConfigFile {
    /// `None`: the keys are those of a program that embeds this one.
    path: Option<PathBuf>,
    values: Table,
    kernels: Option<Table>,
}

impl ConfigFile {
    /// Reads and parses the file. Keys are checked by [`ConfigFile::arguments`].
    pub fn read(path: &Path) -> Result<ConfigFile, CliError> {
        let mut file = ConfigFile { path: Some(path.to_owned()), values: Table::new(), kernels: None };
        let text = std::fs::read_to_string(path).map_err(|error| file.problem(error.to_string()))?;
        if path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml") {
            file.values = yaml::parse(&text).map_err(|problem| file.problem(problem))?;
            return file.take_kernels();
        }
        file.values = toml::from_str(&text).map_err(|error| {
            let line = error.span().map_or(1, |span| 1 + text[..span.start].matches('\n').count());
            file.problem(format!("line {line}: {}", error.message().replace('\n', "; ")))
        })?;
        file.take_kernels()
    }

    /// Takes the keys of a program that embeds this one.
    pub fn of(values: Table) -> Result<ConfigFile, CliError> {
        ConfigFile { path: None, values, kernels: None }.take_kernels()
    }

    fn take_kernels(mut self) -> Result<ConfigFile, CliError> {
        match self.values.remove("kernels") {
            None => {}
            Some(Value::Table(table)) => self.kernels = Some(table),
            Some(other) => {
                let message = format!("kernels: found {}, expected a table [kernels]", other.type_str());
                return Err(self.problem(message));
            }
        }
        Ok(self)
    }

    pub fn problem(&self, message: String) -> CliError {
        match &self.path {
            Some(path) => CliError::File { flag: "--config", path: path.clone(), message },
            None => CliError::Usage(message),
        }
    }

    /// Arguments for all keys, each of which must be a flag of this command that `allows` allows.
    pub fn all_arguments(
        &self,
        root: &clap::Command,
        command: &clap::Command,
        allows: impl Fn(&Arg) -> bool,
    ) -> Result<Vec<OsString>, CliError> {
        let mut arguments = Vec::new();
        for (key, value) in &self.values {
            let long = key.replace('_', "-");
            match (flag(command, &long).filter(|flag| allows(flag)), Dialect::vllm().key(&long)) {
                (Some(flag), _) => self.push(&mut arguments, flag, key, value)?,
                (None, Some(_)) => self.push_foreign(&mut arguments, &long, value),
                (None, None) => return Err(self.unknown(root, key, &long)),
            }
        }
        Ok(arguments)
    }

    /// Arguments for the keys that neither the command line nor the environment sets.
    pub fn arguments(
        &self,
        root: &clap::Command,
        command: &clap::Command,
        given: &ArgMatches,
    ) -> Result<Vec<OsString>, CliError> {
        let mut arguments = Vec::new();
        for (key, value) in &self.values {
            let long = key.replace('_', "-");
            match flag(command, &long) {
                Some(flag) if !is_given(given, flag.get_id().as_str()) => {
                    self.push(&mut arguments, flag, key, value)?;
                }
                Some(_) => {}
                None if Dialect::vllm().key(&long).is_some() => {
                    if foreign::applies(command) {
                        self.push_foreign(&mut arguments, &long, value);
                    }
                }
                None if leaves(root).any(|command| flag(command, &long).is_some()) => {}
                None => return Err(self.unknown(root, key, &long)),
            }
        }
        Ok(arguments)
    }

    /// Copies the table `[kernels]` into the configuration.
    pub fn apply_kernels(&self, config: &mut EngineConfig) -> Result<(), CliError> {
        if let Some(table) = self.kernels.clone() {
            config.kernels = table.try_into().map_err(|error: toml::de::Error| {
                self.problem(format!("[kernels]: {}", error.message().replace('\n', "; ")))
            })?;
            // Paths in the file are relative to its folder.
            let folder = self.path.as_deref().and_then(Path::parent).unwrap_or(Path::new(""));
            config.kernels.plugin.iter_mut().for_each(|plugin| plugin.path = folder.join(&plugin.path));
        }
        Ok(())
    }

    fn push(&self, arguments: &mut Vec<OsString>, flag: &Arg, key: &str, value: &Value) -> Result<(), CliError> {
        let items = match value {
            Value::Array(items) if matches!(flag.get_action(), ArgAction::Append) => items.as_slice(),
            one => std::slice::from_ref(one),
        };
        let long = flag.get_long().unwrap_or(key);
        for item in items {
            let text = match (item, flag.get_action()) {
                (Value::Boolean(true), ArgAction::SetTrue) => {
                    arguments.push(format!("--{long}").into());
                    continue;
                }
                (Value::Boolean(false), ArgAction::SetTrue) => continue,
                // A switch that is off by default.
                (Value::Boolean(false), _) if flag.get_default_values() == ["false"] => continue,
                (Value::String(text), _) => text.clone(),
                (Value::Integer(number), _) => number.to_string(),
                (Value::Float(number), _) => number.to_string(),
                (Value::Boolean(flag), _) => flag.to_string(),
                // A table is the JSON object of the flag.
                (Value::Table(table), _) if foreign::is_json(long) => json!(table).to_string(),
                _ => {
                    return Err(self.problem(format!("{key}: found {}, expected a plain value", item.type_str())));
                }
            };
            arguments.push(format!("--{long}={text}").into());
        }
        Ok(())
    }

    /// A flag that only another server has, as its command line has it.
    fn push_foreign(&self, arguments: &mut Vec<OsString>, long: &str, value: &Value) {
        match value {
            Value::Boolean(true) => arguments.push(format!("--{long}").into()),
            Value::Boolean(false) => arguments.push(format!("--no-{long}").into()),
            Value::Table(table) => arguments.push(format!("--{long}={}", json!(table)).into()),
            Value::Array(items) => {
                let words: Vec<String> = items.iter().map(plain).collect();
                arguments.push(format!("--{long}={}", words.join(" ")).into());
            }
            other => arguments.push(format!("--{long}={}", plain(other)).into()),
        }
    }

    fn unknown(&self, root: &clap::Command, key: &str, long: &str) -> CliError {
        let flags = leaves(root).flat_map(clap::Command::get_arguments).filter_map(Arg::get_long);
        let known = flags.filter(|long| !NO_KEYS.contains(long));
        // Suggest only keys that are similar.
        let near = known
            .map(|known| (strsim::levenshtein(known, long), known))
            .filter(|(distance, _)| *distance <= long.len() / 3);
        let guess = near.min().map_or(String::new(), |(_, known)| format!(", the most similar one is {known:?}"));
        self.problem(format!("unknown key {key:?}, expected the name of a flag{guess}"))
    }
}

/// A value without quotes.
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| json!(value).to_string(), str::to_string)
}

fn leaves(root: &clap::Command) -> impl Iterator<Item = &clap::Command> {
    root.get_subcommands().flat_map(|command| std::iter::once(command).chain(command.get_subcommands()))
}

fn flag<'a>(command: &'a clap::Command, long: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| arg.get_long() == Some(long) && !NO_KEYS.contains(&long))
}

/// Whether the command line or the environment sets this argument or its opposite.
fn is_given(given: &ArgMatches, id: &str) -> bool {
    let opposite = format!("no_{id}");
    let mut rivals = vec![id, opposite.as_str()];
    if id == "model" {
        rivals.push("model_path");
    }
    rivals.into_iter().any(|id| {
        given.try_contains_id(id).is_ok()
            && matches!(given.value_source(id), Some(ValueSource::CommandLine | ValueSource::EnvVariable))
    })
}
