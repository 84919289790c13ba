//! Answers of the hub that end a fetch: one line that says what to do.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::server::{Reply, Server};
use crate::common::{Hub, TOKEN, bytes, fetch, refusal};

const MODEL: [(&str, &[u8]); 3] = [("config.json", b"{}"), ("tokenizer.json", b"{}"), ("model.safetensors", b"data")];

/// A hub that gives this answer to requests whose path contains `part`.
fn refusing(part: &'static str, reply: Reply) -> Hub {
    Hub::scripted(&MODEL, move |request| request.path.contains(part).then(|| reply.clone()))
}

#[test]
fn each_refusal_says_what_to_do() {
    let code = |status, code| Reply::status(status).with("X-Error-Code", code);
    let with_token = "pass a token that may read it with --hf-token or HF_TOKEN (the present one may not)";
    for (part, reply, expected) in [
        ("/api/", code(401, "RepoNotFound"), "org/name: found no such model at http://127.0.0.1:"),
        ("/api/", code(404, "RepoNotFound"), "if the model is private"),
        ("/api/", Reply::status(404), "org/name: found no such model"),
        ("/api/", code(404, "RevisionNotFound"), "org/name has no revision \"main\""),
        ("/api/", Reply::status(401), with_token),
        ("/api/", Reply::status(403).with("X-Error-Message", "no\tentry"), "refused access (403: no entry)"),
        ("/api/", Reply::status(418), "answered with status 418"),
        ("/resolve/", code(401, "GatedRepo"), "org/name is gated: accept its terms at http://127.0.0.1:"),
        ("/resolve/", code(403, "GatedRepo"), with_token),
        ("config.json", code(404, "EntryNotFound"), "org/name has no file config.json at commit 0123456789"),
        ("/resolve/", Reply::status(404), "org/name has no file"),
    ] {
        let hub = refusing(part, reply.clone());
        let message = hub.refusal();
        assert!(message.contains(expected), "{reply:?}: {message}");
        // Refusals are final: at most one request per file.
        assert!(hub.requests().len() <= 4, "{:?}", hub.requests());
        assert!(!hub.cached("refs/main").exists());
    }
    // Without a token the advice is another one, and no header is sent.
    let hub = refusing("/resolve/", code(401, "GatedRepo"));
    let message = refusal(&hub.options_with(&[("HF_TOKEN", "")]), "org/name");
    assert!(message.ends_with("then pass a token with --hf-token or HF_TOKEN"), "{message}");
    assert!(hub.api.requests().iter().all(|request| request.header("Authorization").is_none()));
}

#[test]
fn waits_and_attempts_are_limited() {
    // A wait of an hour is not begun.
    let message = refusing("/api/", Reply::status(429).with("Retry-After", "3600")).refusal();
    assert!(message.contains("too many requests; try again in 3600 s"), "{message}");
    for reply in [Reply::status(429), Reply::status(503), Reply::ok(vec![0; 10]).cut(5)] {
        let hub = refusing("/api/", reply.clone());
        hub.refusal();
        assert_eq!(hub.requests().len(), 5, "{reply:?}");
    }
    // Some bytes of each connection are no progress.
    let hub = Hub::scripted(&[MODEL[0], MODEL[1], ("model.safetensors", &bytes(100_000))], |request| {
        request.is_large().then(|| Reply::contents(request, &bytes(100_000)).cut(10))
    });
    let message = hub.refusal();
    assert!(message.contains("cannot be reached") && hub.contents.requests().len() == 5, "{message}");
    // Nor is a transfer that starts again and again.
    let count = AtomicUsize::new(0);
    let hub = Hub::scripted(&[MODEL[0], MODEL[1], ("model.safetensors", &bytes(100_000))], move |request| {
        let reply = Reply::ok(bytes(100_000));
        request.is_large().then(|| reply.cut([50_000, 9_000][count.fetch_add(1, Ordering::Relaxed) % 2]))
    });
    assert!(hub.refusal().contains("cannot be reached") && hub.contents.requests().len() == 5);
}

#[test]
fn redirects_are_limited() {
    let hub = Hub::scripted(&MODEL, |request| Some(Reply::status(302).with("Location", &request.path)));
    assert!(hub.refusal().contains("found more than 10 redirects"));
    assert_eq!(hub.requests().len(), 11);
    for location in ["", "file:///etc/passwd", "ftp://127.0.0.1/", "https://", "http://user:secret@127.0.0.1/x"] {
        let hub = Hub::scripted(&MODEL, move |_| Some(Reply::status(302).with("Location", location)));
        assert!(hub.refusal().contains("found a redirect to"), "{location}");
    }
}

#[test]
fn the_token_comes_from_the_first_place_that_has_one() {
    let hub = Hub::new(&MODEL);
    let home = hub.home.path();
    std::fs::write(home.join("token"), "from-home\n").unwrap();
    std::fs::write(home.join("other"), "from-path").unwrap();
    let other = home.join("other");
    let other = other.to_str().unwrap();
    let no_token = ("HF_TOKEN", " ");
    for (variables, expected) in [
        (&[][..], Some(TOKEN)),
        (&[("HF_TOKEN", " two\n")], Some("two")),
        (&[no_token, ("HUGGING_FACE_HUB_TOKEN", "old")], Some("old")),
        (&[no_token, ("HF_TOKEN_PATH", other)], Some("from-path")),
        (&[no_token], Some("from-home")),
        (&[("HF_HUB_DISABLE_IMPLICIT_TOKEN", "yes")], None),
    ] {
        fetch(&hub.options_with(variables), "org/name").unwrap();
        let expected = expected.map(|token| format!("Bearer {token}"));
        let request = hub.api.requests().pop().unwrap();
        assert_eq!(request.header("Authorization"), expected.as_deref(), "{variables:?}");
    }
    let variables = |name: &str| (name == "HF_TOKEN").then(|| "line\nX-Other: 1".to_string());
    let error = hub::Options::from_env(&variables).unwrap_err();
    assert!(error.to_string().starts_with("HF_TOKEN: found characters") && !error.to_string().contains("line"));
}

#[test]
fn the_first_error_ends_the_transfers_of_other_files() {
    let weights = bytes(5000);
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    let files: [(&str, &[u8]); 5] = [
        MODEL[0],
        MODEL[1],
        ("model.safetensors.index.json", index),
        ("model-1.safetensors", &weights),
        ("model-2.safetensors", b"small"),
    ];
    // The large file can never be had; the small one is refused for good.
    let hub = Hub::scripted(&files, |request| {
        let is_small = request.method == "GET" && request.path.ends_with("model-2.safetensors");
        if is_small { Some(Reply::status(418)) } else { request.is_large().then(|| Reply::status(500)) }
    });
    let mut options = hub.options();
    options.retry_delay = std::time::Duration::from_secs(3600);
    assert!(refusal(&options, "org/name").contains("418"));
}

#[test]
fn a_hub_that_is_not_there_is_named_with_its_address() {
    let hub = Hub::new(&MODEL);
    // A port that nothing listens on.
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let options = hub.options_with(&[("HF_ENDPOINT", &format!("http://{address}/"))]);
    let message = refusal(&options, "org/name");
    assert!(
        message.starts_with(&format!("{address} cannot be reached: ")) && message.contains("HF_ENDPOINT"),
        "{message}"
    );
    // A server that accepts and says nothing.
    let silent = Server::start(|_| {
        std::thread::sleep(std::time::Duration::from_secs(2));
        Reply::status(200)
    });
    let mut options = hub.options_with(&[("HF_ENDPOINT", &silent.url()), ("HF_HUB_ETAG_TIMEOUT", "0.05")]);
    options.read_timeout = std::time::Duration::from_millis(50);
    assert!(refusal(&options, "org/name").contains("cannot be reached"));
}
