//! The cache alone: what is used without the network, and what is said when something is missing.

use std::fs;
use std::path::Path;

use crate::common::server::Reply;
use crate::common::{COMMIT, Hub, bytes, fetch, fetch_with_events, refusal};

const INDEX: &[u8] = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;

fn model() -> Hub {
    Hub::new(&[
        ("config.json", b"{}"),
        ("tokenizer.json", b"{}"),
        ("model.safetensors.index.json", INDEX),
        ("model-1.safetensors", &bytes(2000)),
        ("model-2.safetensors", b"two"),
    ])
}

#[test]
fn offline_only_the_cache_is_used_and_what_is_missing_is_named() {
    let hub = model();
    for variable in ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"] {
        for value in ["1", "on", "Yes", "TRUE"] {
            let options = hub.options_with(&[(variable, value)]);
            let message = refusal(&options, "org/name");
            assert!(message.starts_with("org/name: found no revision main in /"), "{message}");
            assert!(message.contains("HF_HUB_OFFLINE"), "{message}");
        }
    }
    assert_eq!(hub.requests().len(), 0);
    let folder = hub.fetch().unwrap();
    let requests = hub.requests().len();
    let mut options = hub.options_with(&[("HF_HUB_OFFLINE", "1")]);
    for revision in ["main", COMMIT] {
        options.revision = revision.parse().unwrap();
        assert_eq!(fetch(&options, "org/name").unwrap(), folder);
    }
    options.revision = "other".parse().unwrap();
    assert!(refusal(&options, "org/name").contains("found no revision other"));
    // Files that a loader needs, one at a time.
    options.revision = "main".parse().unwrap();
    for name in ["model-2.safetensors", "config.json", "tokenizer.json"] {
        let target = fs::read_link(folder.join(name)).unwrap();
        fs::remove_file(folder.join(name)).unwrap();
        assert!(refusal(&options, "org/name").contains(&format!("found no {name} in")), "{name}");
        // A link to a blob that was deleted.
        std::os::unix::fs::symlink("../../blobs/gone", folder.join(name)).unwrap();
        assert!(refusal(&options, "org/name").contains(&format!("found no {name} in")), "{name}");
        fs::remove_file(folder.join(name)).unwrap();
        std::os::unix::fs::symlink(target, folder.join(name)).unwrap();
    }
    let index = folder.join("model.safetensors.index.json");
    let (target, damaged) = (fs::read_link(&index).unwrap(), hub.home.path().join("damaged"));
    fs::remove_file(&index).unwrap();
    fs::write(&damaged, "{").unwrap();
    std::os::unix::fs::symlink(damaged, &index).unwrap();
    assert!(refusal(&options, "org/name").contains("index.json: EOF while parsing"));
    fs::remove_file(&index).unwrap();
    std::os::unix::fs::symlink(target, &index).unwrap();
    assert_eq!(fetch(&options, "org/name").unwrap(), folder);
    fs::remove_file(&index).unwrap();
    assert!(refusal(&options, "org/name").contains("found no model.safetensors in"));
    assert_eq!(hub.requests().len(), requests);
    // Online, the same is mended.
    assert_eq!(hub.fetch().unwrap(), folder);
    assert_eq!(fetch(&options, "org/name").unwrap(), folder);
}

#[test]
fn a_hub_that_cannot_be_reached_is_replaced_by_the_cached_snapshot() {
    let hub = model();
    let folder = hub.fetch().unwrap();
    let down = Hub::scripted(&[], |_| Some(Reply::status(503)));
    let home = hub.home.path().to_str().unwrap();
    let options = down.options_with(&[("HF_HOME", home)]);
    let (used, bytes, events) = fetch_with_events(&options);
    assert_eq!((used.unwrap(), bytes), (folder.clone(), (0, 0)));
    assert!(events.last().unwrap().starts_with("stale: 127.0.0.1:") && events.len() == 2, "{events:?}");
    // Not if the hub answers that there is no such model, or that the cache is incomplete.
    let gone = Hub::scripted(&[], |_| Some(Reply::status(404)));
    assert!(refusal(&gone.options_with(&[("HF_HOME", home)]), "org/name").contains("found no such model"));
    fs::remove_file(folder.join("model-1.safetensors")).unwrap();
    assert!(refusal(&options, "org/name").contains("status 503"));
}

#[test]
fn the_folders_of_the_cache_come_from_the_variables() {
    let hub = Hub::new(&[]);
    for (variables, expected) in [
        (&[("HF_HOME", "/a")][..], "/a/hub"),
        (&[("HF_HOME", "/a"), ("HF_HUB_CACHE", "/b")], "/b"),
        (&[("HF_HOME", "/a"), ("HUGGINGFACE_HUB_CACHE", "/c")], "/c"),
        (&[("HF_HOME", ""), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
        (&[("HF_HOME", ""), ("HOME", "/users/me")], "/users/me/.cache/huggingface/hub"),
        (&[("HF_HOME", "~/hf"), ("HOME", "/users/me")], "/users/me/hf/hub"),
        (&[("HF_HOME", "$DATA/${SUB}x/$NONE"), ("DATA", "/d"), ("SUB", "s")], "/d/sx/$NONE/hub"),
    ] {
        let cache = hub.options_with(variables).cache;
        assert_eq!(cache.as_deref(), Some(Path::new(expected)), "{variables:?}");
    }
    let message = refusal(&hub.options_with(&[("HF_HOME", "")]), "org/name");
    assert!(message.starts_with("HF_HOME: found neither") && message.contains("--download-dir"), "{message}");
    for (name, value) in
        [("HF_ENDPOINT", "huggingface.co"), ("HF_ENDPOINT", "http://me:password@host"), ("HF_HUB_ETAG_TIMEOUT", "-1")]
    {
        let error = hub::Options::from_env(&|asked| (asked == name).then(|| value.to_string())).unwrap_err();
        let message = error.to_string();
        assert!(message.starts_with(&format!("{name}: found")) && !message.contains("password"), "{message}");
    }
}
