//! `POST /v1/completions`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use engine::{Delta, GenerationRequest, TokenLogprobs};
use serde_json::{Map, Value, json};

use super::app::App;
use super::body;
use super::error::ApiError;
use super::fields::Fields;
use super::logprobs::{self, CompletionLogprobs};
use super::options::{MAX_LOGPROBS, Options, truncate};
use super::prompts::{self, Input};
use super::reply::{self, Envelope, Usage, choices};
use super::run::Run;
use super::stream::{self, Chunks};

/// Tokens to generate where the request does not say, as in OpenAI's API.
const DEFAULT_MAX_TOKENS: usize = 16;

/// The handler.
pub async fn completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let (completion, options, requests) = body.read(&app, prepare).await?;
    let envelope = Envelope::new(&app, "cmpl", "text_completion");
    let prompt_tokens = completion.prompts.iter().map(|prompt| prompt.ids.len()).sum();
    let run = Run::submit(&app, requests).await?;
    if options.stream {
        return Ok(stream::respond(run, completion, envelope, &options, prompt_tokens));
    }
    let mut usage = Usage { prompt_tokens, ..Usage::default() };
    let (mut completion, mut all) = (completion, Vec::new());
    for (i, answer) in run.collect().await?.into_iter().enumerate() {
        usage.completion_tokens += answer.completion_tokens();
        usage.cached_tokens += answer.cached_tokens;
        completion.prompts[i].logprobs = answer.prompt_logprobs;
        all.extend(answer.sequences.iter().map(|sequence| completion.choice(i, sequence)));
    }
    Ok(Json(envelope.wrap(choices(all), Some(usage.to_json()))).into_response())
}

/// A completion request in flight: all that its choices need.
struct Completion {
    app: Arc<App>,
    prompts: Vec<Prompt>,
    n: usize,
    echo: bool,
    /// Alternatives per token, if log-probabilities were asked for.
    logprobs: Option<usize>,
    prompt_logprobs: Option<usize>,
    skip_special_tokens: bool,
    return_token_ids: bool,
    /// Per choice: its first chunk, with the echo, has been made.
    begun: Vec<bool>,
}

struct Prompt {
    ids: Vec<u32>,
    /// As it is echoed.
    text: String,
    logprobs: Option<Vec<Option<TokenLogprobs>>>,
}

fn prepare(app: &Arc<App>, fields: &Fields) -> Result<(Completion, Options, Vec<GenerationRequest>), ApiError> {
    app.check_model(fields)?;
    fields.refuse("suffix", "this model does not fill in; leave it out")?;
    let mut options = Options::read(app, fields, &["max_tokens"])?;
    let logprobs = fields.count("logprobs", 0, MAX_LOGPROBS)?;
    let echo = fields.bool("echo")?.unwrap_or(false);
    let add_special = fields.bool("add_special_tokens")?.unwrap_or(true);
    let prompt_logprobs = options.params.prompt_logprobs;
    options.params.sampling.logprobs = logprobs;
    if echo && logprobs.is_some() {
        options.params.prompt_logprobs = logprobs.max(prompt_logprobs);
    }
    let prompts = tokenize(app, prompts::read(app, fields, "prompt")?, add_special, echo, &options)?;
    let mut requests = Vec::new();
    for prompt in &prompts {
        requests.push(options.request(app, prompt.ids.clone(), Some(DEFAULT_MAX_TOKENS), "prompt")?);
    }
    let n = options.params.n;
    let completion = Completion {
        app: app.clone(),
        begun: vec![false; n * prompts.len()],
        prompts,
        n,
        echo,
        logprobs,
        prompt_logprobs,
        skip_special_tokens: options.params.skip_special_tokens,
        return_token_ids: options.return_token_ids,
    };
    Ok((completion, options, requests))
}

fn tokenize(
    app: &App,
    inputs: Vec<Input>,
    add_special: bool,
    echo: bool,
    options: &Options,
) -> Result<Vec<Prompt>, ApiError> {
    let (keep, skip_special) = (options.truncate_prompt_tokens, options.params.skip_special_tokens);
    let one = |input: Input| {
        let (ids, text) = input.encode(app, add_special, "prompt")?;
        let whole = ids.len();
        let ids = truncate(ids, keep);
        let text = match text.filter(|_| ids.len() == whole) {
            _ if !echo => String::new(),
            Some(text) => text,
            None => app.tokenizer().decode(&ids, skip_special).map_err(|error| ApiError::invalid("prompt", error))?,
        };
        Ok(Prompt { ids, text, logprobs: None })
    };
    inputs.into_iter().map(one).collect()
}

impl Completion {
    /// The choice for a delta: a piece of a stream, or a whole sequence. The first piece carries what belongs to the
    /// prompt.
    fn choice(&mut self, prompt: usize, delta: &Delta) -> Value {
        let index = prompt * self.n + delta.index as usize;
        let first = !std::mem::replace(&mut self.begun[index], true);
        let source = &self.prompts[prompt];
        let tokenizer = self.app.tokenizer();
        let echo = if self.echo { source.text.as_str() } else { "" };
        let logprobs = self.logprobs.map(|k| {
            let (mut all, length) = (CompletionLogprobs::default(), echo.chars().count());
            if first && self.echo {
                let known = source.logprobs.as_deref().unwrap_or_default();
                all.push_prompt(tokenizer, &source.ids, known, k, self.skip_special_tokens, length);
            }
            delta.tokens.iter().for_each(|token| all.push_output(tokenizer, token, k, length));
            all.into_json()
        });
        let (finish_reason, stop_reason) = reply::finish(delta.finish.as_ref());
        let text = if first { format!("{echo}{}", delta.text) } else { delta.text.clone() };
        let mut choice = json!({
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        });
        if let (true, Some(k), Some(known)) = (first, self.prompt_logprobs, &source.logprobs) {
            choice["prompt_logprobs"] = logprobs::prompt(tokenizer, &source.ids, known, k);
        }
        if self.return_token_ids {
            choice["prompt_token_ids"] = if first { source.ids.clone().into() } else { Value::Null };
            choice["token_ids"] = delta.tokens.iter().map(|token| token.id).collect();
        }
        choice
    }
}

impl Chunks for Completion {
    fn prompt_logprobs(&mut self, prompt: usize, logprobs: Vec<Option<TokenLogprobs>>) {
        self.prompts[prompt].logprobs = Some(logprobs);
    }

    fn chunk(&mut self, prompt: usize, delta: &Delta) -> Option<Map<String, Value>> {
        let first = !self.begun[prompt * self.n + delta.index as usize];
        let tells = !delta.text.is_empty()
            || delta.finish.is_some()
            || (first && self.echo)
            || self.logprobs.is_some()
            || self.return_token_ids;
        tells.then(|| choices(vec![self.choice(prompt, delta)]))
    }
}
