//! `quire completions` and `quire man`: what shells and manuals need to know of the command line.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

use crate::error::CliError;
use crate::{command, without_links};

#[derive(Debug, Args)]
pub struct CompletionsArgs {
    /// bash, zsh, fish, elvish or powershell
    #[arg(value_name = "SHELL")]
    pub shell: Shell,
}

#[derive(Debug, Args)]
pub struct ManArgs {
    /// Folder for a page of each command, which is made if it does not exist
    #[arg(value_name = "FOLDER")]
    pub folder: PathBuf,
}

/// The command line, with help without the links of pages.
fn described() -> clap::Command {
    let plain = |command: clap::Command| command.mut_args(without_links);
    plain(command()).mut_subcommands(|command| plain(command).mut_subcommands(plain))
}

pub fn run(args: &CompletionsArgs) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut described(), "quire", &mut script);
    Ok(io::stdout().write_all(&script)?)
}

pub fn man(args: &ManArgs) -> Result<(), CliError> {
    let wrong = |error: io::Error| CliError::Failed(format!("{}: {error}; name another folder", args.folder.display()));
    std::fs::create_dir_all(&args.folder).map_err(wrong)?;
    clap_mangen::generate_to(described(), &args.folder).map_err(wrong)
}
