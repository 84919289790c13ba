//! The engine and the server for programs that embed this one, such as the Python package. Settings are the keys of `quire.toml`,
//! checked by the parser of the command line.
//!
//! ```
//! use cli::embed::{Purpose, Setup};
//!
//! let settings = [("max_num_seqs".to_string(), 8.into()), ("seed".to_string(), 1.into())];
//! let (engine, _options) = Setup::read(settings.into_iter().collect(), Purpose::Engine)?.start()?;
//! assert_eq!(engine.info().name, "quire-demo");
//! # Ok::<(), cli::embed::SetupError>(())
//! ```

use std::net::SocketAddr;

use clap::{Arg, Args};
use engine::{AsyncEngine, EngineConfig, EngineError, Group};
use server::ServerOptions;
use toml::{Table, Value};

use crate::args::EngineArgs;
use crate::command::{Command, ServeArgs};
use crate::config::ConfigFile;
use crate::error::CliError;
use crate::foreign::Dialect;
pub use crate::foreign::ForeignSetting;
use crate::{command, parse, serve, session};

/// Flags of the server that matter without HTTP too.
const WITHOUT_HTTP: [&str; 6] =
    ["served-model-name", "pooling-type", "reasoning-parser", "max-logprobs", "max-text-bytes", "max-schema-bytes"];

/// What settings are for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// An engine without HTTP.
    Engine,
    /// A server: all flags of `quire serve`.
    Server,
}

impl Purpose {
    fn allows(self, flag: &Arg) -> bool {
        let has = |command: clap::Command| command.get_arguments().any(|arg| arg.get_id() == flag.get_id());
        self == Purpose::Server
            || flag.get_long().is_some_and(|long| WITHOUT_HTTP.contains(&long))
            || has(EngineArgs::augment_args(clap::Command::new("")))
    }

    /// Names of the settings, in order.
    pub fn names(self) -> Vec<String> {
        let root = command();
        let flags = root.find_subcommand("serve").into_iter().flat_map(clap::Command::get_arguments);
        let allowed = flags.filter(|flag| self.allows(flag)).filter_map(Arg::get_long).filter(|long| *long != "help");
        let mut names: Vec<String> = allowed.map(|long| long.replace('-', "_")).collect();
        names.push("kernels".to_string());
        names.extend(Dialect::vllm().without_equal().map(|name| name.replace('-', "_")));
        names.sort();
        names
    }
}

/// Settings of vLLM that have no counterpart here.
pub fn vllm_settings() -> Vec<ForeignSetting> {
    Dialect::vllm().settings()
}

/// Why a start failed, in the line that the program would print.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    /// A setting is unknown or has a wrong value.
    #[error("{0}")]
    Setting(String),
    /// The model cannot be loaded, or the server cannot listen.
    #[error("{0}")]
    Failed(String),
}

impl From<CliError> for SetupError {
    fn from(error: CliError) -> SetupError {
        match &error {
            CliError::Usage(_) | CliError::Engine(EngineError::Config { .. }) => SetupError::Setting(error.to_string()),
            _ => SetupError::Failed(error.to_string()),
        }
    }
}

/// Checked settings.
pub struct Setup {
    args: Box<ServeArgs>,
    config: EngineConfig,
}

impl Setup {
    /// Checks settings. They take precedence over environment variables, and `config` names a settings file, as on the command line.
    ///
    /// # Errors
    /// A name is unknown, or a value is wrong.
    pub fn read(mut settings: Table, purpose: Purpose) -> Result<Setup, SetupError> {
        let root = command();
        let file = settings.remove("config");
        let settings = ConfigFile::of(settings)?;
        let mut arguments = vec!["quire".into(), "serve".into()];
        match file {
            None => {}
            Some(Value::String(path)) => arguments.push(format!("--config={path}").into()),
            Some(other) => {
                let problem = format!("config: found {}, expected the path of a settings file", other.type_str());
                return Err(SetupError::Setting(problem));
            }
        }
        let serve = root.find_subcommand("serve").ok_or_else(|| SetupError::Failed("found no command serve".into()))?;
        arguments.extend(settings.all_arguments(&root, serve, |flag| purpose.allows(flag))?);
        let Some((Command::Serve(args), mut config)) = parse(arguments)? else {
            return Err(SetupError::Setting("help: expected no such setting".to_string()));
        };
        settings.apply_kernels(&mut config)?;
        Ok(Setup { args, config })
    }

    /// Fetches and loads the model, with progress bars on a terminal. The queue and what may be unread have no limits, since all
    /// requests are the program's own.
    ///
    /// # Errors
    /// A setting does not fit the model, or the model cannot be loaded.
    pub fn start(self) -> Result<(AsyncEngine, ServerOptions), SetupError> {
        let Setup { args, mut config } = self;
        args.engine.log.start();
        config.max_queued_requests = usize::MAX;
        config.max_unread_events = usize::MAX;
        config.max_schema_bytes = args.options.limits.max_schema_bytes;
        let group = Group::open(&config.parallel).map_err(CliError::from)?;
        if group.rank() > 0 {
            let found = "found a process of a launcher of ranks, expected one process";
            return Err(SetupError::Setting(format!(
                "tensor_parallel_size: {found}; use `quire serve` with a launcher"
            )));
        }
        args.engine.fetch(&mut config)?;
        Ok((session::load_in(&config, group)?, args.options))
    }

    /// Serves until the future that `stop` makes in the runtime is ready, as `quire serve` does until a signal. `ready` gets the address
    /// once clients are served.
    ///
    /// # Errors
    /// The model cannot be loaded, the server cannot listen, or the engine has died.
    pub fn serve<S: Future<Output = ()> + Send + 'static>(
        self,
        stop: impl FnOnce() -> std::io::Result<S>,
        ready: impl FnOnce(SocketAddr),
    ) -> Result<(), SetupError> {
        self.args.engine.log.start();
        if self.args.listen.uds.is_some() {
            return Err(SetupError::Setting(
                "uds: expected no such setting in a program; use host and port".to_string(),
            ));
        }
        let ready = |address: Option<SocketAddr>| {
            address.map(ready);
        };
        Ok(serve::run_until(*self.args, self.config, stop, ready)?)
    }
}
