//! Token events become text events: each sequence has a text stream, and a stop string in its text ends it. Answers that are
//! returned together are buffered until all have ended.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use sampling::Constraint;
use sched::RequestId;
use text::{TextStream, ThinkingBudget, Tokenizer};

use crate::api::{Delta, Event, FinishReason, GenerationRequest, StopCause, TokenEvent, TokenOutput};
use crate::error::SubmitError;
use crate::serve::answer_buffer::AnswerBuffer;
use crate::serve::constraint::ThinkingConstraint;
use crate::step::Engine;

/// The text of one sequence.
struct SequenceText {
    stream: TextStream,
    /// The text includes that of a stop token.
    show_stop: bool,
}

/// Whether a step is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextStep {
    Planned,
    /// Only the steps in flight are completed.
    None,
}

/// A request that has not ended.
struct RequestTexts {
    /// `None` once the sequence has ended.
    sequences: Vec<Option<SequenceText>>,
    buffer: Option<AnswerBuffer>,
}

/// An [`Engine`] whose events carry text. What concerns requests, submissions, aborts and steps, is here; the rest is the engine's own.
pub(crate) struct TextEngine {
    engine: Engine,
    tokenizer: Arc<Tokenizer>,
    live: HashMap<RequestId, RequestTexts>,
    /// Sequences in whose text the current step completed a stop string.
    stopped: Vec<(RequestId, u32)>,
}

impl Deref for TextEngine {
    type Target = Engine;

    fn deref(&self) -> &Engine {
        &self.engine
    }
}

impl DerefMut for TextEngine {
    fn deref_mut(&mut self) -> &mut Engine {
        &mut self.engine
    }
}

impl TextEngine {
    pub fn new(engine: Engine, tokenizer: Arc<Tokenizer>) -> TextEngine {
        TextEngine { engine, tokenizer, live: HashMap::new(), stopped: Vec::new() }
    }

    pub fn submit(
        &mut self,
        mut request: GenerationRequest,
        constraint: Option<Box<dyn Constraint>>,
    ) -> Result<RequestId, SubmitError> {
        let buffer = AnswerBuffer::new(&mut request.params);
        let params = &request.params;
        let (n, show_stop) = (params.best_of.unwrap_or(params.n), params.include_stop_str_in_output);
        let stream = TextStream::new(self.tokenizer.clone(), &request.prompt, params.stream());
        let constraint = match request.params.thinking.take() {
            Some(limit) => {
                let budget = ThinkingBudget::new(limit, self.tokenizer.clone(), &request.prompt);
                let vocab_size = self.engine.vocab_size();
                Some(Box::new(ThinkingConstraint { budget, grammar: constraint, vocab_size }) as _)
            }
            None => constraint,
        };
        let id = match constraint {
            Some(constraint) => self.engine.submit_constrained(request, constraint)?,
            None => self.engine.submit(request)?,
        };
        // The engine has checked `n`, so the list is bounded.
        let sequences = (0..n).map(|_| Some(SequenceText { stream: stream.clone(), show_stop })).collect();
        self.live.insert(id, RequestTexts { sequences, buffer });
        Ok(id)
    }

    pub fn abort(&mut self, id: RequestId) {
        self.live.remove(&id);
        self.engine.abort(id);
    }

    /// Cancels all requests.
    pub fn abort_all(&mut self) {
        for (id, _) in self.live.drain() {
            self.engine.abort(id);
        }
    }

    /// Runs one step, or only completes the steps in flight. `emit` gets every event in order, and whether it is the request's last.
    pub fn step(&mut self, next: NextStep, mut emit: impl FnMut(RequestId, Event, bool)) {
        self.advance(next, &mut emit);
    }

    fn advance(&mut self, next: NextStep, emit: &mut dyn FnMut(RequestId, Event, bool)) {
        let TextEngine { engine, live, stopped, .. } = self;
        let on_event = |id, event| {
            let Some(RequestTexts { sequences, buffer }) = live.get_mut(&id) else { return };
            let delta = match event {
                TokenEvent::PromptLogprobs(scores) => return emit(id, Event::PromptLogprobs(scores), false),
                TokenEvent::Embedding(vector) => return emit(id, Event::Embedding(vector), false),
                TokenEvent::Started { cached_tokens } => return emit(id, Event::Started { cached_tokens }, false),
                TokenEvent::Token { index, token, finish, drafts } => {
                    let Some(text) = sequences.get_mut(index as usize).and_then(Option::as_mut) else { return };
                    let is_live = finish.is_none();
                    let mut delta = text.add_token(index, token, finish);
                    delta.drafts = drafts;
                    if delta.finish.is_some() {
                        sequences[index as usize] = None;
                        if is_live {
                            stopped.push((id, index));
                        }
                    }
                    delta
                }
            };
            let last = sequences.iter().all(Option::is_none);
            match buffer {
                None => emit(id, Event::Delta(delta), last),
                Some(buffer) => {
                    buffer.add(delta);
                    if last {
                        let answers = buffer.take();
                        let count = answers.len();
                        answers.into_iter().zip(1..).for_each(|(answer, i)| emit(id, Event::Delta(answer), i == count));
                    }
                }
            }
            if last {
                live.remove(&id);
            }
        };
        match next {
            NextStep::Planned => engine.step(on_event),
            NextStep::None => engine.finish_steps(on_event),
        }
        for (id, index) in stopped.drain(..) {
            engine.finish_sequence(id, index);
        }
    }
}

impl SequenceText {
    /// Returns what a token adds. A stop string in the text ends the sequence, whatever `finish` is.
    fn add_token(&mut self, index: u32, token: Option<sampling::Sampled>, finish: Option<FinishReason>) -> Delta {
        let mut delta = Delta { index, finish, ..Delta::default() };
        if let Some(token) = token {
            let ended = !matches!(delta.finish, Some(FinishReason::Stop(Some(StopCause::Complete))));
            let hidden = ended && matches!(delta.finish, Some(FinishReason::Stop(_))) && !self.show_stop;
            let mut text_offset = self.stream.offset();
            if !hidden {
                let added = self.stream.push(token.token);
                (delta.text, text_offset) = (added.text, added.offset);
                if let Some(stop) = added.stop {
                    delta.finish = Some(FinishReason::Stop(Some(StopCause::Text(stop))));
                }
            }
            delta.tokens.push(TokenOutput { id: token.token, logprobs: token.logprob, text_offset });
        }
        let by_text = matches!(&delta.finish, Some(FinishReason::Stop(Some(StopCause::Text(_)))));
        if delta.finish.is_some() && !by_text {
            delta.text += &self.stream.finish();
        }
        delta
    }
}
