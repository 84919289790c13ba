//! What subscribers know, and the last messages. Plain data, shared by the tasks of both sockets.
//!
//! Subscribers have no queues. Each has a position in the same messages, so all of them together, and replay, take no more than
//! [`Limits::bytes`](crate::Limits::bytes). One that falls too far behind loses its oldest messages and finds a gap in the numbers.
//!
//! ```text
//! messages    … 17 18 19 20 21 22 23     24 = next_seq
//! readers             a        b         positions of two subscribers
//! snapshot       (18, everything that messages up to 17 say)
//! ```
//!
//! A request for messages that are gone is answered by a snapshot, under the number that was asked for, and the messages behind it. An
//! empty message with the last number that the snapshot covers closes the gap between the two. A snapshot is encoded again only when
//! the message behind the last one is gone.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::change::{Change, Layout};
use crate::config::Format;
use crate::index::Index;
use crate::wire::encode;

/// Encoded events. A weak reference to it holds no bytes, unlike one to `[u8]`.
pub type Payload = Arc<Vec<u8>>;

/// A published message: its sequence number and its payload.
pub type Message = (u64, Payload);

/// A subscriber.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ReaderId(u64);

/// See the [module](self).
pub struct Journal {
    index: Index,
    layout: Layout,
    format: Format,
    /// Consecutive messages up to the last one.
    messages: VecDeque<Payload>,
    bytes: usize,
    next_seq: u64,
    /// Number of messages kept for replay.
    replayed: u64,
    /// Greatest number of messages that a reader may be behind.
    hwm: u64,
    most_bytes: usize,
    /// Number of the next message of each subscriber.
    readers: HashMap<ReaderId, u64>,
    next_reader: u64,
    /// A snapshot, and the number of the first message that is not part of it.
    snapshot: Option<Message>,
}

/// Sizes of a [`Journal`].
pub struct Sizes {
    /// Number of messages kept for replay.
    pub replayed: usize,
    /// Greatest number of messages that a subscriber may be behind.
    pub hwm: usize,
    /// Greatest size in bytes of all messages. The last message is kept whatever its size.
    pub bytes: usize,
}

impl Journal {
    pub fn new(layout: Layout, format: Format, sizes: &Sizes) -> Journal {
        Journal {
            index: Index::new(layout),
            layout,
            format,
            messages: VecDeque::new(),
            bytes: 0,
            next_seq: 0,
            replayed: sizes.replayed as u64,
            hwm: sizes.hwm as u64,
            most_bytes: sizes.bytes,
            readers: HashMap::new(),
            next_reader: 0,
            snapshot: None,
        }
    }

    /// Number of the next message.
    pub fn next_seq(&self) -> u64 {
        self.next_seq
    }

    /// Adds a message about these changes, unless they are no news. If they list the `whole` cache, the message is a snapshot. Returns
    /// the number of messages that subscribers lose.
    pub fn append(&mut self, timestamp: f64, changes: &[Change], whole: bool) -> Option<u64> {
        let mut events = self.index.apply(changes);
        if whole {
            events = self.index.snapshot();
        }
        if events.is_empty() {
            return None;
        }
        let payload = encode(timestamp, &events, self.layout, self.format);
        self.bytes += payload.len();
        self.messages.push_back(Arc::new(payload));
        self.next_seq += 1;
        Some(self.trim())
    }

    /// Drops what exceeds the limits, and what neither a reader nor replay needs.
    fn trim(&mut self) -> u64 {
        while self.bytes > self.most_bytes && self.messages.len() > 1 {
            self.drop_oldest();
        }
        let floor = self.oldest().max(self.next_seq.saturating_sub(self.hwm));
        let (mut lost, mut needed) = (0, self.next_seq.saturating_sub(self.replayed));
        for position in self.readers.values_mut() {
            lost += floor.saturating_sub(*position);
            *position = floor.max(*position);
            needed = needed.min(*position);
        }
        while self.oldest() < needed && self.messages.len() > 1 {
            self.drop_oldest();
        }
        let first = self.first_replayed();
        self.snapshot.take_if(|(next, _)| *next < first);
        lost
    }

    fn drop_oldest(&mut self) {
        self.bytes -= self.messages.pop_front().map_or(0, |payload| payload.len());
    }

    /// Number of the oldest message.
    fn oldest(&self) -> u64 {
        self.next_seq - self.messages.len() as u64
    }

    /// Number of the first message that a replay gets as it was published.
    fn first_replayed(&self) -> u64 {
        self.oldest().max(self.next_seq.saturating_sub(self.replayed))
    }

    fn message(&self, seq: u64) -> Option<Message> {
        let at = usize::try_from(seq.checked_sub(self.oldest())?).ok()?;
        Some((seq, self.messages.get(at)?.clone()))
    }

    /// Returns an id for a new connection, which reads nothing yet.
    pub fn connect(&mut self) -> ReaderId {
        self.next_reader += 1;
        ReaderId(self.next_reader)
    }

    /// Lets a connection read the messages from now on, or none.
    pub fn subscribe(&mut self, reader: ReaderId, subscribed: bool) {
        if subscribed {
            self.readers.entry(reader).or_insert(self.next_seq);
        } else {
            self.readers.remove(&reader);
        }
    }

    /// Number of subscribers.
    pub fn num_subscribers(&self) -> usize {
        self.readers.len()
    }

    /// Takes the next message of a subscriber.
    pub fn next(&mut self, reader: ReaderId) -> Option<Message> {
        let message = self.message(*self.readers.get(&reader)?)?;
        self.readers.insert(reader, message.0 + 1);
        Some(message)
    }

    /// A snapshot, and the number of the first message that is not part of it.
    fn snapshot(&mut self) -> Message {
        let (index, layout, format, next_seq) = (&self.index, self.layout, self.format, self.next_seq);
        let encode = || (next_seq, Arc::new(encode(now(), &index.snapshot(), layout, format)));
        self.snapshot.get_or_insert_with(encode).clone()
    }
}

/// An answer to a replay request. It holds no messages, however slowly it is read.
pub struct Replay {
    next: u64,
    /// Number of the first message that is not part of the answer.
    end: u64,
    /// Whether a snapshot was the last message, and the one that it stands for up to `next` has to follow.
    joins: bool,
}

impl Replay {
    /// Answers with the messages from `first` on.
    pub fn new(first: u64, journal: &Journal) -> Replay {
        Replay { next: first, end: journal.next_seq, joins: false }
    }

    /// Returns the next message of the answer.
    pub fn next(&mut self, journal: &mut Journal) -> Option<Message> {
        if std::mem::take(&mut self.joins) {
            let empty = encode(now(), &[], journal.layout, journal.format);
            return Some((self.next - 1, Arc::new(empty)));
        }
        if self.next >= self.end {
            return None;
        }
        let seq = self.next;
        if seq >= journal.first_replayed() {
            self.next += 1;
            return journal.message(seq);
        }
        let (next, payload) = journal.snapshot();
        (self.next, self.joins) = (next, next - 1 > seq);
        Some((seq, payload))
    }
}

/// A journal that several tasks share.
#[derive(Clone)]
pub struct SharedJournal(Arc<Mutex<Journal>>);

impl SharedJournal {
    pub fn new(journal: Journal) -> SharedJournal {
        SharedJournal(Arc::new(Mutex::new(journal)))
    }

    pub fn lock(&self) -> MutexGuard<'_, Journal> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Seconds since 1970.
pub fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}
