//! Any body to any route, through the whole of the HTTP side and a real engine: never a 5xx.
#![no_main]

use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::Request;
use engine::{AsyncEngine, EngineConfig};
use serde_json::Value;
use server::http::{App, ServerOptions, router};
use tokio::runtime::{Builder, Runtime};
use tower::ServiceExt;

const PATHS: [&str; 4] = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"];

fn server() -> &'static (Runtime, Router) {
    static SERVER: OnceLock<(Runtime, Router)> = OnceLock::new();
    SERVER.get_or_init(|| {
        let config = EngineConfig { kv_cache_memory_bytes: Some(16 << 20), threads: Some(1), ..EngineConfig::default() };
        let engine = AsyncEngine::start(config, &|_, _| {}).unwrap_or_else(|error| panic!("{error}"));
        let runtime = Builder::new_current_thread().enable_all().build().unwrap_or_else(|error| panic!("{error}"));
        (runtime, router(Arc::new(App::new(engine, ServerOptions::default()))))
    })
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let Some((first, body)) = bytes.split_first() else { return };
    let mut body = body.to_vec();
    // An answer may be as long as the context; what is looked for is at the door.
    if let Ok(Value::Object(mut fields)) = serde_json::from_slice(&body) {
        fields.entry("max_tokens").or_insert(2.into());
        body = Value::Object(fields).to_string().into_bytes();
    }
    let (runtime, router) = server();
    runtime.block_on(async {
        let request = Request::post(PATHS[*first as usize % PATHS.len()]).body(Body::from(body));
        let Ok(request) = request else { return };
        let Ok(response) = router.clone().oneshot(request).await;
        let status = response.status();
        assert!(!status.is_server_error(), "{status}");
        let body = to_bytes(response.into_body(), usize::MAX).await.unwrap_or_default();
        if !status.is_success() {
            let error: Value = serde_json::from_slice(&body).unwrap_or_default();
            assert!(error["error"]["message"].is_string(), "{status} without the error object");
        }
    });
});
