//! Requests of the program itself, without HTTP.

use std::sync::Arc;

use engine::{AsyncEngine, Event};
use serde_json::json;
use server::local::{self, Route, Run};
use server::{App, ServerOptions};

use crate::common::{Server, config};

fn app() -> Arc<App> {
    let engine = AsyncEngine::start(config(), &|_, _| {}).unwrap();
    Arc::new(App::new(engine, local::options(ServerOptions::default())))
}

#[test]
fn a_local_request_has_the_tokens_of_the_route_whose_body_it_is() {
    let (app, server) = (app(), Server::start());
    let body =
        json!({"prompt": "The capital of France is", "seed": 3, "max_tokens": 12, "return_token_ids": true, "n": 2});
    let choices = server.ok("/v1/completions", body.clone())["choices"].clone();
    let request = local::prepare(&app, Route::Completions, body.to_string().as_bytes()).unwrap();
    let mut tokens = vec![Vec::new(); 2];
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        let mut run = Run::submit(&app, vec![request]).await.unwrap();
        while let Some((_, event)) = run.next().await {
            if let Event::Delta(delta) = event {
                tokens[delta.index as usize].extend(delta.tokens.iter().map(|token| token.id));
            }
        }
        assert!(run.failure().is_none());
    });
    for (index, tokens) in tokens.iter().enumerate() {
        assert_eq!(choices[index]["token_ids"], json!(tokens));
    }
}

#[test]
fn a_local_limit_is_cut_to_the_context_and_none_takes_all_of_it() {
    let app = app();
    let request = |route, body: serde_json::Value| local::prepare(&app, route, body.to_string().as_bytes());
    let context = app_context(&app);
    for limit in [json!(1_000_000), json!(null)] {
        let made = request(Route::Completions, json!({"prompt": [1, 2, 3], "max_tokens": limit})).unwrap();
        assert_eq!(made.params.max_tokens, Some(context - 3));
        let body = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": limit});
        let made = request(Route::Chat, body).unwrap();
        assert_eq!(made.params.max_tokens, Some(context - made.prompt.len()));
    }
    let made = request(Route::Completions, json!({"prompt": [1, 2, 3], "max_tokens": 5})).unwrap();
    assert_eq!(made.params.max_tokens, Some(5));
}

fn app_context(app: &Arc<App>) -> usize {
    let body = json!({"prompt": [1]}).to_string();
    let made = local::prepare(app, Route::Completions, body.as_bytes()).unwrap();
    made.params.max_tokens.unwrap() + 1
}

#[test]
fn a_local_body_has_one_prompt_and_the_checks_of_its_route() {
    let app = app();
    let error = |route, body: serde_json::Value| {
        let refused = local::prepare(&app, route, body.to_string().as_bytes()).unwrap_err();
        assert_eq!(refused.status().as_u16(), 400);
        refused.message().to_string()
    };
    let two = error(Route::Completions, json!({"prompt": ["a", "b"]}));
    assert_eq!(two, "prompt: found 2 prompts, expected one prompt in each request");
    assert!(error(Route::Embeddings, json!({"input": ["a", "b"]})).starts_with("input: found 2 prompts"));
    assert!(error(Route::Completions, json!({"prompt": "a", "top_p": 2})).starts_with("top_p: found 2, expected"));
    assert!(error(Route::Chat, json!({"messages": []})).starts_with("messages: found an empty list"));
    let long = json!({"prompt": vec![1; 5000]});
    assert!(error(Route::Completions, long).contains("maximum context length"));
}

#[test]
fn a_local_chat_is_rendered_by_its_own_template_and_keeps_its_text() {
    let app = app();
    let body = json!({
        "messages": [{"role": "user", "content": "Hi"}],
        "chat_template": "{{ messages[0].content }}!",
        "tools": [{"type": "function", "function": {"name": "f", "strict": true, "parameters": {"type": "object"}}}],
        "tool_choice": "none",
    });
    let body = body.to_string();
    assert_eq!(local::render(&app, body.as_bytes()).unwrap(), "Hi!");
    let request = local::prepare(&app, Route::Chat, body.as_bytes()).unwrap();
    assert!(request.params.structured_outputs.is_none() && request.params.reasoning.is_none());
    assert!(request.params.skip_special_tokens);
}
