//! A hub on this machine: one server with the API and small files, another one with the contents of large files.

pub mod server;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use hub::{Event, HubError, ModelId, Options};
use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use server::{Reply, Request, Server};

pub const REPO: &str = "org/name";
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const TOKEN: &str = "hf_secret";
/// Files from this size are redirected to the second server and named by SHA-256.
const LARGE: usize = 1000;

/// Answers a request in place of the hub.
type Script = Arc<dyn Fn(&Request) -> Option<Reply> + Send + Sync>;

/// A hub with one repository.
pub struct Hub {
    pub api: Server,
    pub contents: Server,
    /// The cache.
    pub home: TempDir,
    files: Arc<BTreeMap<String, File>>,
}

struct File {
    bytes: Vec<u8>,
    etag: String,
}

impl Hub {
    pub fn new(files: &[(&str, &[u8])]) -> Hub {
        Hub::scripted(files, |_| None)
    }

    /// A hub on which `script` answers first.
    pub fn scripted(
        files: &[(&str, &[u8])],
        script: impl Fn(&Request) -> Option<Reply> + Send + Sync + 'static,
    ) -> Hub {
        let named =
            |(name, bytes): &(&str, &[u8])| (name.to_string(), File { bytes: bytes.to_vec(), etag: etag(bytes) });
        let files: Arc<BTreeMap<String, File>> = Arc::new(files.iter().map(named).collect());
        let script: Script = Arc::new(script);
        let (stored, first) = (files.clone(), script.clone());
        let contents = Server::start(move |request| {
            first(request).unwrap_or_else(|| {
                let wanted = request.path.strip_prefix("/large/").and_then(|rest| rest.split('?').next());
                let found = stored.values().find(|file| Some(file.etag.as_str()) == wanted);
                found.map_or(Reply::status(404), |file| Reply::contents(request, &file.bytes))
            })
        });
        let (stored, address) = (files.clone(), contents.url());
        let api = Server::start(move |request| script(request).unwrap_or_else(|| answer(request, &stored, &address)));
        Hub { api, contents, home: TempDir::new().unwrap(), files }
    }

    /// The settings of a user of this hub, with a token.
    pub fn options(&self) -> Options {
        self.options_with(&[])
    }

    pub fn options_with(&self, variables: &[(&str, &str)]) -> Options {
        let find = |name: &str| match (variables.iter().find(|(key, _)| *key == name), name) {
            (Some((_, value)), _) => Some(value.to_string()),
            (None, "HF_ENDPOINT") => Some(self.api.url()),
            (None, "HF_HOME") => Some(self.home.path().to_str().unwrap().to_string()),
            (None, "HF_TOKEN") => Some(TOKEN.to_string()),
            _ => None,
        };
        let mut options = Options::from_env(&find).unwrap();
        options.retry_delay = std::time::Duration::from_millis(1);
        options
    }

    pub fn fetch(&self) -> Result<PathBuf, HubError> {
        fetch(&self.options(), REPO)
    }

    /// The message of a fetch that fails: one line without the token.
    pub fn refusal(&self) -> String {
        refusal(&self.options(), REPO)
    }

    /// The folder of the repository in the cache.
    pub fn cached(&self, path: &str) -> PathBuf {
        self.home.path().join("hub/models--org--name").join(path)
    }

    /// Checks that a folder has exactly these of the hub's files, with their contents.
    #[track_caller]
    pub fn check(&self, folder: &Path, names: &[&str]) {
        let mut found = Vec::new();
        list(folder, "", &mut found);
        found.sort();
        assert_eq!(found, names);
        for name in names {
            assert_eq!(&std::fs::read(folder.join(name)).unwrap(), &self.files[*name].bytes, "{name}");
        }
    }

    /// Methods and paths of all requests to the API so far.
    pub fn requests(&self) -> Vec<String> {
        self.api.requests().iter().map(|request| format!("{} {}", request.method, request.path)).collect()
    }
}

pub fn fetch(options: &Options, id: &str) -> Result<PathBuf, HubError> {
    hub::fetch(options, &id.parse::<ModelId>().unwrap(), &|_| {})
}

#[track_caller]
pub fn refusal(options: &Options, id: &str) -> String {
    let error = fetch(options, id).unwrap_err();
    let message = error.to_string();
    assert!(message.lines().count() == 1 && message.len() < 600, "{message}");
    assert!(!message.contains(TOKEN) && !format!("{error:?} {options:?}").contains(TOKEN), "{error:?} {options:?}");
    message
}

/// The last count of bytes, and the other events in words.
pub fn fetch_with_events(options: &Options) -> (Result<PathBuf, HubError>, (u64, u64), Vec<String>) {
    fetch_until_waiting(options, || ())
}

/// Like [`fetch_with_events`]; calls `waiting` when this fetch waits for a lock.
pub fn fetch_until_waiting(
    options: &Options,
    waiting: impl Fn() + Sync,
) -> (Result<PathBuf, HubError>, (u64, u64), Vec<String>) {
    let seen = Mutex::new(((0, 0), Vec::new()));
    let result = hub::fetch(options, &REPO.parse().unwrap(), &|event| {
        let mut seen = seen.lock().unwrap();
        match event {
            // The threads report in any order.
            Event::Bytes { done, total, .. } => seen.0 = (seen.0.0.max(done), seen.0.1.max(total)),
            Event::Waiting { file } => {
                seen.1.push(format!("waiting for {file}"));
                waiting();
            }
            Event::Retrying { error } => seen.1.push(format!("retrying: {error}")),
            Event::Stale { error } => seen.1.push(format!("stale: {error}")),
            _ => {}
        }
    });
    let (bytes, events) = seen.into_inner().unwrap();
    (result, bytes, events)
}

pub fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn git_sha1(bytes: &[u8]) -> String {
    let hasher = Sha1::new_with_prefix(format!("blob {}\0", bytes.len())).chain_update(bytes);
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn etag(bytes: &[u8]) -> String {
    if bytes.len() >= LARGE { sha256(bytes) } else { git_sha1(bytes) }
}

/// Bytes that differ from place to place.
pub fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(2654435761) >> 11) as u8).collect()
}

/// What the hub answers.
fn answer(request: &Request, files: &BTreeMap<String, File>, contents: &str) -> Reply {
    let resolve = format!("/{REPO}/resolve/{COMMIT}/");
    if request.path == format!("/api/models/{REPO}/revision/main") {
        let sizes = files.iter().map(|(name, file)| json!({"rfilename": name, "size": file.bytes.len()}));
        return listing_of(sizes.collect());
    }
    let Some(File { bytes, etag }) = request.path.strip_prefix(&resolve).and_then(|name| files.get(name)) else {
        return Reply::status(404).with("X-Error-Code", "EntryNotFound");
    };
    let described = |reply: Reply| reply.with("X-Repo-Commit", COMMIT);
    if bytes.len() < LARGE {
        return described(Reply::contents(request, bytes)).with("ETag", &format!("\"{etag}\""));
    }
    described(Reply::status(302))
        .with("Location", &format!("{contents}/large/{etag}?signature=private"))
        .with("X-Linked-Etag", &format!("\"{etag}\""))
        .with("X-Linked-Size", &bytes.len().to_string())
}

/// The listing of a revision.
pub fn listing<'a>(names: impl IntoIterator<Item = &'a str>) -> Reply {
    listing_of(names.into_iter().map(|name| json!({"rfilename": name})).collect())
}

fn listing_of(siblings: Vec<Value>) -> Reply {
    let text = json!({"id": REPO, "sha": COMMIT, "private": false, "siblings": siblings}).to_string();
    Reply::ok(text.into_bytes())
}

fn list(folder: &Path, prefix: &str, found: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = format!("{prefix}{}", path.file_name().unwrap().to_str().unwrap());
        if path.is_dir() { list(&path, &format!("{name}/"), found) } else { found.push(name) }
    }
}
