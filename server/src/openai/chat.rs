//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use engine::{Delta, GenerationRequest, StructuredOutput};
use serde_json::json;
use text::ReasoningParser;

use super::choices::{self, Choice, Choices, ChunkWriter, Content, Field, Generation};
use super::completions::CompletionRequest;
use super::logprobs::{Logprobs, Prompt};
use crate::app::{App, LogprobFormat};
use crate::http::ApiError;
use crate::reply::Assistant;
use crate::request::{
    Conversation, Cost, Fields, Options, Reasoning, Tools, Work, alternatives, prompts, truncate, unsupported,
};

/// `POST /v1/chat/completions`.
pub async fn chat_completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    choices::respond::<Chat>(app, request).await
}

/// `POST /v1/chat/completions/render`: the token ids of the prompt, and no answer.
pub async fn render(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    choices::render::<Chat>(app, request, false).await
}

/// A chat request, rendered and tokenized.
pub struct Prepared {
    pub options: Options,
    /// Token ids of the prompt.
    pub ids: Vec<u32>,
    /// Field of the prompt, for errors.
    pub param: &'static str,
    pub tools: Tools,
    /// Parser of the reasoning at the beginning of an answer; `None` if reasoning is not parsed.
    pub reasoning: Option<ReasoningParser>,
    shows_reasoning: bool,
}

impl Prepared {
    /// Renders and tokenizes the conversation, and constrains the output to required tool calls.
    pub fn new(work: &Work, request: ChatRequest) -> Result<(Prepared, Cost), ApiError> {
        let ChatRequest { mut options, mut tools, conversation, shows_reasoning, stops_reasoning } = request;
        tools.earlier_calls = conversation.num_calls();
        let (default, param) = (work.engine.generation_defaults().max_new_tokens, conversation.param);
        let cost = |options: &Options, tokens: usize| {
            let cost = options.cost(work, (1, tokens), default, LogprobFormat::Chat);
            // A chat returns the log probabilities of the prompt once, not in each choice.
            let per_prompt_token = work.logprob_entries(options.params.prompt_logprobs, LogprobFormat::Completion);
            Cost { per_prompt_token, ..cost }
        };
        cost(&options, 0).check(&work.options.limits)?;
        let is_call = tools.constrain(work, &mut options.params)?;
        let prompt = conversation.render(work)?;
        let format = work.reasoning;
        let reasoning = format.parser(&prompt);
        options.params.reasoning = reasoning.clone().filter(|_| !stops_reasoning);
        if format.has_special_marker(work.tokenizer()) {
            options.params.skip_special_tokens = false;
        }
        if let Some(StructuredOutput { grammar, param }) = options.params.structured_outputs.as_deref() {
            let grammar = format.grammar(&prompt, grammar.clone(), is_call, work.tokenizer());
            options.params.structured_outputs = Some(Arc::new(StructuredOutput { grammar, param }));
        }
        let keep = options.truncate_prompt_tokens;
        let ids = truncate(conversation.encode(work, &prompt, keep.is_none())?, keep);
        let cost = cost(&options, ids.len());
        Ok((Prepared { options, ids, param, tools, reasoning, shows_reasoning }, cost))
    }

    /// Tokenizes a plain prompt, whose answer has neither reasoning nor calls.
    pub fn plain(work: &Work, mut request: CompletionRequest) -> Result<(Prepared, Cost), ApiError> {
        const PARAM: &str = "prompt";
        let prompts = std::mem::take(&mut request.prompts);
        let count = prompts.len();
        if count != 1 {
            return Err(ApiError::found(PARAM, &format!("{count} prompts"), "one"));
        }
        let least = prompts.iter().map(|input| input.least_tokens(work)).sum();
        request.cost(work, (1, least), 0).check(&work.options.limits)?;
        let keep = request.options.truncate_prompt_tokens;
        let tokenized = prompts::tokenize(work, prompts, PARAM, request.add_special, keep)?;
        let ids: Vec<u32> = tokenized.into_iter().flat_map(|(ids, _)| ids).collect();
        let cost = request.cost(work, (1, ids.len()), 0);
        let CompletionRequest { options, .. } = request;
        let prepared =
            Prepared { options, ids, param: PARAM, tools: Tools::none(), reasoning: None, shows_reasoning: false };
        Ok((prepared, cost))
    }

    /// Cuts the token limit to the rest of the context. Returns whether it was longer.
    pub fn cut_limit(&mut self, app: &App) -> bool {
        let rest = app.context().saturating_sub(self.ids.len());
        let limit = self.options.max_tokens.as_mut().filter(|(_, limit)| *limit > rest);
        limit.map(|(_, limit)| *limit = rest).is_some()
    }

    /// Request to the engine.
    pub fn request(&self, app: &App) -> Result<GenerationRequest, ApiError> {
        let default = app.engine.generation_defaults().max_new_tokens;
        self.options.request(app, self.ids.clone(), default, self.param)
    }

    /// Parser of a generated message.
    pub fn assistant(&self, app: &App) -> Assistant {
        Assistant::new(app, &self.tools, self.reasoning.clone(), self.shows_reasoning)
    }
}

/// The fields of a chat request.
pub struct ChatRequest {
    pub options: Options,
    pub tools: Tools,
    pub conversation: Conversation,
    /// Return the reasoning.
    pub shows_reasoning: bool,
    /// Stop strings count within the reasoning too.
    pub stops_reasoning: bool,
}

impl ChatRequest {
    /// Reads the fields.
    pub fn read(work: &Work, fields: &Fields<'_>) -> Result<ChatRequest, ApiError> {
        let adapter = work.choose_model(fields)?;
        unsupported::refuse(fields, &unsupported::CHATS)?;
        let description = "Maximum number of tokens to generate; default: the rest of the context.";
        let mut options = Options::read(work, fields, ("max_completion_tokens", description), 1)?;
        options.adapter = adapter;
        options.params.sampling.logprobs = num_logprobs(work, fields)?;
        let tools = Tools::read(fields, &work.options.limits, false)?;
        let reasoning = Reasoning::read(fields)?;
        options.thinking_budget = reasoning.budget(work, options.thinking_budget)?;
        let conversation = Conversation::read(fields, &work.options.limits, tools.shown(&work.options), &reasoning)?;
        let conversation = fields.required("messages", conversation, "a list of at least one message")?;
        let (shows_reasoning, stops_reasoning) = reasoning.is_shown(fields)?;
        Ok(ChatRequest { options, tools, conversation, shows_reasoning, stops_reasoning })
    }
}

/// Number of alternatives per token; `None` without log probabilities.
fn num_logprobs(work: &Work, fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let description = "Number of most likely alternatives per token; requires logprobs.";
    let top = alternatives(work, fields, "top_logprobs", description)?;
    match (fields.flag("logprobs", false, "Return log probabilities of the output tokens.")?, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::requires("top_logprobs", "logprobs: true")),
    }
}

/// State of a running chat request.
struct Chat {
    generation: Generation,
    /// Parser of the reasoning.
    reasoning: Option<ReasoningParser>,
    /// One per sequence.
    assistants: Vec<Assistant>,
}

impl Choices for Chat {
    const NAMES: [&'static str; 3] = ["chatcmpl", "chat.completion", "chat.completion.chunk"];

    fn prepare(work: &Work, fields: &Fields<'_>) -> Result<((Chat, Vec<GenerationRequest>), Cost), ApiError> {
        work.must_generate()?;
        let (prepared, cost) = Prepared::new(work, ChatRequest::read(work, fields)?)?;
        cost.check(&work.options.limits)?;
        let request = prepared.request(work)?;
        let assistants = (0..prepared.options.params.n).map(|_| prepared.assistant(work)).collect();
        let Prepared { ids, options, reasoning, .. } = prepared;
        let prompts = vec![Arc::new(Prompt { ids, logprobs: None })];
        let generation = Generation { app: work.app.clone(), options, prompts };
        Ok(((Chat { generation, reasoning, assistants }, vec![request]), cost))
    }

    fn reasoning(&self) -> Option<ReasoningParser> {
        self.reasoning.clone()
    }

    fn generation(&mut self) -> &mut Generation {
        &mut self.generation
    }

    fn choice<'a>(&mut self, _: usize, delta: &'a Delta, is_whole: bool) -> Option<Choice<'a>> {
        let Chat { generation, assistants, .. } = self;
        let (index, finish) = (delta.index as usize, delta.finish.as_ref());
        let assistant = assistants.get_mut(index)?;
        let piece = assistant.push(&delta.text, finish.is_some());
        if piece.is_empty() && finish.is_none() && !generation.needs_tokens() && !is_whole {
            return None;
        }
        let options = &generation.options;
        let tokens = &delta.tokens;
        let logprobs = |k| Logprobs::Chat { tokenizer: generation.tokenizer(), tokens, k };
        Some(Choice {
            index,
            content: if is_whole { Content::Message(piece) } else { Content::Delta(piece) },
            logprobs: options.params.sampling.logprobs.map(logprobs),
            finish,
            has_called: assistant.has_called(),
            more: options.return_token_ids.then(|| choices::token_ids(delta)).into_iter().collect(),
        })
    }

    /// The role of each choice.
    fn open(&mut self, writer: &mut ChunkWriter) {
        for index in 0..self.assistants.len() {
            let delta = json!({"role": "assistant", "content": ""});
            let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
            let ids = if index == 0 { self.prompt_token_ids() } else { None };
            writer.write([choice], ids.as_slice());
        }
    }

    fn more(&mut self) -> Vec<(&'static str, Field)> {
        let logprobs = self.generation.prompt_logprobs(0, self.generation.options.params.prompt_logprobs);
        logprobs.into_iter().chain(self.prompt_token_ids()).collect()
    }
}

impl Chat {
    fn prompt_token_ids(&self) -> Option<(&'static str, Field)> {
        let Generation { options, prompts, .. } = &self.generation;
        options.return_token_ids.then(|| ("prompt_token_ids", Field::Ids(Some(prompts[0].ids.clone()))))
    }
}
