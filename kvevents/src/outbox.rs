//! What is written to one peer next.
//!
//! It holds a copy of at most [`CHUNK`] bytes of one message, and small messages before it, but never a message itself. So a peer that
//! reads slowly keeps no message in memory. A longer message that is dropped while a peer reads it ends the connection, since the rest
//! of its frame cannot be sent any more.

use std::io::{Error, Result};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use crate::journal::Payload;
use crate::zmtp;

/// Greatest number of bytes of a message that are copied at a time. Most messages are shorter.
const CHUNK: usize = 64 << 10;

/// Size in bytes above which small messages are no longer joined.
const JOINED: usize = 16 << 10;

/// See the [module](self).
pub struct Outbox<W> {
    to: W,
    /// Time in which the peer has to read a chunk.
    stall: Duration,
    bytes: Vec<u8>,
    /// The message that is being written, and the number of its bytes that were copied.
    rest: Option<(Weak<Vec<u8>>, usize)>,
}

impl<W: AsyncWrite + Unpin> Outbox<W> {
    pub fn new(to: W, stall: Duration) -> Outbox<W> {
        Outbox { to, stall, bytes: Vec::new(), rest: None }
    }

    /// Whether [`Outbox::flush`] has to be called before another message is pushed.
    pub fn is_full(&self) -> bool {
        self.rest.is_some() || self.bytes.len() > JOINED
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Adds a message: the frames `before`, then topic, sequence number and payload.
    pub fn push(&mut self, before: &[&[u8]], topic: &str, seq: u64, payload: &Payload) {
        before.iter().for_each(|frame| zmtp::push_frame(&mut self.bytes, frame, true));
        zmtp::push_frame(&mut self.bytes, topic.as_bytes(), true);
        zmtp::push_frame(&mut self.bytes, &seq.to_be_bytes(), true);
        zmtp::push_head(&mut self.bytes, payload.len(), 0);
        self.copy(payload, 0);
    }

    /// Adds a command.
    pub fn push_command(&mut self, command: &[u8]) {
        self.bytes.extend_from_slice(command);
    }

    /// Copies the next chunk of a message.
    fn copy(&mut self, payload: &Payload, from: usize) {
        let end = payload.len().min(from + CHUNK);
        self.bytes.extend_from_slice(&payload[from..end]);
        self.rest = (end < payload.len()).then(|| (Arc::downgrade(payload), end));
    }

    /// Writes everything. Every write has a deadline, so a peer that does not read is an error.
    pub async fn flush(&mut self) -> Result<()> {
        loop {
            timeout(self.stall, self.to.write_all(&self.bytes))
                .await
                .map_err(|_| Error::other("it stopped reading"))??;
            self.bytes.clear();
            let Some((payload, from)) = self.rest.take() else { return Ok(()) };
            let payload =
                payload.upgrade().ok_or_else(|| Error::other("it read a message so slowly that it was dropped"))?;
            self.copy(&payload, from);
        }
    }
}
