//! Request fields that completions, chat completions and responses share: sampling, limits, streaming.

use std::collections::HashSet;
use std::ops::Bound;
use std::sync::Arc;

use engine::{GenerationParams, GenerationRequest, KvTransfer, MAX_TEMPERATURE, SamplingParams};
use serde_json::{Value, json};

use super::cost::{Cost, TOKEN_ID};
use super::fields::Fields;
use super::reasoning::{self, Budget};
use super::search::search;
use super::structured;
use super::unsupported;
use super::work::{Work, too_long};
use crate::app::{App, LogprobFormat};
use crate::http::{ApiError, call};

/// Maximum number of bytes of a name, a salt or another short string.
pub const MAX_SHORT: usize = 1024;

/// Names of the token limit in all APIs, the last of which takes precedence; but that of the route precedes all.
const TOKEN_LIMITS: [&str; 5] =
    ["n_predict", "max_new_tokens", "max_output_tokens", "max_tokens", "max_completion_tokens"];

/// Number of alternatives per token up to which those of a stream are not counted.
const FEW_ALTERNATIVES: usize = 1000;

/// Token limit of a request that asks for the rest of the context.
const NO_LIMIT: usize = usize::MAX;

/// The shared fields of a request.
#[derive(Clone, Debug)]
pub struct Options {
    /// Engine parameters, except `max_tokens`, which depends on the length of each prompt.
    pub params: GenerationParams,
    /// Name and value of the token limit, if given.
    pub max_tokens: Option<(&'static str, usize)>,
    /// Respond with server-sent events.
    pub stream: bool,
    /// Which chunks of a stream have the usage.
    pub stream_usage: StreamUsage,
    /// Return the token ids of prompt and output.
    pub return_token_ids: bool,
    /// Keep only this many tokens from the end of the prompt.
    pub truncate_prompt_tokens: Option<usize>,
    /// LoRA adapter that computes the request.
    pub adapter: Option<String>,
    /// What to exchange with other replicas.
    pub kv_transfer: KvTransfer,
    /// Field and number of the tokens that the reasoning may have.
    pub thinking_budget: Option<Budget>,
    /// The client's id of the request.
    pub request_id: Option<String>,
    priority: i32,
    cache_salt: Option<String>,
}

/// Which chunks of a stream have the usage.
#[derive(Clone, Copy, Debug, Default)]
pub struct StreamUsage {
    /// A last chunk has it.
    pub at_end: bool,
    /// Every chunk has it.
    pub in_all: bool,
}

impl Options {
    /// Reads the fields. `max_tokens` is the route's name of the token limit, with its description; its minimum is `least_tokens`.
    pub fn read(
        work: &Work,
        fields: &Fields<'_>,
        max_tokens: (&'static str, &str),
        least_tokens: i64,
    ) -> Result<Options, ApiError> {
        let limits = &work.options.limits;
        unsupported::refuse(fields, &unsupported::GENERATION)?;
        user(fields)?;
        let stream = fields.flag("stream", false, "Stream the response as server-sent events.")?;
        let mut stream_usage = stream_options(fields, stream)?;
        stream_usage.at_end |= stream && work.options.enable_force_include_usage;
        let description =
            "Return the log probabilities of the prompt tokens with this many alternatives each; not with stream.";
        let prompt_logprobs = alternatives(work, fields, "prompt_logprobs", description)?;
        if stream && prompt_logprobs.is_some() {
            return Err(ApiError::conflict("prompt_logprobs", "stream: true"));
        }
        let description = "Number of sequences to generate for each prompt; default 1.";
        let n = fields.count("n", (1, limits.max_n), description)?.unwrap_or(1);
        let (best_of, beam) = search(fields, n, limits.max_n, stream)?;
        let mut limit = None;
        for name in TOKEN_LIMITS.into_iter().filter(|name| *name != max_tokens.0).chain([max_tokens.0]) {
            // In llama-server, -1 is no limit.
            let least = if name == "n_predict" { -1 } else { least_tokens };
            let other = format!("Another name of {}.", max_tokens.0);
            let description = if name == max_tokens.0 { max_tokens.1 } else { &other };
            let found = fields.integer(name, (least, i64::MAX), description)?;
            limit = found.map(|found| (name, usize::try_from(found).unwrap_or(NO_LIMIT))).or(limit);
        }
        let truncate_prompt_tokens = match truncation(fields)? {
            Some(-1) => {
                let asked = limit.filter(|(_, asked)| *asked != NO_LIMIT);
                Some(beside_output(work, asked.unwrap_or((max_tokens.0, 1)))?)
            }
            other => other.and_then(|n| usize::try_from(n).ok()),
        };
        let description = "Strings that stop the generation. The output ends before the first of them.";
        let stop = fields.strings("stop", (limits.max_stop, limits.max_stop_bytes), description)?;
        let stop_token_ids = fields.token_ids(
            "stop_token_ids",
            (0, limits.max_stop_token_ids),
            "--max-stop-token-ids",
            work.vocab(),
            "Tokens that stop the generation.",
        )?;
        let flag = |name, default, description| fields.flag(name, default, description);
        Ok(Options {
            params: GenerationParams {
                sampling: sampling(work, fields)?,
                n,
                best_of,
                beam,
                max_tokens: None,
                ignore_eos: flag("ignore_eos", false, "Continue after an end-of-sequence token.")?,
                stop: stop.into(),
                stop_token_ids: stop_token_ids.unwrap_or_default(),
                reasoning: None,
                thinking: None,
                include_stop_str_in_output: flag(
                    "include_stop_str_in_output",
                    false,
                    "Include the stop string in the output.",
                )?,
                skip_special_tokens: flag("skip_special_tokens", true, "Remove special tokens from the text.")?,
                prompt_logprobs,
                pooling: None,
                structured_outputs: structured::read(fields, limits)?.map(Arc::new),
                speculative: flag(
                    "speculative",
                    true,
                    "Allow speculative decoding, if the server does it. It changes no token.",
                )?,
            },
            max_tokens: limit,
            stream,
            stream_usage,
            return_token_ids: flag("return_token_ids", false, "Also return the token ids of prompt and output.")?,
            truncate_prompt_tokens,
            adapter: None,
            thinking_budget: reasoning::budget(work, fields)?,
            request_id: request_id(fields)?,
            priority: priority(fields)?,
            cache_salt: cache_salt(fields)?,
            kv_transfer: kv_transfer(fields)?,
        })
    }

    /// Cost of prompts with `tokens` tokens in total. `default` is the token limit if none was given; `None` means the
    /// rest of the context. `logprobs_field` is the field that requests log probabilities.
    pub fn cost(
        &self,
        app: &App,
        (prompts, tokens): (usize, usize),
        default: Option<usize>,
        format: LogprobFormat,
    ) -> Cost {
        let params = &self.params;
        let sequences = params.n.max(params.best_of.unwrap_or(1)).max(params.beam.map_or(1, |beam| beam.width));
        let at_once = app.engine.info().max_num_seqs;
        // A search knows its results only at the end, so it keeps everything even in a stream.
        let is_kept = !self.stream || sequences > params.n || params.beam.is_some();
        let entries = |asked, format| app.logprob_entries(asked, format);
        let sampling = &params.sampling;
        let rest = app.context().saturating_sub(tokens.checked_div(prompts).unwrap_or(0));
        let word = |word: &Vec<u32>| 24 + 4 * word.len();
        let grammar = params.structured_outputs.as_ref().map_or(0, |wanted| wanted.grammar.num_bytes());
        Cost {
            prompts,
            sequences,
            later_sequences: sequences.saturating_sub(at_once).min(at_once),
            n: params.n,
            prompt_tokens: tokens,
            max_tokens: self.max_tokens.map_or(default.unwrap_or(rest), |(_, asked)| asked).min(rest),
            per_prompt_token: entries(params.prompt_logprobs, LogprobFormat::Completion) * params.n,
            // What a slow reader of a stream has not read is bounded in steps, so many alternatives count as if they were kept.
            per_output_token: entries(sampling.logprobs, format)
                * usize::from(is_kept || sampling.logprobs.is_some_and(|count| count > FEW_ALTERNATIVES)),
            keeps_ids: is_kept && self.return_token_ids,
            streams: self.stream,
            is_kept,
            list_bytes: 8 * (params.stop_token_ids.len() + sampling.logit_bias.len()),
            shared_bytes: grammar
                + params.stop.iter().map(String::len).sum::<usize>()
                + sampling.bad_words.iter().map(word).sum::<usize>()
                + sampling.allowed_token_ids.as_ref().map_or(0, |ids| 4 * ids.len()),
            repeated_bytes: if self.return_token_ids { params.n * tokens * TOKEN_ID } else { 0 },
            logprobs_field: if params.prompt_logprobs.is_some() { "prompt_logprobs" } else { format.field() },
        }
    }

    /// `kv_transfer_params` of the response with this id, with which the same request continues on another replica, if
    /// the request asked for that. `prompt_tokens` is the length of the prompt.
    pub fn kv_transfer_params(&self, app: &App, id: &str, prompt_tokens: usize) -> Option<Value> {
        let info = app.engine.info();
        let engine_id = info.kv_engine_id.as_ref().filter(|_| self.kv_transfer.store)?;
        // The other replica knows its blocks by their contents; these are their positions.
        let blocks: Vec<usize> = (0..prompt_tokens / info.block_size).collect();
        Some(json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_engine_id": engine_id,
            "remote_request_id": id,
            "remote_block_ids": blocks,
            "remote_host": null,
            "remote_port": null,
            "tp_size": 1,
        }))
    }

    /// Engine request for one prompt. `default` is the token limit if none was given; `None` means the rest of the context. A limit
    /// beyond that is cut to it. `param` is the prompt's field, for errors.
    pub fn request(
        &self,
        app: &App,
        prompt: Vec<u32>,
        default: Option<usize>,
        param: &str,
    ) -> Result<GenerationRequest, ApiError> {
        check_length(app, prompt.len(), param)?;
        let rest = app.context() - prompt.len();
        let asked = self.max_tokens.map(|(_, asked)| asked);
        let max_tokens = asked.or(default).unwrap_or(rest).min(rest);
        let min_tokens = self.params.sampling.min_tokens;
        if min_tokens > max_tokens {
            let expected = format!("at most max_tokens, which is {max_tokens}");
            return Err(ApiError::wrong("min_tokens", &Value::from(min_tokens), expected));
        }
        let thinking = match self.thinking_budget {
            None => None,
            Some((name, tokens)) => {
                let limit = app.reasoning.limit(app.tokenizer(), &prompt, tokens);
                limit.map_err(|error| ApiError::invalid(name, error))?
            }
        };
        Ok(GenerationRequest {
            prompt,
            second: None,
            params: GenerationParams { max_tokens: Some(max_tokens), thinking, ..self.params.clone() },
            priority: self.priority,
            cache_salt: self.cache_salt.clone(),
            adapter: self.adapter.clone(),
            kv_transfer: self.kv_transfer,
        })
    }
}

/// Checks that a prompt of `length` tokens fits the context, with one more token if the model generates. `param` is its field.
pub fn check_length(app: &App, length: usize, param: &str) -> Result<(), ApiError> {
    if length == 0 {
        return Err(ApiError::found(param, "a prompt without tokens", "at least one token"));
    }
    if length > app.longest_prompt() { Err(too_long(app, length, "", param)) } else { Ok(()) }
}

/// Maximum prompt length besides an output of `asked` tokens, at least one token; `name` is the field of the token
/// limit.
pub fn beside_output(app: &App, (name, asked): (&'static str, usize)) -> Result<usize, ApiError> {
    let (context, most) = (app.context(), app.context().saturating_sub(1));
    if asked > most {
        let problem = format!("found {asked}, expected at most {most}, which leaves one for the prompt; lower it");
        return Err(ApiError::context_length(name, context, problem));
    }
    Ok(context - asked.max(1))
}

/// Reads a number of alternatives with log-probabilities per token, of which -1 is all tokens of the vocabulary.
pub fn alternatives(
    work: &Work,
    fields: &Fields<'_>,
    name: &str,
    description: &str,
) -> Result<Option<usize>, ApiError> {
    let (most, vocab) = (work.options.limits.max_logprobs, work.vocab());
    let description = format!("{description} -1: all tokens of the vocabulary.");
    let found = fields.integer(name, (-1, i64::try_from(most).unwrap_or(i64::MAX)), &description)?;
    if found == Some(-1) && most < vocab {
        let expected = format!("at most {most}; all {vocab} tokens of the vocabulary need --max-logprobs -1");
        return Err(ApiError::wrong(name, &Value::from(-1), expected));
    }
    Ok(found.map(|count| usize::try_from(count).unwrap_or(vocab).min(vocab)))
}

/// Reads `priority`.
pub fn priority(fields: &Fields<'_>) -> Result<i32, ApiError> {
    let range = (i64::from(i32::MIN), i64::from(i32::MAX));
    let description = "Scheduling priority under the priority policy: lower runs first; default 0.";
    Ok(fields.integer("priority", range, description)?.unwrap_or(0) as i32)
}

/// Reads `request_id`.
fn request_id(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    let description = "Id of the response, without its prefix; the header X-Request-Id takes precedence.";
    match fields.str("request_id", usize::MAX, description)? {
        Some(id) if !call::is_id(id) => {
            Err(ApiError::wrong("request_id", &Value::from(id), "up to 128 visible ASCII characters"))
        }
        id => Ok(id.map(str::to_string)),
    }
}

/// Reads `cache_salt`.
pub fn cache_salt(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    let description = "Only requests with the same salt share cached blocks.";
    let salt = fields.str("cache_salt", MAX_SHORT, description)?;
    Ok(salt.filter(|salt| !salt.is_empty()).map(str::to_string))
}

/// Reads `kv_transfer_params`. Keys of other connectors are ignored.
fn kv_transfer(fields: &Fields<'_>) -> Result<KvTransfer, ApiError> {
    let description = "Prefill and decode on different replicas: `do_remote_decode` stores the blocks of the prompt for another \
                       replica, `do_remote_prefill` waits for those that another has stored.";
    let Some(params) = fields.object("kv_transfer_params", description)? else { return Ok(KvTransfer::default()) };
    let flag = |name: &str| match params.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(ApiError::wrong(format!("kv_transfer_params.{name}"), other, "true, false or null")),
    };
    Ok(KvTransfer { load: flag("do_remote_prefill")?, store: flag("do_remote_decode")? })
}

/// Reads `user`, which has no effect. Some clients send a number.
pub fn user<'b>(fields: &'b Fields<'_>) -> Result<Option<&'b Value>, ApiError> {
    let schema = json!({"type": ["string", "integer", "null"], "maxLength": MAX_SHORT});
    match fields.any("user", &schema, "Identifier of the end user; not used.")? {
        Some(Value::String(text)) if text.len() > MAX_SHORT => {
            Err(ApiError::over("user", text.len(), MAX_SHORT, "bytes", "send a shorter string"))
        }
        Some(other) if !other.is_string() && !other.is_i64() => Err(ApiError::wrong("user", other, "a string")),
        user => Ok(user),
    }
}

/// Reads `add_special_tokens` of a plain prompt.
pub fn add_special_tokens(fields: &Fields<'_>) -> Result<bool, ApiError> {
    fields.flag("add_special_tokens", true, "Add special tokens, such as BOS, to the prompt.")
}

/// Reads `truncate_prompt_tokens`.
pub fn truncation(fields: &Fields<'_>) -> Result<Option<i64>, ApiError> {
    let description =
        "Keep this many tokens from the end of the prompt; -1 keeps what the context holds. 0 is invalid.";
    match fields.integer("truncate_prompt_tokens", (-1, i64::MAX), description)? {
        Some(0) => Err(ApiError::wrong("truncate_prompt_tokens", &Value::from(0), "-1 or at least 1")),
        other => Ok(other),
    }
}

/// Returns the last `keep` tokens of a prompt, or all of them.
pub fn truncate(mut ids: Vec<u32>, keep: Option<usize>) -> Vec<u32> {
    if let Some(keep) = keep {
        ids.drain(..ids.len().saturating_sub(keep));
    }
    ids
}

/// Reads the sampling parameters. Defaults come from the checkpoint's `generation_config.json`, then from the engine.
fn sampling(work: &Work, fields: &Fields<'_>) -> Result<SamplingParams, ApiError> {
    let (defaults, neutral) = (work.engine.generation_defaults(), SamplingParams::default());
    let (unit, penalty) = (0.0..=1.0, -2.0..=2.0);
    let above_0 = Bound::Excluded(0.0);
    let positive_unit = (above_0, Bound::Included(1.0));
    let description = "Sample from this many of the most likely tokens; 0 and -1 mean all.";
    let top_k = fields.integer("top_k", (-1, i64::from(u32::MAX)), description)?;
    let top_k = top_k.map(|k| u32::try_from(k).unwrap_or(0));
    let description = "Softmax temperature; 0 means greedy sampling.";
    let temperature = fields.number("temperature", 0.0..=MAX_TEMPERATURE, description)?;
    let top_p =
        fields.number("top_p", positive_unit, "Sample from the most likely tokens with this total probability.")?;
    let description = "Minimum probability of a token, relative to the most likely token.";
    let min_p = fields.number("min_p", unit, description)?;
    let description =
        "Sample from the tokens with information content closest to the entropy, up to this total probability.";
    let typical_p = fields.number("typical_p", positive_unit, description)?;
    let description = "Penalty on tokens of prompt and output: divides positive logits, multiplies negative ones.";
    let repetition_penalty = fields.number("repetition_penalty", (above_0, Bound::Unbounded), description)?;
    let description = "Penalty on tokens of the output, subtracted from their logits once.";
    let presence_penalty = fields.number("presence_penalty", penalty.clone(), description)?;
    let description = "Penalty on tokens of the output, subtracted from their logits per occurrence.";
    let frequency_penalty = fields.number("frequency_penalty", penalty, description)?;
    let description = "Random seed: equal requests with equal seeds have equal responses.";
    let seed = fields.integer("seed", (i64::MIN, i64::MAX), description)?;
    let description = "Minimum number of tokens before a sequence may end.";
    let min_tokens = fields.count("min_tokens", (0, usize::MAX), description)?;
    let min_tokens = min_tokens.or(fields.count("min_new_tokens", (0, usize::MAX), "SGLang's name of min_tokens.")?);
    let allowed_token_ids = fields.token_ids(
        "allowed_token_ids",
        (1, work.options.limits.max_allowed_token_ids),
        "--max-allowed-token-ids",
        work.vocab(),
        "Generate only these tokens.",
    )?;
    Ok(SamplingParams {
        temperature: temperature.or(defaults.temperature).unwrap_or(neutral.temperature),
        top_p: top_p.or(defaults.top_p).unwrap_or(neutral.top_p),
        top_k: top_k.or(defaults.top_k).unwrap_or(neutral.top_k),
        min_p: min_p.or(defaults.min_p).unwrap_or(neutral.min_p),
        typical_p,
        repetition_penalty: repetition_penalty.or(defaults.repetition_penalty).unwrap_or(neutral.repetition_penalty),
        presence_penalty: presence_penalty.unwrap_or(neutral.presence_penalty),
        frequency_penalty: frequency_penalty.unwrap_or(neutral.frequency_penalty),
        // Only the 64 bits matter: negative seeds are valid.
        seed: seed.map(|seed| seed as u64),
        min_tokens: min_tokens.unwrap_or(neutral.min_tokens),
        logit_bias: logit_bias(work, fields)?,
        allowed_token_ids: allowed_token_ids.map(Into::into),
        bad_words: bad_words(work, fields)?.into(),
        logprobs: None,
    })
}

fn logit_bias(work: &Work, fields: &Fields<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let (name, most, vocab) = ("logit_bias", work.options.limits.max_logit_bias, work.vocab());
    let description = "Numbers from -100 to 100 by token id, added to the logits.";
    let Some(map) = fields.object(name, description)? else { return Ok(Vec::new()) };
    if map.len() > most {
        return Err(ApiError::over(name, map.len(), most, "entries", "send fewer or raise --max-logit-bias"));
    }
    let entry = |(key, value): (&String, &Value)| {
        let id = key.parse().ok().filter(|&id: &u32| (id as usize) < vocab).ok_or_else(|| {
            let expected = format!("token ids from 0 to {} as keys", vocab.saturating_sub(1));
            ApiError::wrong(name, &Value::from(key.as_str()), expected)
        })?;
        let bias = value.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        let bias = bias.ok_or_else(|| ApiError::wrong(name, value, "numbers from -100 to 100 as values"))?;
        Ok((id, bias as f32))
    };
    map.iter().map(entry).collect()
}

/// Token ids of each bad word, at the start of a text and after a space: tokenizers often encode these differently.
fn bad_words(work: &Work, fields: &Fields<'_>) -> Result<Vec<Vec<u32>>, ApiError> {
    let (name, limits) = ("bad_words", &work.options.limits);
    let (mut banned, mut seen) = (Vec::new(), HashSet::new());
    let description = "Strings that are not generated.";
    for word in fields.strings(name, (limits.max_bad_words, limits.max_stop_bytes), description)? {
        let forms = match word.trim_start() {
            "" => vec![word],
            bare => vec![bare.to_string(), format!(" {bare}")],
        };
        for form in forms {
            let ids = work.encode(&form, false, name, false)?;
            if !ids.is_empty() && seen.insert(ids.clone()) {
                banned.push(ids);
            }
        }
    }
    Ok(banned)
}

fn stream_options(fields: &Fields<'_>, stream: bool) -> Result<StreamUsage, ApiError> {
    let description =
        "Only with stream. include_usage: send the usage in a last chunk; continuous_usage_stats: in every chunk.";
    let Some(options) = fields.object("stream_options", description)? else { return Ok(StreamUsage::default()) };
    if !stream {
        return Err(ApiError::requires("stream_options", "stream: true"));
    }
    let flag = |name: &str| match options.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(ApiError::wrong(format!("stream_options.{name}"), other, "true or false")),
    };
    Ok(StreamUsage { at_end: flag("include_usage")?, in_all: flag("continuous_usage_stats")? })
}
