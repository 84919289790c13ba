//! OpenAI's API, with vLLM's routes that render its requests.

pub mod batches;
pub mod chat;
mod choices;
pub mod completions;
pub mod conversations;
pub mod embeddings;
mod files;
pub mod logprobs;
mod models;
mod own;
pub mod responses;
mod resume;
mod schemas;
mod work;

use axum::routing::{get, post};

use crate::openapi::{Operation, Routes};
pub use resume::resume;

/// Adds the routes. As in llama-server, some exist without the version too.
pub fn add(routes: &mut Routes) {
    routes.schemas(schemas::SCHEMAS);
    let request =
        routes.request("CompletionRequest", "A request for completions.", completions::CompletionRequest::read);
    let operation = Operation::post("Create completions").reads(&request).returns("Completion").streams();
    routes.add(&["/v1/completions"], post(completions::completions), operation);
    let operation = Operation::post("Tokenize the prompts of a request for completions").reads(&request);
    routes.add(&["/v1/completions/render"], post(completions::render), operation.returns_list("Rendered"));

    let request = routes.request("ChatRequest", "A request for chat completions.", chat::ChatRequest::read);
    let operation = Operation::post("Create chat completions").reads(&request).returns("Chat").streams();
    routes.add(&["/v1/chat/completions", "/chat/completions"], post(chat::chat_completions), operation);
    let read = chat::ChatRequest::read_batch;
    let batch = routes.request("ChatBatchRequest", "A request for completions of several chats.", read);
    let operation = Operation::post("Complete several chats, with a choice for each").reads(&batch).returns("Chat");
    routes.add(&["/v1/chat/completions/batch"], post(chat::batch), operation.streams());
    let operation = Operation::post("Render and tokenize the prompt of a request for chat completions").reads(&request);
    routes.add(&["/v1/chat/completions/render"], post(chat::render), operation.returns("Rendered"));

    let request = routes.request("ResponsesRequest", "A request for a response; n must be 1.", responses::read);
    let operation = Operation::post("Create a response").reads(&request).returns("Response").streams();
    routes.add(&["/v1/responses", "/responses"], post(responses::responses), operation);
    let kept = |operation: Operation| operation.returns("Response");
    let operation = kept(Operation::get("A kept response, or its events (stream, starting_after)")).streams();
    let path = ["/v1/responses/{id}", "/responses/{id}"];
    routes.add(&path, get(responses::get).delete(responses::delete), operation);
    routes.also(&path, Operation::delete("Delete a kept response").returns_object());
    let operation = kept(Operation::post("Cancel a response in the background"));
    routes.add(&["/v1/responses/{id}/cancel", "/responses/{id}/cancel"], post(responses::cancel), operation);
    let operation = Operation::get("The items that a kept response was given (after, limit, order)").returns_object();
    routes.add(
        &["/v1/responses/{id}/input_items", "/responses/{id}/input_items"],
        get(responses::input_items),
        operation,
    );
    let operation = Operation::post("Count the input tokens of a response").reads(&request).returns("InputTokens");
    routes.add(&["/v1/responses/input_tokens"], post(responses::input_tokens), operation);

    let request = routes.request("ConversationRequest", "A new conversation.", conversations::read);
    let operation = Operation::post("Create a conversation").reads(&request).returns("Conversation");
    routes.add(&["/v1/conversations"], post(conversations::create), operation);
    let operation = Operation::get("A conversation").returns("Conversation");
    let methods = get(conversations::get).post(conversations::update).delete(conversations::delete);
    routes.add(&["/v1/conversations/{id}"], methods, operation);
    routes.also(
        &["/v1/conversations/{id}"],
        Operation::post("Replace its metadata").reads(&request).returns("Conversation"),
    );
    routes.also(&["/v1/conversations/{id}"], Operation::delete("Delete a conversation").returns_object());
    let operation = Operation::get("Items of a conversation (after, limit, order)").returns_object();
    let methods = get(conversations::list_items).post(conversations::add_items);
    routes.add(&["/v1/conversations/{id}/items"], methods, operation);
    let operation = Operation::post("Add items to a conversation").reads(&request).returns_object();
    routes.also(&["/v1/conversations/{id}/items"], operation);

    let operation = Operation::post("Upload a file (multipart/form-data: file, purpose)").returns("File");
    routes.add(&["/v1/files"], post(files::upload).get(files::list), operation);
    routes.also(&["/v1/files"], Operation::get("List files (purpose, after, limit, order)").returns_object());
    let operation = Operation::get("A file").returns("File");
    routes.add(&["/v1/files/{id}"], get(files::get).delete(files::delete), operation);
    routes.also(&["/v1/files/{id}"], Operation::delete("Delete a file").returns_object());
    let operation = Operation::get("The contents of a file").returns_text("application/octet-stream");
    routes.add(&["/v1/files/{id}/content"], get(files::content), operation);
    let request = routes.request("BatchRequest", "A file of requests that run below all others.", batches::read);
    let operation = Operation::post("Create a batch").reads(&request).returns("Batch");
    routes.add(&["/v1/batches"], post(batches::create).get(batches::list), operation);
    routes.also(&["/v1/batches"], Operation::get("List batches (after, limit)").returns_object());
    routes.add(&["/v1/batches/{id}"], get(batches::get), Operation::get("A batch").returns("Batch"));
    let operation = Operation::post("Cancel a batch").returns("Batch");
    routes.add(&["/v1/batches/{id}/cancel"], post(batches::cancel), operation);

    let request = routes.request("EmbeddingsRequest", "A request for embeddings.", embeddings::EmbeddingsRequest::read);
    let operation = Operation::post("Create embeddings").reads(&request).returns("Embeddings");
    routes.add(&["/v1/embeddings", "/embeddings"], post(embeddings::embeddings), operation);

    let operation = Operation::get("List the served model and its LoRA adapters").returns("Models");
    routes.add(&["/v1/models", "/models"], get(models::models), operation);
    // The rest of the path, because model names may have slashes.
    let operation = Operation::get("Describe the served model or a LoRA adapter").returns("Model");
    routes.add(&["/v1/models/{*name}"], get(models::model), operation);
}
