//! Models of which only settings and headers are read.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use hub::{HubError, Wanted};
use tempfile::TempDir;

use crate::common::server::Reply;
use crate::common::{Hub, REPO, bytes};

const WEIGHTS: &str = "model.safetensors";
const HEADER: usize = 5000;
const SIZE: usize = 4 << 20;

/// A file whose first 8 bytes are the length of its header.
fn weights(header: usize, size: usize) -> Vec<u8> {
    let mut all = bytes(size);
    all[..8].copy_from_slice(&(header as u64).to_le_bytes());
    all
}

/// Asks for the header, and for ten bytes in the middle of the file.
fn needs(file: &str, beginning: &[u8], size: u64) -> Result<Wanted, String> {
    let Some(length) = beginning.first_chunk() else { return Ok(Wanted::More) };
    let end = 8 + u64::from_le_bytes(*length);
    if end > size {
        return Err(format!("{file}: found a header of {end} bytes"));
    }
    Ok(Wanted::Ranges(vec![0..end, size / 2..size / 2 + 10]))
}

fn outline(hub: &Hub, folder: &Path) -> Result<PathBuf, HubError> {
    hub::outline(&hub.options(), &REPO.parse().unwrap(), &folder.join("name"), &needs, &|_| {})
}

/// The one line with which it fails.
#[track_caller]
fn refusal(hub: &Hub) -> String {
    let error = outline(hub, TempDir::new().unwrap().path()).unwrap_err().to_string();
    assert!(error.lines().count() == 1 && error.len() < 600, "{error}");
    error
}

#[test]
fn weights_have_their_size_and_their_headers_and_take_no_space() {
    let all = weights(HEADER, SIZE);
    let hub = Hub::new(&[("config.json", b"{}"), ("tokenizer.json", &bytes(2000)), (WEIGHTS, &all)]);
    let folder = TempDir::new().unwrap();
    let path = outline(&hub, folder.path()).unwrap();
    assert_eq!(path, folder.path().join("name"));
    assert_eq!(std::fs::read(path.join("config.json")).unwrap(), b"{}");
    assert_eq!(std::fs::read(path.join("tokenizer.json")).unwrap(), bytes(2000));
    let found = std::fs::read(path.join(WEIGHTS)).unwrap();
    assert_eq!(found.len(), SIZE);
    assert_eq!(found[..8 + HEADER], all[..8 + HEADER]);
    assert_eq!(found[SIZE / 2..SIZE / 2 + 10], all[SIZE / 2..SIZE / 2 + 10]);
    assert!(found[SIZE / 2 + 10..].iter().all(|byte| *byte == 0));
    let taken = std::fs::metadata(path.join(WEIGHTS)).unwrap().blocks() * 512;
    assert!(taken < SIZE as u64 / 2, "{taken}");
    // Neither the cache nor the wire has the weights, and the token stays at home.
    assert!(!hub.cached("refs/main").exists());
    let requests = hub.contents.requests();
    let large: Vec<_> = requests.iter().filter(|request| request.header("Range").is_some()).collect();
    assert!(large.len() == 2 && requests.iter().all(|request| request.header("Authorization").is_none()));
    // Afterwards the whole model is downloaded as usual, and is its own outline.
    let whole = hub.fetch().unwrap();
    assert_eq!(outline(&hub, folder.path()).unwrap(), whole);
    assert_eq!(std::fs::read(whole.join(WEIGHTS)).unwrap(), all);
}

#[test]
fn headers_longer_than_the_first_piece_are_read_to_their_end() {
    let all = weights(1 << 20, SIZE);
    let hub = Hub::new(&[("config.json", b"{}"), (WEIGHTS, &all)]);
    let folder = TempDir::new().unwrap();
    let path = outline(&hub, folder.path()).unwrap();
    assert_eq!(std::fs::read(path.join(WEIGHTS)).unwrap()[..(1 << 20) + 8], all[..(1 << 20) + 8]);
    // A loader that cannot say where the header ends gets more until the end of the file.
    let more = |_: &str, beginning: &[u8], size: u64| match beginning.len() as u64 {
        have if have < 3 << 20 => Ok(Wanted::More),
        have => Ok(Wanted::Ranges(std::iter::once(0..have.min(size)).collect())),
    };
    let path = hub::outline(&hub.options(), &REPO.parse().unwrap(), &folder.path().join("b"), &more, &|_| {}).unwrap();
    assert_eq!(std::fs::read(path.join(WEIGHTS)).unwrap(), all);
    let never = |_: &str, _: &[u8], _: u64| Ok(Wanted::More);
    let error = hub::outline(&hub.options(), &REPO.parse().unwrap(), &folder.path().join("c"), &never, &|_| {});
    assert!(error.unwrap_err().to_string().contains("expected a whole header"));
}

#[test]
fn a_server_without_ranges_is_read_from_the_beginning() {
    let all = weights(HEADER, SIZE);
    let whole = all.clone();
    let hub = Hub::scripted(&[("config.json", b"{}"), (WEIGHTS, &all)], move |request| {
        request.is_large().then(|| Reply::ok(whole.clone()))
    });
    let folder = TempDir::new().unwrap();
    let found = std::fs::read(outline(&hub, folder.path()).unwrap().join(WEIGHTS)).unwrap();
    assert_eq!((found.len(), &found[SIZE / 2..SIZE / 2 + 10]), (SIZE, &all[SIZE / 2..SIZE / 2 + 10]));
}

/// Sixty-four bytes, as this part of a file.
fn part(range: &str) -> Reply {
    Reply { status: 206, ..Reply::ok(vec![7; 64]) }.with("Content-Range", range)
}

#[test]
fn answers_that_are_no_part_of_the_file_are_one_line() {
    let all = weights(HEADER, SIZE);
    let files: &[(&str, &[u8])] = &[("config.json", b"{}"), (WEIGHTS, &all)];
    let scripted = |reply: fn() -> Reply| Hub::scripted(files, move |request| request.is_large().then(reply));
    let cases: [(Hub, &str); 6] = [
        (scripted(|| Reply { status: 206, ..Reply::ok(vec![7; 64]) }), "expected the range that was asked for"),
        (scripted(|| part("bytes 9-72/4194304")), "expected the range that was asked for"),
        (scripted(|| part("bytes 0-63/64")), "expected the size that the listing states"),
        (scripted(|| part("bytes 0-524287/4194304")), "ended after 64 bytes"),
        (scripted(|| Reply::status(403)), "403"),
        (Hub::new(&[("config.json", b"{}"), (WEIGHTS, &weights(SIZE, SIZE))]), "found a header of 4194312 bytes"),
    ];
    for (hub, expected) in cases {
        let line = refusal(&hub);
        assert!(line.contains(expected), "{line}");
    }
    let gated = Hub::scripted(files, |request| {
        request.path.starts_with("/api").then(|| Reply::status(401).with("X-Error-Code", "GatedRepo"))
    });
    assert!(refusal(&gated).contains("is gated"));
    let missing = Hub::scripted(files, |request| request.path.starts_with("/api").then(|| Reply::status(404)));
    assert!(refusal(&missing).contains("found no such model"));
}
