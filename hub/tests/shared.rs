//! The cache together with other processes and other tools.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::{Mutex, mpsc};
use std::time::Duration;

use testkit::capability::Capability;
use testkit::not_run;

use crate::common::server::Reply;
use crate::common::{COMMIT, Hub, bytes, etag, fetch, fetch_until_waiting};

const ALL: [&str; 3] = ["config.json", "model.safetensors", "tokenizer.json"];

#[test]
fn of_two_processes_at_once_one_downloads_and_both_succeed() {
    let weights = bytes(200_000);
    let files: [(&str, &[u8]); 3] =
        [("config.json", b"{}"), ("tokenizer.json", b"{ }"), ("model.safetensors", &weights)];
    // The transfer goes on when the other one waits. Locks of one process exclude each other as those of two do.
    let (waits, waited) = mpsc::channel();
    let waited = Mutex::new(waited);
    let hub = Hub::scripted(&files, move |request| {
        if request.is_large() {
            waited.lock().unwrap().recv_timeout(Duration::from_secs(30)).unwrap();
        }
        None
    });
    let run = || fetch_until_waiting(&hub.options(), || waits.send(()).unwrap());
    let (one, two) = std::thread::scope(|scope| {
        let other = scope.spawn(run);
        (run(), other.join().unwrap())
    });
    assert_eq!(hub.contents.requests().len(), 1);
    hub.check(&one.0.unwrap(), &ALL);
    let folder = two.0.unwrap();
    hub.check(&folder, &ALL);
    // Each has counted all bytes that it wanted, the weights among them.
    for (done, total) in [one.1, two.1] {
        assert!(done == total && total >= 200_000, "{done} {total}");
    }
    let waits = [one.2, two.2].concat();
    assert_eq!(waits.iter().filter(|event| *event == "waiting for model.safetensors").count(), 1, "{waits:?}");
}

#[test]
fn a_lock_of_python_is_waited_for_and_its_blob_used() {
    let weights = bytes(5000);
    let hub = Hub::new(&[("config.json", b"{}"), ("tokenizer.json", b"{ }"), ("model.safetensors", &weights)]);
    let locks = hub.home.path().join("hub/.locks/models--org--name");
    fs::create_dir_all(&locks).unwrap();
    fs::create_dir_all(hub.cached("blobs")).unwrap();
    // The kind of lock that Python's library takes. Its holder may delete the file, and another one makes and locks a new one.
    let script = "import fcntl, os, sys, time\n\
        lock = lambda: os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n\
        old = lock()\n\
        fcntl.flock(old, fcntl.LOCK_EX)\n\
        print('locked', flush=True)\n\
        sys.stdin.readline()\n\
        os.unlink(sys.argv[1])\n\
        new = lock()\n\
        fcntl.flock(new, fcntl.LOCK_EX)\n\
        os.close(old)\n\
        time.sleep(0.3)\n\
        open(sys.argv[2], 'wb').write(open(sys.argv[3], 'rb').read())\n";
    let source = hub.home.path().join("source");
    fs::write(&source, &weights).unwrap();
    let lock = locks.join(format!("{}.lock", etag(&weights)));
    let mut python = Command::new("python3");
    python.args(["-c", script]).args([&lock, &hub.cached("blobs").join(etag(&weights)), &source]);
    let mut python = match python.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn() {
        Ok(python) => python,
        Err(missing) => return not_run::report(Capability::Python3, &format!("python3: {missing}")),
    };
    let mut line = String::new();
    BufReader::new(python.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "locked\n");
    let input = Mutex::new(python.stdin.take().unwrap());
    let (folder, _, events) = fetch_until_waiting(&hub.options(), || input.lock().unwrap().write_all(b"\n").unwrap());
    hub.check(&folder.unwrap(), &ALL);
    assert_eq!(events, ["waiting for model.safetensors"]);
    assert_eq!(hub.contents.requests().len(), 0);
    assert!(python.wait().unwrap().success());
}

#[test]
fn a_cache_that_python_has_made_is_used() {
    let weights = bytes(5000);
    let hub = Hub::new(&[("config.json", b"{}"), ("tokenizer.json", b"{}"), ("model.safetensors", &weights)]);
    // huggingface_hub 2: blobs are links into a store that repositories share.
    let (store, blobs) = (hub.home.path().join("hub/blobs/ab"), hub.cached("blobs"));
    let snapshot = hub.cached("snapshots").join(COMMIT);
    for folder in [&store, &blobs, &snapshot, &hub.cached("refs")] {
        fs::create_dir_all(folder).unwrap();
    }
    for (name, contents) in [("config.json", &b"{}"[..]), ("model.safetensors", &weights), ("tokenizer.json", b"{}")] {
        let stored = format!("{}-{name}", etag(contents));
        fs::write(store.join(&stored), contents).unwrap();
        let blob = blobs.join(etag(contents));
        if !blob.exists() {
            std::os::unix::fs::symlink(format!("../../blobs/ab/{stored}"), blob).unwrap();
        }
        std::os::unix::fs::symlink(format!("../../blobs/{}", etag(contents)), snapshot.join(name)).unwrap();
    }
    fs::write(hub.cached("refs/main"), format!("{COMMIT}\n")).unwrap();
    let offline = hub.options_with(&[("HF_HUB_OFFLINE", "1")]);
    let folder = fetch(&offline, "org/name").unwrap();
    hub.check(&folder, &ALL);
    // Online, too, nothing is downloaded again, also if only the blob is there.
    fs::remove_file(snapshot.join("model.safetensors")).unwrap();
    assert_eq!(hub.fetch().unwrap(), folder);
    hub.check(&folder, &ALL);
    assert_eq!(hub.contents.requests().len(), 0);
    // A commit of which Python may not have fetched all files is asked for, once.
    fs::remove_dir_all(hub.cached(".no_exist")).unwrap();
    let mut options = hub.options();
    options.revision = COMMIT.parse().unwrap();
    let listed = Hub::scripted(&[], |request| {
        let is_listing = request.path == format!("/api/models/org/name/revision/{COMMIT}");
        is_listing.then(|| crate::common::listing(ALL))
    });
    let mut online = listed.options_with(&[("HF_HOME", hub.home.path().to_str().unwrap())]);
    online.revision = options.revision;
    for _ in 0..2 {
        assert_eq!(fetch(&online, "org/name").unwrap(), folder);
    }
    assert_eq!(listed.requests().len(), 1);
}

#[test]
fn a_whole_snapshot_is_used_without_writing_to_the_cache() {
    let hub = Hub::new(&[("config.json", b"{}"), ("tokenizer.json", b"{ }"), ("model.safetensors", b"data")]);
    let folder = hub.fetch().unwrap();
    // Nothing can be made below a file.
    let locks = hub.home.path().join("hub/.locks");
    fs::remove_dir_all(&locks).unwrap();
    fs::write(locks, "").unwrap();
    assert_eq!(hub.fetch().unwrap(), folder);
}

#[test]
fn a_newer_commit_is_a_new_snapshot_that_shares_unchanged_blobs() {
    let weights = bytes(5000);
    let hub = Hub::new(&[("config.json", b"{}"), ("tokenizer.json", b"{}"), ("model.safetensors", &weights)]);
    let old = hub.fetch().unwrap();
    let newer = "f".repeat(40);
    let api = hub.api.url();
    let (commit, config) = (newer.clone(), b"{\"a\": 1}");
    let updated = Hub::scripted(&[("config.json", config)], move |request| {
        if request.path.starts_with("/api/") {
            let listing = crate::common::listing(ALL);
            let text = String::from_utf8(listing.body).unwrap().replace(COMMIT, &commit);
            return Some(Reply::ok(text.into_bytes()));
        }
        let path = request.path.replace(&commit, COMMIT);
        let is_config = path.ends_with("config.json");
        let reply = Reply::status(307).with("Location", &format!("{api}{path}"));
        (!is_config).then_some(reply).or_else(|| {
            let reply = Reply::contents(request, config);
            Some(reply.with("ETag", &format!("W/\"{}\"", etag(config))).with("X-Repo-Commit", &commit))
        })
    });
    // The commit that the old server states is another one.
    let home = hub.home.path().to_str().unwrap();
    let options = updated.options_with(&[("HF_HOME", home)]);
    let message = fetch(&options, "org/name").unwrap_err().to_string();
    assert!(message.contains("expected the commit that was listed"), "{message}");
    assert_eq!(fs::read_to_string(hub.cached("refs/main")).unwrap(), COMMIT, "the ref is of a whole snapshot");
    assert!(old.join("model.safetensors").is_file());
}

#[test]
fn a_wait_for_a_holder_without_progress_ends() {
    let weights = bytes(5000);
    let hub = Hub::new(&[("config.json", b"{}"), ("tokenizer.json", b"{ }"), ("model.safetensors", &weights)]);
    let locks = hub.home.path().join("hub/.locks/models--org--name");
    fs::create_dir_all(&locks).unwrap();
    let name = format!("{}.lock", etag(&weights));
    let held = fs::File::create(locks.join(&name)).unwrap();
    held.lock().unwrap();
    let mut options = hub.options();
    options.lock_timeout = Duration::from_millis(50);
    let message = crate::common::refusal(&options, "org/name");
    assert!(message.starts_with("model.safetensors: found ") && message.contains(&name), "{message}");
    drop(held);
    hub.check(&hub.fetch().unwrap(), &ALL);
}

#[test]
fn a_file_of_another_size_than_the_hub_states_is_downloaded_again() {
    let weights = bytes(5000);
    let hub = Hub::new(&[("config.json", b"{}"), ("tokenizer.json", b"{ }"), ("model.safetensors", &weights)]);
    let folder = hub.fetch().unwrap();
    for file in ["model.safetensors", "config.json"] {
        fs::write(folder.join(file), b"damaged").unwrap();
        assert_eq!(hub.fetch().unwrap(), folder);
        hub.check(&folder, &ALL);
    }
    assert_eq!(hub.contents.requests().len(), 2);
    let before = hub.requests().len();
    hub.fetch().unwrap();
    assert_eq!(hub.requests().len(), before + 1, "a whole snapshot costs one request");
}
