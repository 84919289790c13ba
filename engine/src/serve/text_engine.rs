//! Token events become text events: each sequence has a text stream, and a stop string found there ends it. Answers that
//! come together are held until all have ended.

use std::collections::HashMap;
use std::sync::Arc;

use models::Tokenizer;
use sampling::Constraint;
use sched::RequestId;

use crate::api::{Delta, EngineStats, Event, FinishReason, GenerationRequest, StopCause, TokenEvent, TokenOutput};
use crate::error::SubmitError;
use crate::serve::held::Held;
use crate::step::{Engine, StepUnderWay};
use crate::text::TextStream;
use crate::watch::Snapshot;

/// Text of one sequence, until it ends.
struct Written {
    text: TextStream,
    /// Tokens that end the sequence show their text.
    show_stop: bool,
}

/// A request that has not ended.
struct Live {
    /// `None` once the sequence has ended.
    sequences: Vec<Option<Written>>,
    held: Option<Held>,
}

/// An [`Engine`] whose events carry text.
pub(crate) struct TextEngine {
    engine: Engine,
    tokenizer: Arc<Tokenizer>,
    live: HashMap<RequestId, Live>,
    /// Sequences whose text held a stop string in the step under way.
    stopped: Vec<(RequestId, u32)>,
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
        let held = Held::new(&mut request.params);
        let params = &request.params;
        let (n, show_stop) = (params.best_of.unwrap_or(params.n), params.include_stop_str_in_output);
        let text = TextStream::new(self.tokenizer.clone(), &request.prompt, params);
        let id = match constraint {
            Some(constraint) => self.engine.submit_constrained(request, constraint)?,
            None => self.engine.submit(request)?,
        };
        // Only now is n known to be a number that can be served.
        let sequences = (0..n).map(|_| Some(Written { text: text.clone(), show_stop })).collect();
        self.live.insert(id, Live { sequences, held });
        Ok(id)
    }

    pub fn abort(&mut self, id: RequestId) {
        self.live.remove(&id);
        self.engine.abort(id);
    }

    pub fn has_work(&self) -> bool {
        self.engine.has_work()
    }

    pub fn num_unfinished(&self) -> usize {
        self.engine.num_unfinished()
    }

    /// Number of tokens of the model's vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.engine.vocab_size()
    }

    pub fn stats(&self) -> EngineStats {
        self.engine.stats()
    }

    pub fn step_under_way(&self) -> StepUnderWay {
        self.engine.step_under_way()
    }

    pub fn scheduled(&self) -> &[RequestId] {
        self.engine.scheduled()
    }

    pub fn snapshot(&mut self) -> Snapshot {
        self.engine.snapshot()
    }

    /// One step; `emit` gets every event in order, and whether it was the request's last.
    pub fn step(&mut self, mut emit: impl FnMut(RequestId, Event, bool)) {
        let TextEngine { engine, live, stopped, .. } = self;
        engine.step(|id, event| {
            let Some(Live { sequences, held }) = live.get_mut(&id) else { return };
            let delta = match event {
                TokenEvent::PromptLogprobs(scores) => return emit(id, Event::PromptLogprobs(scores), false),
                TokenEvent::Embedding(vector) => return emit(id, Event::Embedding(vector), false),
                TokenEvent::Started { cached_tokens } => return emit(id, Event::Started { cached_tokens }, false),
                TokenEvent::Token { index, token, finish } => {
                    let Some(written) = sequences.get_mut(index as usize).and_then(Option::as_mut) else { return };
                    let found = finish.is_none();
                    let delta = written.add_token(index, token, finish);
                    if delta.finish.is_some() {
                        sequences[index as usize] = None;
                        if found {
                            stopped.push((id, index));
                        }
                    }
                    delta
                }
            };
            let last = sequences.iter().all(Option::is_none);
            match held {
                None => emit(id, Event::Delta(delta), last),
                Some(held) => {
                    held.add(delta);
                    if last {
                        let answers = held.release();
                        let count = answers.len();
                        answers.into_iter().zip(1..).for_each(|(answer, i)| emit(id, Event::Delta(answer), i == count));
                    }
                }
            }
            if last {
                live.remove(&id);
            }
        });
        for (id, index) in stopped.drain(..) {
            engine.finish_sequence(id, index);
        }
    }
}

impl Written {
    /// What a token adds. The text decides too: a stop string ends the sequence, whatever `finish` says.
    fn add_token(&mut self, index: u32, token: Option<sampling::Sampled>, finish: Option<FinishReason>) -> Delta {
        let mut delta = Delta { index, finish, ..Delta::default() };
        if let Some(token) = token {
            let ended = !matches!(delta.finish, Some(FinishReason::Stop(Some(StopCause::Complete))));
            let hidden = ended && matches!(delta.finish, Some(FinishReason::Stop(_))) && !self.show_stop;
            let mut text_offset = self.text.offset();
            if !hidden {
                let added = self.text.push(token.token);
                (delta.text, text_offset) = (added.text, added.offset);
                if let Some(stop) = added.stop {
                    delta.finish = Some(FinishReason::Stop(Some(StopCause::Text(stop))));
                }
            }
            delta.tokens.push(TokenOutput { id: token.token, logprobs: token.logprob, text_offset });
        }
        let by_text = matches!(&delta.finish, Some(FinishReason::Stop(Some(StopCause::Text(_)))));
        if delta.finish.is_some() && !by_text {
            delta.text += &self.text.finish();
        }
        delta
    }
}
