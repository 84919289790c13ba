//! Threads that read request bodies. Bodies go by the work that they may ask for into lanes with their own threads, so that
//! no request waits for one that takes longer by an order of magnitude, and few large ones are in memory as values at once.

use std::sync::Arc;

use tokio::sync::Semaphore;

use super::ApiError;

/// Bodies up to this effort are read on the serving thread: under a millisecond, including tokenization.
pub const INLINE: usize = 4 << 10;

/// For each lane: the greatest effort in it, and its number of threads. The first has what most requests take; the third
/// has the longest text that is tokenized by default, whatever is escaped in it.
pub const LANES: [(usize, usize); 4] = [(64 << 10, 2), (512 << 10, 1), (8 << 20, 1), (usize::MAX, 1)];

/// Permits for threads by effort.
pub struct ParsePool([Arc<Semaphore>; LANES.len()]);

impl Default for ParsePool {
    fn default() -> ParsePool {
        ParsePool(LANES.map(|(_, threads)| Arc::new(Semaphore::new(threads))))
    }
}

impl ParsePool {
    /// Runs `work` of this effort, in bytes of text to tokenize: on this thread if it is little, else on a thread of its lane. The lane's permit is
    /// held to the end of the work even if the caller is dropped.
    pub async fn run<T: Send + 'static>(
        &self,
        effort: usize,
        work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if effort <= INLINE {
            return work();
        }
        let lane = LANES.iter().take_while(|(most, _)| *most < effort).count();
        let failed = |error: &dyn std::fmt::Display| ApiError::internal(format!("reading the request failed: {error}"));
        let permit = self.0[lane].clone().acquire_owned().await.map_err(|error| failed(&error))?;
        let task = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work()
        });
        task.await.unwrap_or_else(|error| Err(failed(&error)))
    }
}

#[cfg(test)]
#[path = "../../tests/unit/parse_pool.rs"]
mod tests;
