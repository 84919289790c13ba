//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use engine::text::ReasoningParser;
use engine::{Delta, StructuredOutput};
use serde_json::json;

use crate::app::{App, LogprobFormat};
use crate::http::{ApiError, call, json};
use crate::reply::{
    Assistant, Choice, Chunks, Envelope, Field, Logprobs, Message, MessageDelta, Piece, Prompt, PromptLogprobs, Run,
    Usage, Writer, choice, stream,
};
use crate::request::{Conversation, Cost, Fields, Options, TOKEN_ID, Tools, Work, body, truncate, unsupported};

/// `POST /v1/chat/completions`.
pub async fn chat_completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let (prepared, cost) = body.read(&app, prepare).await?;
    let Prepared { mut options, ids, tools, reasoning, shows_reasoning } = prepared;
    call::set_request_id(options.request_id.take());
    let logprobs = options.params.sampling.logprobs;
    let assistant = || Assistant::new(&app, &tools, reasoning.clone(), shows_reasoning);
    let mut chat = Chat {
        app: app.clone(),
        assistants: std::iter::repeat_with(assistant).take(options.params.n).collect(),
        logprobs,
        return_token_ids: options.return_token_ids,
        prompt_token_ids: if options.return_token_ids { ids.clone() } else { Vec::new() },
    };
    let default = app.engine.generation_defaults().max_new_tokens;
    let (prompt_tokens, prompt_logprobs) = (ids.len(), options.params.prompt_logprobs);
    let request = options.request(&app, ids.clone(), default, "messages")?;
    let run = Run::submit(&app, vec![request]).await?;
    if options.stream {
        let envelope = Envelope::new(&app, options.adapter.as_deref(), "chatcmpl", "chat.completion.chunk");
        return Ok(stream::respond(run, chat, envelope, options.stream_usage, prompt_tokens));
    }
    let answers = run.collect(logprobs.is_some() || options.return_token_ids).await?;
    json::off_reactor(cost.is_large(), move || {
        let mut usage = Usage { prompt_tokens, ..Usage::default() };
        // A chat has one prompt.
        let mut answer = answers.into_iter().next().unwrap_or_default();
        usage.add(&answer);
        let mut more = Vec::new();
        if let (Some(k), Some(found)) = (prompt_logprobs, answer.prompt_logprobs.take()) {
            let prompt = Arc::new(Prompt { ids: ids.clone(), logprobs: Some(found) });
            let tokenizer = app.engine.tokenizer().clone();
            more.push(("prompt_logprobs", Field::PromptLogprobs(PromptLogprobs { tokenizer, prompt, k })));
        }
        if options.return_token_ids {
            more.push(("prompt_token_ids", Field::Ids(Some(ids))));
        }
        let envelope = Envelope::new(&app, options.adapter.as_deref(), "chatcmpl", "chat.completion");
        let params = options.kv_transfer_params(&app, envelope.id(), prompt_tokens);
        more.extend(params.map(|params| ("kv_transfer_params", params.into())));
        let choices = answer.sequences.iter().map(|sequence| {
            let message = Message(chat.parse(sequence));
            chat.choice(sequence, ("message", message))
        });
        let mut text = Vec::new();
        envelope.write(&mut text, ("choices", choices), &more, Some(usage.to_json()));
        json::respond(text)
    })
    .await
}

/// `POST /v1/chat/completions/render`: the token ids of the prompt, and no answer.
pub async fn render(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let id = choice::response_id("chatcmpl");
    // Written in the closure, off the threads that serve connections.
    let answer = body.read(&app, move |work, fields| {
        let (Prepared { options, ids, .. }, cost) = prepare(work, fields)?;
        let default = work.engine.generation_defaults().max_new_tokens;
        let request = options.request(work, ids, default, "messages")?;
        let rendered = choice::rendered(work, options.adapter.as_deref(), &id, &request.prompt);
        let repeated_bytes = cost.repeated_bytes + TOKEN_ID * cost.prompt_tokens;
        Ok((rendered.into_response(), Cost { repeated_bytes, ..cost }))
    });
    Ok(answer.await?.0)
}

/// A chat request, rendered and tokenized.
pub struct Prepared {
    pub options: Options,
    /// Token ids of the prompt.
    pub ids: Vec<u32>,
    pub tools: Tools,
    /// Parser of the reasoning at the beginning of an answer; `None` if reasoning is not parsed.
    pub reasoning: Option<ReasoningParser>,
    /// Return the reasoning.
    pub shows_reasoning: bool,
}

impl Prepared {
    /// Renders and tokenizes the conversation, and constrains the output to required tool calls.
    pub fn new(work: &Work, request: ChatRequest) -> Result<(Prepared, Cost), ApiError> {
        let ChatRequest { mut options, mut tools, conversation, shows_reasoning, stops_reasoning } = request;
        tools.earlier_calls = conversation.num_calls();
        let default = work.engine.generation_defaults().max_new_tokens;
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
        Ok((Prepared { options, ids, tools, reasoning, shows_reasoning }, cost))
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
        let conversation = Conversation::read(fields, &work.options.limits, tools.definitions.clone())?;
        let conversation = fields.required("messages", conversation, "a list of at least one message")?;
        let (shows_reasoning, stops_reasoning) = read_reasoning(fields)?;
        Ok(ChatRequest { options, tools, conversation, shows_reasoning, stops_reasoning })
    }
}

/// Reads whether to return the reasoning, and whether stop strings count within it.
pub fn read_reasoning(fields: &Fields<'_>) -> Result<(bool, bool), ApiError> {
    let shows = fields.flag("include_reasoning", true, "Return the reasoning.")?;
    let description = "Search the stop strings in the reasoning too, and not only in the answer after it.";
    Ok((shows, fields.flag("stop_in_reasoning", false, description)?))
}

fn prepare(work: &Work, fields: &Fields<'_>) -> Result<(Prepared, Cost), ApiError> {
    Prepared::new(work, ChatRequest::read(work, fields)?)
}

/// Number of alternatives per token; `None` without log probabilities.
fn num_logprobs(work: &Work, fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let range = (0, work.options.limits.max_logprobs);
    let top =
        fields.count("top_logprobs", range, "Number of most likely alternatives per token; requires logprobs.")?;
    match (fields.flag("logprobs", false, "Return log probabilities of the output tokens.")?, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::requires("top_logprobs", "logprobs: true")),
    }
}

/// State of a running chat request.
struct Chat {
    app: Arc<App>,
    /// One per sequence.
    assistants: Vec<Assistant>,
    /// Number of alternatives per token; `None` without log probabilities.
    logprobs: Option<usize>,
    return_token_ids: bool,
    /// For the first chunk of a stream; empty without `return_token_ids`.
    prompt_token_ids: Vec<u32>,
}

impl Chat {
    /// Parses the text of a delta.
    fn parse(&mut self, delta: &Delta) -> Piece {
        let assistant = self.assistants.get_mut(delta.index as usize);
        assistant.map(|assistant| assistant.push(&delta.text, delta.finish.is_some())).unwrap_or_default()
    }

    /// Choice of a delta with this content.
    fn choice<'a, C>(&self, delta: &'a Delta, content: (&'static str, C)) -> Choice<'a, C> {
        let index = delta.index as usize;
        Choice {
            index,
            content,
            logprobs: self.logprobs.map(|k| Logprobs::Chat {
                tokenizer: self.app.engine.tokenizer().clone(),
                tokens: &delta.tokens,
                k,
            }),
            finish: delta.finish.as_ref(),
            has_called: self.assistants.get(index).is_some_and(Assistant::has_called),
            more: if self.return_token_ids { vec![("token_ids", choice::token_ids(delta))] } else { Vec::new() },
        }
    }
}

impl Chunks for Chat {
    /// The role of each choice.
    fn opening(&mut self, writer: &mut Writer) {
        for index in 0..self.assistants.len() {
            let delta = json!({"role": "assistant", "content": ""});
            let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
            let ids = (index == 0 && self.return_token_ids)
                .then(|| ("prompt_token_ids", Field::Ids(Some(std::mem::take(&mut self.prompt_token_ids)))));
            writer.chunk([choice], ids.as_slice());
        }
    }

    fn delta(&mut self, _: usize, delta: &Delta, writer: &mut Writer) {
        let piece = self.parse(delta);
        if !piece.is_empty() || delta.finish.is_some() || self.logprobs.is_some() || self.return_token_ids {
            writer.chunk([self.choice(delta, ("delta", MessageDelta(piece)))], &[]);
        }
    }
}
