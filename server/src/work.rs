//! The work on a request before the engine has it: parsing, rendering and tokenising, on threads that serve nobody else.
//!
//! Bodies go by size into lanes with threads of their own, so that a small request never waits behind a large one, and so
//! that few large ones are in memory as values at once. Work whose client has left ends at its next text.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use engine::TokenizeError;

use super::app::App;
use super::error::ApiError;

/// Text that a tokenizer has to take at once may have this part of the bytes of other text.
const WHOLE: usize = 16;

/// A request that is being read: the server's state, and whether its client still waits.
pub struct Work {
    /// The server's state.
    pub app: Arc<App>,
    gone: Arc<AtomicBool>,
}

/// Held by whoever waits for the work; dropping it ends the work.
pub struct Waiting(Arc<AtomicBool>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

impl Deref for Work {
    type Target = App;

    fn deref(&self) -> &App {
        &self.app
    }
}

impl Work {
    /// Work that goes on while the second value lives.
    pub fn new(app: Arc<App>) -> (Work, Waiting) {
        let gone = Arc::new(AtomicBool::new(false));
        (Work { app, gone: gone.clone() }, Waiting(gone))
    }

    /// An error, which nobody will read, once the client has left.
    pub fn check_client(&self) -> Result<(), ApiError> {
        if self.gone.load(Ordering::Acquire) { Err(ApiError::unavailable("the client has left")) } else { Ok(()) }
    }

    /// The token ids of a text. `param` is its field, for the error; `must_fit` where a text that is longer than the context
    /// would be refused afterwards: then it is refused before, as far as its bytes tell.
    pub fn encode(&self, text: &str, add_special: bool, param: &str, must_fit: bool) -> Result<Vec<u32>, ApiError> {
        self.check_client()?;
        let (found, most) = (text.len(), self.limits.max_text_bytes);
        if found > most {
            return Err(ApiError::over(param, found, most, "bytes of text", "send a shorter text (--max-text-bytes)"));
        }
        let least = self.tokenizer().least_tokens(found);
        if must_fit && least >= self.context() {
            return Err(too_long(self, &format!("at least {least}"), param));
        }
        let room = if must_fit { self.context() } else { self.limits.max_request_tokens };
        let go_on = |tokens| tokens < room && self.check_client().is_ok();
        self.tokenizer().encode_while(text, add_special, most / WHOLE, go_on).map_err(|error| {
            let Err(left) = self.check_client() else {
                return match error {
                    TokenizeError::Stopped(tokens) if must_fit => too_long(self, &format!("at least {tokens}"), param),
                    TokenizeError::Stopped(tokens) => {
                        let advice = "send a shorter text (--max-request-tokens)";
                        ApiError::over(param, tokens, room, "tokens or more", advice)
                    }
                    error => ApiError::invalid(param, error),
                };
            };
            left
        })
    }
}

/// The error for a prompt that does not fit the context. `length` is its number of tokens.
pub fn too_long(app: &App, length: &str, param: &str) -> ApiError {
    let context = app.context();
    let message = format!(
        "the context length is {context} tokens, the prompt has {length} and needs room for one more; shorten it"
    );
    ApiError::context_length(param, message)
}
