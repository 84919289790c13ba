//! Preparation of a request before the engine accepts it: parsing, rendering and tokenizing.
//!
//! It runs on the threads of [`ParsePool`](crate::http::ParsePool). If the client disconnects, it ends before the next text.

use std::ops::Deref;
use std::sync::{Arc, Weak};

use engine::Task;
use text::TokenizeError;

use super::fields::Fields;
use crate::app::App;
use crate::http::ApiError;

/// Divisor of the text limit for text that the tokenizer cannot cut.
const UNSPLIT_DIVISOR: usize = 16;

/// A request in preparation: the server's state, and whether the client is still connected.
pub struct Work {
    /// The server's state.
    pub app: Arc<App>,
    client: Weak<()>,
}

impl Deref for Work {
    type Target = App;

    fn deref(&self) -> &App {
        &self.app
    }
}

impl Work {
    /// Work for the client that holds the second value: it ends when that is dropped.
    pub fn new(app: Arc<App>) -> (Work, Arc<()>) {
        let client = Arc::new(());
        (Work { app, client: Arc::downgrade(&client) }, client)
    }

    /// Fails if the client has disconnected. Nobody reads the error.
    pub fn check_client(&self) -> Result<(), ApiError> {
        if self.client.strong_count() == 0 { Err(ApiError::unavailable("the client has disconnected")) } else { Ok(()) }
    }

    /// Reads the field `model`, which is optional: the LoRA adapter that it names, or `None` for the model as it is.
    pub fn choose_model(&self, fields: &Fields<'_>) -> Result<Option<String>, ApiError> {
        let description = "Name of the served model or of a LoRA adapter; may be omitted.";
        match fields.str("model", usize::MAX, description)?.filter(|name| !self.is_model(name)) {
            Some(name) if self.adapter(name).is_none() => Err(ApiError::unknown_model(name, &self.model)),
            other => Ok(other.map(str::to_string)),
        }
    }

    /// Refuses a request for text if the model generates none.
    pub fn must_generate(&self) -> Result<(), ApiError> {
        match self.engine.info().generates {
            true => Ok(()),
            false => Err(ApiError::unsupported("model", format!("it generates no text; it serves {}", self.serves()))),
        }
    }

    /// Refuses a request for an embedding if the model gives labels.
    pub fn must_embed(&self) -> Result<(), ApiError> {
        match self.pooler().task {
            Task::Embed { .. } => Ok(()),
            Task::Classify { .. } => {
                Err(ApiError::unsupported("model", format!("it has no embeddings; it serves {}", self.serves())))
            }
        }
    }

    /// The routes of a model that pools.
    pub fn serves(&self) -> &'static str {
        match &self.pooler().task {
            Task::Embed { .. } => "/v1/embeddings, /pooling, /score and /rerank",
            Task::Classify { labels, .. } if labels.len() == 1 => "/classify, /pooling, /score and /rerank",
            Task::Classify { .. } => "/classify and /pooling",
        }
    }

    /// Token ids of a text. `param` is its field, for errors. With `must_fit`, a text longer than the context is
    /// rejected early, as far as its bytes tell; the caller would reject it anyway.
    pub fn encode(&self, text: &str, add_special: bool, param: &str, must_fit: bool) -> Result<Vec<u32>, ApiError> {
        self.check_client()?;
        let (found, most) = (text.len(), self.options.limits.max_text_bytes);
        if found > most {
            let advice = "send a shorter text or raise --max-text-bytes";
            return Err(ApiError::over(param, found, most, "bytes of text", advice));
        }
        let least = self.tokenizer().least_tokens(found);
        if must_fit && least > self.longest_prompt() {
            return Err(too_long(self, least, "at least ", param));
        }
        let most_tokens = if must_fit { self.context() } else { self.options.limits.max_request_tokens };
        let go_on = |tokens| tokens < most_tokens && self.check_client().is_ok();
        let result = self.tokenizer().encode_while(text, add_special, most / UNSPLIT_DIVISOR, go_on);
        result.map_err(|error| match (self.check_client(), error) {
            (Err(disconnected), _) => disconnected,
            (Ok(()), TokenizeError::Stopped(tokens)) if must_fit => too_long(self, tokens, "at least ", param),
            (Ok(()), TokenizeError::Stopped(tokens)) => {
                let advice = "send a shorter text or raise --max-request-tokens";
                ApiError::over(param, tokens, most_tokens, "tokens or more", advice)
            }
            (Ok(()), TokenizeError::TooLong { found, most }) => {
                let advice = "send a shorter text or raise --max-text-bytes, of which this is a sixteenth";
                ApiError::over(param, found, most, "bytes of text that the tokenizer cannot cut", advice)
            }
            (Ok(()), error) => ApiError::invalid(param, error),
        })
    }
}

/// Error for a prompt of `length` tokens, or of `at_least` so many, that does not fit the context.
pub fn too_long(app: &App, length: usize, at_least: &str, param: &str) -> ApiError {
    let (context, most) = (app.context(), app.longest_prompt());
    let problem = format!("found a prompt of {at_least}{length} tokens, expected at most {most}; shorten the prompt");
    ApiError::context_length(param, context, problem).with_excess(length, most)
}
