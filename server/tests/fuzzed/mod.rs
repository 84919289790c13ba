//! Properties of any input, checked by the ordinary tests and by libFuzzer (`fuzz/`): requests through the whole HTTP side and a
//! real engine, grammars, and the detokenizer.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::Request;
use engine::{AsyncEngine, EngineConfig};
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde_json::{Map, Value};
use server::{App, ServerOptions, router};
use text::{Grammar, Grammars, StreamOptions, TextStream, Tokenizer};
use tokio::runtime::{Builder, Runtime};

/// All routes with a body, and one without.
pub const PATHS: [&str; 26] = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/api/embed",
    "/api/embeddings",
    "/api/show",
    "/completion",
    "/invocations",
    "/abort_requests",
    "/infill",
    "/apply-template",
    "/embedding",
    "/v1/embeddings",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/tokenize",
    "/detokenize",
    "/quire/state",
];

fn start() -> AsyncEngine {
    let config = EngineConfig { kv_cache_memory_bytes: Some(16 << 20), threads: Some(1), ..EngineConfig::default() };
    AsyncEngine::start(config, &|_, _| {}).unwrap()
}

/// The first byte selects a route, the others are the body. The response is never a 5xx, and errors have the error object.
pub fn request(bytes: &[u8]) {
    static SERVER: OnceLock<(Runtime, Router)> = OnceLock::new();
    let (runtime, router) = SERVER.get_or_init(|| {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        (runtime, router(Arc::new(App::new(start(), ServerOptions::default()))))
    });
    let Some((first, body)) = bytes.split_first() else { return };
    let path = PATHS[*first as usize % PATHS.len()];
    let mut body = body.to_vec();
    // Without a limit, responses may be as long as the context; these tests are about the input.
    if let Ok(Value::Object(mut fields)) = serde_json::from_slice(&body) {
        for limit in ["max_tokens", "max_output_tokens", "n_predict"] {
            fields.entry(limit).or_insert(2.into());
        }
        if path.starts_with("/api/") {
            let options = fields.entry("options").or_insert(Value::Object(Map::new()));
            if let Some(options) = options.as_object_mut() {
                options.entry("num_predict").or_insert(2.into());
            }
        }
        body = Value::Object(fields).to_string().into_bytes();
    }
    runtime.block_on(async {
        let request = Request::post(path).header("host", "localhost");
        let request = request.header("content-type", "application/json").body(Body::from(body));
        let Ok(response) = TowerToHyperService::new(router.clone()).call(request.unwrap()).await;
        let status = response.status();
        assert!(!status.is_server_error(), "{status}");
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap_or_default();
        if !status.is_success() {
            let error: Value = serde_json::from_slice(&body).unwrap_or_default();
            let message = error["error"]["message"].as_str().or(error["error"].as_str());
            assert!(message.is_some_and(|message| !message.contains('\n')), "{status} without the error object");
        }
    });
}

/// The first byte selects a form, the others are a definition. It is compiled or refused in one line, without end of the process.
pub fn grammar(bytes: &[u8]) {
    static GRAMMARS: OnceLock<Arc<Grammars>> = OnceLock::new();
    let grammars = GRAMMARS.get_or_init(|| Arc::new(Grammars::new(start().tokenizer().clone(), 1 << 20)));
    let Some((form, text)) = bytes.split_first() else { return };
    let text = String::from_utf8_lossy(text).into_owned();
    let grammar = match form % 7 {
        0 => Grammar::JsonSchema(text),
        1 => Grammar::StrictSchema(text),
        2 => Grammar::Regex(text),
        3 => Grammar::Lark(format!("start: {text}")),
        4 => Grammar::Ebnf(format!("root ::= {text}")),
        5 => Grammar::Choice(text.split('\n').map(str::to_string).collect()),
        _ => Grammar::from_text(text),
    };
    if let Err(problem) = grammars.compile_blocking(&grammar) {
        let problem = problem.to_string();
        assert!(!problem.is_empty() && !problem.contains('\n'), "{problem:?}");
    }
}

/// Any token ids after any prompt: the pieces add up to a prefix of the whole text, and stop strings never appear.
pub fn detokeniser(prompt: &[u16], output: &[u16], stop: &[String], skip_special_tokens: bool) {
    static TOKENIZER: OnceLock<(Arc<Tokenizer>, usize)> = OnceLock::new();
    let (tokenizer, vocab) = TOKENIZER.get_or_init(|| {
        let engine = start();
        (engine.tokenizer().clone(), engine.info().vocab_size)
    });
    let ids = |of: &[u16]| of.iter().map(|id| u32::from(*id) % *vocab as u32).collect::<Vec<u32>>();
    let stop: Vec<String> = stop.iter().filter(|text| !text.is_empty()).cloned().collect();
    let read = |stop: &[String]| {
        let options = StreamOptions { stop, skip_special: skip_special_tokens, ..StreamOptions::default() };
        let mut stream = TextStream::new(tokenizer.clone(), &ids(prompt), options);
        let mut text = String::new();
        for id in ids(output) {
            let delta = stream.push(id);
            text += &delta.text;
            if delta.stop.is_some() {
                return text;
            }
        }
        text + &stream.finish()
    };
    let whole = read(&[]);
    let text = read(&stop);
    assert!(whole.starts_with(&text), "{text:?} of {whole:?}");
    assert!(stop.iter().all(|stop| !text.contains(stop)), "{stop:?} in {text:?}");
}
