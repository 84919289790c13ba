//! Where the model is: a folder, a GGUF file, or an id on the Hugging Face hub, whose files are downloaded.
//!
//! A path that exists is never an id. The environment variables of other tools of the hub are honoured (`docs/configuration.md`).

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use clap::Args;
use hub::{Event, HubError, ModelId, Options, Token};
use indicatif::BinaryBytes;

use super::error::CliError;
use super::log::note;
use super::progress::progress_bar;

#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Hugging Face hub")]
pub struct HubArgs {
    /// Branch, tag or commit of a model on the hub [default: main]
    ///
    /// It is an error with a path.
    #[arg(long, value_name = "REVISION", env = "QUIRE_REVISION")]
    pub revision: Option<String>,
    /// Access token for the hub; HF_TOKEN or `hf auth login` keep it out of the process list
    ///
    /// It takes precedence over the variables below. Private and gated models need one.
    #[arg(long, value_name = "TOKEN")]
    pub hf_token: Option<HfToken>,
    /// Folder of downloaded models [default: the cache that Hugging Face tools share]
    ///
    /// It has the layout of the cache.
    #[arg(long, value_name = "FOLDER", env = "QUIRE_DOWNLOAD_DIR")]
    pub download_dir: Option<PathBuf>,
}

/// A token as given. It is checked after parsing, because a parser's error shows the value.
#[derive(Clone)]
pub struct HfToken(String);

impl From<String> for HfToken {
    fn from(text: String) -> HfToken {
        HfToken(text)
    }
}

impl fmt::Debug for HfToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HfToken(not shown)")
    }
}

/// Returns `model` if it exists as a path; otherwise takes it as a hub id and returns the path of its files, which are downloaded
/// unless they are cached.
pub fn locate(model: &Path, args: &HubArgs) -> Result<PathBuf, CliError> {
    by_id(model, args, fetch)
}

/// Like [`locate`], but of the weights that are not cached only the headers are read. The files are in `folders`.
pub fn outline(model: &Path, args: &HubArgs, folders: &mut Folders) -> Result<PathBuf, CliError> {
    by_id(model, args, |options, id| {
        let name = id.repo().rsplit('/').next().unwrap_or_default();
        let folder = folders.add().map_err(|source| HubError::Io { path: std::env::temp_dir(), source })?.join(name);
        let needs = |file: &str, bytes: &[u8], size: u64| match models::needed(file, bytes, size) {
            Ok(models::Needed::More) => Ok(hub::Wanted::More),
            Ok(models::Needed::Ranges(ranges)) => Ok(hub::Wanted::Ranges(ranges)),
            Err(error) => Err(format!("{}: {error}", id.repo())),
        };
        let path = with_progress(options, id, |report| hub::outline(options, id, &folder, &needs, report))?;
        if path.starts_with(&folder) {
            note(format_args!("{id}: read the settings and the headers of the weights; no weights were downloaded"));
        }
        Ok(path)
    })
}

/// Temporary folders, which are removed at the end.
#[derive(Default)]
pub struct Folders(Vec<PathBuf>);

impl Folders {
    /// Adds a folder that no other program can read.
    fn add(&mut self) -> std::io::Result<PathBuf> {
        use std::os::unix::fs::DirBuilderExt;
        for number in 0.. {
            let path = std::env::temp_dir().join(format!("quire-plan-{}-{number}", std::process::id()));
            match std::fs::DirBuilder::new().mode(0o700).create(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
                Ok(()) => {
                    self.0.push(path.clone());
                    return Ok(path);
                }
            }
        }
        Err(std::io::ErrorKind::AlreadyExists.into())
    }
}

impl Drop for Folders {
    fn drop(&mut self) {
        for folder in &self.0 {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

/// Returns `model` if it exists as a path, otherwise what `fetch` makes of a hub id.
fn by_id(
    model: &Path,
    args: &HubArgs,
    fetch: impl FnOnce(&Options, &ModelId) -> Result<PathBuf, HubError>,
) -> Result<PathBuf, CliError> {
    let shown = model.display();
    if model.exists() {
        return match &args.revision {
            None => Ok(model.to_path_buf()),
            Some(revision) => Err(CliError::Usage(format!(
                "--revision: found {revision:?} with the path {shown}, expected it with a hub id only; omit it"
            ))),
        };
    }
    let id: Option<ModelId> = model.to_str().and_then(|text| text.parse().ok());
    let id = id.ok_or_else(|| {
        CliError::Usage(format!(
            "{shown}: no such folder or file; expected a checkpoint folder, a .gguf file, or a hub id such as Qwen/Qwen3-0.6B"
        ))
    })?;
    let mut options = Options::from_env(&|name| std::env::var(name).ok())?;
    if let Some(revision) = &args.revision {
        options.revision = revision.parse()?;
    }
    if let Some(token) = &args.hf_token {
        options.token = Some(Token::new(&token.0)?);
    }
    if let Some(folder) = &args.download_dir {
        options.cache = Some(folder.clone());
    }
    fetch(&options, &id).map_err(|error| match error {
        // It may have been meant as a path.
        HubError::RepoNotFound { .. } | HubError::Network { .. } | HubError::Offline { .. } => {
            CliError::Failed(format!("{error}; {shown} is no folder or file here either"))
        }
        other => other.into(),
    })
}

/// Fetches a model with a progress bar.
fn fetch(options: &Options, id: &ModelId) -> Result<PathBuf, HubError> {
    with_progress(options, id, |report| hub::fetch(options, id, report))
}

/// Shows the events of `get` in a progress bar and in notes.
fn with_progress(
    options: &Options,
    id: &ModelId,
    get: impl FnOnce(&(dyn Fn(Event<'_>) + Sync)) -> Result<PathBuf, HubError>,
) -> Result<PathBuf, HubError> {
    let bar = progress_bar(0, "downloading {bar:32} {binary_bytes}/{binary_total_bytes}, {binary_bytes_per_sec}");
    let began: OnceLock<Instant> = OnceLock::new();
    let (last, received) = (Mutex::new(String::new()), AtomicU64::new(0));
    let said = |line: fmt::Arguments<'_>| bar.suspend(|| note(line));
    let path = get(&|event| match event {
        Event::Bytes { done, total, received: bytes } => {
            began.get_or_init(|| {
                let cache = options.cache.as_deref().unwrap_or(Path::new(""));
                said(format_args!("downloading {id} to {}", cache.display()));
                Instant::now()
            });
            bar.set_length(total);
            bar.set_position(done);
            received.fetch_max(bytes, Ordering::Relaxed);
        }
        Event::Waiting { file } => said(format_args!("waiting for another process that downloads {file}")),
        Event::Retrying { error } => {
            // The same failure of the next attempt, or of another file, is said once.
            let line = format!("{error}; trying again");
            let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
            if *last != line {
                said(format_args!("{line}"));
                *last = line;
            }
        }
        Event::Stale { error } => said(format_args!("{error}; using the cached snapshot of {id}")),
        _ => {}
    });
    let bytes = received.into_inner();
    bar.finish_and_clear();
    if let (Some(began), Ok(_), 1..) = (began.get(), &path, bytes) {
        let seconds = began.elapsed().as_secs_f64();
        let rate = BinaryBytes((bytes as f64 / seconds.max(1e-9)) as u64);
        note(format_args!("downloaded {} in {seconds:.1} s ({rate}/s)", BinaryBytes(bytes)));
    }
    path
}
