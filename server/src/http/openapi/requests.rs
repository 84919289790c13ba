//! The shapes of requests. What the comments say stands in the document.

use schemars::JsonSchema;
use serde_json::{Map, Value};

/// Prompts in one of four forms.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[expect(dead_code, reason = "described, never made")]
enum Prompts {
    /// A text.
    Text(String),
    /// Token ids.
    #[schemars(extend("minItems" = 1))]
    Ids(Vec<u32>),
    /// Several prompts, each a text or token ids.
    #[schemars(extend("minItems" = 1, "maxItems" = 2048))]
    Many(Vec<Prompt>),
}

/// One prompt.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[expect(dead_code, reason = "described, never made")]
enum Prompt {
    /// A text.
    Text(String),
    /// Token ids.
    #[schemars(extend("minItems" = 1))]
    Ids(Vec<u32>),
}

/// One text or several.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[expect(dead_code, reason = "described, never made")]
enum Texts {
    /// One.
    #[schemars(extend("minLength" = 1))]
    One(String),
    /// Several.
    Many(Vec<String>),
}

/// What every request may say.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
struct Common {
    /// The served model; it is meant where none is named.
    model: Option<String>,
    /// Whose request it is; not used.
    user: Option<String>,
    /// Lower runs first, under the priority policy.
    priority: Option<i32>,
    /// Prompts share cached blocks only under the same salt.
    cache_salt: Option<String>,
    /// Keep this many tokens of the end of the prompt; -1 what the context holds.
    #[schemars(range(min = -1), extend("not" = {"const": 0}))]
    truncate_prompt_tokens: Option<i64>,
}

/// How tokens are chosen, and when a text ends.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
struct Sampling {
    /// Softmax temperature; 0 takes the likeliest token.
    #[schemars(range(min = 0, max = 2))]
    temperature: Option<f32>,
    /// Keep the likeliest tokens up to this probability.
    #[schemars(extend("exclusiveMinimum" = 0), range(max = 1))]
    top_p: Option<f32>,
    /// Keep this many of the likeliest tokens; 0 and -1 keep all.
    #[schemars(range(min = -1, max = 4_294_967_295_i64))]
    top_k: Option<i64>,
    /// Drop tokens below this share of the likeliest one's probability.
    #[schemars(range(min = 0, max = 1))]
    min_p: Option<f32>,
    /// Keep the tokens of typical information up to this probability.
    #[schemars(extend("exclusiveMinimum" = 0), range(max = 1))]
    typical_p: Option<f32>,
    /// Divides the positive logits of tokens seen.
    #[schemars(extend("exclusiveMinimum" = 0))]
    repetition_penalty: Option<f32>,
    /// Taken from the logits of tokens that the output has.
    #[schemars(range(min = -2, max = 2))]
    presence_penalty: Option<f32>,
    /// Taken from the logits of tokens for each time that the output has them.
    #[schemars(range(min = -2, max = 2))]
    frequency_penalty: Option<f32>,
    /// Equal requests of equal seeds have equal answers.
    seed: Option<i64>,
    /// Tokens before a text may end.
    #[schemars(range(min = 0))]
    min_tokens: Option<u64>,
    /// Token ids to what is added to their logits, -100 to 100.
    logit_bias: Option<Map<String, Value>>,
    /// No other tokens come.
    #[schemars(length(min = 1))]
    allowed_token_ids: Option<Vec<u32>>,
    /// Texts that do not come.
    bad_words: Option<Texts>,
    /// Texts before which the output ends; at most 16.
    stop: Option<Texts>,
    /// Tokens with which the output ends.
    stop_token_ids: Option<Vec<u32>>,
    /// Leave the stop text in the output.
    include_stop_str_in_output: Option<bool>,
    /// End-of-sequence tokens do not end the output.
    ignore_eos: Option<bool>,
    /// Leave special tokens out of the text.
    skip_special_tokens: Option<bool>,
    /// Answers to each prompt.
    #[schemars(range(min = 1, max = 128))]
    n: Option<u32>,
    /// Samples to make, of which the n likeliest are returned.
    #[schemars(range(min = 1, max = 128))]
    best_of: Option<u32>,
    /// Search for the likeliest answers.
    use_beam_search: Option<bool>,
    /// Hypotheses of a beam search.
    #[schemars(range(min = 1, max = 128))]
    beam_width: Option<u32>,
    /// Above 0 a beam search favours long answers.
    length_penalty: Option<f32>,
    /// A beam search ends as soon as it has enough answers.
    early_stopping: Option<bool>,
    /// Answer as server-sent events.
    stream: Option<bool>,
    /// include_usage, continuous_usage_stats.
    stream_options: Option<Map<String, Value>>,
    /// Log-probabilities of the prompt, with so many alternatives.
    #[schemars(range(min = 0, max = 20))]
    prompt_logprobs: Option<u32>,
    /// Give token ids too.
    return_token_ids: Option<bool>,
    /// What the text must match: one of json, regex, choice, grammar, json_object.
    structured_outputs: Option<Map<String, Value>>,
    /// A JSON schema, or its text.
    guided_json: Option<Value>,
    /// A regular expression.
    guided_regex: Option<String>,
    /// Texts to choose from.
    guided_choice: Option<Vec<String>>,
    /// A grammar in Lark's syntax.
    guided_grammar: Option<String>,
    /// text, json_object or json_schema.
    response_format: Option<Map<String, Value>>,
}

/// A request for the continuation of prompts.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct Completion {
    /// What is continued.
    prompt: Prompts,
    /// Most tokens of an answer; 0 only scores the prompt.
    #[schemars(range(min = 0))]
    max_tokens: Option<u64>,
    /// The prompt stands before the text.
    echo: Option<bool>,
    /// Log-probabilities, with so many alternatives.
    #[schemars(range(min = 0, max = 20))]
    logprobs: Option<u32>,
    /// Begin with the tokenizer's special tokens.
    add_special_tokens: Option<bool>,
    #[schemars(flatten)]
    common: Common,
    #[schemars(flatten)]
    sampling: Sampling,
}

/// What steers the chat template.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
struct Template {
    /// Variables of the model's chat template.
    chat_template_kwargs: Option<Map<String, Value>>,
    /// End the prompt where an answer begins.
    add_generation_prompt: Option<bool>,
    /// Go on with the last message.
    continue_final_message: Option<bool>,
    /// Begin with the tokenizer's special tokens too.
    add_special_tokens: Option<bool>,
}

/// One message.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
struct Message {
    /// Who speaks; the chat template knows which there are.
    role: String,
    /// A text, a list of text parts, or nothing.
    content: Option<Value>,
}

/// A function that may be called.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
struct Tool {
    /// "function".
    r#type: String,
    /// name, description, parameters (a JSON schema).
    function: Map<String, Value>,
}

/// A request for the answer to a conversation.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct Chat {
    /// The conversation.
    #[schemars(length(min = 1))]
    messages: Vec<Message>,
    /// Most tokens of an answer; without it, what the context holds.
    #[schemars(range(min = 1))]
    max_completion_tokens: Option<u64>,
    /// The older name of the same.
    #[schemars(range(min = 1))]
    max_tokens: Option<u64>,
    /// Give log-probabilities.
    logprobs: Option<bool>,
    /// So many alternatives to each token.
    #[schemars(range(min = 0, max = 20))]
    top_logprobs: Option<u32>,
    /// What may be called.
    tools: Option<Vec<Tool>>,
    /// none, auto, required, or a function by name.
    tool_choice: Option<Value>,
    /// Several calls may come in one message.
    parallel_tool_calls: Option<bool>,
    /// How long to think: none, minimal, low, medium, high or xhigh; the chat template knows what that means.
    reasoning_effort: Option<String>,
    #[schemars(flatten)]
    template: Template,
    #[schemars(flatten)]
    common: Common,
    #[schemars(flatten)]
    sampling: Sampling,
}

/// A request for the answer to items. n is 1 here.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct Responses {
    /// A text, or a list of items: message, function_call, function_call_output, reasoning.
    input: Value,
    /// The system's message.
    instructions: Option<String>,
    /// Most tokens of the answer.
    #[schemars(range(min = 1))]
    max_output_tokens: Option<u64>,
    /// format: text, json_object or json_schema.
    text: Option<Map<String, Value>>,
    /// Functions: type, name, description, parameters.
    tools: Option<Vec<Map<String, Value>>>,
    /// none, auto, required, or a function by name.
    tool_choice: Option<Value>,
    /// Several calls may come in one answer.
    parallel_tool_calls: Option<bool>,
    /// Accepted; only tools of a server's own would count.
    #[schemars(range(min = 1))]
    max_tool_calls: Option<u64>,
    /// effort, as reasoning_effort of a chat.
    reasoning: Option<Map<String, Value>>,
    /// So many alternatives to each token.
    #[schemars(range(min = 0, max = 20))]
    top_logprobs: Option<u32>,
    /// "message.output_text.logprobs" gives log-probabilities.
    include: Option<Texts>,
    /// auto cuts the beginning of an input that is too long; disabled refuses it.
    truncation: Option<String>,
    /// Up to 16 short texts, repeated in the answer.
    metadata: Option<Map<String, Value>>,
    /// Accepted; answers are not stored and say so.
    store: Option<bool>,
    /// Refused: answers are not stored.
    previous_response_id: Option<Value>,
    /// Refused: answers are not stored.
    conversation: Option<Value>,
    /// Repeated in the answer.
    prompt_cache_key: Option<String>,
    /// Repeated in the answer.
    safety_identifier: Option<String>,
    /// Variables of the model's chat template.
    chat_template_kwargs: Option<Map<String, Value>>,
    #[schemars(flatten)]
    common: Common,
    #[schemars(flatten)]
    sampling: Sampling,
}

/// A request for vectors.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct Embeddings {
    /// What becomes vectors.
    input: Prompts,
    /// float, or base64: little-endian float32.
    encoding_format: Option<String>,
    /// Only the model's own width.
    #[schemars(range(min = 1))]
    dimensions: Option<u64>,
    /// Begin with the tokenizer's special tokens.
    add_special_tokens: Option<bool>,
    #[schemars(flatten)]
    common: Common,
}

/// A text, or a conversation, to be tokenised.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct Tokenize {
    /// The served model.
    model: Option<String>,
    /// The text.
    prompt: Option<String>,
    /// A conversation, in the place of a text.
    messages: Option<Vec<Message>>,
    /// As a chat has them.
    tools: Option<Vec<Tool>>,
    /// Give the tokens as texts too.
    return_token_strs: Option<bool>,
    #[schemars(flatten)]
    template: Template,
}

/// Token ids that become a text.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "described, never made")]
pub struct Detokenize {
    /// The served model.
    model: Option<String>,
    /// The ids.
    tokens: Vec<u32>,
}
