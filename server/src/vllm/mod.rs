//! Routes that vLLM adds to OpenAI's API: tokenizer, embeddings and scores of texts, LoRA adapters, prefix cache, sleep.

mod abort;
mod adapters;
mod inspect;
mod invocations;
pub mod pooling;
mod prefix_cache;
pub mod sleep;
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
    ("Sleeping.is_sleeping", "boolean", "Whether it sleeps."),
    ("Load", "object", "What the server does."),
    ("Load.server_load", "integer", "Number of requests that have not ended."),
    ("ServerInfo", "object", "The model and the choices made at the start."),
    ("ServerInfo.vllm_config", "any", "Lines, or with config_format=json an object."),
    ("ServerInfo.version", "string", "Version of the server."),
];

/// Adds the routes; `may_change_adapters` and `is_dev` say what clients may do.
pub fn add(routes: &mut Routes, may_change_adapters: bool, is_dev: bool) {
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

    let reset = if is_dev { post(prefix_cache::reset) } else { post(prefix_cache::forbidden) };
    let operation = Operation::post("Empty the prefix cache").returns_nothing("The cache is empty.");
    let with_flag = |operation: Operation, (name, description)| operation.with_flag(name, description);
    routes.add(&["/reset_prefix_cache"], reset, prefix_cache::PARAMETERS.into_iter().fold(operation, with_flag));

    let operation = Operation::get("Whether the engine sleeps").returns("Sleeping");
    routes.add(&["/is_sleeping"], get(sleep::is_sleeping), operation);
    let [to_sleep, wake_up] = match is_dev {
        true => [post(sleep::sleep), post(sleep::wake_up)],
        false => [post(sleep::forbidden), post(sleep::forbidden)],
    };
    let operation = Operation::post("Give memory back").returns_nothing("The engine sleeps.");
    let with_word = |operation: Operation, (name, words, description)| operation.with_word(name, words, description);
    routes.add(&["/sleep"], to_sleep, sleep::PARAMETERS.into_iter().fold(operation, with_word));
    let operation = Operation::post("Take the memory again").returns_nothing("The engine is awake.");
    routes.add(&["/wake_up"], wake_up, operation);

    routes.add(&["/load"], get(inspect::load), Operation::get("Number of unfinished requests").returns("Load"));
    let [info, tokenizer] = match is_dev {
        true => [get(inspect::server_info), get(inspect::tokenizer_info)],
        false => [get(inspect::forbidden), get(inspect::forbidden)],
    };
    let operation = Operation::get("The model and the choices made at the start").returns("ServerInfo");
    let description = "Lines, the default, or an object.";
    routes.add(&["/server_info"], info, operation.with_word("config_format", &["text", "json"], description));
    let operation = Operation::get("The configuration of the tokenizer").returns_object();
    routes.add(&["/tokenizer_info"], tokenizer, operation);
    let request = routes.request("AbortRequest", "Requests to end.", abort::ids);
    let operation = Operation::post("End requests").reads(&request).returns_nothing("They end.");
    let abort = if is_dev { post(abort::abort) } else { post(abort::forbidden) };
    routes.add(&["/abort_requests"], abort, operation);
    let operation = Operation::post("A request of any route, which its fields tell").returns_object().streams();
    routes.add(&["/invocations"], post(invocations::invocations), operation);
}
