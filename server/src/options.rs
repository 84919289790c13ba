//! What completions and chat have in common: sampling, limits, streaming. Read once, checked field by field.

use std::collections::HashSet;
use std::sync::Arc;

use engine::{BeamSearch, GenerationParams, GenerationRequest, Grammar, SamplingParams};
use serde_json::Value;

use super::app::App;
use super::cost::Cost;
use super::error::ApiError;
use super::fields::{Fields, Range};
use super::structured;
use super::work::{Work, too_long};

/// Most bytes of a name, a salt or another short text.
pub const MAX_SHORT: usize = 1024;

/// Fields of other engines and later versions; each has an effect that a client would miss, so none is ignored.
const UNSUPPORTED: [(&str, &str); 6] = [
    ("prompt_embeds", "send text or token ids"),
    ("logits_processors", "use logit_bias, allowed_token_ids or bad_words"),
    ("return_tokens_as_token_ids", "use return_token_ids"),
    ("audio", "this server writes text"),
    ("functions", "send tools"),
    ("function_call", "send tool_choice"),
];

/// The part of a request that both APIs share.
#[derive(Debug)]
pub struct Options {
    /// All but `max_tokens`, which depends on the length of each prompt.
    pub params: GenerationParams,
    /// `max_tokens` as it was asked for, and the name of the field that asked.
    pub max_tokens: Option<(&'static str, usize)>,
    /// Answer as server-sent events.
    pub stream: bool,
    /// A last chunk with the usage.
    pub include_usage: bool,
    /// The usage so far in every chunk.
    pub continuous_usage: bool,
    /// Give prompt and output as token ids too.
    pub return_token_ids: bool,
    /// Keep this many tokens of the end of the prompt.
    pub truncate_prompt_tokens: Option<usize>,
    priority: i32,
    cache_salt: Option<String>,
}

impl Options {
    /// Reads the shared fields. `max_tokens` lists the fields for the token limit with their descriptions, the preferred
    /// first; the limit is at least `least_tokens`.
    pub fn read(
        work: &Work,
        fields: &Fields<'_>,
        max_tokens: &[(&'static str, &str)],
        least_tokens: usize,
    ) -> Result<Options, ApiError> {
        let limits = &work.limits;
        for (name, advice) in UNSUPPORTED {
            fields.refuse(name, advice)?;
        }
        user(fields)?;
        let stream = fields.flag("stream", false, "Answer as server-sent events.")?;
        let (include_usage, continuous_usage) = stream_options(fields, stream)?;
        let prompt_logprobs = fields.count(
            "prompt_logprobs",
            (0, limits.max_logprobs),
            "Give log-probabilities of the prompt's tokens, with this many alternatives each; not with stream.",
        )?;
        if stream && prompt_logprobs.is_some() {
            return Err(ApiError::unsupported("prompt_logprobs", "not with stream; leave one of the two out"));
        }
        let n = fields.count("n", (1, limits.max_n), "Number of answers to each prompt; 1 by default.")?.unwrap_or(1);
        let (best_of, beam) = search(fields, n, limits.max_n, stream)?;
        let mut limit = None;
        for (name, description) in max_tokens.iter().rev() {
            limit = fields.count(name, (least_tokens, usize::MAX), description)?.map(|found| (*name, found)).or(limit);
        }
        let truncate_prompt_tokens = match truncation(fields)? {
            // What the context holds next to the output.
            Some(-1) => Some(beside_output(work, limit.unwrap_or((max_tokens[0].0, 1)))?),
            other => other.and_then(|n| usize::try_from(n).ok()),
        };
        let stop = fields.strings(
            "stop",
            (limits.max_stop, limits.max_stop_bytes),
            "The output ends before any of these texts.",
        )?;
        let stop_token_ids = fields.token_ids(
            "stop_token_ids",
            (0, limits.max_stop_token_ids),
            "--max-stop-token-ids",
            work.vocab(),
            "The output ends with any of these tokens.",
        )?;
        Ok(Options {
            params: GenerationParams {
                sampling: sampling(work, fields)?,
                n,
                best_of,
                beam,
                max_tokens: None,
                ignore_eos: fields.flag("ignore_eos", false, "End-of-sequence tokens do not end the output.")?,
                stop: stop.into(),
                stop_token_ids: stop_token_ids.unwrap_or_default(),
                include_stop_str_in_output: fields.flag(
                    "include_stop_str_in_output",
                    false,
                    "Keep the stop text in the output.",
                )?,
                skip_special_tokens: fields.flag(
                    "skip_special_tokens",
                    true,
                    "Leave special tokens out of the text.",
                )?,
                prompt_logprobs,
                pooling: None,
                structured_outputs: structured::read(fields, limits)?.map(Arc::new),
            },
            max_tokens: limit,
            stream,
            include_usage,
            continuous_usage,
            return_token_ids: fields.flag("return_token_ids", false, "Give prompt and output as token ids too.")?,
            truncate_prompt_tokens,
            priority: priority(fields)?,
            cache_salt: cache_salt(fields)?,
        })
    }

    /// What prompts with `tokens` tokens in all cost. `default` is the token limit where none was asked for; `None` means
    /// the rest of the context. `logprobs_field` is the field that asks for log-probabilities.
    pub fn cost(
        &self,
        app: &App,
        (prompts, tokens): (usize, usize),
        default: Option<usize>,
        logprobs_field: &'static str,
    ) -> Cost {
        let params = &self.params;
        let sequences = params.n.max(params.best_of.unwrap_or(1)).max(params.beam.map_or(1, |beam| beam.width));
        // All is kept to the end where the best are found there.
        let is_kept = !self.stream || sequences > params.n || params.beam.is_some();
        let alternatives = |asked: Option<usize>| asked.map_or(0, |k| k + 1);
        let sampling = &params.sampling;
        let room = app.context().saturating_sub(tokens.checked_div(prompts).unwrap_or(0));
        let word = |word: &Vec<u32>| 24 + 4 * word.len();
        let grammar = params.structured_outputs.as_ref().map_or(0, |wanted| bytes(&wanted.grammar));
        let list_bytes = 8 * (params.stop_token_ids.len() + sampling.logit_bias.len());
        Cost {
            prompts,
            sequences,
            n: params.n,
            prompt_tokens: tokens,
            max_tokens: self.max_tokens.map_or(default.unwrap_or(room), |(_, asked)| asked).min(room),
            per_prompt_token: params.n * alternatives(params.prompt_logprobs),
            per_output_token: if is_kept {
                alternatives(sampling.logprobs) + usize::from(self.return_token_ids)
            } else {
                0
            },
            is_kept,
            list_bytes,
            shared_bytes: grammar
                + params.stop.iter().map(String::len).sum::<usize>()
                + sampling.bad_words.iter().map(word).sum::<usize>()
                + sampling.allowed_token_ids.as_ref().map_or(0, |ids| 4 * ids.len()),
            repeated_bytes: if self.return_token_ids { params.n * tokens * 8 } else { 0 },
            logprobs_field: if params.prompt_logprobs.is_some() { "prompt_logprobs" } else { logprobs_field },
        }
    }

    /// Keeps as much of the end of the prompt as the context holds beside the output, as `truncate_prompt_tokens: -1`.
    /// `name` is the field of the token limit.
    pub fn fit_prompt(&mut self, app: &App, name: &'static str) -> Result<(), ApiError> {
        self.truncate_prompt_tokens = Some(beside_output(app, self.max_tokens.unwrap_or((name, 1)))?);
        Ok(())
    }

    /// The request for one prompt. `default` is the token limit where none was asked for (cut to the context); `None`
    /// means the rest of the context. `param` is the prompt's field, for the error.
    pub fn request(
        &self,
        app: &App,
        prompt: Vec<u32>,
        default: Option<usize>,
        param: &str,
    ) -> Result<GenerationRequest, ApiError> {
        let (context, length) = (app.context(), prompt.len());
        check_length(app, length, param)?;
        let room = context - length;
        let max_tokens = match self.max_tokens {
            Some((name, asked)) if asked > room => {
                let message = format!(
                    "found {asked}, expected at most {room}: the context length is {context} tokens and the prompt \
                     has {length}"
                );
                return Err(ApiError::context_length(name, message));
            }
            Some((_, asked)) => asked,
            None => default.unwrap_or(room).min(room),
        };
        let min_tokens = self.params.sampling.min_tokens;
        if min_tokens > max_tokens {
            let expected = format!("at most max_tokens, which is {max_tokens}");
            return Err(ApiError::wrong("min_tokens", &Value::from(min_tokens), expected));
        }
        Ok(GenerationRequest {
            prompt,
            params: GenerationParams { max_tokens: Some(max_tokens), ..self.params.clone() },
            priority: self.priority,
            cache_salt: self.cache_salt.clone(),
        })
    }
}

/// A prompt of `length` tokens fits the context and leaves room for one more. `param` is its field.
pub fn check_length(app: &App, length: usize, param: &str) -> Result<(), ApiError> {
    let context = app.context();
    if length == 0 {
        return Err(ApiError::invalid(param, "the prompt has no tokens, expected at least one"));
    }
    if length >= context { Err(too_long(app, &length.to_string(), param)) } else { Ok(()) }
}

/// Tokens of the context beside an output of `asked` tokens, at least one; `name` is the field that asks for them.
fn beside_output(app: &App, (name, asked): (&'static str, usize)) -> Result<usize, ApiError> {
    let (context, most) = (app.context(), app.context().saturating_sub(1));
    if asked > most {
        let message = format!(
            "found {asked}, expected at most {most}: the context length is {context} tokens and the prompt needs at \
             least one"
        );
        return Err(ApiError::context_length(name, message));
    }
    Ok(context - asked.max(1))
}

/// Bytes of a grammar's definition.
fn bytes(grammar: &Grammar) -> usize {
    match grammar {
        Grammar::JsonObject => 0,
        Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text) => text.len(),
        Grammar::Choice(choices) => choices.iter().map(String::len).sum(),
    }
}

/// `priority`: lower goes first, where the scheduler's policy asks.
pub fn priority(fields: &Fields<'_>) -> Result<i32, ApiError> {
    let range = (i64::from(i32::MIN), i64::from(i32::MAX));
    Ok(fields.integer("priority", range, "Lower runs first, under the priority policy; 0 by default.")?.unwrap_or(0)
        as i32)
}

/// `cache_salt`: prompts share cached blocks only under the same one.
pub fn cache_salt(fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
    let salt = fields.str("cache_salt", MAX_SHORT, "Prompts share cached blocks only under the same salt.")?;
    Ok(salt.filter(|salt| !salt.is_empty()).map(str::to_string))
}

/// `user`, which is checked and not used.
pub fn user<'b>(fields: &'b Fields<'_>) -> Result<Option<&'b str>, ApiError> {
    fields.str("user", MAX_SHORT, "Whose request it is; not used.")
}

/// `truncate_prompt_tokens`: -1 or at least 1.
pub fn truncation(fields: &Fields<'_>) -> Result<Option<i64>, ApiError> {
    let description = "Keep this many tokens of the end of the prompt; -1 keeps what the context holds. 0 is refused.";
    match fields.integer("truncate_prompt_tokens", (-1, i64::MAX), description)? {
        Some(0) => Err(ApiError::wrong("truncate_prompt_tokens", &Value::from(0), "-1 or at least 1")),
        other => Ok(other),
    }
}

/// The last `keep` tokens of a prompt, if truncation was asked for.
pub fn truncate(mut ids: Vec<u32>, keep: Option<usize>) -> Vec<u32> {
    if let Some(keep) = keep {
        ids.drain(..ids.len().saturating_sub(keep));
    }
    ids
}

/// Sampling as asked for, then as the checkpoint's `generation_config.json` says, then neutral.
fn sampling(work: &Work, fields: &Fields<'_>) -> Result<SamplingParams, ApiError> {
    let (defaults, neutral) = (work.engine.generation_defaults(), SamplingParams::default());
    let number = |name, range, description| fields.number(name, range, description);
    let penalty = Range::Within(-2.0, 2.0);
    let share = Range::AboveUpTo(0.0, 1.0);
    let top_k = fields.integer(
        "top_k",
        (-1, i64::from(u32::MAX)),
        "Keep this many of the likeliest tokens; 0 and -1 keep all.",
    )?;
    let top_k = top_k.map(|k| u32::try_from(k).unwrap_or(0));
    Ok(SamplingParams {
        temperature: number(
            "temperature",
            Range::Within(0.0, 2.0),
            "Softmax temperature; 0 takes the likeliest token.",
        )?
        .or(defaults.temperature)
        .unwrap_or(neutral.temperature),
        top_p: number("top_p", share, "Keep the likeliest tokens up to this probability.")?
            .or(defaults.top_p)
            .unwrap_or(neutral.top_p),
        top_k: top_k.or(defaults.top_k).unwrap_or(neutral.top_k),
        min_p: number(
            "min_p",
            Range::Within(0.0, 1.0),
            "Drop tokens below this share of the likeliest one's probability.",
        )?
        .or(defaults.min_p)
        .unwrap_or(neutral.min_p),
        typical_p: number("typical_p", share, "Keep the tokens of typical information up to this probability.")?,
        repetition_penalty: number(
            "repetition_penalty",
            Range::Above(0.0),
            "Divides the positive logits of tokens seen, and multiplies the negative ones.",
        )?
        .or(defaults.repetition_penalty)
        .unwrap_or(neutral.repetition_penalty),
        presence_penalty: number("presence_penalty", penalty, "Subtracted from the logits of tokens in the output.")?
            .unwrap_or(neutral.presence_penalty),
        frequency_penalty: number(
            "frequency_penalty",
            penalty,
            "Subtracted from the logit of a token for each time that the output has it.",
        )?
        .unwrap_or(neutral.frequency_penalty),
        // Negative seeds are as good as any: only the 64 bits matter.
        seed: fields
            .integer("seed", (i64::MIN, i64::MAX), "Equal requests with equal seeds get equal answers.")?
            .map(|seed| seed as u64),
        min_tokens: fields
            .count("min_tokens", (0, usize::MAX), "Number of tokens before which a text may not end.")?
            .unwrap_or(neutral.min_tokens),
        logit_bias: logit_bias(work, fields)?,
        allowed_token_ids: fields
            .token_ids(
                "allowed_token_ids",
                (1, work.limits.max_allowed_token_ids),
                "--max-allowed-token-ids",
                work.vocab(),
                "Only these tokens may be generated.",
            )?
            .map(Into::into),
        bad_words: bad_words(work, fields)?.into(),
        logprobs: None,
    })
}

fn logit_bias(work: &Work, fields: &Fields<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let (name, most, vocab) = ("logit_bias", work.limits.max_logit_bias, work.vocab());
    let description = "Numbers from -100 to 100 by token id, which are added to the logits.";
    let Some(map) = fields.object(name, description)? else { return Ok(Vec::new()) };
    if map.len() > most {
        return Err(ApiError::over(name, map.len(), most, "entries", "send fewer (--max-logit-bias)"));
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

/// A word is banned at the start of a text and after a space: tokenizers tend to write these differently.
fn bad_words(work: &Work, fields: &Fields<'_>) -> Result<Vec<Vec<u32>>, ApiError> {
    let (name, limits) = ("bad_words", &work.limits);
    let description = "Texts that are not generated.";
    let (mut banned, mut seen) = (Vec::new(), HashSet::new());
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

fn stream_options(fields: &Fields<'_>, stream: bool) -> Result<(bool, bool), ApiError> {
    let description =
        "Only with stream. include_usage: give the usage in a last chunk; continuous_usage_stats: in every chunk.";
    let Some(options) = fields.object("stream_options", description)? else { return Ok((false, false)) };
    if !stream {
        return Err(ApiError::invalid("stream_options", "only together with stream: true"));
    }
    let flag = |name: &str| match options.get(name) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(flag)) => Ok(*flag),
        Some(other) => Err(ApiError::wrong(format!("stream_options.{name}"), other, "true or false")),
    };
    Ok((flag("include_usage")?, flag("continuous_usage_stats")?))
}

/// What replaces plain sampling: the best of several samples, or a beam search. `best_of` is also the older name of a
/// beam's width.
fn search(
    fields: &Fields<'_>,
    n: usize,
    max_n: usize,
    stream: bool,
) -> Result<(Option<usize>, Option<BeamSearch>), ApiError> {
    let at_least_n = |name, description| match fields.count(name, (1, max_n), description)? {
        Some(found) if found < n => {
            Err(ApiError::wrong(name, &Value::from(found), format!("at least n, which is {n}")))
        }
        found => Ok(found),
    };
    let best_of = at_least_n("best_of", "Number of samples to make, of which the n likeliest are returned.")?;
    let width = at_least_n("beam_width", "Number of hypotheses of a beam search; n by default.")?;
    let length_penalty =
        fields.number("length_penalty", Range::Any, "Above 0 a beam search favours long answers; 1 by default.")?;
    let early_stopping = fields.bool("early_stopping", "A beam search ends as soon as it has enough answers.")?;
    if fields.flag("use_beam_search", false, "Search for the likeliest answers.")? {
        if best_of.is_some() && width.is_some() {
            return Err(ApiError::invalid("best_of", "not together with beam_width, of which it is the older name"));
        }
        let plain = BeamSearch::new(width.or(best_of).unwrap_or(n));
        return Ok((
            None,
            Some(BeamSearch {
                length_penalty: length_penalty.unwrap_or(plain.length_penalty),
                early_stopping: early_stopping.unwrap_or(plain.early_stopping),
                ..plain
            }),
        ));
    }
    for (name, asks) in [
        ("beam_width", width.is_some()),
        ("length_penalty", length_penalty.is_some_and(|penalty| penalty != 1.0)),
        ("early_stopping", early_stopping == Some(true)),
    ] {
        if asks {
            return Err(ApiError::invalid(name, "only together with use_beam_search: true"));
        }
    }
    match best_of.filter(|&candidates| candidates > n) {
        Some(_) if stream => Err(ApiError::invalid(
            "best_of",
            format_args!(
                "more than n, which is {n}, not with stream: the best are known at the end; leave one of the two out"
            ),
        )),
        best_of => Ok((best_of, None)),
    }
}
