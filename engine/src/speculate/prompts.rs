//! What a proposer knows of prompts: computed once for a request and shared by its sequences.

use std::collections::HashMap;
use std::sync::Arc;

use sched::{RequestId, SeqId};

/// See the [module](self).
pub(super) struct Prompts<T>(HashMap<RequestId, Arc<T>>);

impl<T> Prompts<T> {
    pub fn new() -> Prompts<T> {
        Prompts(HashMap::new())
    }

    /// Returns what is known of the prompt of a sequence; `read` is called for the first sequence of a request.
    pub fn begin(&mut self, seq: SeqId, read: impl FnOnce() -> T) -> Arc<T> {
        self.0.entry(seq.request).or_insert_with(|| Arc::new(read())).clone()
    }

    /// A sequence has ended; `prompt` is what it got.
    pub fn end(&mut self, seq: SeqId, prompt: Arc<T>) {
        drop(prompt);
        if self.0.get(&seq.request).is_some_and(|prompt| Arc::strong_count(prompt) == 1) {
            self.0.remove(&seq.request);
        }
    }
}
