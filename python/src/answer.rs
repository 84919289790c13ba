//! What a stream returns, as Python objects. Numbers are bytes in the machine's order, which `memoryview.cast` and NumPy read in place.

use engine::{Delta, Event, FinishReason, StopCause, TokenLogprobs, TokenOutput};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// What a request has gained since the last answer.
#[pyclass(frozen, get_all, module = "quire._quire")]
pub struct Answer {
    /// Index of the request among those submitted together.
    request: usize,
    /// Number of prompt tokens that came from the prefix cache, if the prompt was computed since.
    cached_tokens: Option<usize>,
    /// Log-probabilities of the prompt, without its first token, if they were requested.
    prompt_logprobs: Option<Py<Logprobs>>,
    /// The embedding as float32, if it was requested.
    embedding: Option<Py<PyBytes>>,
    /// What sequences have gained, in the order of their indices.
    sequences: Vec<Py<Sequence>>,
    /// Whether all sequences have ended.
    finished: bool,
}

/// What a sequence has gained.
#[pyclass(frozen, get_all, module = "quire._quire")]
pub struct Sequence {
    /// Index of the sequence, below `n`.
    index: u32,
    /// Text.
    text: String,
    /// Token ids as uint32.
    token_ids: Py<PyBytes>,
    /// Log-probabilities of the tokens, if they were requested.
    logprobs: Option<Py<Logprobs>>,
    /// `"stop"` or `"length"`, if the sequence has ended.
    finish_reason: Option<&'static str>,
    /// The stop token that ended it.
    stop_token: Option<u32>,
    /// The stop string that ended it.
    stop_text: Option<String>,
}

/// Log-probabilities of tokens.
#[pyclass(frozen, get_all, module = "quire._quire")]
pub struct Logprobs {
    /// Of each token, as float32.
    logprobs: Py<PyBytes>,
    /// Of each token: 1 + the number of likelier ones, as uint32.
    ranks: Py<PyBytes>,
    /// Number of alternatives of each token, as uint32.
    counts: Py<PyBytes>,
    /// Ids of all alternatives, most likely first, as uint32.
    top_token_ids: Py<PyBytes>,
    /// Log-probabilities of all alternatives, as float32.
    top_logprobs: Py<PyBytes>,
}

impl Logprobs {
    fn new<'a>(py: Python<'_>, all: impl Iterator<Item = &'a TokenLogprobs> + Clone) -> PyResult<Py<Logprobs>> {
        let top = || all.clone().flat_map(|one| &one.top);
        let made = Logprobs {
            logprobs: bytes(py, all.clone().map(|one| one.logprob.to_ne_bytes())),
            ranks: bytes(py, all.clone().map(|one| u32::try_from(one.rank).unwrap_or(u32::MAX).to_ne_bytes())),
            counts: bytes(py, all.clone().map(|one| (one.top.len() as u32).to_ne_bytes())),
            top_token_ids: bytes(py, top().map(|(id, _)| id.to_ne_bytes())),
            top_logprobs: bytes(py, top().map(|(_, logprob)| logprob.to_ne_bytes())),
        };
        Py::new(py, made)
    }
}

/// Numbers as bytes.
pub fn bytes(py: Python<'_>, numbers: impl Iterator<Item = [u8; 4]>) -> Py<PyBytes> {
    let all: Vec<[u8; 4]> = numbers.collect();
    PyBytes::new(py, all.as_flattened()).unbind()
}

/// Events of a request that have not been returned.
#[derive(Default)]
pub struct Pending {
    cached_tokens: Option<usize>,
    prompt_logprobs: Option<Vec<Option<TokenLogprobs>>>,
    embedding: Option<Vec<f32>>,
    deltas: Vec<Delta>,
    /// Number of sequences that have not ended.
    open: usize,
    is_new: bool,
}

impl Pending {
    /// A request with `n` sequences.
    pub fn new(n: usize) -> Pending {
        Pending { open: n, ..Pending::default() }
    }

    /// Adds the next event.
    pub fn add(&mut self, event: Event) {
        self.is_new = true;
        match event {
            Event::PromptLogprobs(all) => self.prompt_logprobs = Some(all),
            Event::Embedding(vector) => self.embedding = Some(vector),
            Event::Started { cached_tokens } => self.cached_tokens = Some(cached_tokens),
            Event::Delta(delta) => {
                self.open -= usize::from(delta.finish.is_some()).min(self.open);
                match self.deltas.iter_mut().find(|known| known.index == delta.index) {
                    Some(known) => known.extend(delta),
                    None => self.deltas.push(delta),
                }
            }
        }
    }

    /// Whether there is an answer: what came since the last one, or with `whole` only once all sequences have ended.
    pub fn is_due(&self, whole: bool) -> bool {
        self.is_new && (!whole || self.open == 0)
    }

    /// Takes the answer of the request with this index.
    pub fn take(&mut self, py: Python<'_>, request: usize) -> PyResult<Answer> {
        self.is_new = false;
        self.deltas.sort_by_key(|delta| delta.index);
        let prompt = self.prompt_logprobs.take();
        let prompt = prompt.map(|all| Logprobs::new(py, all.iter().flatten())).transpose()?;
        let embedding = self.embedding.take().map(|vector| bytes(py, vector.iter().map(|x| x.to_ne_bytes())));
        let sequences = self.deltas.drain(..).map(|delta| sequence(py, delta)).collect::<PyResult<_>>()?;
        Ok(Answer {
            request,
            cached_tokens: self.cached_tokens.take(),
            prompt_logprobs: prompt,
            embedding,
            sequences,
            finished: self.open == 0,
        })
    }
}

fn sequence(py: Python<'_>, delta: Delta) -> PyResult<Py<Sequence>> {
    let tokens = &delta.tokens;
    let all = || tokens.iter().filter_map(|token: &TokenOutput| token.logprobs.as_ref());
    let logprobs = all().next().map(|_| Logprobs::new(py, all())).transpose()?;
    let (finish_reason, cause) = match delta.finish {
        None => (None, None),
        Some(FinishReason::Length) => (Some("length"), None),
        Some(FinishReason::Stop(cause)) => (Some("stop"), cause),
        // A failure is an exception.
        Some(FinishReason::Grammar(_) | FinishReason::Error(_)) => (Some("error"), None),
    };
    let (stop_token, stop_text) = match cause {
        Some(StopCause::Token(id)) => (Some(id), None),
        Some(StopCause::Text(text)) => (None, Some(text)),
        Some(StopCause::Complete) | None => (None, None),
    };
    let token_ids = bytes(py, tokens.iter().map(|token| token.id.to_ne_bytes()));
    let (index, text) = (delta.index, delta.text);
    Py::new(py, Sequence { index, text, token_ids, logprobs, finish_reason, stop_token, stop_text })
}
