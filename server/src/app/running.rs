//! The calls whose requests run, by their ids, so that another call can end them.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// What the ids of responses begin with.
const PREFIXES: [&str; 7] = ["chatcmpl", "cmpl", "embd", "pool", "classify", "score", "rerank"];

/// The running calls.
#[derive(Debug, Default)]
pub struct Running {
    calls: Mutex<HashMap<u64, (String, oneshot::Sender<()>)>>,
    next: AtomicU64,
}

/// A running call, until it is dropped.
#[derive(Debug)]
pub struct Registered {
    running: Arc<Running>,
    number: u64,
    /// Receives the order to end.
    pub ended: oneshot::Receiver<()>,
}

impl Running {
    /// Registers a call with this id.
    pub fn register(self: &Arc<Running>, id: String) -> Registered {
        let (sender, ended) = oneshot::channel();
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.calls().insert(number, (id, sender));
        Registered { running: self.clone(), number, ended }
    }

    /// Ends the calls with these ids. An id may be that of a response, which has a prefix.
    pub fn abort(&self, ids: &[String]) {
        let bare = |named| {
            let (prefix, id): (&str, &str) = str::split_once(named, '-')?;
            PREFIXES.contains(&prefix).then_some(id)
        };
        let named: HashSet<&str> = ids.iter().flat_map(|id| [Some(id.as_str()), bare(id)]).flatten().collect();
        let ended: Vec<_> = self.calls().extract_if(|_, (id, _)| named.contains(id.as_str())).collect();
        for (_, (_, sender)) in ended {
            // The call may have ended.
            let _ = sender.send(());
        }
    }

    fn calls(&self) -> MutexGuard<'_, HashMap<u64, (String, oneshot::Sender<()>)>> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.running.calls().remove(&self.number);
    }
}
