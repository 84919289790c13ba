//! Downloads that succeed, some after trouble.

use std::collections::HashSet;
use std::fs;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::common::server::Reply;
use crate::common::{COMMIT, Hub, TOKEN, bytes, etag, fetch, fetch_with_events, git_sha1, listing, sha256};

const SETTINGS: [(&str, &[u8]); 2] = [("config.json", b"{}"), ("tokenizer.json", b"{\"model\": 1}")];

/// A hub with settings and one large file, on which `script` answers first.
fn with_weights(
    weights: &[u8],
    script: impl Fn(&crate::common::server::Request) -> Option<Reply> + Send + Sync + 'static,
) -> Hub {
    Hub::scripted(&[SETTINGS[0], SETTINGS[1], ("model.safetensors", weights)], script)
}

const ALL: [&str; 3] = ["config.json", "model.safetensors", "tokenizer.json"];

#[test]
fn a_model_is_downloaded_into_the_shared_layout_with_only_the_files_it_needs() {
    let (one, two) = (bytes(300_000), bytes(5000));
    let index =
        br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-1.safetensors"}}"#;
    let hub = Hub::new(&[
        SETTINGS[0],
        SETTINGS[1],
        ("README.md", b"text"),
        ("model.safetensors.index.json", index),
        ("model-1.safetensors", &one),
        ("model-2.safetensors", &two),
        ("model-3.safetensors", b"not in the index"),
        ("pytorch_model.bin", b"pickle"),
        ("consolidated.safetensors", b"the same again"),
        ("onnx/model.onnx", b"another format"),
        ("additional_chat_templates/tool_use.jinja", b"{{ tools }}"),
        ("tokenizer.model", b"the same vocabulary"),
    ]);
    let (folder, (done, total), events) = fetch_with_events(&hub.options());
    let folder = folder.unwrap();
    assert_eq!(folder, hub.cached("snapshots").join(COMMIT));
    let needed = [
        "additional_chat_templates/tool_use.jinja",
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ];
    hub.check(&folder, &needed);
    assert_eq!((done, events), (total, vec![]));
    assert_eq!(total, (300_000 + 5000 + index.len() + 2 + 12 + 11) as u64);
    // The layout: names of blobs, relative links, the ref, what does not exist, locks, the tag of caches.
    let link = |name: &str| fs::read_link(folder.join(name)).unwrap().to_str().unwrap().to_string();
    assert_eq!(link("model-1.safetensors"), format!("../../blobs/{}", sha256(&one)));
    assert_eq!(link("config.json"), format!("../../blobs/{}", git_sha1(b"{}")));
    assert_eq!(link(needed[0]), format!("../../../blobs/{}", git_sha1(b"{{ tools }}")));
    assert_eq!(fs::read_to_string(hub.cached("refs/main")).unwrap(), COMMIT);
    assert!(hub.cached(&format!(".no_exist/{COMMIT}/generation_config.json")).is_file());
    assert_eq!(fs::read_dir(hub.cached("blobs")).unwrap().count(), needed.len());
    let lock = format!("hub/.locks/models--org--name/{}.lock", sha256(&one));
    assert!(hub.home.path().join(lock).is_file());
    assert!(fs::read_to_string(hub.home.path().join("hub/CACHEDIR.TAG")).unwrap().starts_with("Signature: 8a477f59"));
    // The token goes to the endpoint only.
    let bearer = format!("Bearer {TOKEN}");
    assert!(hub.api.requests().iter().all(|request| request.header("Authorization") == Some(&bearer)));
    assert!(hub.contents.requests().iter().all(|request| request.header("Authorization").is_none()));
    assert_eq!(hub.contents.requests().len(), 2, "each large file once");
    for request in hub.requests() {
        let is_needed = request.starts_with("GET /api/") || needed.iter().any(|name| request.ends_with(name));
        assert!(is_needed, "{request}");
    }
    // What is cached is not asked for again.
    let before = hub.requests().len();
    assert_eq!(hub.fetch().unwrap(), folder);
    assert_eq!(hub.requests()[before..], ["GET /api/models/org/name/revision/main"]);
    let mut options = hub.options();
    options.revision = COMMIT.parse().unwrap();
    assert_eq!(fetch(&options, crate::common::REPO).unwrap(), folder);
    assert_eq!(hub.requests().len(), before + 1, "a commit is cached for good");
}

#[test]
fn a_vocabulary_in_another_format_is_downloaded_where_there_is_no_tokenizer_json() {
    let hub = Hub::new(&[
        SETTINGS[0],
        ("model.safetensors", b"data"),
        ("tekken.json", b"{}"),
        ("tokenizer.model", b"pieces"),
        ("added_tokens.json", b"{ }"),
    ]);
    let (folder, ..) = fetch_with_events(&hub.options());
    let needed = ["added_tokens.json", "config.json", "model.safetensors", "tekken.json", "tokenizer.model"];
    hub.check(&folder.unwrap(), &needed);
}

#[test]
fn a_broken_transfer_resumes_where_it_ended() {
    let weights = bytes(600_000);
    let hub = with_weights(&weights, {
        let weights = weights.clone();
        move |request| {
            // Every connection breaks after 70,000 bytes, so there are more breaks than attempts without progress.
            request.is_large().then(|| Reply::contents(request, &weights)).map(|reply| match reply.body.len() {
                70_000.. => reply.cut(70_000),
                _ => reply,
            })
        }
    });
    let (folder, (done, total), events) = fetch_with_events(&hub.options());
    hub.check(&folder.unwrap(), &ALL);
    assert!(done == total && events.len() == 8 && events[0].contains("cannot be reached"), "{events:?}");
    let starts: Vec<_> = hub.contents.requests().iter().map(|request| request.from()).collect();
    assert_eq!(starts[..3], [None, Some(70_000), Some(140_000)]);
    assert_eq!(starts.len(), 9);
}

#[test]
fn a_transfer_that_stalls_is_given_up_and_resumed() {
    let weights = bytes(50_000);
    let hub = with_weights(&weights, {
        let weights = weights.clone();
        move |request| {
            let stalls = request.is_large() && request.from().is_none();
            stalls.then(|| Reply::contents(request, &weights).cut(20_000).stalling(Duration::from_secs(60)))
        }
    });
    let mut options = hub.options();
    options.read_timeout = Duration::from_millis(400);
    hub.check(&fetch(&options, "org/name").unwrap(), &ALL);
    let starts: Vec<_> = hub.contents.requests().iter().map(|request| request.from()).collect();
    assert_eq!(starts, [None, Some(20_000)]);
}

#[test]
fn what_an_earlier_process_left_is_continued() {
    let weights = bytes(50_000);
    for (left, asked, rest) in [(20_000, Some(20_000), 30_000), (50_000, None, 0), (60_000, None, 50_000)] {
        let hub = with_weights(&weights, |_| None);
        fs::create_dir_all(hub.cached("blobs")).unwrap();
        let mut begun = weights.clone();
        begun.resize(left, 0);
        let partial = hub.cached(&format!("blobs/{}.incomplete", sha256(&weights)));
        fs::write(&partial, begun).unwrap();
        let last = AtomicU64::new(0);
        let folder = hub::fetch(&hub.options(), &"org/name".parse().unwrap(), &|event| {
            if let hub::Event::Bytes { received, .. } = event {
                last.fetch_max(received, Ordering::Relaxed);
            }
        });
        hub.check(&folder.unwrap(), &ALL);
        assert!(!partial.exists());
        // What was there counts as done, but was not received.
        let settings: u64 = SETTINGS.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        assert_eq!(last.into_inner(), rest + settings, "{left}");
        let requests = hub.contents.requests();
        assert_eq!(requests.first().and_then(|request| request.from()), asked, "{left}");
        // A complete one only needs its name.
        assert_eq!(requests.len(), usize::from(left != 50_000), "{left}");
    }
}

#[test]
fn a_server_that_ignores_or_refuses_ranges_is_read_from_the_start() {
    let weights = bytes(50_000);
    for status in [200, 206, 416] {
        let all = weights.clone();
        let hub = with_weights(&weights, move |request| {
            let whole = Reply::ok(all.clone());
            match (request.is_large(), request.from(), status) {
                (false, ..) => None,
                (true, None, _) => Some(whole),
                (true, Some(_), 200) => Some(whole),
                // Another range than that which is asked for.
                (true, Some(_), 206) => {
                    Some(Reply { status: 206, ..whole }.with("Content-Range", "bytes 0-49999/50000"))
                }
                (true, Some(_), _) => Some(Reply::status(416)),
            }
        });
        fs::create_dir_all(hub.cached("blobs")).unwrap();
        fs::write(hub.cached(&format!("blobs/{}.incomplete", sha256(&weights))), [7; 999]).unwrap();
        hub.check(&hub.fetch().unwrap(), &ALL);
        let starts: Vec<_> = hub.contents.requests().iter().map(|request| request.from()).collect();
        let expected: &[_] = if status == 200 { &[Some(999)] } else { &[Some(999), None] };
        assert_eq!(starts, expected, "{status}");
    }
}

#[test]
fn a_busy_or_failing_server_is_asked_again() {
    for trouble in [429, 408, 500, 503] {
        let seen = Mutex::new(HashSet::new());
        // The first request of every kind fails.
        let hub = with_weights(&bytes(5000), move |request| {
            let is_first = seen.lock().unwrap().insert(format!("{} {}", request.method, request.path));
            is_first.then(|| Reply::status(trouble).with("Retry-After", "0"))
        });
        hub.check(&hub.fetch().unwrap(), &ALL);
    }
    // The wait that the server states is kept.
    let count = AtomicUsize::new(0);
    let hub = with_weights(b"small", move |_| {
        (count.fetch_add(1, Ordering::Relaxed) == 0).then(|| Reply::status(429).with("Retry-After", "1"))
    });
    let start = Instant::now();
    hub.fetch().unwrap();
    assert!(start.elapsed().as_secs_f64() >= 1.0);
}

#[test]
fn a_signed_address_that_has_expired_is_asked_for_again() {
    let count = AtomicUsize::new(0);
    let hub = with_weights(&bytes(5000), move |request| {
        (request.is_large() && count.fetch_add(1, Ordering::Relaxed) == 0).then(|| Reply::status(403))
    });
    hub.check(&hub.fetch().unwrap(), &ALL);
}

#[test]
fn a_renamed_repository_and_a_mirror_are_followed() {
    let weights = bytes(5000);
    // Relative redirects of the API and of files.
    let renamed = Hub::scripted(&[SETTINGS[0], SETTINGS[1], ("model.safetensors", &weights)], |request| {
        let target = request.path.replace("org/old", "org/name");
        (target != request.path).then(|| Reply::status(307).with("Location", &target))
    });
    let folder = fetch(&renamed.options(), "org/old").unwrap();
    renamed.check(&folder, &ALL);
    assert!(folder.to_str().unwrap().contains("models--org--old"));
    // A mirror that redirects to another host: the token stays with the mirror.
    let target = renamed.api.url();
    let mirror = crate::common::server::Server::start(move |request| {
        Reply::status(308).with("Location", &format!("{target}{}", request.path))
    });
    let before = renamed.api.requests().len();
    let options = renamed.options_with(&[("HF_ENDPOINT", &mirror.url())]);
    renamed.check(&fetch(&options, "org/name").unwrap(), &ALL);
    assert!(mirror.requests().iter().all(|request| request.header("Authorization").is_some()));
    assert!(renamed.api.requests()[before..].iter().all(|request| request.header("Authorization").is_none()));
}

#[test]
fn a_revision_with_slashes_is_one_part_of_the_address_and_folders_of_the_ref() {
    let hub = with_weights(b"small", |request| {
        (request.path == "/api/models/org/name/revision/refs%2Fpr%2F1").then(|| listing(ALL))
    });
    let mut options = hub.options();
    options.revision = "refs/pr/1".parse().unwrap();
    hub.check(&fetch(&options, "org/name").unwrap(), &ALL);
    assert_eq!(fs::read_to_string(hub.cached("refs/refs/pr/1")).unwrap(), COMMIT);
}

#[test]
fn files_are_moved_into_the_snapshot_where_there_are_no_links() {
    // Two files with equal contents share a blob, which can be moved only once.
    let weights = bytes(5000);
    let files = [SETTINGS[0], ("generation_config.json", b"{}"), SETTINGS[1], ("model.safetensors", &weights)];
    let hub = Hub::new(&files);
    let options = hub.options_with(&[("HF_HUB_DISABLE_SYMLINKS", "1")]);
    let folder = fetch(&options, "org/name").unwrap();
    hub.check(&folder, &["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]);
    assert!(!fs::symlink_metadata(folder.join("config.json")).unwrap().is_symlink());
    assert!(!hub.cached("blobs").join(etag(&weights)).exists());
    // They are found by both kinds of readers.
    let before = hub.requests().len();
    assert_eq!(hub.fetch().unwrap(), folder);
    assert_eq!(hub.requests().len(), before + 1);
}

#[test]
fn an_empty_file_is_made_without_a_transfer() {
    let hub = Hub::new(&[SETTINGS[0], ("tokenizer.json", b""), ("model.safetensors", b"")]);
    hub.check(&hub.fetch().unwrap(), &ALL);
}
