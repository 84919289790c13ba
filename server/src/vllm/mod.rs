//! Routes that vLLM adds to OpenAI's API: tokenizer, embeddings and scores of texts, LoRA adapters, prefix cache, sleep.

mod adapters;
pub mod pooling;
mod prefix_cache;
mod sleep;
mod tokenize;

use axum::routing::{get, post};

use crate::openapi::{Operation, Routes, Schema};

/// Schemas of responses.
const SCHEMAS: &[Schema] = &[
    ("Tokenize", "object", "Token ids of a prompt."),
    ("Tokenize.count", "integer", "Number of tokens."),
    ("Tokenize.max_model_len", "integer", "Maximum context length, prompt plus output."),
    ("Tokenize.tokens", "[integer]", "The token ids."),
    ("Tokenize.token_strs", "[string]?", "The tokens as strings, with return_token_strs."),
    ("Detokenize", "object", "Text of token ids."),
    ("Detokenize.prompt", "string", "The text."),
    ("Rendered", "object", "A prompt as the engine would compute it."),
    ("Rendered.request_id", "string", "Id that the response to the request would have."),
    ("Rendered.model", "string", "Name of the served model or of the LoRA adapter."),
    ("Rendered.token_ids", "[integer]", "Token ids of the prompt."),
    ("Sleeping", "object", "Whether the engine sleeps."),
    ("Sleeping.is_sleeping", "boolean", "Always false."),
];

/// Adds the routes; `may_change_adapters` and `may_reset` say what clients may do.
pub fn add(routes: &mut Routes, may_change_adapters: bool, may_reset: bool) {
    routes.schemas(SCHEMAS);
    pooling::add(routes);
    let request = routes.request("TokenizeRequest", "A text or a conversation.", tokenize::TokenizeRequest::read);
    let operation = Operation::post("Tokenize a text or a conversation").reads(&request).returns("Tokenize");
    routes.add(&["/tokenize"], post(tokenize::tokenize), operation);
    let request = routes.request("DetokenizeRequest", "Token ids.", tokenize::token_ids);
    let operation = Operation::post("Convert token ids to text").reads(&request).returns("Detokenize");
    routes.add(&["/detokenize"], post(tokenize::detokenize), operation);

    let [load, unload] = match may_change_adapters {
        true => [post(adapters::load), post(adapters::unload)],
        false => [post(adapters::forbidden), post(adapters::forbidden)],
    };
    let request = routes.request("LoadLoraAdapterRequest", "An adapter to load.", adapters::LoadRequest::read);
    let operation = Operation::post("Load a LoRA adapter").reads(&request).returns_text("text/plain");
    routes.add(&["/v1/load_lora_adapter"], load, operation);
    let request = routes.request("UnloadLoraAdapterRequest", "An adapter to unload.", adapters::unload_name);
    let operation = Operation::post("Unload a LoRA adapter once its requests have ended").reads(&request);
    routes.add(&["/v1/unload_lora_adapter"], unload, operation.returns_text("text/plain"));

    let reset = if may_reset { post(prefix_cache::reset) } else { post(prefix_cache::forbidden) };
    let operation = Operation::post("Empty the prefix cache").returns_nothing("The cache is empty.");
    let with_flag = |operation: Operation, (name, description)| operation.with_flag(name, description);
    routes.add(&["/reset_prefix_cache"], reset, prefix_cache::PARAMETERS.into_iter().fold(operation, with_flag));

    let operation = Operation::get("Whether the engine sleeps, which it never does").returns("Sleeping");
    routes.add(&["/is_sleeping"], get(sleep::is_sleeping), operation);
    let operation = Operation::post("Not supported: the engine does not sleep");
    routes.add(&["/sleep"], post(sleep::sleep), operation);
    let operation = Operation::post("Succeeds, because the engine is awake").returns_nothing("The engine is awake.");
    routes.add(&["/wake_up"], post(sleep::wake_up), operation);
}
