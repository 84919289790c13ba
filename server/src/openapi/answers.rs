//! The shapes of answers. What the comments say stands in the document.

use schemars::JsonSchema;
use serde_json::{Map, Value};

/// What is wrong.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct Error {
    /// The error object.
    error: ErrorObject,
}

/// OpenAI's error object.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
struct ErrorObject {
    /// What was found, what was expected, what to do.
    message: String,
    /// invalid_request_error, authentication_error, server_error and the like.
    r#type: String,
    /// The field that is wrong.
    param: Option<String>,
    /// A word for programs.
    code: Option<String>,
}

/// Tokens of an answer.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
struct Usage {
    /// Of all prompts.
    prompt_tokens: u64,
    /// Of all answers.
    completion_tokens: Option<u64>,
    /// Of both.
    total_tokens: u64,
    /// cached_tokens: how many came from the prefix cache.
    prompt_tokens_details: Option<Map<String, Value>>,
}

/// Continuations of prompts.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct Completion {
    /// Of this answer.
    id: String,
    /// "text_completion".
    object: String,
    /// Unix seconds.
    created: u64,
    /// The served model.
    model: String,
    /// By prompt, then by sequence.
    choices: Vec<CompletionChoice>,
    /// Tokens.
    usage: Option<Usage>,
}

/// One continuation.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
struct CompletionChoice {
    /// prompt · n + sequence.
    index: u64,
    /// The text.
    text: String,
    /// tokens, token_logprobs, top_logprobs, text_offset.
    logprobs: Option<Map<String, Value>>,
    /// stop or length.
    finish_reason: Option<String>,
    /// The stop text or token that ended it.
    stop_reason: Option<Value>,
}

/// Answers to a conversation.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct Chat {
    /// Of this answer.
    id: String,
    /// "chat.completion".
    object: String,
    /// Unix seconds.
    created: u64,
    /// The served model.
    model: String,
    /// One for each sequence.
    choices: Vec<ChatChoice>,
    /// Tokens.
    usage: Option<Usage>,
}

/// One answer.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
struct ChatChoice {
    /// Of the sequence.
    index: u64,
    /// The message.
    message: AssistantMessage,
    /// content: a list with one entry per token.
    logprobs: Option<Map<String, Value>>,
    /// stop, length or tool_calls.
    finish_reason: Option<String>,
    /// The stop text or token that ended it.
    stop_reason: Option<Value>,
}

/// What the model says.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
struct AssistantMessage {
    /// "assistant".
    role: String,
    /// The text.
    content: Option<String>,
    /// The thoughts before it.
    reasoning_content: Option<String>,
    /// Functions that are called.
    tool_calls: Option<Vec<Map<String, Value>>>,
}

/// An answer of items.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct Response {
    /// Of this answer.
    id: String,
    /// "response".
    object: String,
    /// Unix seconds.
    created_at: u64,
    /// completed, incomplete, in_progress or failed.
    status: String,
    /// Why it is incomplete.
    incomplete_details: Option<Map<String, Value>>,
    /// What went wrong.
    error: Option<Map<String, Value>>,
    /// The served model.
    model: String,
    /// Items: reasoning, message, function_call.
    output: Vec<Map<String, Value>>,
    /// input_tokens, output_tokens, total_tokens and their details.
    usage: Option<Map<String, Value>>,
}

/// The length of a prompt.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct InputTokens {
    /// "response.input_tokens".
    object: String,
    /// Tokens.
    input_tokens: u64,
}

/// Vectors.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct Embeddings {
    /// Of this answer.
    id: String,
    /// "list".
    object: String,
    /// Unix seconds.
    created: u64,
    /// The served model.
    model: String,
    /// One for each input.
    data: Vec<Embedding>,
    /// Tokens.
    usage: Usage,
}

/// One vector.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
struct Embedding {
    /// "embedding".
    object: String,
    /// Of the input.
    index: u64,
    /// Its numbers, of length 1.
    embedding: Vector,
}

/// Numbers, or the base64 of their bytes.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[expect(dead_code, reason = "described, never made")]
enum Vector {
    /// float.
    Numbers(Vec<f32>),
    /// base64.
    Bytes(String),
}

/// Token ids.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct Tokenize {
    /// How many.
    count: u64,
    /// Longest prompt plus output.
    max_model_len: u64,
    /// The ids.
    tokens: Vec<u32>,
    /// As texts, if asked for.
    token_strs: Option<Vec<String>>,
}

/// A text.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct Detokenize {
    /// The text.
    prompt: String,
}

/// The served models.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct Models {
    /// "list".
    object: String,
    /// One.
    data: Vec<Model>,
}

/// A served model.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct Model {
    /// Its name.
    id: String,
    /// "model".
    object: String,
    /// Unix seconds of the start.
    created: u64,
    /// "quire".
    owned_by: String,
    /// Where it came from.
    root: String,
    /// Longest prompt plus output.
    max_model_len: u64,
}

/// How the server is.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct Health {
    /// "ok".
    status: String,
}

/// The engine as whoever watches it sees it; docs/state.md says what each field counts.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct State {
    /// The model's name.
    model: String,
    /// Longest prompt plus output.
    max_model_len: u64,
    /// The version of the server.
    version: String,
    /// Seconds since the engine was made.
    uptime: f64,
    /// Tokens per block.
    block_size: u64,
    /// Where the blocks are.
    blocks: Map<String, Value>,
    /// Who owns which block.
    map: Map<String, Value>,
    /// Live requests.
    requests: Vec<Map<String, Value>>,
    /// Live requests that are not listed.
    requests_left_out: u64,
    /// Gauges and counters.
    stats: Map<String, Value>,
    /// Speed over the last two seconds.
    rates: Map<String, Value>,
    /// The last minute.
    history: Map<String, Value>,
}

/// What the server is.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct Version {
    /// Of this program.
    version: String,
}
