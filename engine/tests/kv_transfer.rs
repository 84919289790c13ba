//! Prefill on one replica and decode on another over a shared folder: the bits of one replica, and only the tail is computed.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use engine::{AsyncEngine, EngineConfig, Event, GenerationRequest, KvRole, KvTransfer, KvTransferConfig};
use tempfile::TempDir;

use crate::common::{TOKEN_BYTES, config, on_sim, prompt, request};
use crate::lora::{LORA, adapters, with_lora};

const STORE: KvTransfer = KvTransfer { load: false, store: true };
const LOAD: KvTransfer = KvTransfer { load: true, store: false };

/// A replica with a folder, which waits at most half a minute for blocks.
fn replica(base: EngineConfig, folder: &Path, role: KvRole) -> EngineConfig {
    let (path, max_bytes, wait_seconds) = (folder.to_path_buf(), 1 << 30, 30.0);
    let transfer = KvTransferConfig { role, engine_id: None, path, max_bytes, wait_seconds, always: false };
    let kv_offloading_bytes =
        if base.kv_offloading_bytes > 0 { base.kv_offloading_bytes } else { 64 * 8 * TOKEN_BYTES };
    EngineConfig { kv_transfer: Some(transfer), kv_offloading_bytes, ..base }
}

fn start(config: EngineConfig) -> AsyncEngine {
    AsyncEngine::start(config, &|_, _| {}).unwrap()
}

/// Runs a request alone. Returns its tokens with their log-probabilities, and the number of cached tokens.
fn run(engine: &AsyncEngine, request: GenerationRequest, kv_transfer: KvTransfer) -> (Vec<String>, usize) {
    let (mut tokens, mut cached) = (Vec::new(), 0);
    block_on(async {
        let mut stream = engine.submit(GenerationRequest { kv_transfer, ..request }).await.unwrap();
        while let Some(event) = stream.next().await {
            match event {
                Event::Started { cached_tokens } => cached = cached_tokens,
                Event::Delta(delta) => tokens.extend(delta.tokens.iter().map(|token| format!("{token:?}"))),
                _ => {}
            }
        }
    });
    (tokens, cached)
}

/// Computes the prompt and one token, and stores the blocks.
fn prefill(engine: &AsyncEngine, request: &GenerationRequest) {
    let mut request = request.clone();
    request.params.max_tokens = Some(1);
    run(engine, request, STORE);
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort_unstable();
    files
}

fn wait_for_files(folder: &Path, count: usize) -> Vec<PathBuf> {
    let start = Instant::now();
    loop {
        let found = files(folder);
        if found.len() == count && found.iter().all(|path| path.extension().is_some_and(|e| e == "kvblock")) {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{} files, expected {count}", found.len());
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn a_request_prefilled_on_one_replica_and_decoded_on_another_has_the_bits_of_one() {
    let (folder, lora) = (TempDir::new().unwrap(), adapters());
    let base = || with_lora(64, LORA);
    let engines = [
        start(base()),
        start(replica(base(), folder.path(), KvRole::Producer)),
        start(replica(base(), folder.path(), KvRole::Consumer)),
    ];
    for engine in &engines {
        block_on(engine.load_adapter("a", lora.path().join("a"), false)).unwrap();
    }
    let [alone, first, second] = &engines;
    let salted = GenerationRequest { cache_salt: Some("tenant".into()), ..request(1, 60, 12, 1) };
    let adapted = GenerationRequest { adapter: Some("a".into()), ..request(1, 60, 12, 1) };
    for (at, request) in [request(1, 60, 12, 1), salted, adapted, request(2, 64, 12, 1)].into_iter().enumerate() {
        let (want, _) = run(alone, request.clone(), KvTransfer::default());
        // Before the blocks are there, nothing is found, although the tokens of some requests are equal.
        assert_eq!(run(second, request.clone(), KvTransfer::default()), (want.clone(), 0), "request {at}");
        let other = GenerationRequest { prompt: request.prompt.clone(), ..request.clone() };
        prefill(first, &request);
        // The second replica computed it before. A third computes the tail alone: the seven full blocks are loaded.
        let third = start(replica(base(), folder.path(), KvRole::Consumer));
        block_on(third.load_adapter("a", lora.path().join("a"), false)).unwrap();
        assert_eq!(run(&third, other, LOAD), (want, 56), "request {at}");
        let stats = third.stats();
        assert_eq!((stats.scheduler.host_prefix_hits, stats.scheduler.blocks_loaded), (56, 7));
    }
    assert_eq!(wait_for_files(folder.path(), 3 * 7 + 8).len(), 29);
}

#[test]
fn on_cuda_sim_blocks_are_read_and_written_between_the_steps_of_others() {
    let base = EngineConfig { max_model_len: Some(64), ..config(40) };
    let Some(base) = on_sim(base) else { return };
    let folder = TempDir::new().unwrap();
    let request = request(1, 30, 4, 1);
    let (want, _) = run(&start(base.clone()), request.clone(), KvTransfer::default());
    prefill(&start(replica(base.clone(), folder.path(), KvRole::Both)), &request);
    assert_eq!(run(&start(replica(base, folder.path(), KvRole::Both)), request, LOAD), (want, 24));
}

#[test]
fn windows_and_recurrent_states_are_exchanged_too() {
    let mixed = crate::windows::mixed();
    let windows = crate::windows::config(mixed.path(), 600 * 2 * 32 * 4 * 8);
    let recurrent = crate::recurrent::config(256);
    let cases = [(windows, request(1, 70, 6, 1), 64), (recurrent, crate::recurrent::request(1, 150, 6, 1), 128)];
    for (base, request, expected) in cases {
        let folder = TempDir::new().unwrap();
        let base = EngineConfig { kv_offloading_bytes: base.kv_cache_memory_bytes.unwrap(), ..base };
        let (want, _) = run(&start(base.clone()), request.clone(), KvTransfer::default());
        prefill(&start(replica(base.clone(), folder.path(), KvRole::Both)), &request);
        assert_eq!(run(&start(replica(base, folder.path(), KvRole::Both)), request, LOAD), (want, expected));
    }
}

/// What becomes of a file, given its contents and those of another.
type Harm = Box<dyn Fn(&[u8], &[u8]) -> Vec<u8>>;

#[test]
fn broken_and_foreign_files_are_ignored_and_written_anew() {
    let folder = TempDir::new().unwrap();
    let base = || config(64);
    let request = request(1, 60, 6, 1);
    let (want, _) = run(&start(base()), request.clone(), KvTransfer::default());
    let first = start(replica(base(), folder.path(), KvRole::Producer));
    prefill(&first, &request);
    let names = wait_for_files(folder.path(), 7);
    let whole: Vec<Vec<u8>> = names.iter().map(|path| std::fs::read(path).unwrap()).collect();
    let of_block = |block: usize| {
        let tokens: Vec<u8> = request.prompt[8 * block..][..8].iter().flat_map(|token| token.to_le_bytes()).collect();
        whole.iter().position(|file| file[56..][..32] == tokens[..]).unwrap()
    };
    let first_block = of_block(0);
    let second = || {
        let mut second = replica(base(), folder.path(), KvRole::Both);
        second.kv_transfer.as_mut().unwrap().wait_seconds = 0.1;
        start(second)
    };
    let mut harms: Vec<(String, Harm)> = vec![
        ("an empty file".into(), Box::new(|_, _| Vec::new())),
        ("a truncated file".into(), Box::new(|own, _| own[..own.len() - 1].to_vec())),
        ("a longer file".into(), Box::new(|own, _| [own, &[0]].concat())),
        ("another block".into(), Box::new(|_, other| other.to_vec())),
    ];
    // A flipped bit in each part: magic, name, numbers, tokens, contents, digest.
    for at in [0, 8, 40, 48, 56, 100, 5000, whole[0].len() - 1] {
        let flip = move |own: &[u8], _: &[u8]| {
            let mut own = own.to_vec();
            own[at] ^= 1;
            own
        };
        harms.push((format!("a flipped bit at {at}"), Box::new(flip)));
    }
    for (what, harm) in harms {
        for (k, path) in names.iter().enumerate() {
            std::fs::write(path, harm(&whole[k], &whole[(k + 1) % 7])).unwrap();
        }
        let second = second();
        assert_eq!(run(&second, request.clone(), LOAD), (want.clone(), 0), "{what}");
        // It stores what it has computed.
        prefill(&second, &request);
        drop(second);
        let start = Instant::now();
        while std::fs::read(&names[first_block]).ok().as_ref() != Some(&whole[first_block]) {
            assert!(start.elapsed() < Duration::from_secs(20), "{what} is not replaced");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    // A block in the middle is missing: those behind it are of no use.
    names.iter().zip(&whole).for_each(|(path, whole)| std::fs::write(path, whole).unwrap());
    std::fs::remove_file(&names[of_block(3)]).unwrap();
    assert_eq!(run(&second(), request, LOAD), (want, 24));
}

#[test]
fn replicas_with_other_weights_or_another_cache_share_nothing() {
    let folder = TempDir::new().unwrap();
    let shape = testkit::model::Shape::named("tiny").unwrap();
    let checkpoint = |seed| {
        let folder = TempDir::new().unwrap();
        testkit::model::write(&shape, folder.path(), seed).unwrap();
        folder
    };
    let (one, other) = (checkpoint(7), checkpoint(8));
    let of = |checkpoint: &TempDir, block_size| {
        let model = engine::ModelSource::Folder(checkpoint.path().to_path_buf());
        let (kv_cache_memory_bytes, kv_offloading_bytes) = (Some(32 << 20), 8 << 20);
        let base = EngineConfig { model, kv_cache_memory_bytes, kv_offloading_bytes, block_size, ..config(1) };
        let mut replica = replica(base, folder.path(), KvRole::Both);
        replica.kv_transfer.as_mut().unwrap().wait_seconds = 0.1;
        start(replica)
    };
    let request = request(1, 60, 2, 1);
    prefill(&of(&one, Some(8)), &request);
    let cached = |engine: &AsyncEngine| run(engine, request.clone(), LOAD).1;
    assert_eq!([cached(&of(&one, Some(8))), cached(&of(&other, Some(8))), cached(&of(&one, Some(16)))], [56, 0, 0]);
}

#[test]
fn a_request_waits_for_blocks_that_are_being_stored_and_no_longer_than_it_may() {
    let folder = TempDir::new().unwrap();
    let base = || config(64);
    let second = start(replica(base(), folder.path(), KvRole::Consumer));
    let request = request(1, 60, 6, 1);
    let (want, _) = run(&start(base()), request.clone(), KvTransfer::default());
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| run(&second, request.clone(), LOAD));
        while second.num_unfinished() == 0 {
            std::thread::yield_now();
        }
        // Others are not held up.
        assert_eq!(
            run(&second, GenerationRequest { prompt: prompt(9, 20), ..request.clone() }, KvTransfer::default()).0.len(),
            6
        );
        prefill(&start(replica(base(), folder.path(), KvRole::Producer)), &request);
        assert_eq!(waiting.join().unwrap(), (want.clone(), 56));
    });
    let mut hasty = replica(base(), &folder.path().join("empty"), KvRole::Consumer);
    hasty.kv_transfer.as_mut().unwrap().wait_seconds = 0.05;
    assert_eq!(run(&start(hasty), request, LOAD), (want, 0));
}

#[test]
fn always_exchanges_the_blocks_of_requests_that_do_not_ask_for_it() {
    let folder = TempDir::new().unwrap();
    let both = || {
        let mut both = replica(config(64), folder.path(), KvRole::Both);
        both.kv_transfer.as_mut().unwrap().always = true;
        start(both)
    };
    let (request, quiet) = (request(1, 60, 6, 1), KvTransfer::default());
    let (want, cached) = run(&both(), request.clone(), quiet);
    assert_eq!(cached, 0);
    wait_for_files(folder.path(), 7);
    assert_eq!(run(&both(), request, quiet), (want, 56));
}

#[test]
fn a_wrong_setting_is_one_line_with_what_was_found_and_what_is_expected() {
    let parse = |text: &str| text.parse::<KvTransferConfig>().unwrap_err();
    for (text, expected) in [
        ("[]", "expected a JSON object such as"),
        ("{", "not valid JSON"),
        (r#"{"kv_role": "kv_both"}"#, "kv_connector: not found, expected \"SharedFolder\""),
        (r#"{"kv_connector": "NixlConnector"}"#, "kv_connector: found \"NixlConnector\", expected \"SharedFolder\""),
        (r#"{"kv_connector": "SharedFolder"}"#, "kv_role: not found, expected \"kv_producer\""),
        (r#"{"kv_connector": "SharedFolder", "kv_rolle": 1}"#, "unknown key \"kv_rolle\""),
        (r#"{"kv_connector": "SharedFolder", "kv_role": "kv_both"}"#, "shared_storage_path: not found"),
        (
            r#"{"kv_connector": "SharedFolder", "kv_role": "kv_both", "kv_connector_extra_config": {"shared_storage_path": "/x", "max_bytes": -1}}"#,
            "max_bytes: found -1, expected a number of bytes above 0",
        ),
    ] {
        let error = parse(text);
        assert!(error.contains(expected) && !error.contains('\n'), "{error}");
    }
    let folder = TempDir::new().unwrap();
    let without = EngineConfig { kv_offloading_bytes: 0, ..replica(config(20), folder.path(), KvRole::Both) };
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    for (config, expected) in [
        (without, "expected --kv-offloading-size above 0"),
        (replica(config(20), &file, KvRole::Both), "expected a shared_storage_path that can be created"),
    ] {
        let error = AsyncEngine::start(config, &|_, _| {}).err().unwrap().to_string();
        assert!(error.starts_with("--kv-transfer-config: found ") && error.contains(expected), "{error}");
        assert!(!error.contains('\n'), "{error}");
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}
