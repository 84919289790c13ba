//! The log on standard error: its level and format.

use std::fmt;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Args, ValueEnum};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use super::otel::Exporter;
use super::values;

/// Target of the command line's notes in a JSON log, which shows them at every level.
const NOTES: &str = "quire::note";

/// The log is JSON, so everything on standard error must be.
static NOTES_ARE_EVENTS: AtomicBool = AtomicBool::new(false);

/// Prints a line for the user to standard error. An error while doing so is ignored: there is no other place to report it.
pub fn note(line: impl fmt::Display) {
    if NOTES_ARE_EVENTS.load(Ordering::Relaxed) {
        tracing::info!(target: NOTES, "{}", line.to_string().trim());
    } else {
        let _ = writeln!(io::stderr(), "{line}");
    }
}

/// Format of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines of text.
    #[default]
    Text,
    /// One JSON object per line.
    Json,
}

#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Log")]
pub struct LogArgs {
    /// Format of the log: text, or json with one object per line [default: text]
    #[arg(long, value_name = "FORMAT", env = "QUIRE_LOG_FORMAT")]
    pub log_format: Option<LogFormat>,
    /// Level of the log: error, warn, info (a line per request) or debug, or per module such as engine=debug,warn
    /// [default: warn]
    #[arg(long, value_name = "LEVEL", value_parser = values::log_filter, env = "QUIRE_LOG")]
    pub log_level: Option<String>,
}

impl LogArgs {
    /// Starts the log of this process. A second call has no effect.
    pub fn start(&self) {
        let mut filter = EnvFilter::new(self.log_level.as_deref().unwrap_or("warn"));
        let form: Box<dyn Layer<Registry> + Send + Sync> = match self.log_format.unwrap_or_default() {
            LogFormat::Text => tracing_subscriber::fmt::layer().with_writer(io::stderr).with_filter(filter).boxed(),
            LogFormat::Json => {
                NOTES_ARE_EVENTS.store(true, Ordering::Relaxed);
                if let Ok(notes) = format!("{NOTES}=info").parse() {
                    filter = filter.add_directive(notes);
                }
                let json = tracing_subscriber::fmt::layer().json().flatten_event(true).with_span_list(false);
                json.with_writer(io::stderr).with_filter(filter).boxed()
            }
        };
        // This fails if the program that embeds this library already has a log, which is used then.
        let _ = tracing_subscriber::registry().with(form).with(traces()).try_init();
    }
}

/// The layer that sends spans of requests to a collector, independent of the log's level.
fn traces<S: tracing::Subscriber + for<'a> LookupSpan<'a>>() -> Option<impl Layer<S>> {
    let exporter = Exporter::from_env(|name| std::env::var(name).ok());
    let started = exporter.and_then(|exporter| exporter.map(Exporter::start).transpose());
    let layer = started.unwrap_or_else(|error| {
        note(format_args!("no traces are sent: {error}"));
        None
    })?;
    let requests = tracing_subscriber::filter::filter_fn(|span| span.is_span() && span.target() == "quire::request");
    Some(layer.with_filter(requests))
}
