//! The command line of `quire`: parses it, merges it with `quire.toml` and runs one subcommand.
//!
//! An error is one line on standard error, `quire: ...`, with exit code 1. Standard output carries only results; notes and progress
//! go to standard error. If the reader of standard output closes the pipe, the program ends without an error.
//!
//! ```
//! // `quire --version` in a shell:
//! let code = cli::main(["quire", "--version"].map(Into::into));
//! assert_eq!(code, std::process::ExitCode::SUCCESS);
//! ```

mod args;
mod bench;
mod chat;
mod command;
mod completions;
mod config;
mod convert;
pub mod embed;
mod error;
mod foreign;
mod generate;
mod listen;
mod log;
mod lora;
mod model;
mod otel;
mod plan;
mod profile;
mod progress;
mod replay;
mod run_batch;
mod serve;
mod session;
mod shared;
mod values;
mod yaml;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, CommandFactory, FromArgMatches};
use engine::EngineConfig;

use args::EngineArgs;
use command::{Cli, Command};
use config::ConfigFile;
use error::CliError;
use foreign::{Dialect, Translation};
use log::{LogArgs, note};
use profile::Profiling;

/// Runs the program with its arguments, the first of which is the program's name.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let outcome = run(arguments.into_iter().collect());
    otel::flush();
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.is_closed_pipe() => ExitCode::SUCCESS,
        Err(error) => {
            // It may repeat what a server has sent.
            note(format_args!("quire: {}", ::bench::client::printable(&error.to_string())));
            ExitCode::FAILURE
        }
    }
}

/// Returns the command line as clap describes it. Help texts are Markdown, with links of `docs/configuration.md`.
pub fn command() -> clap::Command {
    let with_variables = |command: clap::Command| command.mut_args(with_variable);
    Cli::command().mut_subcommand("serve", with_variables).mut_subcommand("llama-server", with_variables)
}

/// Returns a table in Markdown of the flags of `vllm serve` that this program does not have, and of what becomes of each.
pub fn vllm_flags() -> String {
    Dialect::vllm().to_markdown()
}

/// Names the environment variable of a flag that only `quire serve` has.
fn with_variable(arg: Arg) -> Arg {
    match (arg.get_long(), arg.get_env(), arg.get_help_heading()) {
        (Some(long), None, None | Some(server::ACCESS_AND_LIMITS)) => {
            let name = format!("QUIRE_{}", long.to_uppercase().replace('-', "_"));
            // clap takes static names.
            arg.env(&*name.leak())
        }
        _ => arg,
    }
}

fn run(arguments: Vec<OsString>) -> Result<(), CliError> {
    let Some((command, mut config)) = parse(arguments)? else { return Ok(()) };
    command.log().unwrap_or(&LogArgs::default()).start();
    let shared = command.shared();
    let profiling = shared.profile.zip(shared.engine);
    let profiling = profiling.map(|(args, engine)| args.start(&engine.common, &mut config)).transpose()?;
    let outcome = match command {
        Command::Serve(args) | Command::LlamaServer(args) => serve::run(*args, config),
        Command::Chat(args) => chat::run(args, config),
        Command::Generate(args) => generate::run(args, config),
        Command::RunBatch(args) => run_batch::run(&args, config),
        Command::Plan(args) => plan::run(&args, config),
        Command::Bench(args) => bench::run(args, config),
        Command::Top(args) => Ok(::bench::top::run(&args)?),
        Command::Convert(args) => convert::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Completions(args) => completions::run(&args),
        Command::Man(args) => completions::man(&args),
        Command::Kernels(args) => plan::kernels(&args, config),
    };
    // Write the profile even if the command failed.
    let profiled = profiling.flatten().map_or(Ok(()), Profiling::finish);
    outcome.and(profiled)
}

/// The command and the engine's configuration; `None` if help or the version was requested and printed.
fn parse(mut arguments: Vec<OsString>) -> Result<Option<(Command, EngineConfig)>, CliError> {
    let adapted = |command: clap::Command| {
        // If a flag is given twice, the last one counts, as in vLLM.
        command.mut_args(negative_numbers).mut_args(without_links).mut_args(switch).args_override_self(true)
    };
    let mut root = command().mut_subcommands(|command| adapted(command).mut_subcommands(adapted));
    root.build();
    // A command may have subcommands: the last one has the flags.
    let (mut command, mut words) = (&root, 1);
    while let Some(next) = arguments.get(words).and_then(|word| command.find_subcommand(word)) {
        (command, words) = (next, words + 1);
    }
    let flags = arguments.split_off(words.min(arguments.len()));
    let translated = |flags: Vec<OsString>| match Dialect::of_command(command) {
        Some(dialect) => foreign::translate(dialect, command, flags),
        None => Ok(Translation { arguments: flags, notes: Vec::new() }),
    };
    let Translation { arguments: own, mut notes } = translated(flags.clone())?;
    let Some(mut matches) = matches(&root, &[&arguments[..], &own].concat())? else { return Ok(None) };
    let mut given = &matches;
    while let Some((_, inner)) = given.subcommand() {
        given = inner;
    }
    // A command without settings takes no file of them.
    let file = given.try_get_one::<PathBuf>("config").ok().flatten();
    let file = file.map(|path| ConfigFile::read(path)).transpose()?;
    if let Some(file) = &file {
        // The command line alone was valid, so an error now is in the file. Its flags come before a possible `--`.
        let all = [file.arguments(&root, command, given)?, flags].concat();
        let all = translated(all).map_err(|error| file.problem(error.to_string()))?;
        notes = all.notes;
        arguments.extend(all.arguments);
        matches = root.try_get_matches_from(&arguments).map_err(|error| file.problem(one_line(&error)))?;
    }
    let cli = Cli::from_arg_matches(&matches).map_err(|error| CliError::Usage(one_line(&error)))?;
    notes.into_iter().for_each(note);
    let shared = cli.command.shared();
    let mut config = shared.engine.map_or_else(EngineConfig::default, EngineArgs::to_config);
    config.record = shared.record.and_then(|args| args.record.clone());
    if let Some(file) = file {
        file.apply_kernels(&mut config)?;
    }
    Ok(Some((cli.command, config)))
}

/// Makes `--threads -1` a wrong value of the flag and not an unknown flag `-1`.
fn negative_numbers(arg: Arg) -> Arg {
    let takes_one = !arg.is_positional() && arg.get_action().takes_values();
    arg.allow_negative_numbers(takes_one)
}

/// Lets a flag without a value have one too, as `--no-x` needs it.
fn switch(arg: Arg) -> Arg {
    if arg.get_long().is_none() || !matches!(arg.get_action(), ArgAction::SetTrue) {
        return arg;
    }
    let takes = arg.action(ArgAction::Set).value_name("BOOL").num_args(0..=1).require_equals(true);
    let parser = clap::builder::BoolishValueParser::new();
    takes
        .default_missing_value("true")
        .default_value("false")
        .hide_default_value(true)
        .value_parser(parser)
        .hide_possible_values(true)
}

/// Shows `text` in the help where the page has `[text](target)`.
fn without_links(arg: Arg) -> Arg {
    let Some(help) = arg.get_long_help().map(ToString::to_string) else { return arg };
    let mut pieces = help.split("](");
    let mut plain = pieces.next().unwrap_or_default().to_string();
    for piece in pieces {
        plain.replace_range(plain.rfind('[').map_or(0..0, |open| open..open + 1), "");
        plain.push_str(piece.split_once(')').map_or(piece, |(_, after)| after));
    }
    arg.long_help(plain)
}

fn matches(root: &clap::Command, arguments: &[OsString]) -> Result<Option<ArgMatches>, CliError> {
    match root.clone().try_get_matches_from(arguments) {
        Ok(matches) => Ok(Some(matches)),
        Err(error) if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            error.print()?;
            Ok(None)
        }
        Err(error) if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            if let Some(command) = arguments.iter().skip(1).find_map(|word| root.find_subcommand(word)) {
                let names: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
                let names = names.join(", ").replace(", help", "");
                return Err(CliError::Usage(format!("{}: expected a subcommand: {names}", command.get_name())));
            }
            error.print()?;
            Err(CliError::Usage("expected a command, for example `quire serve`".into()))
        }
        Err(error) => Err(CliError::Usage(one_line(&error))),
    }
}

/// clap's message without the usage lines, and without its advice to pass an unknown flag as a value.
fn one_line(error: &clap::Error) -> String {
    let text = error.to_string();
    let lines = text.lines().map(str::trim).take_while(|line| !line.starts_with("Usage:"));
    let is_kept = |line: &&str| {
        !line.is_empty() && !line.starts_with("For more information") && !line.starts_with("tip: to pass '")
    };
    let kept: Vec<&str> = lines.filter(is_kept).collect();
    kept.join("; ").trim_start_matches("error: ").to_string()
}
