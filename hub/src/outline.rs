//! A model without its weights: settings, and files of weights of which only the headers are read. The rest of these files are holes,
//! which take no space, so that a loader can check everything but numbers.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use ureq::http::header::{CONTENT_LENGTH, CONTENT_RANGE};

use crate::client::{ATTEMPTS, Client, Failure, header};
use crate::error::{HubError, at, shown};
use crate::id::{Commit, ModelId};
use crate::options::Options;
use crate::path::RepoPath;
use crate::progress::Event;

/// First piece of a file, which mostly has the whole header of safetensors.
const FIRST_BYTES: u64 = 512 << 10;
/// Most bytes of a file that are read.
const MAX_BYTES: u64 = 128 << 20;

/// What a loader needs of a file of weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// More of its beginning, before it can say.
    More,
    /// These bytes.
    Ranges(Vec<Range<u64>>),
}

/// Says what is needed of a file: its name, the bytes at its beginning, and its size. An error is one line.
pub type Needs<'a> = &'a (dyn Fn(&str, &[u8], u64) -> Result<Wanted, String> + Sync);

/// Returns a folder of a model, or the path of its GGUF file, below `folder`, whose files of weights have only the bytes that `needs`
/// asks for. A model that is cached is returned as it is. Settings are downloaded to the cache.
///
/// # Errors
/// The errors of [`fetch`](crate::fetch), or a file with a damaged header.
pub fn outline(
    options: &Options,
    model: &ModelId,
    folder: &Path,
    needs: Needs<'_>,
    report: &(dyn Fn(Event<'_>) + Sync),
) -> Result<PathBuf, HubError> {
    crate::fetch::with_listing(options, model, report, |fetch, listing| {
        let (weights, is_gguf) = fetch.settings(listing)?;
        let (commit, snapshot) = (&listing.commit, fetch.repo.snapshot(&listing.commit));
        let path = |folder: &Path| match weights.first().filter(|_| is_gguf) {
            Some(first) => first.below(folder),
            None => folder.to_path_buf(),
        };
        if weights.iter().all(|file| fetch.has(listing, file)) {
            return Ok(path(&snapshot));
        }
        fs::create_dir_all(folder).map_err(at(folder))?;
        for file in fetch.present(listing) {
            let (from, to) = (file.below(&snapshot), file.below(folder));
            let parent = to.parent().unwrap_or(folder);
            fs::create_dir_all(parent).map_err(at(parent))?;
            std::os::unix::fs::symlink(&from, &to).map_err(at(&to))?;
        }
        fetch.each(&weights, |file| {
            let stated = listing.files.get(file.as_str()).copied().flatten();
            write(fetch.client, commit, file, stated, &file.below(folder), needs)
        })?;
        Ok(path(folder))
    })
}

/// Writes the bytes of a file that are needed, and holes for the rest.
fn write(
    client: &Client<'_>,
    commit: &Commit,
    file: &RepoPath,
    stated: Option<u64>,
    path: &Path,
    needs: Needs<'_>,
) -> Result<(), HubError> {
    let (mut bytes, size) = client.part(commit, file, stated, 0..FIRST_BYTES)?;
    let ranges = loop {
        let have = bytes.len() as u64;
        match needs(file.as_str(), &bytes, size).map_err(HubError::Header)? {
            Wanted::Ranges(ranges) => break ranges,
            Wanted::More if have == size => {
                return Err(HubError::Header(format!("{file}: found {size} bytes, expected a whole header")));
            }
            Wanted::More if have >= MAX_BYTES => {
                return Err(HubError::Header(format!(
                    "{file}: found a header of more than {MAX_BYTES} bytes, expected less"
                )));
            }
            Wanted::More => {
                let (more, _) = client.part(commit, file, Some(size), have..(2 * have).min(MAX_BYTES))?;
                bytes.extend(more);
            }
        }
    };
    let wanted = ranges.iter().map(|range| range.end.saturating_sub(range.start)).fold(0u64, u64::saturating_add);
    if wanted > MAX_BYTES {
        return Err(HubError::Header(format!("{file}: found {wanted} bytes to read, expected at most {MAX_BYTES}")));
    }
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(at(parent))?;
    let mut target = File::create(path).map_err(at(path))?;
    target.write_all(&bytes).map_err(at(path))?;
    for range in ranges {
        let start = range.start.max(bytes.len() as u64);
        if start < range.end.min(size) {
            let (part, _) = client.part(commit, file, Some(size), start..range.end.min(size))?;
            target.seek(SeekFrom::Start(start)).map_err(at(path))?;
            target.write_all(&part).map_err(at(path))?;
        }
    }
    target.set_len(size).map_err(at(path))
}

impl Client<'_> {
    /// Bytes of a file, cut at its end, and its size, which must be the stated one.
    fn part(
        &self,
        commit: &Commit,
        file: &RepoPath,
        stated: Option<u64>,
        range: Range<u64>,
    ) -> Result<(Vec<u8>, u64), HubError> {
        let mut failed = 0;
        loop {
            match self.try_part(commit, file, stated, &range) {
                Ok(part) => return Ok(part),
                Err(failure) => self.pause(failure, &mut failed, ATTEMPTS)?,
            }
        }
    }

    fn try_part(
        &self,
        commit: &Commit,
        file: &RepoPath,
        stated: Option<u64>,
        range: &Range<u64>,
    ) -> Result<(Vec<u8>, u64), Failure> {
        let mut answer = self.range(commit, file, range)?;
        let is_part = answer.status().as_u16() == 206;
        // `bytes 0-99/1234`, or the length of a whole file from a server without ranges.
        let (start, size) = if is_part {
            let text = header(&answer, CONTENT_RANGE).unwrap_or_default();
            let parts = text.strip_prefix("bytes ").and_then(|rest| rest.split_once('/'));
            let start = parts.and_then(|(range, _)| range.split_once('-')?.0.parse::<u64>().ok());
            let size = parts.and_then(|(_, size)| size.parse::<u64>().ok()).or(stated);
            let both = start.filter(|start| *start == range.start).zip(size);
            both.ok_or_else(|| {
                self.unusable(format!("the range {:?} of {file}", shown(text)), "the range that was asked for")
            })?
        } else {
            let size = header(&answer, CONTENT_LENGTH).and_then(|size| size.parse().ok()).or(stated);
            (0, size.ok_or_else(|| self.unusable(format!("{file} without a size"), "its number of bytes"))?)
        };
        if stated.is_some_and(|stated| stated != size) {
            return Err(self.unusable(format!("{size} bytes of {file}"), "the size that the listing states").into());
        }
        let end = range.end.min(size);
        if start < range.start && end > MAX_BYTES {
            return Err(self
                .unusable(format!("no range of {file}"), "a server that answers requests for ranges")
                .into());
        }
        let mut body = answer.body_mut().as_reader().take(end.saturating_sub(start));
        let mut bytes = Vec::new();
        body.read_to_end(&mut bytes).map_err(|error| self.broken(error.to_string()))?;
        if start + (bytes.len() as u64) < end {
            return Err(self.broken(format!("{file} ended after {} bytes", start + bytes.len() as u64)));
        }
        bytes.drain(..(range.start - start) as usize);
        Ok((bytes, size))
    }
}
