//! What goes to standard error: how much of it, and in which form.

use std::fmt;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use clap::{Args, ValueEnum};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

use super::values;

/// Under this name the notes of the command line are in a log of objects, at every level.
const NOTES: &str = "quire::note";

/// The log is one of objects, and everything on standard error has to be one.
static NOTES_ARE_EVENTS: AtomicBool = AtomicBool::new(false);

/// A line for the user on standard error; if nobody listens there, there is nobody to tell.
pub fn note(line: impl fmt::Display) {
    if NOTES_ARE_EVENTS.load(Ordering::Relaxed) {
        tracing::info!(target: NOTES, "{}", line.to_string().trim());
    } else {
        let _ = writeln!(io::stderr(), "{line}");
    }
}

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
#[derive(Debug, Default, Args)]
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
        // It fails where a program around this library has a log already, which is then the one to use.
        let _ = tracing_subscriber::registry().with(form).with(traces()).try_init();
    }
}

/// The spans of requests on their way to a collector, whatever the log shows.
fn traces<S: tracing::Subscriber + for<'a> LookupSpan<'a>>() -> Option<impl Layer<S>> {
    let exporter = super::otel::Exporter::from_env(|name| std::env::var(name).ok());
    let layer = match exporter.map(|exporter| exporter.map(super::otel::Exporter::start)) {
        Ok(None) => return None,
        Ok(Some(Ok(layer))) => layer,
        Ok(Some(Err(error))) => {
            super::note(format_args!("no traces are sent: {error}"));
            return None;
        }
        Err(error) => {
            super::note(format_args!("no traces are sent: {error}"));
            return None;
        }
    };
    let requests = tracing_subscriber::filter::filter_fn(|span| span.is_span() && span.target() == "quire::request");
    Some(layer.with_filter(requests))
}
