//! The last messages, for replay. Bounded in number and in bytes.

use std::collections::VecDeque;
use std::sync::Arc;

/// Greatest size in bytes of the buffered messages. A request for older ones is answered by a snapshot, so nothing is lost.
pub const MAX_BYTES: usize = 64 << 20;

/// A published message: its sequence number and its payload.
pub type Message = (u64, Arc<[u8]>);

/// Consecutive messages up to the last one.
pub struct Buffer {
    messages: VecDeque<Message>,
    most: usize,
    bytes: usize,
}

impl Buffer {
    pub fn new(most: usize) -> Buffer {
        Buffer { messages: VecDeque::new(), most, bytes: 0 }
    }

    /// Adds the next message, and drops the oldest ones that exceed a limit.
    pub fn push(&mut self, message: Message) {
        self.bytes += message.1.len();
        self.messages.push_back(message);
        while self.messages.len() > self.most || self.bytes > MAX_BYTES {
            let Some((_, payload)) = self.messages.pop_front() else { break };
            self.bytes -= payload.len();
        }
    }

    /// The messages from `first` on; `None` if the buffer no longer has all of them. `next` is the number of the next message.
    pub fn since(&self, first: u64, next: u64) -> Option<Vec<Message>> {
        let oldest = self.messages.front().map_or(next, |(seq, _)| *seq);
        let skip = usize::try_from(first.checked_sub(oldest)?).unwrap_or(usize::MAX);
        Some(self.messages.iter().skip(skip).cloned().collect())
    }
}
