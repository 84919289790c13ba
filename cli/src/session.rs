//! Shared by `serve`, `chat` and `generate`: the runtime, loading the engine, and a description of the model.

use std::convert::Infallible;
use std::io;
use std::ops::Deref;
use std::time::Duration;

use engine::{
    AsyncEngine, Delta, EngineConfig, EngineError, FinishReason, GenerationDefaults, GenerationParams, Group, LoadOn,
    ModelSource, SamplingParams,
};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};

use super::args::SamplingArgs;
use super::error::CliError;
use super::progress::progress_bar;

/// A runtime for engine handles. The engine computes on its own threads, so two are enough here.
pub fn runtime() -> io::Result<Runtime> {
    Builder::new_multi_thread().worker_threads(2).enable_all().build()
}

/// Opens the group of ranks of a configuration. Errors are reported by rank 0 alone.
pub fn open_group(config: &EngineConfig) -> Result<Group, CliError> {
    match Group::open(&config.parallel) {
        Err(EngineError::Rank { rank: 0, .. }) => std::process::exit(1),
        other => Ok(other?),
    }
}

/// Loads the model with a progress bar. On a rank other than 0 of a group, computes until rank 0 ends, and ends the process.
pub fn start(config: EngineConfig) -> Result<Running, CliError> {
    let group = open_group(&config)?;
    match group.rank() {
        0 => start_in(config, group),
        _ => match follow(&config, group, Ok(()))? {},
    }
}

/// Computes as a rank other than 0 of a group until rank 0 ends, and ends the process. Rank 0 reports errors, also that of `fetched`,
/// this rank's search for the model, and decides what a signal means that the launcher sends to every rank.
pub fn follow(config: &EngineConfig, group: Group, fetched: Result<(), CliError>) -> Result<Infallible, CliError> {
    if let Err(error) = fetched {
        group.refuse(error);
        drop(group);
        std::process::exit(1);
    }
    let runtime = runtime()?;
    let _entered = runtime.enter();
    let _ignored = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let followed = engine::follow(config, group);
    std::process::exit(i32::from(followed.is_err()))
}

/// Loads the model with a progress bar, as rank 0 of a group, for an engine that ends with the process.
pub fn start_in(config: EngineConfig, group: Group) -> Result<Running, CliError> {
    Ok(Running(load_in(&config, group)?))
}

/// Loads the model with a progress bar, as rank 0 of a group.
pub fn load_in(config: &EngineConfig, group: Group) -> Result<AsyncEngine, CliError> {
    let bar = progress_bar(0, "loading {bar:32} {binary_bytes}/{binary_total_bytes}");
    let loaded = engine::load(config, LoadOn::Group(group), &|done, total| {
        if bar.length() != Some(total) {
            bar.set_length(total);
        }
        bar.set_position(done);
    });
    bar.finish_and_clear();
    Ok(AsyncEngine::run(config, loaded?)?)
}

/// Time that the end of the engine may take: longer than ranks take to leave their group.
const END_TIME: Duration = Duration::from_secs(5);

/// An engine that ends before the process does.
pub struct Running(AsyncEngine);

impl Deref for Running {
    type Target = AsyncEngine;

    fn deref(&self) -> &AsyncEngine {
        &self.0
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.end(END_TIME);
    }
}

pub fn describe(engine: &AsyncEngine, source: &ModelSource) -> String {
    let info = engine.info();
    let kind = if *source == ModelSource::Demo { "demo model" } else { "model" };
    let parameters = match info.num_parameters {
        n if n >= 1_000_000_000 => format!("{:.1}B", n as f64 / 1e9),
        n => format!("{:.1}M", n as f64 / 1e6),
    };
    format!(
        "{kind}: {} ({}, {parameters} parameters, context of {} tokens)",
        info.name, info.architecture, info.max_model_len
    )
}

/// The sampling defaults from `generation_config.json` that differ from the neutral ones, in one line; `None` if none do.
pub fn sampling_defaults(defaults: &GenerationDefaults) -> Option<String> {
    let neutral = SamplingParams::default();
    let number = |name: &str, value: Option<f32>, neutral: f32| {
        value.filter(|value| *value != neutral).map(|value| format!("{name} {value}"))
    };
    let changed = [
        number("temperature", defaults.temperature, neutral.temperature),
        number("top_p", defaults.top_p, neutral.top_p),
        defaults.top_k.filter(|top_k| *top_k != neutral.top_k).map(|top_k| format!("top_k {top_k}")),
        number("min_p", defaults.min_p, neutral.min_p),
        number("repetition_penalty", defaults.repetition_penalty, neutral.repetition_penalty),
        defaults.max_new_tokens.map(|max_tokens| format!("max_tokens {max_tokens}")),
    ];
    let changed: Vec<String> = changed.into_iter().flatten().collect();
    (!changed.is_empty()).then(|| {
        format!("sampling defaults from generation_config.json: {}; a request can override each", changed.join(", "))
    })
}

/// The parameters from the flags, then from `defaults`, then those of greedy decoding.
pub fn params(args: &SamplingArgs, defaults: Option<&GenerationDefaults>) -> GenerationParams {
    let neutral = SamplingParams::default();
    let sampling = SamplingParams {
        temperature: args.temperature.or(defaults.and_then(|d| d.temperature)).unwrap_or(0.0),
        top_p: args.top_p.or(defaults.and_then(|d| d.top_p)).unwrap_or(neutral.top_p),
        top_k: args.top_k.or(defaults.and_then(|d| d.top_k)).unwrap_or(neutral.top_k),
        min_p: args.min_p.or(defaults.and_then(|d| d.min_p)).unwrap_or(neutral.min_p),
        repetition_penalty: args
            .repetition_penalty
            .or(defaults.and_then(|d| d.repetition_penalty))
            .unwrap_or(neutral.repetition_penalty),
        ..neutral
    };
    GenerationParams {
        sampling,
        max_tokens: args.max_tokens,
        stop: args.stop.as_slice().into(),
        ignore_eos: args.ignore_eos,
        ..GenerationParams::default()
    }
}

/// Checks the flags before a model is loaded.
pub fn check(args: &SamplingArgs) -> Result<(), CliError> {
    let checked = params(args, None).sampling.validate();
    checked.map_err(|error| CliError::Usage(format!("--{}: {}", error.param.replace('_', "-"), error.message)))
}

/// The finish reason of a sequence, if this is its last delta. A failure is an error.
pub fn finish_reason(delta: &Delta) -> Result<Option<&'static str>, CliError> {
    match &delta.finish {
        None => Ok(None),
        Some(FinishReason::Length) => Ok(Some("length")),
        Some(FinishReason::Stop(_)) => Ok(Some("stop")),
        Some(FinishReason::Grammar(message) | FinishReason::Error(message)) => Err(CliError::Failed(message.clone())),
    }
}

/// The events ended before a sequence did.
pub fn broken_off() -> CliError {
    CliError::Failed("the engine stopped before the text was complete".into())
}
