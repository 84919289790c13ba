//! The events of a [`Run`] as the events of an API.
//!
//! Invalid requests are rejected with a status before the stream begins. If the engine fails later, the stream ends with an
//! error. Events are pulled as the client reads.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::response::Response;
use engine::{Delta, Event, TokenLogprobs};

use super::run::{self, Run, Usage};
use crate::http::ApiError;
use crate::http::sse::{self, EventSource, Framing};

/// Deltas with more tokens than this, such as those of a beam search, are written while another thread serves
/// connections.
const LARGE_DELTA: usize = 32;

/// Work that ends a stream.
pub type Settling = Pin<Box<dyn Future<Output = Result<(), ApiError>> + Send>>;

/// Translates the events of the engine to those of an API.
pub trait Translator: Send + Unpin + 'static {
    /// How the stream is written.
    const FRAMING: Framing = Framing::EVENTS;

    /// The token counts so far, which already include what the other functions receive.
    fn usage(&mut self) -> &mut Usage;

    /// Receives the news that a prompt has been computed.
    fn started(&mut self) {}

    /// Receives the log probabilities of a prompt, before its first delta.
    fn prompt_logprobs(&mut self, _prompt: usize, _logprobs: Vec<Option<TokenLogprobs>>) {}

    /// Receives new tokens of a sequence.
    fn delta(&mut self, prompt: usize, delta: &Delta);

    /// Receives the end: all sequences have ended, or there is a failure.
    fn end(&mut self, failure: Option<ApiError>);

    /// Work between the end and the last events, if there is any.
    fn settle(&mut self) -> Option<Settling> {
        None
    }

    /// Receives the result of that work.
    fn settled(&mut self, _result: Result<(), ApiError>) {}

    /// Appends the next events to be sent; `false` if there are none.
    fn write(&mut self, lines: &mut Vec<u8>) -> bool;
}

/// Hands an event to a translator.
pub fn translate(translator: &mut impl Translator, run: &Run, prompt: usize, event: Event) -> Result<(), ApiError> {
    match event {
        Event::PromptLogprobs(logprobs) => translator.prompt_logprobs(prompt, logprobs),
        // A request for an embedding has no other events.
        Event::Embedding(_) => {}
        Event::Started { cached_tokens } => {
            translator.usage().cached_tokens += cached_tokens;
            translator.started();
        }
        Event::Delta(delta) => {
            let usage = translator.usage();
            usage.completion_tokens += delta.tokens.len();
            usage.drafts += delta.drafts;
            usage.reasoning_tokens = run.reasoning_tokens();
            run::failed(&delta)?;
            // Other tasks of this thread continue on another one.
            match delta.tokens.len() > LARGE_DELTA {
                true => tokio::task::block_in_place(|| translator.delta(prompt, &delta)),
                false => translator.delta(prompt, &delta),
            }
        }
    }
    Ok(())
}

/// Translates all events of a run, of which nothing is sent.
pub async fn finish(mut run: Run, translator: &mut impl Translator) -> Result<(), ApiError> {
    while let Some((prompt, event)) = run.next().await {
        translate(translator, &run, prompt, event)?;
    }
    run.failure().map_or(Ok(()), Err)?;
    if let Some(settling) = translator.settle() {
        let result = settling.await;
        translator.settled(result);
    }
    Ok(())
}

/// The response that streams a run.
pub fn respond(run: Run, translator: impl Translator) -> Response {
    sse::respond(TranslatedRun { run: Some(run), settling: None, translator })
}

struct TranslatedRun<T> {
    /// `None` after its end. Dropping it cancels the rest of it.
    run: Option<Run>,
    settling: Option<Settling>,
    translator: T,
}

impl<T: Translator> EventSource for TranslatedRun<T> {
    const FRAMING: Framing = T::FRAMING;

    fn poll_events(&mut self, cx: &mut Context<'_>, lines: &mut Vec<u8>) -> Poll<bool> {
        let TranslatedRun { run, settling, translator } = self;
        if let Some(work) = settling {
            let result = ready!(work.as_mut().poll(cx));
            translator.settled(result);
            *settling = None;
        }
        if translator.write(lines) {
            return Poll::Ready(true);
        }
        let Some(running) = run else { return Poll::Ready(false) };
        let failure = match ready!(running.poll_next(cx)) {
            Some((prompt, event)) => translate(translator, running, prompt, event).err().map(Some),
            None => Some(running.failure()),
        };
        if let Some(failure) = failure {
            translator.end(failure);
            *run = None;
            *settling = translator.settle();
        }
        // The last events wait for the work.
        if settling.is_none() {
            translator.write(lines);
        }
        Poll::Ready(true)
    }
}
