//! The whole: from an id to the folder that a loader opens.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::cache::Repo;
use crate::client::{Client, Listing, Metadata};
use crate::download::Download;
use crate::error::{HubError, at, shown};
use crate::id::{Commit, ModelId};
use crate::options::Options;
use crate::path::RepoPath;
use crate::progress::{Event, Progress};
use crate::select::{self, Unusable, Weights};
use crate::snapshot::{self, MAX_SHARDS, Snapshot};

/// Largest file that is not weights, in bytes.
const MAX_SETTINGS_BYTES: u64 = 256 << 20;

/// Returns the folder of a model, or the path of its GGUF file, and downloads what the cache lacks.
///
/// A request is made unless the revision is the full hash of a commit that is cached. If the hub cannot be reached, a cached snapshot
/// is used ([`Event::Stale`]).
///
/// # Errors
/// The model or revision does not exist, or needs a token; it has no weights in a supported format; the hub cannot be reached; a file
/// does not have the stated size and hash; the disk is full. Files that have arrived stay in the cache.
pub fn fetch(options: &Options, model: &ModelId, report: &(dyn Fn(Event<'_>) + Sync)) -> Result<PathBuf, HubError> {
    with_listing(options, model, report, |fetch, listing| fetch.run(listing))
}

/// Returns the cached model if it is whole or the hub cannot be reached, otherwise what `work` makes of the listing of its files.
pub(crate) fn with_listing(
    options: &Options,
    model: &ModelId,
    report: &(dyn Fn(Event<'_>) + Sync),
    work: impl FnOnce(&Fetch<'_>, &Listing) -> Result<PathBuf, HubError>,
) -> Result<PathBuf, HubError> {
    let cache = options.cache.as_ref().ok_or_else(|| HubError::Setting {
        name: "HF_HOME",
        problem: "found neither this variable nor HOME, expected a folder for downloads; set it, or --download-dir"
            .into(),
    })?;
    let repo = Repo::new(cache, model, options.no_symlinks);
    let known = repo.resolve(&options.revision)?;
    let cached = known.map(|commit| Snapshot::read(&repo, &commit, model)).transpose();
    if options.offline {
        return offline(options, &repo, model, cached?);
    }
    // A damaged snapshot does not matter if the revision is another commit by now.
    let cached = match cached.unwrap_or_default() {
        Some(snapshot) if snapshot.is_whole && options.revision.commit().is_some() => return Ok(snapshot.path),
        other => other.filter(|snapshot| snapshot.missing.is_none()),
    };
    let progress = Progress::new(report);
    let client = Client::new(options, model, &progress)?;
    match (client.listing(cached.is_none()), cached) {
        (Ok(listing), _) => {
            work(&Fetch { options, model, client: &client, repo: &repo, progress: &progress }, &listing)
        }
        (Err(error), Some(snapshot)) if error.is_outage() => {
            progress.report(Event::Stale { error: &error });
            Ok(snapshot.path)
        }
        (Err(error), _) => Err(error),
    }
}

/// The cached snapshot, or what is missing of it.
fn offline(options: &Options, repo: &Repo, model: &ModelId, cached: Option<Snapshot>) -> Result<PathBuf, HubError> {
    let missing = match cached {
        None => format!("no revision {}", options.revision.as_str()),
        Some(Snapshot { missing: Some(file), .. }) => format!("no {}", shown(&file)),
        Some(snapshot) => return Ok(snapshot.path),
    };
    Err(HubError::Offline { repo: model.to_string(), missing, cache: repo.root().to_path_buf() })
}

pub(crate) struct Fetch<'a> {
    options: &'a Options,
    model: &'a ModelId,
    pub client: &'a Client<'a>,
    pub repo: &'a Repo,
    progress: &'a Progress<'a>,
}

impl Fetch<'_> {
    fn run(&self, listing: &Listing) -> Result<PathBuf, HubError> {
        let (weights, is_gguf) = self.settings(listing)?;
        let folder = self.repo.snapshot(&listing.commit);
        let first = weights.first().filter(|_| is_gguf).map(|first| first.below(&folder));
        self.download(listing, weights, u64::MAX)?;
        self.record(&listing.commit, &select::settings(&names(listing)).1)?;
        Ok(first.unwrap_or(folder))
    }

    /// Downloads all files but weights. Returns the files of the weights, and whether they are GGUF.
    pub fn settings(&self, listing: &Listing) -> Result<(Vec<RepoPath>, bool), HubError> {
        let names = names(listing);
        let weights = select::weights(&names, self.model.gguf()).map_err(|reason| self.unusable(reason, listing))?;
        self.download(listing, self.present(listing), MAX_SETTINGS_BYTES)?;
        match weights {
            Weights::Single(file) => Ok((vec![file], false)),
            Weights::Sharded { index } => {
                let shards = snapshot::shards(&index.below(&self.repo.snapshot(&listing.commit)))?;
                if let Some(missing) = shards.iter().find(|shard| !names.contains(shard.as_str())) {
                    return Err(self.no_entry(missing.as_str(), &listing.commit));
                }
                Ok((shards, false))
            }
            Weights::Gguf(parts) => Ok((parts, true)),
        }
    }

    /// The files that are not weights, with the index of shards.
    pub fn present(&self, listing: &Listing) -> Vec<RepoPath> {
        let names = names(listing);
        let (mut settings, _) = select::settings(&names);
        if let Ok(Weights::Sharded { index }) = select::weights(&names, self.model.gguf()) {
            settings.push(index);
        }
        settings
    }

    /// Records what the revision is and which files it lacks, unless the cache is only there to be read.
    fn record(&self, commit: &Commit, absent: &[RepoPath]) -> Result<(), HubError> {
        let recorded = absent.iter().try_for_each(|file| self.repo.mark_absent(commit, file));
        match recorded.and_then(|()| self.repo.write_ref(&self.options.revision, commit)) {
            Err(HubError::Io { source, .. })
                if matches!(source.kind(), ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied) =>
            {
                Ok(())
            }
            other => other,
        }
    }

    /// Whether the snapshot has a file. One of another size than the hub states was damaged after it had got its name.
    pub fn has(&self, listing: &Listing, file: &RepoPath) -> bool {
        let stated = listing.files.get(file.as_str()).copied().flatten();
        let found = std::fs::metadata(file.below(&self.repo.snapshot(&listing.commit)));
        found.is_ok_and(|found| found.is_file() && stated.is_none_or(|size| found.len() == size))
    }

    /// Brings the files that the snapshot lacks, several at once. The first error stops all of them.
    fn download(&self, listing: &Listing, mut files: Vec<RepoPath>, max_bytes: u64) -> Result<(), HubError> {
        let commit = &listing.commit;
        files.retain(|file| !self.has(listing, file));
        if files.is_empty() {
            return Ok(());
        }
        self.repo.prepare()?;
        if files.len() > MAX_SHARDS {
            let found = format!("{} files of weights", files.len());
            return Err(self.client.unusable(found, "at most 4096"));
        }
        let wanted = self.each(&files, |file| {
            let metadata = self.client.metadata(commit, file)?;
            if metadata.size > max_bytes {
                let found = format!("{} bytes of {file}", metadata.size);
                return Err(self.client.unusable(found, "at most 256 MiB for a file that is not weights"));
            }
            Ok(metadata)
        })?;
        self.check_space(&wanted)?;
        let total = wanted.iter().fold(0u64, |sum, file| sum.saturating_add(file.size));
        if total > 0 {
            self.progress.expect(total);
        }
        let download = Download { client: self.client, repo: self.repo, commit, progress: self.progress };
        self.each(&wanted, |file| download.run(file)).map(drop)
    }

    /// Calls `work` on each item from several threads. The results are in the order of the items.
    pub fn each<T: Sync, R: Send>(
        &self,
        items: &[T],
        work: impl Fn(&T) -> Result<R, HubError> + Sync,
    ) -> Result<Vec<R>, HubError> {
        let next = AtomicUsize::new(0);
        let results = Mutex::new(Vec::new());
        let first_error = Mutex::new(None);
        std::thread::scope(|scope| {
            for _ in 0..self.options.connections.clamp(1, items.len().max(1)) {
                scope.spawn(|| {
                    while !self.client.is_stopped() {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        let Some(item) = items.get(index) else { return };
                        match work(item) {
                            Ok(result) => locked(&results).push((index, result)),
                            Err(error) => {
                                // Errors of threads that this one stops come later and are dropped.
                                locked(&first_error).get_or_insert(error);
                                self.client.stop.store(true, Ordering::Relaxed);
                            }
                        }
                    }
                });
            }
        });
        if let Some(error) = locked(&first_error).take() {
            return Err(error);
        }
        let mut results = std::mem::take(&mut *locked(&results));
        results.sort_by_key(|(index, _)| *index);
        Ok(results.into_iter().map(|(_, result)| result).collect())
    }

    /// Checks that the disk has space for what is missing, before anything is downloaded.
    fn check_space(&self, wanted: &[Metadata]) -> Result<(), HubError> {
        let present = |file: &Metadata| {
            let (blob, partial) = (self.repo.blob(&file.etag), self.repo.partial(&file.etag));
            let len = |path: &PathBuf| std::fs::metadata(path).map_or(0, |found| found.len());
            len(&blob).max(len(&partial))
        };
        let needed = wanted.iter().fold(0u64, |sum, file| sum.saturating_add(file.size.saturating_sub(present(file))));
        let folder = self.repo.root();
        let disk = rustix::fs::statvfs(folder).map_err(|error| at(folder)(error.into()))?;
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if free < needed {
            return Err(HubError::Space { folder: folder.to_path_buf(), free, needed });
        }
        Ok(())
    }

    fn no_entry(&self, file: &str, commit: &Commit) -> HubError {
        let (repo, commit) = (self.model.repo().to_string(), commit.as_str().to_string());
        HubError::EntryNotFound { repo, file: shown(file), commit }
    }

    fn unusable(&self, reason: Unusable, listing: &Listing) -> HubError {
        let repo = self.model.repo().to_string();
        let wanted = self.model.gguf().unwrap_or_default().to_string();
        match reason {
            Unusable::NoWeights(found) => HubError::NoWeights { repo, found },
            Unusable::SeveralGguf(choices) => HubError::SeveralGguf { repo, choices },
            Unusable::NoGguf(choices) => HubError::NoGguf { repo, wanted, choices },
            Unusable::NoPart(file) => self.no_entry(&file, &listing.commit),
            Unusable::Name(name) => self
                .client
                .unusable(format!("the file name {:?}", shown(&name)), "a relative path without special characters"),
        }
    }
}

fn names(listing: &Listing) -> BTreeSet<&str> {
    listing.files.keys().map(String::as_str).collect()
}

fn locked<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    value.lock().unwrap_or_else(PoisonError::into_inner)
}
