//! Command lines of other servers: their flags become those of this program, have no effect, which a note says, or are refused with what
//! to use instead. A flag that would be missed is never dropped in silence.
//!
//! [`translate`] runs before the parser of the command line, which checks the values of what is left. It also accepts the notation of
//! vLLM: `-tp 2`, `_` for `-`, unique beginnings of names, `--no-x`, `None`, and keys of a JSON flag after dots (`--hf-overrides.key 1`).

mod llama;
mod notation;
mod table;
mod translate;

use std::sync::OnceLock;

use clap::{Arg, ArgAction, Command};

pub use translate::{Translation, translate};

/// What becomes of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// A flag of this program has the name and the meaning.
    Ours,
    /// A flag of this program has another name.
    Renamed(&'static str),
    /// It is a key of a flag of this program whose value is a JSON object.
    Part(&'static str, &'static str),
    /// It has no effect, and why.
    NoEffect(&'static str),
    /// It has no effect with its default and with these values. Others are refused, for a reason.
    Only(&'static [&'static str], &'static str),
    /// Refused, with what to do instead.
    Refused(&'static str),
    /// Settings of pooling.
    Pooler,
    /// Settings of structured outputs.
    StructuredOutputs,
    /// The revision of the tokenizer, which is that of the model.
    SameRevision,
}

/// Type of the value of a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Switch,
    Whole,
    /// A whole number that may end in a letter.
    Human,
    Number,
    Text,
    Json,
    /// Several words.
    List,
}

/// A flag of another program.
#[derive(Clone, Debug)]
pub struct Foreign {
    pub name: &'static str,
    shorts: Vec<&'static str>,
    pub kind: Kind,
    default: Option<&'static str>,
    pub fate: Fate,
}

/// A setting of another program that has no counterpart in this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignSetting {
    /// Name, with underscores.
    pub name: String,
    /// Values that are accepted without effect; `None`: all.
    pub values: Option<Vec<&'static str>>,
    /// Why it has no effect, or what to do instead.
    pub reason: &'static str,
}

/// The flags of another program.
pub struct Dialect(Vec<Foreign>);

impl Dialect {
    /// The flags of `vllm serve`.
    pub fn vllm() -> &'static Dialect {
        static VLLM: OnceLock<Dialect> = OnceLock::new();
        VLLM.get_or_init(|| Dialect::of(table::VLLM))
    }

    /// The flags of another server that a command takes, or of the program that measures one.
    pub fn of_command(command: &Command) -> Option<&'static Dialect> {
        static BENCH: OnceLock<Dialect> = OnceLock::new();
        static LLAMA: OnceLock<Dialect> = OnceLock::new();
        if command.get_name() == "llama-server" {
            return Some(LLAMA.get_or_init(|| Dialect::of(llama::LLAMA_SERVER)));
        }
        if applies(command) {
            return Some(Dialect::vllm());
        }
        own(command, "percentile-metrics").map(|_| BENCH.get_or_init(|| Dialect::of(table::VLLM_BENCH)))
    }

    fn of(groups: &[table::Group]) -> Dialect {
        let flags = |group: &table::Group| {
            let fate = group.fate;
            group.flags.split_whitespace().map(move |entry| entry_of(entry, fate))
        };
        Dialect(groups.iter().flat_map(flags).collect())
    }

    pub fn get(&self, name: &str) -> Option<&Foreign> {
        self.0.iter().find(|flag| flag.name == name)
    }

    /// Names of flags that this program does not have.
    pub fn without_equal(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.0.iter().filter(|flag| flag.fate != Fate::Ours).map(|flag| flag.name)
    }

    /// Flags without a counterpart here, as settings: with the values that are accepted without effect, and the reason.
    pub fn settings(&self) -> Vec<ForeignSetting> {
        let setting = |flag: &Foreign| {
            let (values, reason) = match flag.fate {
                Fate::NoEffect(why) => (None, why),
                Fate::Only(values, why) => (Some(values), why),
                Fate::Refused(advice) => (Some(&[][..]), advice),
                _ => return None,
            };
            let with_default = |values: &[&'static str]| {
                let default = flag.default.filter(|default| !values.contains(default));
                values.iter().copied().chain(default).collect()
            };
            Some(ForeignSetting { name: flag.name.replace('-', "_"), values: values.map(with_default), reason })
        };
        self.0.iter().filter_map(setting).collect()
    }

    /// The flag of a key of a settings file, whose `no-` the key may have.
    pub fn key(&self, long: &str) -> Option<&Foreign> {
        let found = self.get(long).or_else(|| self.get(long.strip_prefix("no-")?));
        found.filter(|flag| flag.fate != Fate::Ours)
    }

    /// A table of what becomes of the flags that this program does not have.
    pub fn to_markdown(&self) -> String {
        let mut rows: Vec<(String, Vec<String>)> = Vec::new();
        for flag in self.0.iter().filter(|flag| flag.fate != Fate::Ours) {
            let fate = match flag.fate {
                Fate::Ours => continue,
                Fate::Renamed(ours) => format!("the flag `--{ours}`"),
                Fate::Part(ours, key) => format!("the key `{key}` of `--{ours}`"),
                Fate::NoEffect(why) => format!("no effect: {why}"),
                Fate::Only(values, why) => {
                    let values: Vec<String> = values.iter().map(|value| format!("`{value}`")).collect();
                    let values = if values.is_empty() { "no value".to_string() } else { values.join(", ") };
                    format!("{values}: no effect, others are refused: {why}")
                }
                Fate::Refused(advice) => format!("refused: {advice}"),
                Fate::Pooler => "`pooling_type` is `--pooling-type`; other keys are refused".to_string(),
                Fate::StructuredOutputs => {
                    "`reasoning_parser` is `--reasoning-parser`, `backend` has no effect; other keys are refused"
                        .to_string()
                }
                Fate::SameRevision => "refused unless it is that of `--revision`".to_string(),
            };
            let name = format!("`--{}`", flag.name);
            match rows.iter_mut().find(|(other, _)| *other == fate) {
                Some((_, names)) => names.push(name),
                None => rows.push((fate, vec![name])),
            }
        }
        let row = |(fate, names): (String, Vec<String>)| format!("| {} | {fate} |\n", names.join(", "));
        "| flag of vLLM | what becomes of it |\n|---|---|\n".to_string()
            + &rows.into_iter().map(row).collect::<String>()
    }

    fn short(&self, letters: &str) -> Option<&Foreign> {
        self.0.iter().find(|flag| flag.shorts.contains(&letters))
    }

    /// The one flag whose name begins so.
    fn unique(&self, beginning: &str) -> Option<&Foreign> {
        let mut found = self.0.iter().filter(|flag| flag.name.starts_with(beginning));
        found.next().filter(|_| found.next().is_none() && !beginning.is_empty())
    }
}

/// Parses an entry of the table.
fn entry_of(entry: &'static str, fate: Fate) -> Foreign {
    let (rest, default) = entry.split_once('=').map_or((entry, None), |(rest, default)| (rest, Some(default)));
    let (names, kind) = rest.split_once(':').unwrap_or((rest, ""));
    let (name, shorts) = names.split_once('(').unwrap_or((names, ""));
    let kind = match kind {
        "" => Kind::Switch,
        "i" => Kind::Whole,
        "h" => Kind::Human,
        "f" => Kind::Number,
        "j" => Kind::Json,
        "l" => Kind::List,
        _ => Kind::Text,
    };
    let shorts = shorts.trim_end_matches(')').split(',').filter(|short| !short.is_empty()).collect();
    Foreign { name, shorts, kind, default, fate }
}

/// Whether a command takes the flags of an engine, and so those of other servers.
pub fn applies(command: &Command) -> bool {
    own(command, "max-model-len").is_some()
}

/// Whether the value of a flag of this program is a JSON object.
pub fn is_json(name: &str) -> bool {
    Dialect::vllm().get(name).is_some_and(|flag| flag.fate == Fate::Ours && flag.kind == Kind::Json)
}

fn own<'a>(command: &'a Command, name: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|arg| arg.get_long() == Some(name))
}

/// Whether a flag of this program is on or off.
fn is_switch(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue) || arg.is_require_equals_set()
}

#[cfg(test)]
mod tests;
