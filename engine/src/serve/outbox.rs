//! The engine's end of the streams. What a step emits for a stream is sent as one batch: the reader is woken once per step, however many
//! requests and sequences the stream has and however many tokens they gained.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use sched::RequestId;
use tokio::sync::mpsc;

use crate::api::Event;

/// What a step emitted for a stream.
pub(super) struct Batch {
    /// The end of the step.
    pub at: Instant,
    pub events: Vec<Emitted>,
}

/// An event of one of the requests of a stream.
pub(super) struct Emitted {
    /// Index of the request in the stream.
    pub request: usize,
    /// When the first step of the request began.
    pub scheduled: Option<Instant>,
    pub event: Event,
}

/// The sending end of a stream, for one of its requests.
#[derive(Clone)]
pub(super) struct BatchSender {
    /// Number of the stream, which all its requests share.
    pub stream: u64,
    /// Index of the request in the stream.
    pub request: usize,
    pub sender: mpsc::Sender<Batch>,
    pub fell_behind: Arc<AtomicBool>,
}

struct Recipient {
    stream: u64,
    request: usize,
    scheduled: Option<Instant>,
}

struct OpenStream {
    sender: BatchSender,
    /// Number of its requests that have not ended.
    open: usize,
    /// Events of the current step.
    events: Vec<Emitted>,
}

/// The streams of all requests that have not ended.
#[derive(Default)]
pub(super) struct Outbox {
    recipients: HashMap<RequestId, Recipient>,
    streams: HashMap<u64, OpenStream>,
    /// Streams with events of the current step.
    pending: Vec<u64>,
}

impl Outbox {
    /// Adds a request.
    pub fn open(&mut self, id: RequestId, sender: BatchSender) {
        let (stream, request) = (sender.stream, sender.request);
        self.recipients.insert(id, Recipient { stream, request, scheduled: None });
        self.streams.entry(stream).or_insert(OpenStream { sender, open: 0, events: Vec::new() }).open += 1;
    }

    /// Removes a request. Returns whether it was open. Events of the current step are still sent.
    pub fn close(&mut self, id: RequestId) -> bool {
        let Some(recipient) = self.recipients.remove(&id) else { return false };
        if let Some(stream) = self.streams.get_mut(&recipient.stream) {
            stream.open -= 1;
            if stream.open == 0 && stream.events.is_empty() {
                self.streams.remove(&recipient.stream);
            }
        }
        true
    }

    /// Records that the first step of a request began.
    pub fn scheduled(&mut self, id: RequestId, began: Instant) {
        if let Some(recipient) = self.recipients.get_mut(&id) {
            recipient.scheduled.get_or_insert(began);
        }
    }

    /// Adds an event of the current step, which may be the last of its request. Tokens of one sequence become one event.
    pub fn add(&mut self, id: RequestId, event: Event, is_last: bool) {
        let Some(&Recipient { stream, request, scheduled }) = self.recipients.get(&id) else { return };
        let Some(OpenStream { events, .. }) = self.streams.get_mut(&stream) else { return };
        if events.is_empty() {
            self.pending.push(stream);
        }
        match (events.last_mut(), event) {
            (Some(Emitted { request: last, event: Event::Delta(before), .. }), Event::Delta(delta))
                if *last == request && before.index == delta.index =>
            {
                before.extend(delta);
            }
            (_, event) => events.push(Emitted { request, scheduled, event }),
        }
        if is_last {
            self.close(id);
        }
    }

    /// Sends the events of the step that ended `at`. Returns the requests of streams whose reader is gone or has fallen behind.
    pub fn send(&mut self, at: Instant) -> Vec<RequestId> {
        let mut lost = Vec::new();
        for number in self.pending.drain(..) {
            let Some(stream) = self.streams.get_mut(&number) else { continue };
            let events = std::mem::take(&mut stream.events);
            let is_sent = stream.sender.send(Batch { at, events });
            if stream.open == 0 {
                self.streams.remove(&number);
            } else if !is_sent {
                let requests = self.recipients.iter().filter(|(_, recipient)| recipient.stream == number);
                lost.extend(requests.map(|(&id, _)| id));
            }
        }
        lost
    }
}

impl BatchSender {
    /// Returns `false` if the reader is gone or has fallen behind.
    fn send(&self, batch: Batch) -> bool {
        let sent = self.sender.try_send(batch);
        if let Err(mpsc::error::TrySendError::Full(_)) = sent {
            self.fell_behind.store(true, Ordering::Release);
        }
        sent.is_ok()
    }
}
