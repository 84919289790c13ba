//! `quire serve`.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use engine::{AsyncEngine, EngineConfig, Task};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::command::ServeArgs;
use super::error::CliError;
use super::{lora, note, session};
use server::{App, ServerOptions, Store};

pub fn run(args: ServeArgs, config: EngineConfig) -> Result<(), CliError> {
    engine::allocator::limit_retention();
    let grace = args.shutdown_timeout;
    let stop = || {
        let mut signals = Signals::new()?;
        Ok(async move {
            signals.next().await;
            note(
                format_args!("stopping: running requests may finish within {grace} s; a second signal stops at once",),
            );
            tokio::spawn(async move { std::process::exit(128 + signals.next().await) });
        })
    };
    run_until(args, config, stop, |_| {})
}

/// Serves until the future that `stop` makes in the runtime is ready. `ready` gets the address, which a Unix socket does not have,
/// once clients are served.
pub fn run_until<S: Future<Output = ()> + Send + 'static>(
    args: ServeArgs,
    mut config: EngineConfig,
    stop: impl FnOnce() -> std::io::Result<S>,
    ready: impl FnOnce(Option<SocketAddr>),
) -> Result<(), CliError> {
    config.max_queued_requests = args.max_queued_requests;
    config.max_unread_events = args.max_unread_events;
    config.max_schema_bytes = args.options.limits.max_schema_bytes;
    let keys_of_file = args.api_key_file.as_deref().map_or_else(|| Ok(Vec::new()), read_keys)?;
    let mut api_keys = [args.api_key.clone(), keys_of_file].concat();
    if api_keys.is_empty() {
        // As in vLLM, an empty variable is none.
        api_keys.extend(std::env::var("VLLM_API_KEY").ok().filter(|key| !key.is_empty()));
    }
    // The flag takes all words that follow, so the second name may be a misplaced model.
    if let ([_, second, ..], None) = (args.options.served_model_names.as_slice(), args.engine.model()) {
        let advice = "expected a model with several names; put MODEL before the flag";
        return Err(CliError::Usage(format!("--served-model-name: found {second:?} and no model, {advice}")));
    }
    let group = session::open_group(&config)?;
    if group.rank() > 0 {
        let fetched = args.engine.fetch(&mut config);
        match session::follow(&config, group, fetched)? {}
    }
    // Bind first, so that a port in use is reported before minutes of downloading and loading.
    let bound = args.listen.bind().inspect_err(|error| group.refuse(error))?;
    let store = open_store(&args).inspect_err(|error| group.refuse(error))?;
    let runtime = session::runtime()?;
    let loading = {
        let _runtime = runtime.enter();
        runtime.spawn(server::refuse_while_loading(bound.listener()?))
    };
    args.engine.fetch(&mut config).inspect_err(|error| group.refuse(error))?;
    let source = config.model.clone();
    let engine = session::start_in(config, group)?;
    note(session::describe(&engine, &source));
    runtime.block_on(lora::load(&engine, &args))?;
    let sampling = session::sampling_defaults(engine.generation_defaults());
    engine.info().notes.iter().chain(&sampling).for_each(|line| note(format_args!("  {line}")));
    let root = args.engine.model().map_or_else(|| engine.info().name.clone(), |path| path.display().to_string());
    let options = ServerOptions {
        root,
        api_keys: api_keys.clone(),
        log_prompts: args.enable_log_requests.then_some(args.max_log_len),
        ..args.options.clone()
    };
    let app = App::new(engine.clone(), options);
    let app = Arc::new(match store {
        Some(store) => app.with_store(store),
        None => app,
    });
    note(format_args!("  {}", app.formats()));
    let grace = Duration::from_secs(args.shutdown_timeout);
    let cancelled = runtime.block_on(async {
        let stop = stop()?;
        loading.abort();
        // Connections are refused until the task has ended.
        let _ = loading.await;
        let (listener, address) = (bound.listener()?, bound.address()?);
        let (url, options) = args.listen.url(&bound)?;
        greet(&engine, &url, &options, !api_keys.is_empty());
        if api_keys.is_empty() && address.is_some_and(|address| !address.ip().to_canonical().is_loopback()) {
            note("no API key is set: everyone who can reach this address may use the server (--api-key, --api-key-file);");
            note("requests that name it by a host name with a dot are refused (--allowed-hosts)\n");
        }
        ready(address);
        server::serve(listener, app, stop, grace).await
    });
    let cancelled = cancelled.map_err(CliError::Serve)?;
    if cancelled > 0 {
        note(format_args!("{cancelled} requests were cancelled"));
    }
    Ok(())
}

/// Opens the folder of stored answers, if there is one.
fn open_store(args: &ServeArgs) -> Result<Option<Store>, CliError> {
    let state = &args.options.state;
    let Some(folder) = &state.state_dir else { return Ok(None) };
    let opened = Store::open(folder, state.limits());
    let store = opened.map_err(|error| CliError::File {
        flag: "--state-dir",
        path: folder.clone(),
        message: error.to_string(),
    })?;
    if store.was_repaired() {
        note(format_args!("--state-dir {}: it was not closed in order, and has been checked", folder.display()));
    }
    Ok(Some(store))
}

fn read_keys(path: &Path) -> Result<Vec<String>, CliError> {
    let problem = |message: String| CliError::File { flag: "--api-key-file", path: path.to_owned(), message };
    let text = std::fs::read_to_string(path).map_err(|error| problem(error.to_string()))?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(str::to_string).collect();
    // An empty file must not leave a server open that was meant to be protected.
    if keys.is_empty() { Err(problem("found no key, expected one per line".to_string())) } else { Ok(keys) }
}

/// Prints the address and an example command.
fn greet(engine: &AsyncEngine, url: &str, options: &str, has_keys: bool) {
    let key = if has_keys { " -H 'Authorization: Bearer YOUR_KEY'" } else { "" };
    let info = engine.info();
    let (path, body) = match &info.pooler.task {
        Task::Embed { .. } if !info.generates => ("v1/embeddings", r#""input": "The capital of France""#),
        Task::Classify { .. } if !info.generates => ("classify", r#""input": "The capital of France""#),
        _ if engine.chat_template().is_some() => (
            "v1/chat/completions",
            r#""messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32, "temperature": 0"#,
        ),
        _ => ("v1/completions", r#""prompt": "The capital of France is", "max_tokens": 32, "temperature": 0"#),
    };
    note(format_args!(
        "listening on {}, try:\n",
        if options.is_empty() { url } else { options.trim_start_matches("--unix-socket ").trim() }
    ));
    note(format_args!("  curl {options}{url}/{path}{key} \\\n    -H 'Content-Type: application/json' \\"));
    note(format_args!("    -d '{{{body}}}'\n"));
}

struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Signals> {
        Ok(Signals { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.interrupt.recv() => SignalKind::interrupt().as_raw_value(),
            _ = self.terminate.recv() => SignalKind::terminate().as_raw_value(),
        }
    }
}
