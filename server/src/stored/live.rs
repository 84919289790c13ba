//! Work that runs: who waits for its news, and how it is told to end.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::Stored;

/// Why work ends before it is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Its owner cancelled it.
    Cancelled,
    /// The server stops and leaves it to its next start.
    Stopped,
}

/// What running work knows of its events.
pub enum Latest {
    /// The lines of further events, and the number behind them.
    Events(Vec<u8>, u64),
    /// There are none yet.
    None,
    /// The store knows.
    Unknown,
}

/// Running work.
pub struct Live {
    end: watch::Sender<Option<Ended>>,
    /// Counts what readers may look for in the store.
    news: watch::Sender<u64>,
    /// The events that were kept last: the number of the first, and the lines of each. `None` if the store has more.
    latest: Mutex<Option<(u64, Vec<Vec<u8>>)>>,
    /// Lines of a batch: all, those with an output, and those with an error.
    lines: [AtomicU64; 3],
}

impl Live {
    /// The lines of a batch: all, those with an output, and those with an error.
    pub fn counts(&self) -> [u64; 3] {
        self.lines.each_ref().map(|count| count.load(Ordering::Relaxed))
    }

    /// Sets the counts of lines.
    pub fn count(&self, counts: [u64; 3]) {
        self.lines.iter().zip(counts).for_each(|(line, count)| line.store(count, Ordering::Relaxed));
    }

    /// Counts a line that has ended.
    pub fn count_line(&self, is_error: bool) {
        self.lines[1 + usize::from(is_error)].fetch_add(1, Ordering::Relaxed);
    }

    /// Tells readers that the store has more.
    pub fn tell(&self) {
        *self.latest() = None;
        self.news.send_modify(|count| *count += 1);
    }

    /// Whether someone reads.
    pub fn has_readers(&self) -> bool {
        self.news.receiver_count() > 0
    }

    /// Tells readers of events that are kept, which they then need not look for in the store: the number of the first, and the lines of
    /// each.
    pub fn tell_events(&self, first: u64, lines: Vec<Vec<u8>>) {
        *self.latest() = Some((first, lines));
        self.news.send_modify(|count| *count += 1);
    }

    /// What is known of the events from number `next` on, without a look into the store.
    pub fn after(&self, next: u64) -> Latest {
        let latest = self.latest();
        let Some((first, lines)) = &*latest else { return Latest::Unknown };
        match next.checked_sub(*first).map(|skipped| lines.get(skipped as usize..)) {
            Some(Some([])) => Latest::None,
            Some(Some(new)) => Latest::Events(new.concat(), first + lines.len() as u64),
            // The reader is behind.
            Some(None) | None => Latest::Unknown,
        }
    }

    fn latest(&self) -> MutexGuard<'_, Option<(u64, Vec<Vec<u8>>)>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Receives the news.
    pub fn news(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }

    /// Asks the work to end.
    pub fn cancel(&self) {
        self.end.send_if_modified(|end| {
            end.is_none() && {
                *end = Some(Ended::Cancelled);
                true
            }
        });
    }

    /// Why it was asked to end, if it was.
    pub fn ended(&self) -> Option<Ended> {
        *self.end.borrow()
    }

    /// Waits until it is asked to end.
    pub async fn end(&self) -> Ended {
        let mut end = self.end.subscribe();
        loop {
            if let Some(ended) = *end.borrow_and_update() {
                return ended;
            }
            // This value owns the sender, so the channel stays open.
            let _ = end.changed().await;
        }
    }
}

/// Work that counts as running until this is dropped.
pub struct Guard {
    stored: Arc<Stored>,
    id: String,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.stored.running().remove(&self.id);
    }
}

/// All work that runs, by the id of its record.
#[derive(Default)]
pub struct Running {
    live: Mutex<(HashMap<String, Arc<Live>>, bool)>,
    /// Work that was taken up after a start.
    pub resumed: AtomicU64,
    /// Work that was left to another start, because it needs another model.
    pub left: AtomicU64,
}

impl Running {
    fn lock(&self) -> MutexGuard<'_, (HashMap<String, Arc<Live>>, bool)> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that work begins; `None` if the server stops, or if it runs already.
    pub fn begin(&self, id: &str) -> Option<Arc<Live>> {
        let mut live = self.lock();
        if live.1 || live.0.contains_key(id) {
            return None;
        }
        let begun = Arc::new(Live {
            end: watch::Sender::new(None),
            news: watch::Sender::new(0),
            latest: Mutex::default(),
            lines: Default::default(),
        });
        live.0.insert(id.to_string(), begun.clone());
        Some(begun)
    }

    /// Counts work as running until the result is dropped, also by a panic.
    pub fn guard(&self, stored: &Arc<Stored>, id: &str) -> Guard {
        Guard { stored: stored.clone(), id: id.to_string() }
    }

    /// Notes that work has ended.
    fn remove(&self, id: &str) {
        if let Some(live) = self.lock().0.remove(id) {
            live.tell();
        }
    }

    /// The running work of this id.
    pub fn get(&self, id: &str) -> Option<Arc<Live>> {
        self.lock().0.get(id).cloned()
    }

    /// Number of running work.
    pub fn len(&self) -> usize {
        self.lock().0.len()
    }

    /// Whether the server stops.
    pub fn is_stopping(&self) -> bool {
        self.lock().1
    }

    /// Asks all work to end for a later start, and lets none begin. Returns how many there were.
    pub fn stop(&self) -> usize {
        let mut live = self.lock();
        live.1 = true;
        for live in live.0.values() {
            live.end.send_if_modified(|end| {
                end.is_none() && {
                    *end = Some(Ended::Stopped);
                    true
                }
            });
            live.tell();
        }
        live.0.len()
    }

    /// Counts work that was taken up.
    pub fn note_resumed(&self) {
        self.resumed.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts work that was left.
    pub fn note_left(&self) {
        self.left.fetch_add(1, Ordering::Relaxed);
    }
}
