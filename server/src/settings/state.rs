//! Where a server keeps responses, files and batches, and how much of them.

use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use store::Limits;

use super::values;

/// Greatest size of what is kept in memory, unless it is set.
const IN_MEMORY: u64 = 64 << 20;
/// Greatest size of what is kept in a folder, unless it is set.
const IN_FOLDER: u64 = 4 << 30;

/// Heading in the help of these flags.
const HEADING: &str = "Stored answers";

/// Where a server keeps responses, files and batches, and how much of them. `Default` has the defaults of the flags.
#[derive(Clone, Debug, Parser, PartialEq)]
#[command(no_binary_name = true)]
pub struct StateOptions {
    /// Folder for responses, conversations, files and batches, which survive a restart and a crash [default: they are kept in memory]
    ///
    /// The folder is made if it does not exist, and only its owner can read it. One server at a time uses it. See
    /// [stored answers](stored-answers.md).
    #[arg(long, value_name = "FOLDER", help_heading = HEADING, env = "QUIRE_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
    /// Maximum size of what is kept [default: 4G in a folder, 64M in memory]
    ///
    /// Over it, the oldest ended responses are dropped; then requests that store something are refused. The file may be up to twice as
    /// large.
    #[arg(long, value_name = "BYTES", value_parser = values::bytes::<u64>, help_heading = HEADING, env = "QUIRE_STATE_MAX_BYTES")]
    pub state_max_bytes: Option<u64>,
    /// Seconds for which responses, files and batches are kept
    ///
    /// Unfinished work is kept until it ends. A file may ask for less or more (`expires_after`).
    #[arg(long, value_name = "SECONDS", default_value = "2592000", value_parser = values::seconds, help_heading = HEADING, env = "QUIRE_STATE_TTL")]
    pub state_ttl: Duration,
}

impl Default for StateOptions {
    fn default() -> StateOptions {
        StateOptions::parse_from([""; 0])
    }
}

impl StateOptions {
    /// The limits of the store.
    pub fn limits(&self) -> Limits {
        let usual = if self.state_dir.is_some() { IN_FOLDER } else { IN_MEMORY };
        Limits { max_bytes: self.state_max_bytes.unwrap_or(usual), ttl: self.state_ttl }
    }
}
