//! Token events become text events: each sequence has a text stream, and a stop string in its text ends it. Answers that are
//! returned together are buffered until all have ended.

use std::collections::{HashMap, VecDeque};
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use sampling::Constraint;
use sched::RequestId;
use text::{TextStream, ThinkingBudget, Tokenizer};

use crate::api::{Delta, Event, FinishReason, GenerationRequest, StopCause, TokenEvent, TokenOutput};
use crate::error::SubmitError;
use crate::serve::answer_buffer::AnswerBuffer;
use crate::serve::constraint::ThinkingConstraint;
use crate::serve::later_sequences::LaterSequences;
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
    /// Number of sequences that have not ended.
    open: usize,
    buffer: Option<AnswerBuffer>,
    later: Option<LaterSequences>,
}

/// An [`Engine`] whose events carry text. What concerns requests, submissions, aborts and steps, is here; the rest is the engine's own.
pub(crate) struct TextEngine {
    engine: Engine,
    tokenizer: Arc<Tokenizer>,
    live: HashMap<RequestId, RequestTexts>,
    /// The request and the number of each [later sequence](LaterSequences) in the engine.
    later: HashMap<RequestId, (RequestId, u32)>,
    /// Sequences in whose text the current step completed a stop string, as the engine numbers them.
    stopped: Vec<(RequestId, u32)>,
    /// Requests with later sequences, one of which can be submitted: once for each sequence that ended in the current step.
    continued: VecDeque<RequestId>,
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
        TextEngine {
            engine,
            tokenizer,
            live: HashMap::new(),
            later: HashMap::new(),
            stopped: Vec::new(),
            continued: VecDeque::new(),
        }
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
        let mut later = LaterSequences::split(&mut request, constraint.as_deref(), self.engine.max_num_seqs());
        let id = match constraint {
            Some(constraint) => self.engine.submit_constrained(request, constraint)?,
            None => self.engine.submit(request)?,
        };
        // The engine has checked `n`, so the list is bounded.
        let sequences = (0..n).map(|_| Some(SequenceText { stream: stream.clone(), show_stop })).collect();
        later.iter_mut().for_each(|later| later.follow(&self.engine, id));
        self.live.insert(id, RequestTexts { sequences, open: n, buffer, later });
        Ok(id)
    }

    pub fn abort(&mut self, id: RequestId) {
        self.engine.abort(id);
        if self.live.remove(&id).is_some_and(|request| request.later.is_some()) {
            let of_request = |_: &RequestId, (first, _): &mut (RequestId, u32)| *first == id;
            self.later.extract_if(of_request).for_each(|(id, _)| _ = self.engine.abort(id));
        }
    }

    /// Cancels all requests.
    pub fn abort_all(&mut self) {
        let later = self.later.drain().map(|(id, _)| id);
        for id in self.live.drain().map(|(id, _)| id).chain(later) {
            self.engine.abort(id);
        }
    }

    /// Runs one step, or only completes the steps in flight. `emit` gets every event in order, and whether it is the request's last.
    pub fn step(&mut self, next: NextStep, mut emit: impl FnMut(RequestId, Event, bool)) {
        self.advance(next, &mut emit);
    }

    fn advance(&mut self, next: NextStep, emit: &mut dyn FnMut(RequestId, Event, bool)) {
        let TextEngine { engine, live, later, stopped, continued, .. } = self;
        let on_event = |engine_id, event| {
            let (id, number) = later.get(&engine_id).copied().unwrap_or((engine_id, 0));
            let Some(request) = live.get_mut(&id) else { return };
            let (index, token, finish, drafts) = match event {
                // The first sequences have said it.
                _ if number > 0 && !matches!(event, TokenEvent::Token { .. }) => return,
                TokenEvent::PromptLogprobs(scores) => return emit(id, Event::PromptLogprobs(scores), false),
                TokenEvent::Embedding(vector) => return emit(id, Event::Embedding(vector), false),
                TokenEvent::Started { cached_tokens } => return emit(id, Event::Started { cached_tokens }, false),
                TokenEvent::Token { index, token, finish, drafts } => (index, token, finish, drafts),
            };
            let Some(text) = request.text(number + index) else { return };
            let is_live = finish.is_none();
            let mut delta = text.add_token(number + index, token, finish);
            delta.drafts = drafts;
            if delta.finish.is_some() {
                if is_live {
                    stopped.push((engine_id, index));
                }
                later.remove(&engine_id);
                continued.extend(request.later.is_some().then_some(id));
            }
            if request.deliver(id, delta, emit) {
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
        while let Some(id) = continued.pop_front() {
            let Some(request) = live.get_mut(&id) else { continue };
            match request.later.as_mut().and_then(|sequences| sequences.next(engine)) {
                None => {}
                Some((number, Ok(engine_id))) => drop(later.insert(engine_id, (id, number))),
                Some((number, Err(error))) => {
                    let finish = Some(FinishReason::Error(error.to_string()));
                    continued.push_back(id);
                    if request.deliver(id, Delta { index: number, finish, ..Delta::default() }, emit) {
                        live.remove(&id);
                    }
                }
            }
        }
    }
}

impl RequestTexts {
    fn text(&mut self, index: u32) -> Option<&mut SequenceText> {
        self.sequences.get_mut(index as usize)?.as_mut()
    }

    /// Passes on output of a sequence, or buffers it. Returns whether the request has ended.
    fn deliver(&mut self, id: RequestId, delta: Delta, emit: &mut dyn FnMut(RequestId, Event, bool)) -> bool {
        if delta.finish.is_some() {
            self.sequences[delta.index as usize] = None;
            self.open -= 1;
        }
        let last = self.open == 0;
        match &mut self.buffer {
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
        last
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
