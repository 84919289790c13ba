//! What a handle refuses while a grammar is compiled.
#![cfg(test)]
#![allow(clippy::unwrap_used)]

use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;

use super::AsyncEngine;
use crate::api::{EngineConfig, GenerationParams, GenerationRequest};
use crate::error::SubmitError;
use crate::grammar::{Grammar, StructuredOutput};

#[test]
fn a_request_whose_grammar_is_compiled_while_the_engine_begins_to_drain_is_refused() {
    let engine = AsyncEngine::start(EngineConfig { threads: Some(1), ..Default::default() }, &|_, _| {}).unwrap();
    let grammar = Grammar::Regex("[a-z]{1,40}".into());
    let structured_outputs = Some(std::sync::Arc::new(StructuredOutput { grammar, param: "structured_outputs" }));
    let params = GenerationParams { structured_outputs, ..Default::default() };
    let request = GenerationRequest { prompt: vec![1, 2, 3], params, ..Default::default() };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let outcome = runtime.block_on(async {
        let others = engine.shared.grammars.pause().await;
        let mut submitted = pin!(engine.submit(request));
        let waits = poll_fn(|context| Poll::Ready(submitted.as_mut().poll(context).is_pending())).await;
        assert!(waits, "no grammar is compiled before the others are done");
        engine.drain();
        drop(others);
        submitted.await
    });
    assert_eq!(outcome.err(), Some(SubmitError::Closed));
    assert_eq!(engine.num_unfinished(), 0);
}
