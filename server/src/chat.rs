//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use engine::text::ReasoningParser;
use engine::{Delta, TokenLogprobs};
use serde_json::{Value, json};

use super::app::App;
use super::assistant::{Assistant, Said};
use super::body;
use super::cost::Cost;
use super::error::ApiError;
use super::fields::Fields;
use super::json::{Json, off_reactor};
use super::logprobs;
use super::messages::Conversation;
use super::options::{Options, truncate};
use super::reply::{self, Envelope, Usage, choices};
use super::run::Run;
use super::settings::Reasoning;
use super::stream::{self, Chunk, Chunks};
use super::tools::Tools;
use super::work::Work;

/// The handler.
pub async fn chat_completions(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let mut body = body::receive(&app, request).await?;
    let (Prepared { options, ids, tools, reasoning }, cost) = body.read(&app, prepare).await?;
    let logprobs = options.params.sampling.logprobs;
    let speaker = || Assistant::new(&app, &tools, reasoning);
    let mut chat = Chat {
        app: app.clone(),
        speakers: std::iter::repeat_with(speaker).take(options.params.n).collect(),
        n: options.params.n,
        logprobs,
        return_token_ids: options.return_token_ids,
        prompt_token_ids: if options.return_token_ids { ids.clone() } else { Vec::new() },
    };
    let default = app.engine.generation_defaults().max_new_tokens;
    let (prompt_tokens, prompt_logprobs) = (ids.len(), options.params.prompt_logprobs);
    let request = options.request(&app, ids.clone(), default, "messages")?;
    let run = Run::submit(&app, vec![request]).await?;
    if options.stream {
        let envelope = Envelope::new(&app, "chatcmpl", "chat.completion.chunk");
        return Ok(stream::respond(run, chat, envelope, &options, prompt_tokens));
    }
    let answers = run.collect(logprobs.is_some() || options.return_token_ids).await?;
    off_reactor(cost.is_large(), move || {
        let (mut usage, mut reply) = (Usage { prompt_tokens, ..Usage::default() }, Vec::new());
        for answer in answers {
            usage.completion_tokens += answer.completion_tokens;
            usage.cached_tokens += answer.cached_tokens;
            reply = choices(answer.sequences.iter().map(|sequence| chat.message(sequence)).collect());
            if let (Some(k), Some(found)) = (prompt_logprobs, &answer.prompt_logprobs) {
                reply.push(("prompt_logprobs", logprobs::prompt(app.tokenizer(), &ids, found, k)));
            }
        }
        if options.return_token_ids {
            reply.push(("prompt_token_ids", Json::Value(ids.into())));
        }
        Envelope::new(&app, "chatcmpl", "chat.completion").wrap(reply, Some(usage.to_json())).into_response()
    })
    .await
}

/// A chat request, read.
pub struct Prepared {
    /// Sampling and limits.
    pub options: Options,
    /// The prompt.
    pub ids: Vec<u32>,
    /// What may be called.
    pub tools: Tools,
    /// Whether thoughts are split off; if so, whether the prompt has opened them.
    pub reasoning: Option<bool>,
}

impl Prepared {
    /// Renders and tokenises the conversation, and holds the model to the tools that it must call. `logprobs_field` is the
    /// field that asks for log-probabilities.
    pub fn new(work: &Work, asked: Asked, logprobs_field: &'static str) -> Result<(Prepared, Cost), ApiError> {
        let Asked { mut options, tools, conversation } = asked;
        let default = work.engine.generation_defaults().max_new_tokens;
        let cost = |options: &Options, tokens: usize| {
            let cost = options.cost(work, (1, tokens), default, logprobs_field);
            // Here the log-probabilities of the prompt are given once, beside the choices.
            Cost { per_prompt_token: cost.per_prompt_token / options.params.n, ..cost }
        };
        cost(&options, 0).check(&work.limits)?;
        tools.hold(work, &mut options.params)?;
        let prompt = conversation.render(work)?;
        let opened = match work.reasoning {
            Reasoning::Off => None,
            Reasoning::Tags => Some(ReasoningParser::is_opened_by(&prompt)),
            Reasoning::Always => Some(true),
        };
        // A grammar holds a text from its first letter: there are thoughts in it only if it writes the tag itself.
        let reasoning = opened.map(|opened| opened && options.params.structured_outputs.is_none());
        let keep = options.truncate_prompt_tokens;
        let ids = truncate(conversation.encode(work, &prompt, keep.is_none())?, keep);
        let cost = cost(&options, ids.len());
        Ok((Prepared { options, ids, tools, reasoning }, cost))
    }
}

/// What a request says.
pub struct Asked {
    /// Sampling and limits.
    pub options: Options,
    /// What may be called.
    pub tools: Tools,
    /// What is answered.
    pub conversation: Conversation,
}

impl Asked {
    /// Reads the fields.
    pub fn read(work: &Work, fields: &Fields<'_>) -> Result<Asked, ApiError> {
        work.check_model(fields)?;
        fields.refuse("echo", "end the messages with the text and set continue_final_message")?;
        let names = [
            ("max_completion_tokens", "Most tokens of an answer; by default what the context holds."),
            ("max_tokens", "The older name of max_completion_tokens."),
        ];
        let mut options = Options::read(work, fields, &names, 1)?;
        options.params.sampling.logprobs = wanted_logprobs(work, fields)?;
        let tools = Tools::read(fields, &work.limits)?;
        let conversation = Conversation::read(fields, &work.limits, tools.definitions.clone())?;
        let conversation = fields.required("messages", conversation, "a list of at least one message")?;
        Ok(Asked { options, tools, conversation })
    }
}

/// What is asked for, and the prompt.
fn prepare(work: &Work, fields: &Fields<'_>) -> Result<(Prepared, Cost), ApiError> {
    Prepared::new(work, Asked::read(work, fields)?, "top_logprobs")
}

/// `logprobs` switches them on here, `top_logprobs` says how many alternatives.
fn wanted_logprobs(work: &Work, fields: &Fields<'_>) -> Result<Option<usize>, ApiError> {
    let range = (0, work.limits.max_logprobs);
    let top = fields.count("top_logprobs", range, "Number of alternatives to each token; only with logprobs.")?;
    match (fields.flag("logprobs", false, "Give log-probabilities.")?, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(ApiError::invalid("top_logprobs", "only together with logprobs: true")),
    }
}

/// A chat request in flight: all that its choices need.
struct Chat {
    app: Arc<App>,
    n: usize,
    /// One per sequence.
    speakers: Vec<Assistant>,
    /// Alternatives per token, if log-probabilities were asked for.
    logprobs: Option<usize>,
    return_token_ids: bool,
    /// For the first chunk of a stream; empty unless token ids were asked for.
    prompt_token_ids: Vec<u32>,
}

impl Chat {
    /// The choice of a whole answer.
    fn message(&mut self, sequence: &Delta) -> Json {
        let said = self.hear(sequence);
        self.choice(sequence, "message", said.message())
    }

    /// What a delta adds to the message of its sequence.
    fn hear(&mut self, delta: &Delta) -> Said {
        let speaker = self.speakers.get_mut(delta.index as usize);
        speaker.map(|speaker| speaker.hear(&delta.text, delta.finish.is_some())).unwrap_or_default()
    }

    fn choice(&self, delta: &Delta, key: &str, content: Value) -> Json {
        let (mut finish_reason, stop_reason) = reply::finish(delta.finish.as_ref());
        let called = self.speakers.get(delta.index as usize).is_some_and(Assistant::has_called);
        if called && finish_reason == "stop" {
            finish_reason = "tool_calls".into();
        }
        let mut choice = Json::from(json!({
            "index": delta.index,
            key: content,
            "logprobs": null,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }));
        choice.set("logprobs", self.logprobs.map(|k| logprobs::chat(self.app.tokenizer(), &delta.tokens, k)));
        if self.return_token_ids {
            choice.set("token_ids", delta.tokens.iter().map(|token| token.id).collect::<Value>());
        }
        choice
    }
}

impl Chunks for Chat {
    /// Each choice begins with its role.
    fn opening(&mut self) -> Vec<Chunk> {
        let role = |index| {
            let delta = json!({"role": "assistant", "content": ""});
            choices(vec![json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null}).into()])
        };
        let mut opening: Vec<_> = (0..self.n).map(role).collect();
        if let (true, Some(first)) = (self.return_token_ids, opening.first_mut()) {
            first.push(("prompt_token_ids", Json::Value(std::mem::take(&mut self.prompt_token_ids).into())));
        }
        opening
    }

    /// A stream cannot ask for them.
    fn prompt_logprobs(&mut self, _: usize, _: Vec<Option<TokenLogprobs>>) {}

    fn chunk(&mut self, _: usize, delta: &Delta) -> Option<Chunk> {
        let content = self.hear(delta).delta();
        let tells = content.as_object().is_some_and(|content| !content.is_empty())
            || delta.finish.is_some()
            || self.logprobs.is_some()
            || self.return_token_ids;
        tells.then(|| choices(vec![self.choice(delta, "delta", content)]))
    }
}
