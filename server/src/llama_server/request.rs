//! The fields of `/completion` and `/infill`.

use engine::GenerationRequest;
use serde_json::{Map, Value, json};

use crate::app::{App, LogprobFormat};
use crate::http::ApiError;
use crate::openai::completions::CompletionRequest;
use crate::request::unsupported::{EMPTY, Field, refuse};
use crate::request::{
    Around, Cost, EXTENSIONS, Fields, Infill, Options, Translation, Work, accept, prompts, repeat_penalty,
};

/// Fields that completions have under the same name.
const SAME: [&str; 11] = [
    "model",
    "stream",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "stop",
    "n_predict",
];

/// Fields of completions with other names here.
pub const NAMES: [(&str, &str); 2] = [("logprobs", "n_probs"), ("repetition_penalty", "repeat_penalty")];

/// Fields that the reader of completions refuses, unless they ask for nothing.
const REFUSED: [&str; 9] = [
    "mirostat",
    "xtc_probability",
    "dry_multiplier",
    "dynatemp_range",
    "top_n_sigma",
    "n_cmpl",
    "n_indent",
    "t_max_predict_ms",
    "lora",
];

/// Further fields that would change the answer. The samplers are those of this server, in its order, which is that of this list without
/// those that are refused.
const UNSUPPORTED: [Field; 2] = [
    (&["post_sampling_probs"], EMPTY, "remove it: probabilities are those before the filters"),
    (
        &["samplers"],
        r#"["", [], "edskypmxt", ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]]"#,
        "remove it: the order of the filters is fixed",
    ),
];

/// Fields that change nothing in an answer of this server.
const ACCEPTED: [(&str, &str); 17] = [
    ("cache_prompt", "Accepted without effect: every prefix is cached."),
    ("id_slot", "Accepted without effect: there are no slots."),
    ("n_keep", "Accepted without effect: a prompt that does not fit is refused."),
    ("n_discard", "Accepted without effect: a prompt that does not fit is refused."),
    ("n_cache_reuse", "Accepted without effect: every prefix is cached."),
    ("min_keep", "Accepted without effect: the likeliest token is always kept."),
    ("mirostat_tau", "Accepted without effect: mirostat is refused."),
    ("mirostat_eta", "Accepted without effect: mirostat is refused."),
    ("xtc_threshold", "Accepted without effect: xtc_probability is refused."),
    ("dry_base", "Accepted without effect: dry_multiplier is refused."),
    ("dry_allowed_length", "Accepted without effect: dry_multiplier is refused."),
    ("dry_penalty_last_n", "Accepted without effect: dry_multiplier is refused."),
    ("dry_sequence_breakers", "Accepted without effect: dry_multiplier is refused."),
    ("dynatemp_exponent", "Accepted without effect: dynatemp_range is refused."),
    ("penalize_nl", "Accepted without effect: penalties count all tokens."),
    ("timings_per_token", "Accepted without effect: the end of a stream has the times."),
    ("return_progress", "Accepted without effect."),
];

/// A request, ready to run.
pub struct Asked {
    /// The fields that completions have too.
    pub options: Options,
    /// Token ids and texts of the prompts.
    pub prompts: Vec<(Vec<u32>, String)>,
    /// Whether the prompt is a list of prompts, and the answer a list of answers.
    pub is_list: bool,
    /// Return the token ids of a whole answer.
    pub returns_tokens: bool,
    /// The fields to return; empty: all.
    pub response_fields: Vec<String>,
}

impl Asked {
    /// The requests of the engine. Each limit is cut to the rest of the context.
    pub fn requests(&self, app: &App) -> Result<Vec<GenerationRequest>, ApiError> {
        let one = |(ids, _): &(Vec<u32>, String)| self.options.request(app, ids.clone(), None, "prompt");
        self.prompts.iter().map(one).collect()
    }
}

/// What is read beside the body of a completion.
pub struct Read {
    completion: CompletionRequest,
    is_list: bool,
    returns_tokens: bool,
    response_fields: Vec<String>,
}

/// Prepares a request of `/completion`.
pub fn completion(work: &Work, fields: &Fields<'_>) -> Result<(Asked, Cost), ApiError> {
    work.must_generate()?;
    prepare(work, read(work, fields)?)
}

/// Prepares a request of `/infill`.
pub fn infill(work: &Work, fields: &Fields<'_>) -> Result<(Asked, Cost), ApiError> {
    work.must_generate()?;
    prepare(work, read_infill(work, fields)?)
}

fn prepare(work: &Work, read: Read) -> Result<(Asked, Cost), ApiError> {
    let Read { mut completion, is_list, returns_tokens, response_fields } = read;
    let inputs = std::mem::take(&mut completion.prompts);
    let count = inputs.len();
    let least = inputs.iter().map(|input| input.least_tokens(work)).sum();
    completion.cost(work, (count, least), 0).check(&work.options.limits)?;
    let mut texts = 0;
    let mut prompts = Vec::new();
    let keep = completion.options.truncate_prompt_tokens;
    for (ids, text) in prompts::tokenize(work, inputs, "prompt", completion.add_special, keep)? {
        let decode = || work.tokenizer().decode(&ids, false).map_err(|error| ApiError::invalid("prompt", error));
        let text = text.map_or_else(decode, Ok)?;
        texts += text.len();
        prompts.push((ids, text));
    }
    let tokens = prompts.iter().map(|(ids, _)| ids.len()).sum();
    let cost = completion.cost(work, (count, tokens), 0);
    // Log probabilities are held as JSON until the answer is written.
    let asked = completion.options.params.sampling.logprobs.filter(|_| !completion.options.stream);
    let mut per_output_token = work.logprob_entries(asked, LogprobFormat::Chat);
    per_output_token.bytes *= 2;
    let keeps_ids = returns_tokens && !completion.options.stream;
    let cost = Cost { per_output_token, keeps_ids, repeated_bytes: cost.repeated_bytes + 2 * texts, ..cost };
    cost.check(&work.options.limits)?;
    let CompletionRequest { options, .. } = completion;
    Ok((Asked { options, prompts, is_list, returns_tokens, response_fields }, cost))
}

/// Reads the fields of `/completion`.
pub fn read(work: &Work, fields: &Fields<'_>) -> Result<Read, ApiError> {
    let mut body = Translation::new(work, fields, CompletionRequest::read);
    common(work, fields, &mut body)?;
    let mut is_list = false;
    match mixed(work, fields)? {
        Some(ids) => {
            body.describe("prompt", "prompt");
            body.set("prompt", &ids);
        }
        None => {
            is_list = fields.raw("prompt").is_some_and(|raw| {
                raw.get().strip_prefix('[').is_some_and(|rest| rest.trim_start().starts_with(['"', '[']))
            });
            body.copy("prompt", "prompt");
        }
    }
    finish(work, fields, body, is_list)
}

/// Reads the fields of `/infill`.
pub fn read_infill(work: &Work, fields: &Fields<'_>) -> Result<Read, ApiError> {
    let limits = &work.options.limits;
    let mut body = Translation::new(work, fields, CompletionRequest::read);
    common(work, fields, &mut body)?;
    let text = |name, description| fields.str(name, limits.max_text_bytes, description);
    let before = text("input_prefix", "The text before.")?.unwrap_or_default();
    let after = text("input_suffix", "The text after.")?.unwrap_or_default();
    let begun = text("prompt", "The beginning of what is filled in.")?.unwrap_or_default();
    let item = json!({"type": "object", "properties": {"filename": {"type": "string"}, "text": {"type": "string"}}});
    let description = "Other files: their names and texts.";
    let list = fields.list("input_extra", limits.max_prompts, "--max-prompts", &item, description)?;
    let one = |(index, file): (usize, &Value)| {
        let field = |name: &str, default: Option<&str>| {
            let found = &file[name];
            let found = found.as_str().or(default.filter(|_| found.is_null())).map(str::to_string);
            found.ok_or_else(|| ApiError::wrong(format!("input_extra[{index}].{name}"), &file[name], "a string"))
        };
        Ok((field("filename", Some("tmp"))?, field("text", None)?))
    };
    let files = list.into_iter().flatten().enumerate().map(one).collect::<Result<Vec<_>, ApiError>>()?;
    match Infill::of(work.tokenizer()) {
        Some(infill) => {
            let around = Around { files: &files, before, after, begun };
            body.set("prompt", &infill.prompt(work, around, true, "input_prefix")?);
        }
        // So that the other fields are checked first.
        None => body.set("prompt", &[0]),
    }
    let read = finish(work, fields, body, false)?;
    Infill::required(work, "input_prefix")?;
    Ok(read)
}

fn finish(
    work: &Work,
    fields: &Fields<'_>,
    body: Translation<'_, '_, CompletionRequest>,
    is_list: bool,
) -> Result<Read, ApiError> {
    let returns_tokens = fields.flag("return_tokens", false, "Return the token ids.")?;
    let description = "Names of the fields to return, with / before those within another; default: all.";
    let response_fields = fields.strings("response_fields", (64, 256), description)?;
    Ok(Read { completion: body.read(work)?, is_list, returns_tokens, response_fields })
}

/// Reads the fields that both routes have.
fn common(work: &Work, fields: &Fields<'_>, body: &mut Translation<'_, '_, CompletionRequest>) -> Result<(), ApiError> {
    refuse(fields, &UNSUPPORTED)?;
    accept(fields, &ACCEPTED);
    body.copy_all(&REFUSED);
    // Without a limit, as there.
    body.set("n_predict", &-1);
    for name in ["max_tokens", "max_completion_tokens"] {
        let description = "Another name of n_predict.";
        if let Some(limit) = fields.integer(name, (-1, i64::MAX), description)? {
            body.set("n_predict", &limit);
        }
    }
    body.copy_all(&SAME);
    body.copy("grammar", "grammar");
    body.describe("json_schema", "json_schema");
    // A grammar precedes a schema.
    if fields.raw("grammar").is_none_or(|raw| raw.get() == "\"\"") {
        body.copy("json_schema", "json_schema");
    }
    body.copy_all(&EXTENSIONS);
    body.copy("n_probs", "logprobs");
    body.describe("seed", "seed");
    if let Some(seed) = fields.get("seed")?.filter(|seed| **seed != -1) {
        body.set("seed", seed);
    }
    let description = "Penalty on tokens of prompt and output. Other values than 1 need repeat_last_n: -1.";
    let penalty = fields.any("repeat_penalty", &json!({"type": "number"}), description)?;
    let description = "Number of tokens that repeat_penalty counts: -1, all; 0, none.";
    let window = fields.integer("repeat_last_n", (-1, i64::MAX), description)?;
    if let Some(penalty) = repeat_penalty(penalty, window, ["repeat_penalty", "repeat_last_n"])? {
        body.set("repetition_penalty", penalty);
    }
    let schema = json!({"anyOf": [{"type": "object"}, {"type": "array"}]});
    let description = "Biases by token id or text: an object, or a list of pairs. false forbids a token.";
    if let Some(biases) = fields.any("logit_bias", &schema, description)? {
        body.set("logit_bias", &logit_bias(work, biases)?);
    }
    Ok(())
}

/// Biases by token id, of a list of pairs or an object whose names are ids or texts. All tokens of a text get its bias.
fn logit_bias(work: &Work, biases: &Value) -> Result<Map<String, Value>, ApiError> {
    const PARAM: &str = "logit_bias";
    let most = work.options.limits.max_logit_bias;
    let mut map = Map::new();
    let mut add = |token: &Value, bias: &Value| -> Result<(), ApiError> {
        let bias = if *bias == Value::Bool(false) { json!(-100) } else { bias.clone() };
        let ids = match token {
            Value::Number(id) => vec![id.to_string()],
            Value::String(text) if text.parse::<u32>().is_ok() && biases.is_object() => vec![text.clone()],
            Value::String(text) => work.encode(text, false, PARAM, false)?.iter().map(u32::to_string).collect(),
            other => return Err(ApiError::wrong(PARAM, other, "token ids or texts")),
        };
        map.extend(ids.into_iter().map(|id| (id, bias.clone())));
        match map.len() > most {
            true => Err(ApiError::over(PARAM, map.len(), most, "entries", "send fewer or raise --max-logit-bias")),
            false => Ok(()),
        }
    };
    match biases {
        Value::Object(pairs) => pairs.iter().try_for_each(|(token, bias)| add(&Value::from(token.as_str()), bias))?,
        Value::Array(pairs) => pairs.iter().try_for_each(|pair| match pair.as_array().map(Vec::as_slice) {
            Some([token, bias]) => add(token, bias),
            _ => Err(ApiError::wrong(PARAM, pair, "pairs of a token and its bias")),
        })?,
        other => return Err(ApiError::wrong(PARAM, other, "an object, or a list of pairs")),
    }
    Ok(map)
}

/// Token ids of a prompt that is a list of token ids and texts.
fn mixed(work: &Work, fields: &Fields<'_>) -> Result<Option<Vec<u32>>, ApiError> {
    let Some(raw) = fields.raw("prompt").filter(|raw| raw.get().starts_with('[')) else { return Ok(None) };
    // A list of texts is a list of prompts, and one of numbers is read without making values of it.
    let has_both = raw.get().contains('"') && raw.get().contains(|c: char| c.is_ascii_digit());
    if !has_both {
        return Ok(None);
    }
    let Some(parts) = fields.get("prompt")?.and_then(Value::as_array) else { return Ok(None) };
    if !parts.iter().any(Value::is_number) || !parts.iter().all(|part| part.is_number() || part.is_string()) {
        return Ok(None);
    }
    let mut ids = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        match part {
            Value::String(text) => ids.extend(work.encode(text, index == 0, "prompt", true)?),
            number => {
                let id =
                    number.as_u64().and_then(|id| u32::try_from(id).ok()).filter(|id| (*id as usize) < work.vocab());
                ids.push(id.ok_or_else(|| ApiError::wrong("prompt", number, "texts and token ids of the vocabulary"))?);
            }
        }
        Cost { prompts: 1, prompt_tokens: ids.len(), ..Cost::default() }.check(&work.options.limits)?;
    }
    Ok(Some(ids))
}
