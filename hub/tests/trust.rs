//! Answers that must not be believed: wrong contents, sizes, hashes and names.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::server::{Reply, Request};
use crate::common::{Hub, bytes, git_sha1, listing, sha256};

const SETTINGS: [(&str, &[u8]); 2] = [("config.json", b"{}"), ("tokenizer.json", b"{}")];

fn with_weights(weights: &[u8], script: impl Fn(&Request) -> Option<Reply> + Send + Sync + 'static) -> Hub {
    Hub::scripted(&[SETTINGS[0], SETTINGS[1], ("model.safetensors", weights)], script)
}

/// Checks that nothing of the weights is in the cache.
#[track_caller]
fn check_clean(hub: &Hub) {
    let mut blobs: Vec<_> = fs::read_dir(hub.cached("blobs")).unwrap().map(|entry| entry.unwrap().path()).collect();
    blobs.retain(|path| fs::metadata(path).unwrap().len() > 2);
    assert!(blobs.is_empty() && !hub.cached("refs/main").exists(), "{blobs:?}");
}

#[test]
fn contents_with_a_wrong_hash_are_downloaded_once_more_and_then_deleted() {
    // Named by SHA-256, and by git's hash.
    for len in [5000, 500] {
        let (weights, count) = (bytes(len), std::sync::Arc::new(AtomicUsize::new(0)));
        for bad in [1, usize::MAX] {
            let (count, mut wrong) = (count.clone(), weights.clone());
            count.store(0, Ordering::Relaxed);
            wrong[len / 2] ^= 1;
            let hub = with_weights(&weights, move |request| {
                let is_small = request.method == "GET" && request.path.ends_with("/model.safetensors");
                let is_weights = if len == 500 { is_small } else { request.is_large() };
                let is_bad = is_weights && count.fetch_add(1, Ordering::Relaxed) < bad;
                is_bad.then(|| Reply::ok(wrong.clone()))
            });
            if bad == 1 {
                hub.check(&hub.fetch().unwrap(), &["config.json", "model.safetensors", "tokenizer.json"]);
                continue;
            }
            let message = hub.refusal();
            let expected = if len == 5000 { sha256(&weights) } else { git_sha1(&weights) };
            assert!(message.contains("model.safetensors: found a hash of "), "{message}");
            assert!(message.contains(&format!("expected {expected}")), "{message}");
            check_clean(&hub);
        }
    }
}

#[test]
fn contents_of_another_size_than_announced_are_refused() {
    let weights = bytes(5000);
    for (other, no_length) in [(6000, true), (6000, false), (4000, true), (4000, false)] {
        let hub = with_weights(&weights, move |request| {
            let reply = request.is_large().then(|| Reply::ok(bytes(other)))?;
            Some(if no_length { reply.without_length() } else { reply })
        });
        let message = hub.refusal();
        let expected =
            if no_length && other < 5000 { "the server did not send" } else { "the size that was announced" };
        let short = "the transfer ended at byte 4000 of 5000";
        assert!(message.contains(expected) || no_length && message.contains(short), "{other} {no_length}: {message}");
        assert!(!hub.cached("refs/main").exists());
    }
}

#[test]
fn a_size_that_no_disk_has_is_refused_before_the_download() {
    let hub = with_weights(&bytes(5000), |request| {
        let is_head = request.method == "HEAD" && request.path.ends_with("/model.safetensors");
        let reply = Reply::status(302).with("X-Linked-Etag", &"a".repeat(64)).with("Location", "/x");
        is_head.then(|| reply.with("X-Linked-Size", "1000000000000000000"))
    });
    let message = hub.refusal();
    assert!(message.contains("931322574.62 GiB for the download") && message.contains("--download-dir"), "{message}");
    // A file that is not weights has a limit of its own.
    let hub = with_weights(&bytes(5000), |request| {
        let is_head = request.method == "HEAD" && request.path.ends_with("/config.json");
        is_head.then(|| Reply::status(200).with("ETag", &"a".repeat(40)).with("X-Linked-Size", "300000000"))
    });
    assert!(hub.refusal().contains("expected at most 256 MiB"));
    assert!(hub.requests().iter().all(|request| !request.starts_with("GET /org")));
}

#[test]
fn an_etag_that_is_no_hash_or_a_size_that_is_no_number_is_refused() {
    let good = "a".repeat(64);
    for (etag, size, expected) in [
        ("../../../../etc/passwd", "1", "found the etag \"../../../../etc/passwd\""),
        ("", "1", "found the etag \"\""),
        ("\"abc\"", "1", "a hash of 64 or 40"),
        (&"A".repeat(64), "1", "a hash of 64 or 40"),
        (&"g".repeat(40), "1", "a hash of 64 or 40"),
        (&good, "-1", "found the size \"-1\""),
        (&good, "99999999999999999999999", "a number of bytes"),
    ] {
        let (etag, size) = (etag.to_string(), size.to_string());
        let hub = with_weights(&bytes(5000), move |request| {
            let is_head = request.method == "HEAD" && request.path.ends_with("/model.safetensors");
            is_head.then(|| Reply::status(200).with("X-Linked-Etag", &etag).with("X-Linked-Size", &size))
        });
        let message = hub.refusal();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn a_hostile_listing_is_refused() {
    let listed = |names: &[&str]| {
        let reply = listing(["config.json"].iter().chain(names).copied());
        Hub::scripted(&[], move |request| request.path.starts_with("/api/").then(|| reply.clone()))
    };
    // Names outside of the folder are never needed; a GGUF file with one is refused.
    for name in ["../../x.safetensors", "/etc/model.safetensors", "model.safetensors\0", "..", ""] {
        assert!(listed(&[name]).refusal().contains("expected model.safetensors, "), "{name:?}");
    }
    for name in [
        "../../x.gguf",
        "/etc/x.gguf",
        "a/../x.gguf",
        "x\0.gguf",
        "a//x.gguf",
        "a\\x.gguf",
        &format!("{}.gguf", "x".repeat(300)),
    ] {
        let message = listed(&[name]).refusal();
        assert!(message.contains("found the file name") && message.contains("a relative path"), "{name:?}: {message}");
    }
    let many: Vec<String> = (0..100_001).map(|i| format!("{i}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    assert!(listed(&many).refusal().contains("found a listing of 100002 files"));
    // Longer than the limit: it is not read to its end.
    let endless = Hub::scripted(&[], |_| Some(Reply::ok(vec![b' '; 17 << 20])));
    assert!(endless.refusal().contains("a listing of more than 16777216 bytes"));
    for (text, expected) in [
        ("{}", "not valid (missing field `sha`"),
        ("<html>", "expected JSON"),
        (r#"{"sha": "../../x", "siblings": []}"#, "found the commit \"../../x\""),
        (r#"{"sha": "0123456789abcdef0123456789abcdef01234567"}"#, "found none, expected model.safetensors"),
    ] {
        let hub = Hub::scripted(&[], move |_| Some(Reply::ok(text.into())));
        let message = hub.refusal();
        assert!(message.contains(expected), "{text}: {message}");
    }
}

#[test]
fn an_index_names_only_safetensors_files_inside_of_the_folder() {
    for shard in ["../../../../x.safetensors", "/x.safetensors", "pytorch_model.bin", "weights.pkl", ""] {
        let index = serde_json::json!({"weight_map": {"a": shard}}).to_string();
        let files = [SETTINGS[0], SETTINGS[1], ("model.safetensors.index.json", index.as_bytes()), (shard, b"data")];
        let message = Hub::new(&files).refusal();
        assert!(message.contains("expected the name of a safetensors file"), "{shard}: {message}");
    }
    let index = br#"{"weight_map": {"a": "model-1.safetensors"}}"#;
    let message = Hub::new(&[SETTINGS[0], SETTINGS[1], ("model.safetensors.index.json", index)]).refusal();
    assert!(message.contains("org/name has no file model-1.safetensors"), "{message}");
    let many: Vec<String> = (0..4097).map(|i| format!("\"{i}\": \"{i}.safetensors\"")).collect();
    let many = format!("{{\"weight_map\": {{{}}}}}", many.join(", "));
    let message = Hub::new(&[SETTINGS[0], SETTINGS[1], ("model.safetensors.index.json", many.as_bytes())]).refusal();
    assert!(message.contains("found more than 4096 files"), "{message}");
    let message = Hub::new(&[SETTINGS[0], SETTINGS[1], ("model.safetensors.index.json", b"[]")]).refusal();
    assert!(message.contains("model.safetensors.index.json: ") && message.contains("delete this file"), "{message}");
}
