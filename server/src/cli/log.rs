//! What goes to standard error: how much of it, and in which form.

use std::io;

use clap::{Args, ValueEnum};
use tracing_subscriber::layer::SubscriberExt;
#[cfg(feature = "otel")]
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

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
        let form: Box<dyn Layer<Registry> + Send + Sync> = match self.log_format.unwrap_or_default() {
            LogFormat::Text => tracing_subscriber::fmt::layer().with_writer(io::stderr).with_filter(filter).boxed(),
            LogFormat::Json => {
                let json = tracing_subscriber::fmt::layer().json().flatten_event(true).with_span_list(false);
                json.with_writer(io::stderr).with_filter(filter).boxed()
            }
        };
        // It fails where a program around this library has a log already, which is then the one to use.
        let _ = tracing_subscriber::registry().with(form).with(traces()).try_init();
    }
}

/// The spans of requests on their way to a collector, whatever the log shows.
#[cfg(feature = "otel")]
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

/// Without the feature there is nothing to add.
#[cfg(not(feature = "otel"))]
fn traces() -> Option<tracing_subscriber::layer::Identity> {
    None
}
