//! `docs/configuration.md` against the command line as clap describes it and the engine's defaults.

use std::collections::BTreeSet;

use clap::{Arg, Command};
use engine::EngineConfig;
use serde_json::Value;
use testkit::markdown::{self, Row};

/// A flag of one command.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Flag {
    /// With its dashes.
    name: String,
    variable: Option<String>,
    /// As clap, the help text (`[default: …]`) or the engine states it.
    default: Option<String>,
}

impl Flag {
    fn new(arg: &Arg, engine: &Value) -> Option<Flag> {
        let name = arg.get_long()?;
        let values: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
        let of_clap = (arg.get_action().takes_values() && !values.is_empty()).then(|| values.join(","));
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let of_help = help.split_once("[default: ").and_then(|(_, rest)| Some(rest.split(']').next()?.to_owned()));
        let of_engine = match &engine[name.replace('-', "_")] {
            value @ (Value::Bool(_) | Value::Number(_)) => Some(value.to_string()),
            _ => None,
        };
        Some(Flag {
            name: format!("--{name}"),
            variable: arg.get_env().map(|name| name.to_string_lossy().into_owned()),
            default: of_clap.or(of_help).or(of_engine),
        })
    }

    /// Its key in a settings file; the flag that names the file has none.
    fn key(&self) -> Option<String> {
        (self.name != "--config").then(|| self.name.trim_start_matches('-').replace('-', "_"))
    }

    /// What a row says that differs. Columns: flag, variable, key, default, meaning.
    fn difference(&self, row: &Row<'_>) -> Option<String> {
        let name = &self.name;
        let (variable, key, default) = (row.code(1).next(), row.code(2).next(), row.cell(3).replace('`', ""));
        if variable != self.variable.as_deref() {
            return Some(format!("{name}: found the variable {variable:?}, expected {:?}", self.variable));
        }
        if key != self.key().as_deref() {
            return Some(format!("{name}: found the key {key:?}, expected {:?}", self.key()));
        }
        let expected = self.default.as_deref()?;
        // clap prints 1.0 as 1.
        let number = |text: &str| text.parse::<f64>().ok();
        let is_same = default == expected || number(expected).is_some_and(|value| number(&default) == Some(value));
        (!is_same).then(|| format!("{name}: found the default {default:?}, expected {expected:?}"))
    }
}

/// The flags of a command and of its subcommands.
fn flags(command: &Command, engine: &Value) -> BTreeSet<Flag> {
    let own = command.get_arguments().filter_map(|arg| Flag::new(arg, engine));
    own.chain(command.get_subcommands().flat_map(|inner| flags(inner, engine))).collect()
}

/// Names that only one of both has.
fn one_sided(declared: &BTreeSet<String>, documented: &BTreeSet<String>) -> Vec<String> {
    let missing = declared.difference(documented).map(|name| format!("{name}: found no row, expected one"));
    let gone =
        documented.difference(declared).map(|name| format!("{name}: found a row, but the code has no such name"));
    missing.chain(gone).collect()
}

/// Everything in which the page differs from the code.
fn differences(page: &str, flags: &BTreeSet<Flag>, kernels: &Value) -> Vec<String> {
    let rows = markdown::rows(page);
    let named = |prefix: &str| -> BTreeSet<String> {
        rows.iter().flat_map(|row| row.code(0)).filter(|code| code.starts_with(prefix)).map(str::to_owned).collect()
    };
    let keys = kernels.as_object().unwrap().keys().map(|key| format!("kernels.{key}")).collect();
    let names = flags.iter().map(|flag| flag.name.clone()).collect();
    let mut found = [one_sided(&names, &named("--")), one_sided(&keys, &named("kernels."))].concat();
    for flag in flags {
        // Commands may differ in a flag of one name: one of its rows is that of this one.
        let rows = rows.iter().filter(|row| row.code(0).any(|code| code == flag.name));
        let wrong: Vec<Option<String>> = rows.map(|row| flag.difference(row)).collect();
        if wrong.iter().all(Option::is_some) {
            found.extend(wrong.into_iter().next().flatten());
        }
    }
    found
}

#[test]
fn the_configuration_page_lists_every_flag_with_its_variable_key_and_default() {
    let engine = serde_json::to_value(EngineConfig::default()).unwrap();
    let page = std::fs::read_to_string(testkit::workspace::root().join("docs/configuration.md")).unwrap();
    let flags = flags(&cli::command(), &engine);
    assert!(flags.len() > 100, "{} flags", flags.len());
    let found = differences(&page, &flags, &engine["kernels"]);
    assert!(found.is_empty(), "docs/configuration.md:\n{}", found.join("\n"));
}

#[test]
fn each_difference_between_the_page_and_the_code_is_found() {
    let engine = serde_json::json!({"block_size": 1, "share": 0.4, "kernels": {"decode": "auto"}});
    let command = Command::new("quire").subcommand(
        Command::new("serve")
            .arg(Arg::new("path"))
            .arg(Arg::new("size").long("block-size").env("QUIRE_BLOCK_SIZE").help("Tokens [default: 16]"))
            .arg(Arg::new("off").long("no-cache").action(clap::ArgAction::SetTrue))
            .arg(Arg::new("port").short('p').long("port").default_value("8000"))
            .arg(Arg::new("share").long("share")),
    );
    let flags = flags(&command, &engine);
    let good = "| `--block-size` | `QUIRE_BLOCK_SIZE` | `block_size` | 16 | tokens |\n| `--no-cache` | – | `no_cache` | off | |\n\
        | `--port`, `-p` | | `port` | `8000` | |\n| `--share` | | `share` | 0.4 | |\n| `kernels.decode` | auto | |\n";
    assert_eq!(differences(good, &flags, &engine["kernels"]), [""; 0]);
    for (from, to, message) in [
        ("| `--port`", "| `--port2`", "--port: found no row"),
        (
            "| `--port`, `-p` | |",
            "| `--port` | `QUIRE_PORT` |",
            "found the variable Some(\"QUIRE_PORT\"), expected None",
        ),
        ("`no_cache`", "`cache`", "--no-cache: found the key Some(\"cache\"), expected Some(\"no_cache\")"),
        ("| 16 |", "| 32 |", "--block-size: found the default \"32\", expected \"16\""),
        ("| 0.4 |", "| 0.9 |", "--share: found the default \"0.9\", expected \"0.4\""),
        ("`kernels.decode`", "`kernels.prefill`", "kernels.prefill: found a row"),
    ] {
        let found = differences(&good.replace(from, to), &flags, &engine["kernels"]);
        assert!(found.iter().any(|difference| difference.contains(message)), "{message}: {found:?}");
    }
}
