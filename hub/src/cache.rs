//! The folders of one repository in the cache.
//!
//! ```text
//! CACHE/CACHEDIR.TAG
//! CACHE/.locks/models--ORG--NAME/ETAG.lock
//! CACHE/models--ORG--NAME/blobs/ETAG                   contents; may be a link into a store that huggingface_hub shares
//!                         blobs/ETAG.incomplete        the first bytes, written only under the lock
//!                         refs/REVISION                the hash of a commit
//!                         snapshots/COMMIT/FILE     -> ../../blobs/ETAG
//!                         .no_exist/COMMIT/FILE        empty: the commit has no such file
//! ```
//!
//! Files appear under their final names by renaming, so another process never sees half of one.

use std::fs;
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{HubError, at};
use crate::etag::Etag;
use crate::id::{Commit, ModelId, Revision};
use crate::path::RepoPath;

const TAG: &str = "CACHEDIR.TAG";
/// The signature that <https://bford.info/cachedir/> defines; backup programs leave out folders with it.
const TAG_TEXT: &str =
    "Signature: 8a477f597d28d172789f06886806bc55\n# This folder is a cache of the Hugging Face hub.\n";

/// The folders of one repository.
#[derive(Debug)]
pub(crate) struct Repo {
    root: PathBuf,
    /// `models--ORG--NAME`.
    folder: String,
    no_symlinks: bool,
}

impl Repo {
    pub fn new(root: &Path, model: &ModelId, no_symlinks: bool) -> Repo {
        let folder = format!("models--{}", model.repo().replace('/', "--"));
        Repo { root: root.to_path_buf(), folder, no_symlinks }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    fn path(&self) -> PathBuf {
        self.root.join(&self.folder)
    }

    pub fn blob(&self, etag: &Etag) -> PathBuf {
        self.path().join("blobs").join(etag.as_str())
    }

    pub fn partial(&self, etag: &Etag) -> PathBuf {
        self.path().join("blobs").join(format!("{etag}.incomplete"))
    }

    pub fn lock(&self, etag: &Etag) -> PathBuf {
        self.root.join(".locks").join(&self.folder).join(format!("{etag}.lock"))
    }

    pub fn snapshot(&self, commit: &Commit) -> PathBuf {
        self.path().join("snapshots").join(commit.as_str())
    }

    fn absent(&self, commit: &Commit) -> PathBuf {
        self.path().join(".no_exist").join(commit.as_str())
    }

    fn reference(&self, revision: &Revision) -> PathBuf {
        revision.path().below(&self.path().join("refs"))
    }

    /// Makes the folders that every download needs.
    pub fn prepare(&self) -> Result<(), HubError> {
        let locks = self.root.join(".locks").join(&self.folder);
        for folder in [self.path().join("blobs"), self.path().join("refs"), self.path().join("snapshots"), locks] {
            fs::create_dir_all(&folder).map_err(at(folder))?;
        }
        let tag = self.root.join(TAG);
        // The tag is a courtesy to backup programs. A download does not fail without it.
        if !tag.exists() {
            let _ = write_atomically(&tag, TAG_TEXT.as_bytes());
        }
        Ok(())
    }

    /// The commit of a revision as the cache knows it.
    pub fn resolve(&self, revision: &Revision) -> Result<Option<Commit>, HubError> {
        if let Some(commit) = revision.commit() {
            return Ok(Some(commit));
        }
        let path = self.reference(revision);
        let file = match fs::File::open(&path) {
            Ok(file) => file,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
            Err(error) => return Err(at(path)(error)),
        };
        let mut text = String::new();
        // A folder (a revision that is the beginning of another) or bytes that are no text: no commit.
        let read = file.take(64).read_to_string(&mut text);
        Ok(read.ok().and_then(|_| Commit::parse(text.trim())))
    }

    /// Records the commit of a revision. The snapshot must be whole.
    pub fn write_ref(&self, revision: &Revision, commit: &Commit) -> Result<(), HubError> {
        if revision.commit().is_some() || self.resolve(revision)?.as_ref() == Some(commit) {
            return Ok(());
        }
        let path = self.reference(revision);
        write_atomically(&path, commit.as_str().as_bytes()).map_err(at(path))
    }

    /// Whether a file of a commit is known not to exist.
    pub fn is_absent(&self, commit: &Commit, file: &RepoPath) -> bool {
        file.below(&self.absent(commit)).exists()
    }

    /// Records that a commit has no such file.
    pub fn mark_absent(&self, commit: &Commit, file: &RepoPath) -> Result<(), HubError> {
        let path = file.below(&self.absent(commit));
        if path.exists() { Ok(()) } else { write_atomically(&path, b"").map_err(at(path)) }
    }

    /// Puts a blob into a snapshot: as a relative link, or the blob itself where there are no links.
    pub fn link(&self, etag: &Etag, commit: &Commit, file: &RepoPath) -> Result<(), HubError> {
        let path = file.below(&self.snapshot(commit));
        make_parent(&path).map_err(at(&path))?;
        if !self.no_symlinks {
            let target = format!("{}blobs/{etag}", "../".repeat(2 + file.depth()));
            let temporary = temporary(&path);
            match std::os::unix::fs::symlink(target, &temporary) {
                Ok(()) => return fs::rename(&temporary, &path).map_err(at(path)),
                Err(error) if matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::Unsupported) => {}
                Err(error) => return Err(at(path)(error)),
            }
        }
        fs::rename(self.blob(etag), &path).map_err(at(path))
    }
}

/// Writes a small file so that it appears at once with all of its contents.
fn write_atomically(path: &Path, contents: &[u8]) -> io::Result<()> {
    make_parent(path)?;
    let temporary = temporary(path);
    let mut file = fs::OpenOptions::new().write(true).create_new(true).open(&temporary)?;
    file.write_all(contents)?;
    fs::rename(&temporary, path).inspect_err(|_| {
        let _ = fs::remove_file(&temporary);
    })
}

fn make_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)
}

/// A name beside `path` that no other thread or process uses.
fn temporary(path: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    path.with_file_name(format!(".{}.{count}.tmp", std::process::id()))
}
