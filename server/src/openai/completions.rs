//! `POST /v1/completions`.

use std::borrow::Cow;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use engine::{Delta, GenerationRequest, TokenLogprobs};

use crate::app::{App, LogprobFormat};
use crate::http::{ApiError, Json, call, json};
use crate::reply::{
    Choice, Chunks, Envelope, Field, Logprobs, PromptLogprobs, Run, Usage, Writer, choice, logprobs, stream,
};
use crate::request::{
    Cost, Fields, Input, Options, TOKEN_ID, Work, add_special_tokens, body, prompts, truncate, unsupported,
};

/// Default of `max_tokens`, as in OpenAI's API.
const DEFAULT_MAX_TOKENS: usize = 16;

/// `POST /v1/completions`.
pub async fn completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let ((mut completion, requests), cost) = body.read(&app, prepare).await?;
    call::set_request_id(completion.options.request_id.take());
    let envelope = Envelope::new(&app, completion.options.adapter.as_deref(), "cmpl", "text_completion");
    let prompt_tokens = completion.prompts.iter().map(|prompt| prompt.ids().len()).sum();
    let run = Run::submit(&app, requests).await?;
    if completion.options.stream {
        let usage = completion.options.stream_usage;
        return Ok(stream::respond(run, completion, envelope, usage, prompt_tokens));
    }
    let answers = run.collect(completion.needs_tokens()).await?;
    json::off_reactor(cost.is_large(), move || {
        let mut usage = Usage { prompt_tokens, ..Usage::default() };
        let params = completion.options.kv_transfer_params(&completion.app, envelope.id(), prompt_tokens);
        let more: Vec<_> = params.map(|params| ("kv_transfer_params", params.into())).into_iter().collect();
        let mut sequences = Vec::new();
        for (i, answer) in answers.into_iter().enumerate() {
            usage.add(&answer);
            completion.set_prompt_logprobs(i, answer.prompt_logprobs);
            sequences.extend(answer.sequences.into_iter().map(|sequence| (i, sequence)));
        }
        let choices = sequences.iter().map(|(i, sequence)| completion.choice(*i, sequence));
        let mut text = Vec::new();
        envelope.write(&mut text, ("choices", choices), &more, Some(usage.to_json()));
        json::respond(text)
    })
    .await
}

/// `POST /v1/completions/render`: the token ids of each prompt, and no completion.
pub async fn render(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let id = choice::response_id("cmpl");
    // Written in the closure, off the threads that serve connections.
    let answer = body.read(&app, move |work, fields| {
        let ((Completion { prompts, options, .. }, _), cost) = prepare(work, fields)?;
        let adapter = options.adapter.as_deref();
        let all: Vec<Json> = prompts.iter().map(|prompt| choice::rendered(work, adapter, &id, prompt.ids())).collect();
        let repeated_bytes = cost.repeated_bytes + TOKEN_ID * cost.prompt_tokens;
        Ok((Json::from(all).into_response(), Cost { repeated_bytes, ..cost }))
    });
    Ok(answer.await?.0)
}

/// State of a running completion request.
struct Completion {
    app: Arc<App>,
    prompts: Vec<Prompt>,
    options: Options,
    echo: bool,
    prompt_logprobs: Option<usize>,
    /// Whether the first chunk of each choice, which has the echo, has been made.
    begun: Vec<bool>,
}

struct Prompt {
    /// Shared by all choices.
    scored: Arc<logprobs::Prompt>,
    /// Text to echo.
    text: String,
}

impl Prompt {
    fn ids(&self) -> &[u32] {
        &self.scored.ids
    }
}

/// The fields of a completion request.
pub struct CompletionRequest {
    options: Options,
    echo: bool,
    add_special: bool,
    /// `prompt_logprobs` of the request. `echo` with `logprobs` sets them in `options` too.
    prompt_logprobs: Option<usize>,
    prompts: Vec<Input>,
}

impl CompletionRequest {
    /// Reads the fields.
    pub fn read(work: &Work, fields: &Fields<'_>) -> Result<CompletionRequest, ApiError> {
        let adapter = work.choose_model(fields)?;
        unsupported::refuse(fields, &unsupported::COMPLETIONS)?;
        let description = "Maximum number of tokens to generate, default 16; 0 only scores the prompt.";
        let mut options = Options::read(work, fields, ("max_tokens", description), 0)?;
        let description = "Return log probabilities of the output tokens with this many alternatives each.";
        let logprobs = fields.count("logprobs", (0, work.options.limits.max_logprobs), description)?;
        let echo = fields.flag("echo", false, "Return the prompt before the generated text.")?;
        let add_special = add_special_tokens(fields)?;
        let prompt_logprobs = options.params.prompt_logprobs;
        options.adapter = adapter;
        options.params.sampling.logprobs = logprobs;
        if echo && logprobs.is_some() {
            options.params.prompt_logprobs = logprobs.max(prompt_logprobs);
        }
        let prompts = prompts::read(work, fields, "prompt", "Prompts to complete.")?;
        Ok(CompletionRequest { options, echo, add_special, prompt_logprobs, prompts })
    }

    /// Cost with prompts of this many tokens and bytes in total.
    fn cost(&self, app: &App, tokens: usize, bytes: usize) -> Cost {
        let params = &self.options.params;
        let cost =
            self.options.cost(app, (self.prompts.len(), tokens), Some(DEFAULT_MAX_TOKENS), LogprobFormat::Completion);
        let copies = |asked| app.logprob_entries(asked, LogprobFormat::Completion) * params.n;
        let echoed = if self.echo { params.sampling.logprobs } else { None };
        Cost {
            per_prompt_token: copies(self.prompt_logprobs) + copies(echoed),
            repeated_bytes: cost.repeated_bytes + if self.echo { params.n * bytes } else { 0 },
            ..cost
        }
    }
}

fn prepare(work: &Work, fields: &Fields<'_>) -> Result<((Completion, Vec<GenerationRequest>), Cost), ApiError> {
    let mut request = CompletionRequest::read(work, fields)?;
    let least = request.prompts.iter().map(|input| input.least_tokens(work)).sum();
    request.cost(work, least, 0).check(&work.options.limits)?;
    let inputs = std::mem::take(&mut request.prompts);
    let prompts = tokenize(work, inputs, &request)?;
    let (tokens, bytes) =
        prompts.iter().fold((0, 0), |(ids, bytes), prompt| (ids + prompt.ids().len(), bytes + prompt.text.len()));
    let cost = Cost { prompts: prompts.len(), ..request.cost(work, tokens, bytes) };
    cost.check(&work.options.limits)?;
    let CompletionRequest { options, echo, prompt_logprobs, .. } = request;
    let mut requests = Vec::new();
    for prompt in &prompts {
        requests.push(options.request(work, prompt.ids().to_vec(), Some(DEFAULT_MAX_TOKENS), "prompt")?);
    }
    let begun = vec![false; options.params.n * prompts.len()];
    let completion = Completion { app: work.app.clone(), prompts, options, echo, prompt_logprobs, begun };
    Ok(((completion, requests), cost))
}

fn tokenize(work: &Work, inputs: Vec<Input>, request: &CompletionRequest) -> Result<Vec<Prompt>, ApiError> {
    let (keep, skip_special) = (request.options.truncate_prompt_tokens, request.options.params.skip_special_tokens);
    let (mut prompts, mut tokens) = (Vec::new(), 0);
    for input in inputs {
        let (ids, text) = input.encode(work, request.add_special, "prompt", keep.is_none())?;
        let whole = ids.len();
        let ids = truncate(ids, keep);
        let text = match text.filter(|_| ids.len() == whole) {
            _ if !request.echo => String::new(),
            Some(text) => text,
            None => work.tokenizer().decode(&ids, skip_special).map_err(|error| ApiError::invalid("prompt", error))?,
        };
        tokens += ids.len();
        Cost { prompts: 1, prompt_tokens: tokens, ..Cost::default() }.check(&work.options.limits)?;
        prompts.push(Prompt { scored: Arc::new(logprobs::Prompt { ids, logprobs: None }), text });
    }
    Ok(prompts)
}

impl Completion {
    /// Whether choices have more of each token than its text.
    fn needs_tokens(&self) -> bool {
        self.options.params.sampling.logprobs.is_some() || self.options.return_token_ids
    }

    /// Index of a delta's choice.
    fn index(&self, prompt: usize, delta: &Delta) -> usize {
        prompt * self.options.params.n + delta.index as usize
    }

    fn set_prompt_logprobs(&mut self, prompt: usize, logprobs: Option<Vec<Option<TokenLogprobs>>>) {
        // No choice shares it yet.
        if let Some(prompt) = Arc::get_mut(&mut self.prompts[prompt].scored) {
            prompt.logprobs = logprobs;
        }
    }

    /// Choice of a delta: a piece of a stream or a whole sequence. The first one of a sequence echoes the prompt.
    fn choice<'a>(&mut self, prompt: usize, delta: &'a Delta) -> Choice<'a, Cow<'a, str>> {
        let index = self.index(prompt, delta);
        let first = !std::mem::replace(&mut self.begun[index], true);
        let source = &self.prompts[prompt];
        let tokenizer = self.app.engine.tokenizer();
        let echo = if self.echo { source.text.as_str() } else { "" };
        let logprobs = self.options.params.sampling.logprobs.map(|k| {
            Logprobs::Completion(logprobs::Completion {
                tokenizer: tokenizer.clone(),
                prompt: (first && self.echo).then(|| source.scored.clone()),
                shift: echo.chars().count(),
                skip_special: self.options.params.skip_special_tokens,
                tokens: &delta.tokens,
                k,
            })
        });
        let text = if first { format!("{echo}{}", delta.text).into() } else { delta.text.as_str().into() };
        let mut more = Vec::new();
        if let (true, Some(k), Some(_)) = (first, self.prompt_logprobs, &source.scored.logprobs) {
            let (tokenizer, prompt) = (tokenizer.clone(), source.scored.clone());
            more.push(("prompt_logprobs", Field::PromptLogprobs(PromptLogprobs { tokenizer, prompt, k })));
        }
        if self.options.return_token_ids {
            more.push(("prompt_token_ids", Field::Ids(first.then(|| source.ids().to_vec()))));
            more.push(("token_ids", choice::token_ids(delta)));
        }
        let finish = delta.finish.as_ref();
        Choice { index, content: ("text", text), logprobs, finish, has_called: false, more }
    }
}

impl Chunks for Completion {
    fn prompt_logprobs(&mut self, prompt: usize, logprobs: Vec<Option<TokenLogprobs>>) {
        self.set_prompt_logprobs(prompt, Some(logprobs));
    }

    fn delta(&mut self, prompt: usize, delta: &Delta, writer: &mut Writer) {
        let is_sent = !delta.text.is_empty()
            || delta.finish.is_some()
            || (self.echo && !self.begun[self.index(prompt, delta)])
            || self.needs_tokens();
        if is_sent {
            writer.chunk([self.choice(prompt, delta)], &[]);
        }
    }
}
