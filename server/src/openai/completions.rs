//! `POST /v1/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use engine::Delta;

use super::choices::{self, Choice, Choices, Content, Field, Generation};
use super::logprobs::{self, Logprobs, Prompt};
use crate::app::{App, LogprobFormat};
use crate::http::ApiError;
use crate::request::{
    Around, Cost, Fields, Infill, Input, Options, Work, add_special_tokens, alternatives, prompts, unsupported,
};

/// Default of `max_tokens`, as in OpenAI's API.
const DEFAULT_MAX_TOKENS: usize = 16;

/// `POST /v1/completions`.
pub async fn completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    choices::respond(app, request, Completion::prepare).await
}

/// `POST /v1/completions/render`: the token ids of each prompt, and no completion.
pub async fn render(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    choices::render(app, request, Completion::prepare, true).await
}

/// The fields of a completion request.
pub struct CompletionRequest {
    pub options: Options,
    echo: bool,
    /// Add special tokens to prompts that are texts.
    pub add_special: bool,
    /// `prompt_logprobs` of the request. `echo` with `logprobs` sets them in `options` too.
    prompt_logprobs: Option<usize>,
    pub prompts: Vec<Input>,
}

impl CompletionRequest {
    /// Reads the fields.
    pub fn read(work: &Work, fields: &Fields<'_>) -> Result<CompletionRequest, ApiError> {
        let adapter = work.choose_model(fields)?;
        unsupported::refuse(fields, &unsupported::COMPLETIONS)?;
        let description = "Maximum number of tokens to generate, default 16; 0 only scores the prompt.";
        let mut options = Options::read(work, fields, ("max_tokens", description), 0)?;
        let description = "Return log probabilities of the output tokens with this many alternatives each.";
        let logprobs = alternatives(work, fields, "logprobs", description)?;
        let echo = fields.flag("echo", false, "Return the prompt before the generated text.")?;
        let add_special = add_special_tokens(fields)?;
        let prompt_logprobs = options.params.prompt_logprobs;
        options.adapter = adapter;
        options.params.sampling.logprobs = logprobs;
        if echo && logprobs.is_some() {
            options.params.prompt_logprobs = logprobs.max(prompt_logprobs);
        }
        let description = "Text after the completion, for a model that has learned to fill in; not with echo.";
        let suffix = fields.str("suffix", work.options.limits.max_text_bytes, description)?;
        let suffix = suffix.filter(|suffix| !suffix.is_empty());
        if suffix.is_some() && echo {
            return Err(ApiError::conflict("suffix", "echo"));
        }
        let prompts = prompts::read(work, fields, "prompt", "Prompts to complete.")?;
        let prompts = match suffix {
            None => prompts,
            Some(after) => filled_in(work, &prompts, after, add_special)?,
        };
        Ok(CompletionRequest { options, echo, add_special, prompt_logprobs, prompts })
    }

    /// Cost with prompts of this number and of this many tokens and bytes in total.
    pub fn cost(&self, app: &App, prompts: (usize, usize), bytes: usize) -> Cost {
        let params = &self.options.params;
        let cost = self.options.cost(app, prompts, Some(DEFAULT_MAX_TOKENS), LogprobFormat::Completion);
        let copies = |asked| app.logprob_entries(asked, LogprobFormat::Completion) * params.n;
        let echoed = if self.echo { params.sampling.logprobs } else { None };
        Cost {
            per_prompt_token: copies(self.prompt_logprobs) + copies(echoed),
            repeated_bytes: cost.repeated_bytes + if self.echo { params.n * bytes } else { 0 },
            ..cost
        }
    }
}

/// Prompts of which each shows the text before the completion, and `after` it.
fn filled_in(work: &Work, prompts: &[Input], after: &str, add_special: bool) -> Result<Vec<Input>, ApiError> {
    let infill = Infill::required(work, "suffix")?;
    let mut tokens = 0;
    let one = |prompt: &Input| {
        let Input::Text(before) = prompt else {
            return Err(ApiError::found("prompt", "token ids together with suffix", "text"));
        };
        let ids = infill.prompt(work, Around { before, after, ..Around::default() }, add_special, "prompt")?;
        tokens += ids.len();
        Cost { prompts: 1, prompt_tokens: tokens, ..Cost::default() }.check(&work.options.limits)?;
        Ok(Input::Ids(ids))
    };
    prompts.iter().map(one).collect()
}

/// State of a running completion request.
struct Completion {
    generation: Generation,
    echo: bool,
    /// Texts to echo by prompt.
    texts: Vec<String>,
    prompt_logprobs: Option<usize>,
    /// Whether the first chunk of each choice, which has the echo, has been made.
    begun: Vec<bool>,
}

impl Completion {
    fn prepare(work: &Work, fields: &Fields<'_>) -> choices::Submission<Completion> {
        work.must_generate()?;
        let mut request = CompletionRequest::read(work, fields)?;
        let least = request.prompts.iter().map(|input| input.least_tokens(work)).sum();
        let count = request.prompts.len();
        request.cost(work, (count, least), 0).check(&work.options.limits)?;
        let inputs = std::mem::take(&mut request.prompts);
        let keep = request.options.truncate_prompt_tokens;
        let (mut prompts, mut texts) = (Vec::new(), Vec::new());
        for (ids, text) in prompts::tokenize(work, inputs, "prompt", request.add_special, keep)? {
            let decode = || work.tokenizer().decode(&ids, request.options.params.skip_special_tokens);
            texts.push(match text {
                _ if !request.echo => String::new(),
                Some(text) => text,
                None => decode().map_err(|error| ApiError::invalid("prompt", error))?,
            });
            prompts.push(Arc::new(Prompt { ids, logprobs: None }));
        }
        let tokens = prompts.iter().map(|prompt| prompt.ids.len()).sum();
        let cost = request.cost(work, (count, tokens), texts.iter().map(String::len).sum());
        cost.check(&work.options.limits)?;
        let CompletionRequest { options, echo, prompt_logprobs, .. } = request;
        let request =
            |prompt: &Arc<Prompt>| options.request(work, prompt.ids.clone(), Some(DEFAULT_MAX_TOKENS), "prompt");
        let requests = prompts.iter().map(request).collect::<Result<_, _>>()?;
        let begun = vec![false; options.params.n * prompts.len()];
        let generation = Generation { app: work.app.clone(), options, prompts };
        Ok(((Completion { generation, echo, texts, prompt_logprobs, begun }, requests), cost))
    }
}

impl Choices for Completion {
    const NAMES: [&'static str; 3] = ["cmpl", "text_completion", "text_completion"];

    fn generation(&mut self) -> &mut Generation {
        &mut self.generation
    }

    /// The first choice of a sequence echoes the prompt.
    fn choice<'a>(&mut self, prompt: usize, delta: &'a Delta, is_whole: bool) -> Option<Choice<'a>> {
        let Completion { generation, echo, texts, prompt_logprobs, begun } = self;
        let (options, finish) = (&generation.options, delta.finish.as_ref());
        let index = prompt * options.params.n + delta.index as usize;
        let first = !begun[index];
        let is_empty = delta.text.is_empty() && finish.is_none() && !(*echo && first) && !generation.needs_tokens();
        if is_empty && !is_whole {
            return None;
        }
        begun[index] = true;
        let source = &generation.prompts[prompt];
        let logprobs = options.params.sampling.logprobs.map(|k| {
            Logprobs::Completion(logprobs::Completion {
                tokenizer: generation.tokenizer(),
                prompt: (first && *echo).then(|| source.clone()),
                shift: texts[prompt].chars().count(),
                skip_special: options.params.skip_special_tokens,
                tokens: &delta.tokens,
                k,
            })
        });
        let text = if first { format!("{}{}", texts[prompt], delta.text).into() } else { delta.text.as_str().into() };
        let mut more = Vec::new();
        if first {
            more.extend(generation.prompt_logprobs(prompt, *prompt_logprobs));
        }
        if options.return_token_ids {
            more.push(("prompt_token_ids", Field::Ids(first.then(|| source.ids.clone()))));
            more.push(choices::token_ids(delta));
        }
        Some(Choice { index, content: Content::Text(text), logprobs, finish, has_called: false, more })
    }
}
