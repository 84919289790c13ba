//! Answers that are returned together after the last sequence has ended: the best of several samples, and the results of a beam
//! search.

use crate::api::{Delta, FinishReason, GenerationParams};

/// The output of a request that is not returned yet.
pub(crate) struct AnswerBuffer {
    /// One per sequence, by index.
    answers: Vec<Delta>,
    /// Number of candidates to return after ranking them; `None` for a beam search, whose results are ranked already.
    best: Option<usize>,
    show_logprobs: bool,
}

impl AnswerBuffer {
    /// Creates a buffer; `None` for a request whose output is streamed. Candidates are ranked by log-probability: if the caller
    /// asked for none, they are switched on here and removed from the answer.
    pub fn new(params: &mut GenerationParams) -> Option<AnswerBuffer> {
        let best = params.best_of.filter(|&candidates| candidates > params.n).map(|_| params.n);
        if best.is_none() && params.beam.is_none() {
            return None;
        }
        let show_logprobs = params.sampling.logprobs.is_some();
        if best.is_some() {
            params.sampling.logprobs.get_or_insert(0);
        }
        Some(AnswerBuffer { answers: Vec::new(), best, show_logprobs })
    }

    /// Appends output of a sequence.
    pub fn add(&mut self, delta: Delta) {
        let index = delta.index as usize;
        for index in self.answers.len()..=index {
            self.answers.push(Delta { index: index as u32, ..Delta::default() });
        }
        self.answers[index].extend(delta);
    }

    /// Takes the answers, each as one delta, numbered from the best.
    pub fn take(&mut self) -> Vec<Delta> {
        let mut answers = std::mem::take(&mut self.answers);
        if let Some(n) = self.best {
            // The sort is stable, so of equal candidates the first one wins. A failure concerns the whole request, so it ranks
            // first and is always returned.
            answers.sort_by(|a, b| failed(b).cmp(&failed(a)).then(mean_logprob(b).total_cmp(&mean_logprob(a))));
            answers.truncate(n);
        }
        for (answer, index) in answers.iter_mut().zip(0..) {
            answer.index = index;
            if !self.show_logprobs {
                answer.tokens.iter_mut().for_each(|token| token.logprobs = None);
            }
        }
        answers
    }
}

fn failed(answer: &Delta) -> bool {
    matches!(answer.finish, Some(FinishReason::Grammar(_) | FinishReason::Error(_)))
}

/// Mean log-probability per token, by which OpenAI's reference ranks `best_of`; 0 without tokens.
fn mean_logprob(answer: &Delta) -> f64 {
    let logprobs = answer.tokens.iter().filter_map(|token| token.logprobs.as_ref());
    let sum: f64 = logprobs.map(|logprobs| f64::from(logprobs.logprob)).sum();
    sum / answer.tokens.len().max(1) as f64
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::api::TokenOutput;
    use sampling::TokenLogprobs;

    fn candidate(index: u32, logprob: f32, finish: FinishReason) -> Delta {
        let logprobs = Some(TokenLogprobs { logprob, rank: 1, top: Vec::new() });
        let tokens = vec![TokenOutput { id: index, logprobs, text_offset: 0 }];
        Delta { index, tokens, finish: Some(finish), ..Delta::default() }
    }

    #[test]
    fn a_failure_ranks_first_and_equal_candidates_keep_their_order() {
        let mut params = GenerationParams { n: 3, best_of: Some(4), ..Default::default() };
        let mut buffer = AnswerBuffer::new(&mut params).unwrap();
        let error = FinishReason::Error("no device".into());
        buffer.add(candidate(3, -9.0, error));
        (0..3).for_each(|index| buffer.add(candidate(index, -1.0, FinishReason::Length)));
        let order: Vec<(u32, u32)> = buffer.take().iter().map(|answer| (answer.index, answer.tokens[0].id)).collect();
        assert_eq!(order, [(0, 3), (1, 0), (2, 1)]);
    }
}
