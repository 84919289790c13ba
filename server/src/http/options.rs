//! What completions and chat have in common: sampling, limits, streaming. Read once, checked field by field.

use engine::{BeamSearch, GenerationParams, GenerationRequest, SamplingParams};
use serde_json::Value;

use super::app::App;
use super::error::ApiError;
use super::fields::Fields;
use super::structured;

/// Most alternatives per token that may be asked for.
pub const MAX_LOGPROBS: usize = 20;

/// Most banned words.
const MAX_BAD_WORDS: usize = 1024;

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
    /// Reads the shared fields. `max_tokens` lists the names of the field for the token limit, the preferred first.
    pub fn read(app: &App, fields: &Fields, max_tokens: &[&'static str]) -> Result<Options, ApiError> {
        for (name, advice) in UNSUPPORTED {
            fields.refuse(name, advice)?;
        }
        fields.str("user")?;
        let stream = fields.bool("stream")?.unwrap_or(false);
        let (include_usage, continuous_usage) = stream_options(fields, stream)?;
        let prompt_logprobs = fields.count("prompt_logprobs", 0, MAX_LOGPROBS)?;
        if stream && prompt_logprobs.is_some() {
            return Err(ApiError::unsupported("prompt_logprobs", "not with stream; leave one of the two out"));
        }
        let n = fields.count("n", 1, app.limits.max_n)?.unwrap_or(1);
        let (best_of, beam) = search(fields, n, app.limits.max_n, stream)?;
        let mut limit = None;
        for name in max_tokens.iter().rev() {
            limit = fields.count(name, 0, usize::MAX)?.map(|found| (*name, found)).or(limit);
        }
        let truncate_prompt_tokens = match fields.integer("truncate_prompt_tokens", -1..=i64::MAX)? {
            // What the context holds next to the output.
            Some(-1) => Some(beside_output(app, limit.unwrap_or((max_tokens[0], 1)))?),
            Some(0) => return Err(ApiError::wrong("truncate_prompt_tokens", &Value::from(0), "-1 or at least 1")),
            other => other.and_then(|n| usize::try_from(n).ok()),
        };
        Ok(Options {
            params: GenerationParams {
                sampling: sampling(app, fields)?,
                n,
                best_of,
                beam,
                max_tokens: None,
                ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
                stop: fields.strings("stop", app.limits.max_stop)?,
                stop_token_ids: fields.token_ids("stop_token_ids", app.vocab())?.unwrap_or_default(),
                include_stop_str_in_output: fields.bool("include_stop_str_in_output")?.unwrap_or(false),
                skip_special_tokens: fields.bool("skip_special_tokens")?.unwrap_or(true),
                prompt_logprobs,
                pooling: None,
                structured_outputs: structured::read(fields)?,
            },
            max_tokens: limit,
            stream,
            include_usage,
            continuous_usage,
            return_token_ids: fields.bool("return_token_ids")?.unwrap_or(false),
            truncate_prompt_tokens,
            priority: priority(fields)?,
            cache_salt: cache_salt(fields)?,
        })
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
    if length >= context {
        let message = format!(
            "the context length is {context} tokens, the prompt has {length} and needs room for one more; shorten it"
        );
        return Err(ApiError::context_length(param, message));
    }
    Ok(())
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

/// `priority`: lower goes first, where the scheduler's policy asks.
pub fn priority(fields: &Fields) -> Result<i32, ApiError> {
    Ok(fields.integer("priority", i64::from(i32::MIN)..=i64::from(i32::MAX))?.unwrap_or(0) as i32)
}

/// `cache_salt`: prompts share cached blocks only under the same one.
pub fn cache_salt(fields: &Fields) -> Result<Option<String>, ApiError> {
    Ok(fields.str("cache_salt")?.filter(|salt| !salt.is_empty()).map(str::to_string))
}

/// The last `keep` tokens of a prompt, if truncation was asked for.
pub fn truncate(mut ids: Vec<u32>, keep: Option<usize>) -> Vec<u32> {
    if let Some(keep) = keep {
        ids.drain(..ids.len().saturating_sub(keep));
    }
    ids
}

/// Sampling as asked for, then as the checkpoint's `generation_config.json` says, then neutral.
fn sampling(app: &App, fields: &Fields) -> Result<SamplingParams, ApiError> {
    let (defaults, neutral) = (app.engine.generation_defaults(), SamplingParams::default());
    let penalty = |name| fields.number(name, "a number from -2 to 2", |x| (-2.0..=2.0).contains(&x));
    let share = |name| fields.number(name, "a number above 0, at most 1", |x| x > 0.0 && x <= 1.0);
    let top_k = fields.integer("top_k", -1..=i64::from(u32::MAX))?.map(|k| u32::try_from(k).unwrap_or(0));
    Ok(SamplingParams {
        temperature: fields
            .number("temperature", "a number from 0 to 2", |x| (0.0..=2.0).contains(&x))?
            .or(defaults.temperature)
            .unwrap_or(neutral.temperature),
        top_p: share("top_p")?.or(defaults.top_p).unwrap_or(neutral.top_p),
        top_k: top_k.or(defaults.top_k).unwrap_or(neutral.top_k),
        min_p: fields
            .number("min_p", "a number from 0 to 1", |x| (0.0..=1.0).contains(&x))?
            .or(defaults.min_p)
            .unwrap_or(neutral.min_p),
        typical_p: share("typical_p")?,
        repetition_penalty: fields
            .number("repetition_penalty", "a number above 0", |x| x > 0.0)?
            .or(defaults.repetition_penalty)
            .unwrap_or(neutral.repetition_penalty),
        presence_penalty: penalty("presence_penalty")?.unwrap_or(neutral.presence_penalty),
        frequency_penalty: penalty("frequency_penalty")?.unwrap_or(neutral.frequency_penalty),
        // Negative seeds are as good as any: only the 64 bits matter.
        seed: fields.integer("seed", i64::MIN..=i64::MAX)?.map(|seed| seed as u64),
        min_tokens: fields.count("min_tokens", 0, usize::MAX)?.unwrap_or(neutral.min_tokens),
        logit_bias: logit_bias(app, fields)?,
        allowed_token_ids: allowed_token_ids(app, fields)?,
        bad_words: bad_words(app, fields)?,
        logprobs: None,
    })
}

fn logit_bias(app: &App, fields: &Fields) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(map) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    let vocab = app.vocab();
    let entry = |(key, value): (&String, &Value)| {
        let id = key.parse().ok().filter(|&id: &u32| (id as usize) < vocab).ok_or_else(|| {
            let expected = format!("token ids from 0 to {} as keys", vocab.saturating_sub(1));
            ApiError::wrong("logit_bias", &Value::from(key.as_str()), expected)
        })?;
        let bias = value.as_f64().filter(|bias| (-100.0..=100.0).contains(bias));
        let bias = bias.ok_or_else(|| ApiError::wrong("logit_bias", value, "numbers from -100 to 100 as values"))?;
        Ok((id, bias as f32))
    };
    map.iter().map(entry).collect()
}

fn allowed_token_ids(app: &App, fields: &Fields) -> Result<Option<Vec<u32>>, ApiError> {
    match fields.token_ids("allowed_token_ids", app.vocab())? {
        Some(ids) if ids.is_empty() => {
            Err(ApiError::wrong("allowed_token_ids", &Value::Array(Vec::new()), "at least one id"))
        }
        ids => Ok(ids),
    }
}

/// A word is banned at the start of a text and after a space: tokenizers tend to write these differently.
fn bad_words(app: &App, fields: &Fields) -> Result<Vec<Vec<u32>>, ApiError> {
    let mut banned: Vec<Vec<u32>> = Vec::new();
    for word in fields.strings("bad_words", MAX_BAD_WORDS)? {
        let forms = match word.trim_start() {
            "" => vec![word],
            bare => vec![bare.to_string(), format!(" {bare}")],
        };
        for form in forms {
            let ids = app.tokenizer().encode(&form, false).map_err(|error| ApiError::invalid("bad_words", error))?;
            if !ids.is_empty() && !banned.contains(&ids) {
                banned.push(ids);
            }
        }
    }
    Ok(banned)
}

fn stream_options(fields: &Fields, stream: bool) -> Result<(bool, bool), ApiError> {
    let Some(options) = fields.object("stream_options")? else { return Ok((false, false)) };
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
    fields: &Fields,
    n: usize,
    max_n: usize,
    stream: bool,
) -> Result<(Option<usize>, Option<BeamSearch>), ApiError> {
    let at_least_n = |name| match fields.count(name, 1, max_n)? {
        Some(found) if found < n => {
            Err(ApiError::wrong(name, &Value::from(found), format!("at least n, which is {n}")))
        }
        found => Ok(found),
    };
    let (best_of, width) = (at_least_n("best_of")?, at_least_n("beam_width")?);
    let length_penalty = fields.number("length_penalty", "a number", |_| true)?;
    let early_stopping = fields.bool("early_stopping")?;
    if fields.bool("use_beam_search")?.unwrap_or(false) {
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
