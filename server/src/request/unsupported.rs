//! Fields of other servers, and of other routes, that would change the answer here if they were supported.
//!
//! They are refused by name, so that no constraint is ignored. All other fields without a reader (`metadata`, `cache_prompt`,
//! `service_tier`, …) do not change an answer and are ignored, as in vLLM.

use serde_json::json;

use super::fields::Fields;
use crate::http::ApiError;

/// Values that ask for nothing, if a field has no other.
pub const EMPTY: &str = r#"[false, "", [], {}]"#;

/// Names; a JSON list of the values, besides `null`, that change nothing; and what to do instead.
pub type Field = (&'static [&'static str], &'static str, &'static str);

/// Fields that no request for text has.
pub const GENERATION: [Field; 30] = [
    (&["prompt_embeds", "input_embeds", "input_ids"], EMPTY, "send text or token ids"),
    (
        &["logits_processors", "custom_logit_processor", "custom_params", "vllm_xargs"],
        EMPTY,
        "use logit_bias, allowed_token_ids or bad_words",
    ),
    (&["return_tokens_as_token_ids", "return_tokens"], EMPTY, "use return_token_ids"),
    (&["return_hidden_states", "return_routed_experts"], EMPTY, "remove it: this server returns text and token ids"),
    (&["audio"], EMPTY, "remove it: this server generates text only"),
    (&["modalities"], r#"[["text"], []]"#, "remove it: this server generates text only"),
    (&["mm_processor_kwargs", "media_io_kwargs"], EMPTY, "remove it: this model accepts only text"),
    (&["web_search_options"], "[]", "remove it: this server has no built-in tools"),
    (&["functions"], EMPTY, "use tools"),
    (&["function_call"], EMPTY, "use tool_choice"),
    (
        &["mirostat", "mirostat_mode", "xtc_probability", "dry_multiplier", "dynatemp_range", "smoothing_factor"],
        "[0]",
        FILTERS,
    ),
    (&["top_a", "epsilon_cutoff", "eta_cutoff", "penalty_alpha"], "[0]", FILTERS),
    (&["top_n_sigma"], "[-1, 0]", FILTERS),
    (&["tfs", "tfs_z", "guidance_scale"], "[1]", FILTERS),
    (&["dynamic_temperature", "samplers", "sampler_order", "sampler_priority"], EMPTY, FILTERS),
    (&["do_sample"], "[true]", "use temperature: 0 means greedy sampling"),
    (&["repeat_penalty", "encoder_repetition_penalty"], "[1]", "use repetition_penalty, which counts all tokens"),
    (&["no_repeat_ngram_size"], "[0]", "use repetition_penalty or frequency_penalty"),
    (&["repetition_detection"], EMPTY, "use repetition_penalty or frequency_penalty"),
    (&["n_probs"], "[0]", "use logprobs"),
    (&["n_cmpl"], "[1]", "use n"),
    (&["n_indent", "t_max_predict_ms"], "[0, -1]", "use max_tokens or a grammar"),
    (&["stop_regex"], EMPTY, "use stop or structured_outputs"),
    (&["no_stop_trim"], EMPTY, "use include_stop_str_in_output"),
    (&["lora", "lora_path"], EMPTY, "name the adapter in model"),
    (&["format", "guided_whitespace_pattern"], EMPTY, "use response_format or structured_outputs"),
    (&["options", "sampling_params", "parameters"], EMPTY, "send its fields beside the others"),
    (&["thinking", "think", "enable_thinking"], "[]", "use reasoning_effort or chat_template_kwargs"),
    (&["separate_reasoning", "stream_reasoning"], "[true]", "remove it: reasoning is returned and streamed separately"),
    TRUNCATION,
];

const FILTERS: &str = "use temperature, top_k, top_p, min_p, typical_p or the penalties";

const TRUNCATION: Field = (&["truncation_side"], r#"["left"]"#, "remove it: the end of a prompt is kept");

/// Fields that chats and responses have, and completions do not.
pub const COMPLETIONS: [Field; 2] = [
    (&["documents", "reasoning_effort", "reasoning"], EMPTY, "use /v1/chat/completions"),
    (&["top_logprobs"], "[0]", "use logprobs"),
];

/// Fields that completions and responses have, and chats do not.
pub const CHATS: [Field; 1] = [(&["echo"], EMPTY, "end messages with the text and set continue_final_message")];

/// Fields that completions and chats have, and responses do not, and those of OpenAI's responses.
pub const RESPONSES: [Field; 5] = [
    (&["prompt"], EMPTY, "use instructions and input"),
    (&["prompt_logprobs", "best_of", "echo"], EMPTY, "use /v1/chat/completions"),
    (&["logprobs"], EMPTY, "use top_logprobs"),
    (&["reasoning_effort"], EMPTY, "use reasoning.effort"),
    (&["continue_final_message"], EMPTY, "use /v1/chat/completions"),
];

/// Fields that no request for a vector has.
pub const POOLED: [Field; 3] = [
    (&["normalize"], "[true]", "use use_activation"),
    (&["padding"], EMPTY, "remove it: prompts are computed without padding"),
    (&["mm_processor_kwargs"], EMPTY, "remove it: this model accepts only text"),
];

/// Fields of other servers' embeddings.
pub const EMBEDDINGS: [Field; 1] =
    [(&["input_type", "instruction"], EMPTY, "put the instruction into input, or use prompt_name")];

/// Fields of vectors that labels do not have.
pub const CLASSES: [Field; 2] = [
    (&["embed_dtype"], r#"["float32"]"#, "remove it: scores are numbers in JSON"),
    (&["endianness"], r#"["native", "little"]"#, "remove it: scores are numbers in JSON"),
];

/// Fields of embeddings that pooling does not have.
pub const POOLING: [Field; 1] = [(&["dimensions"], "[]", "use /v1/embeddings")];

/// Fields of other servers' scores.
pub const SCORES: [Field; 1] =
    [(&["chat_template", "chat_template_kwargs"], EMPTY, "remove it: pairs are written as the model expects them")];

/// Fields of rankings that scores do not have.
pub const PAIRS: [Field; 2] =
    [(&["raw_scores"], "[false]", "use use_activation: false"), (&["texts"], EMPTY, "use documents")];

/// Fails if one of the fields is present with a value that asks for something.
pub fn refuse(fields: &Fields<'_>, unsupported: &[Field]) -> Result<(), ApiError> {
    for (names, neutral, advice) in unsupported {
        names.iter().try_for_each(|name| fields.refuse(name, neutral, advice))?;
    }
    Ok(())
}

/// Describes fields that are accepted without effect, because they would not change an answer: names, and what they ask for.
pub fn accept(fields: &Fields<'_>, accepted: &[(&str, &str)]) {
    accepted.iter().for_each(|(name, description)| fields.describe(name, description, || json!({})));
}
