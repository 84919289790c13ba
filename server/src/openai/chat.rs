//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use engine::{Delta, GenerationRequest, StructuredOutput};
use serde_json::{Value, json};
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
    choices::respond(app, request, Chat::prepare).await
}

/// `POST /v1/chat/completions/batch`, as in vLLM: one choice for each of several conversations.
pub async fn batch(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    choices::respond(app, request, Chat::prepare_batch).await
}

/// `POST /v1/chat/completions/render`: the token ids of the prompt, and no answer.
pub async fn render(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    choices::render(app, request, Chat::prepare, false).await
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
        chat_cost(work, &options, (1, 0)).check(&work.options.limits)?;
        let is_call = tools.constrain(work, &mut options.params)?;
        tools.earlier_calls = conversation.num_calls();
        let (ids, reasoning) = rendered(work, &mut options, &conversation, (is_call, stops_reasoning))?;
        let cost = chat_cost(work, &options, (1, ids.len()));
        let param = conversation.param;
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

/// Cost of conversations of this number and of this many tokens in total.
fn chat_cost(work: &Work, options: &Options, conversations: (usize, usize)) -> Cost {
    let default = work.engine.generation_defaults().max_new_tokens;
    let cost = options.cost(work, conversations, default, LogprobFormat::Chat);
    // A chat returns the log probabilities of the prompt once, not in each choice.
    let per_prompt_token = work.logprob_entries(options.params.prompt_logprobs, LogprobFormat::Completion);
    Cost { per_prompt_token, ..cost }
}

/// Renders and tokenizes a conversation, and tells `options` what its prompt says of reasoning. Also returns the parser of the reasoning.
fn rendered(
    work: &Work,
    options: &mut Options,
    conversation: &Conversation,
    (is_call, stops_reasoning): (bool, bool),
) -> Result<(Vec<u32>, Option<ReasoningParser>), ApiError> {
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
    Ok((ids, reasoning))
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
        let mut request = ChatRequest::read_options(work, fields)?;
        let messages = Conversation::read_messages(fields, &work.options.limits)?;
        request.conversation.set_messages(fields.required("messages", messages, "a list of at least one message")?);
        Ok(request)
    }

    /// Reads the fields of a batch. Returns the conversations beside the request, which has none.
    pub fn read_batch(work: &Work, fields: &Fields<'_>) -> Result<(ChatRequest, Vec<Vec<Value>>), ApiError> {
        let request = ChatRequest::read_options(work, fields)?;
        let conversations = request.conversation.read_batch(fields, &work.options.limits)?;
        Ok((request, conversations))
    }

    /// Reads the fields but for the messages.
    fn read_options(work: &Work, fields: &Fields<'_>) -> Result<ChatRequest, ApiError> {
        let adapter = work.choose_model(fields)?;
        unsupported::refuse(fields, &unsupported::CHATS)?;
        let description = "Maximum number of tokens to generate; default: the rest of the context.";
        let mut options = Options::read(work, fields, ("max_completion_tokens", description), 1)?;
        options.adapter = adapter;
        options.params.sampling.logprobs = num_logprobs(work, fields)?;
        let tools = Tools::read(fields, &work.options.limits, false)?;
        let reasoning = Reasoning::read(fields)?;
        options.thinking_budget = reasoning.budget(work, options.thinking_budget)?;
        let conversation =
            Conversation::read_options(fields, &work.options.limits, tools.shown(&work.options), &reasoning, true)?;
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
    /// Parsers of the reasoning, one per conversation.
    reasoning: Vec<Option<ReasoningParser>>,
    /// One per sequence, conversation by conversation.
    assistants: Vec<Assistant>,
    /// Whether choices have the tokens of their prompts, because there may be several.
    is_batch: bool,
}

impl Chat {
    fn prepare(work: &Work, fields: &Fields<'_>) -> choices::Submission<Chat> {
        work.must_generate()?;
        let (prepared, cost) = Prepared::new(work, ChatRequest::read(work, fields)?)?;
        cost.check(&work.options.limits)?;
        let request = prepared.request(work)?;
        let assistants = (0..prepared.options.params.n).map(|_| prepared.assistant(work)).collect();
        let Prepared { ids, options, reasoning, .. } = prepared;
        let prompts = vec![Arc::new(Prompt { ids, logprobs: None })];
        let generation = Generation { app: work.app.clone(), options, prompts };
        let chat = Chat { generation, reasoning: vec![reasoning], assistants, is_batch: false };
        Ok(((chat, vec![request]), cost))
    }

    fn prepare_batch(work: &Work, fields: &Fields<'_>) -> choices::Submission<Chat> {
        work.must_generate()?;
        let (request, conversations) = ChatRequest::read_batch(work, fields)?;
        let ChatRequest { mut options, mut tools, mut conversation, shows_reasoning, stops_reasoning } = request;
        let (count, mut tokens) = (conversations.len(), 0);
        // Each has a grammar of its own, behind its reasoning.
        let cost = |options: &Options, tokens| {
            let cost = chat_cost(work, options, (count, tokens));
            Cost { shared_bytes: cost.shared_bytes.saturating_mul(count), ..cost }
        };
        let mut all = cost(&options, 0);
        all.check(&work.options.limits)?;
        let is_call = tools.constrain(work, &mut options.params)?;
        let default = work.engine.generation_defaults().max_new_tokens;
        let (mut requests, mut prompts, mut parsers, mut assistants) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for messages in conversations {
            conversation.set_messages(messages);
            tools.earlier_calls = conversation.num_calls();
            let mut own = options.clone();
            let (ids, reasoning) = rendered(work, &mut own, &conversation, (is_call, stops_reasoning))?;
            tokens += ids.len();
            all = cost(&own, tokens);
            all.check(&work.options.limits)?;
            let assistant = || Assistant::new(work, &tools, reasoning.clone(), shows_reasoning);
            assistants.extend((0..own.params.n).map(|_| assistant()));
            requests.push(own.request(work, ids.clone(), default, conversation.param)?);
            prompts.push(Arc::new(Prompt { ids, logprobs: None }));
            parsers.push(reasoning);
        }
        let generation = Generation { app: work.app.clone(), options, prompts };
        Ok(((Chat { generation, reasoning: parsers, assistants, is_batch: true }, requests), all))
    }

    fn prompt_token_ids(&self) -> Option<(&'static str, Field)> {
        let Generation { options, prompts, .. } = &self.generation;
        (options.return_token_ids && !self.is_batch)
            .then(|| ("prompt_token_ids", Field::Ids(Some(prompts[0].ids.clone()))))
    }
}

impl Choices for Chat {
    const NAMES: [&'static str; 3] = ["chatcmpl", "chat.completion", "chat.completion.chunk"];

    fn reasoning(&self) -> Vec<Option<ReasoningParser>> {
        self.reasoning.clone()
    }

    fn generation(&mut self) -> &mut Generation {
        &mut self.generation
    }

    fn choice<'a>(&mut self, prompt: usize, delta: &'a Delta, is_whole: bool) -> Option<Choice<'a>> {
        let Chat { generation, assistants, is_batch, .. } = self;
        let index = prompt * generation.options.params.n + delta.index as usize;
        let finish = delta.finish.as_ref();
        let assistant = assistants.get_mut(index)?;
        let piece = assistant.push(&delta.text, finish.is_some());
        if piece.is_empty() && finish.is_none() && !generation.needs_tokens() && !is_whole {
            return None;
        }
        let options = &generation.options;
        let tokens = &delta.tokens;
        let logprobs = |k| Logprobs::Chat { tokenizer: generation.tokenizer(), tokens, k };
        let mut more = Vec::new();
        if *is_batch && is_whole {
            more.extend(generation.prompt_logprobs(prompt, options.params.prompt_logprobs));
        }
        if options.return_token_ids {
            let ids = || ("prompt_token_ids", Field::Ids(Some(generation.prompts[prompt].ids.clone())));
            more.extend((*is_batch && is_whole).then(ids));
            more.push(choices::token_ids(delta));
        }
        Some(Choice {
            index,
            content: if is_whole { Content::Message(piece) } else { Content::Delta(piece) },
            logprobs: options.params.sampling.logprobs.map(logprobs),
            finish,
            has_called: assistant.has_called(),
            more,
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
        if self.is_batch {
            return Vec::new();
        }
        let logprobs = self.generation.prompt_logprobs(0, self.generation.options.params.prompt_logprobs);
        logprobs.into_iter().chain(self.prompt_token_ids()).collect()
    }
}
