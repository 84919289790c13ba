//! What goes to standard error: how much of it, and in which form.

use std::io;

use clap::{Args, ValueEnum};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

use super::values;

/// How the log is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// A line for people.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

/// The flags of the log.
#[derive(Debug, Args)]
#[command(next_help_heading = "Log")]
pub struct LogArgs {
    /// text, or json: one object per line [default: text]
    #[arg(long, value_name = "FORMAT", env = "QUIRE_LOG_FORMAT")]
    pub log_format: Option<LogFormat>,
    /// error, warn, info (a line per request), debug, or per part: engine=debug,warn [default: warn]
    #[arg(long, value_name = "LEVEL", value_parser = values::log_filter, env = "QUIRE_LOG")]
    pub log_level: Option<String>,
}

impl LogArgs {
    /// Starts the log of this process; a second call changes nothing.
    pub fn start(&self) {
        let filter = EnvFilter::new(self.log_level.as_deref().unwrap_or("warn"));
        let registry = tracing_subscriber::registry().with(filter);
        // It fails where a program around this library has a log already, which is then the one to use.
        let _ = match self.log_format.unwrap_or_default() {
            LogFormat::Text => {
                let text = tracing_subscriber::fmt::layer().with_writer(io::stderr);
                registry.with(text).try_init()
            }
            LogFormat::Json => {
                let json = tracing_subscriber::fmt::layer().json().flatten_event(true).with_span_list(false);
                registry.with(json.with_writer(io::stderr)).try_init()
            }
        };
    }
}
