//! The engine's end of the streams. What a step emits for a stream is sent as one batch: the reader is woken once per step, however
//! many requests and sequences the stream has and however many tokens they gained.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use sched::RequestId;
use tokio::sync::mpsc;

use crate::api::Event;
use crate::serve::wakers::Wakers;

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
    wakers: Arc<Wakers>,
}

impl Outbox {
    pub fn new(wakers: Arc<Wakers>) -> Outbox {
        Outbox { wakers, ..Outbox::default() }
    }

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

    /// The open requests.
    pub fn ids(&self) -> Vec<RequestId> {
        self.recipients.keys().copied().collect()
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

    /// Sends the events of the step that ended `at`, and wakes the readers together. Returns the requests of streams whose reader is
    /// gone or has fallen behind.
    pub fn send(&mut self, at: Instant) -> Vec<RequestId> {
        let mut lost = Vec::new();
        self.wakers.collect();
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
        self.wakers.wake_collected();
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::api::{Delta, TokenOutput};

    fn token(index: u32, id: u32) -> Event {
        let tokens = vec![TokenOutput { id, logprobs: None, text_offset: 0 }];
        Event::Delta(Delta { index, text: format!("{id} "), tokens, ..Delta::default() })
    }

    fn sender(stream: u64, request: usize, sender: &mpsc::Sender<Batch>) -> BatchSender {
        BatchSender { stream, request, sender: sender.clone(), fell_behind: Arc::default() }
    }

    #[test]
    fn a_step_is_one_batch_for_each_stream_and_one_delta_for_each_sequence() {
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        let (one, mut first) = mpsc::channel(4);
        let (two, mut second) = mpsc::channel(4);
        outbox.open(RequestId(1), sender(1, 0, &one));
        outbox.open(RequestId(2), sender(2, 0, &two));
        outbox.open(RequestId(3), sender(1, 1, &one));
        outbox.scheduled(RequestId(3), now);
        for (request, index, id) in [(1, 0, 10), (1, 0, 11), (1, 1, 12), (2, 0, 20), (3, 0, 30), (3, 0, 31)] {
            outbox.add(RequestId(request), token(index, id), request == 3 && id == 31);
        }
        assert!(outbox.send(now).is_empty());
        let batch = first.try_recv().unwrap().events;
        let texts: Vec<_> = batch
            .iter()
            .map(|emitted| {
                let Event::Delta(delta) = &emitted.event else { panic!("a delta") };
                (emitted.request, emitted.scheduled.is_some(), delta.index, delta.text.as_str(), delta.tokens.len())
            })
            .collect();
        assert_eq!(texts, [(0, false, 0, "10 11 ", 2), (0, false, 1, "12 ", 1), (1, true, 0, "30 31 ", 2)]);
        assert!(first.try_recv().is_err(), "one batch");
        assert_eq!(second.try_recv().unwrap().events.len(), 1);
        assert!(outbox.send(now).is_empty() && second.try_recv().is_err(), "a step without events sends nothing");
    }

    #[test]
    fn a_stream_closes_with_its_last_request_and_a_lost_reader_ends_all_of_them() {
        let (mut outbox, now) = (Outbox::default(), Instant::now());
        let (one, mut reader) = mpsc::channel(1);
        (0..2).for_each(|request| outbox.open(RequestId(request), sender(7, request as usize, &one)));
        drop(one);
        assert!(outbox.close(RequestId(0)) && !outbox.close(RequestId(0)));
        outbox.add(RequestId(1), token(0, 1), false);
        assert!(outbox.send(now).is_empty());
        outbox.open(RequestId(2), sender(7, 2, &outbox.streams[&7].sender.sender.clone()));
        outbox.add(RequestId(2), token(0, 2), false);
        let mut lost = outbox.send(now);
        lost.sort_by_key(|id| id.0);
        assert_eq!(lost, [RequestId(1), RequestId(2)], "the reader fell behind");
        assert!(outbox.streams[&7].sender.fell_behind.load(Ordering::Relaxed));
        assert!(lost.into_iter().all(|id| outbox.close(id)));
        assert!(outbox.streams.is_empty() && outbox.recipients.is_empty());
        assert_eq!(reader.try_recv().unwrap().events.len(), 1);
        assert!(matches!(reader.try_recv(), Err(mpsc::error::TryRecvError::Disconnected)));
    }
}
