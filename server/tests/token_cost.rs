//! What a streamed token costs: how often the server writes, and how much it allocates.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::http::Request;
use engine::AsyncEngine;
use http_body_util::BodyExt;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use server::{App, ServerOptions, router};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf};

use crate::common::long::{self, noop::NoOp};
use crate::common::{config, slow};
use crate::counter::{allocated_bytes, allocations};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn service(engine: &AsyncEngine) -> TowerToHyperService<axum::Router> {
    TowerToHyperService::new(router(Arc::new(App::new(engine.clone(), ServerOptions::default()))))
}

/// A connection that counts its writes.
struct Counted(DuplexStream, Arc<AtomicUsize>);

impl AsyncRead for Counted {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Counted {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.1.fetch_add(1, Relaxed);
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.1.fetch_add(1, Relaxed);
        let joined: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
        Pin::new(&mut self.0).poll_write(cx, &joined)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}

#[test]
fn a_stream_of_many_sequences_is_written_once_per_step() {
    let engine = AsyncEngine::start(slow(config()), &|_, _| {}).unwrap();
    let service = service(&engine);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let more = json!({"max_tokens": 12, "ignore_eos": true, "n": 8, "temperature": 1, "seed": 1, "stream": true});
    let prompts = json!({"prompt": ["One", "Two", "Three"]});
    let messages = json!({"messages": [{"role": "user", "content": "One"}]});
    for (path, fields, sequences) in [(COMPLETIONS, prompts, 24), (CHAT, messages, 8)] {
        let mut body = more.clone();
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let (writes, body) = (Arc::new(AtomicUsize::new(0)), body.to_string());
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        let steps = engine.stats().steps;
        let answer = runtime.block_on(async {
            let (mut client, connection) = tokio::io::duplex(1 << 20);
            let io = TokioIo::new(Counted(connection, writes.clone()));
            tokio::spawn(http1::Builder::new().serve_connection(io, service.clone()));
            client.write_all(format!("{head}{body}").as_bytes()).await.unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            answer
        });
        let (writes, steps) = (writes.load(Relaxed), (engine.stats().steps - steps) as usize);
        assert!(answer.contains("data: [DONE]\n\n"), "{answer}");
        assert_eq!(answer.matches("\"finish_reason\":\"length\"").count(), sequences, "{answer}");
        // The head, and the end of the body.
        assert!(writes <= steps + 2, "{path}: {writes} writes in {steps} steps");
    }
}

/// Lines of a stream, with the number of allocations of this thread for each, and their bytes.
async fn lines(engine: &AsyncEngine, path: &str, body: &Value) -> Vec<[f64; 2]> {
    let service = service(engine);
    let request = Request::post(path).header("host", "localhost").header("content-type", "application/json");
    let Ok(mut response) = service.call(request.body(Body::from(body.to_string())).unwrap()).await;
    assert_eq!(response.status(), 200, "{path}");
    // All frames but the last are full, whoever is faster.
    while engine.num_unfinished() > 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let mut lines = Vec::new();
    loop {
        let before = [allocations(), allocated_bytes()];
        let Some(frame) = response.body_mut().frame().await else { return lines };
        let spent = [allocations() - before[0], allocated_bytes() - before[1]];
        let data = frame.unwrap().into_data().unwrap();
        let count = data.windows(6).filter(|bytes| *bytes == b"data: ").count();
        lines.extend(std::iter::repeat_n(spent.map(|sum| sum as f64 / count as f64), count));
    }
}

#[test]
fn nothing_that_a_token_costs_grows_with_the_answer() {
    const LENGTH: usize = 4_000;
    let engine = long::start(NoOp::new(), 2 * LENGTH, 8);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let messages = json!([{"role": "user", "content": "One"}]);
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}});
    for (path, most, more) in [
        (
            COMPLETIONS,
            4.0,
            json!({"prompt": "One", "stop": ["\n\n", "never"], "stream_options": {"include_usage": true}}),
        ),
        (COMPLETIONS, 60.0, json!({"prompt": "One", "logprobs": 3})),
        (CHAT, 5.0, json!({"messages": messages})),
        (CHAT, 60.0, json!({"messages": messages, "logprobs": true, "top_logprobs": 3})),
        (CHAT, 40.0, json!({"messages": messages, "tools": [tool]})),
    ] {
        let body = long::request(LENGTH, more);
        let lines = runtime.block_on(lines(&engine, path, &body));
        assert!(lines.len() >= LENGTH, "{path}: {} lines", lines.len());
        let mean =
            |lines: &[[f64; 2]], which: usize| lines.iter().map(|line| line[which]).sum::<f64>() / lines.len() as f64;
        let (early, late) = (&lines[100..600], &lines[LENGTH - 600..LENGTH - 100]);
        for (which, unit) in ["allocations", "bytes"].into_iter().enumerate() {
            let (early, late) = (mean(early, which), mean(late, which));
            assert!(late <= 1.1 * early + 1.0, "{body}: {early} {unit} per token, later {late}");
        }
        assert!(mean(late, 0) <= most, "{body}: {} allocations per token", mean(late, 0));
    }
}
