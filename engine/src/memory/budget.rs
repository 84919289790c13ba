//! The number of bytes for the cache: what the user specifies, or a share of the memory.
//!
//! The engine may fill a GPU, so there the share is of all its memory, and it also covers the weights, a step, and the memory of
//! other programs. The memory of a CPU is shared with other programs, so there the share is of what is free beside the weights.

use device::MemoryInfo;

use super::bytes::Bytes;
use crate::error::{EngineError, bad};

/// Default share of a GPU's memory to use, as in vLLM.
const GPU_SHARE: f64 = 0.9;
/// Default share of a CPU's free memory that becomes cache.
const FREE_SHARE: f64 = 0.4;

/// The demands on memory at start.
pub(crate) struct Budget<'a> {
    /// The device's memory before anything is loaded.
    pub memory: MemoryInfo,
    /// `--gpu-memory-utilization`.
    pub share: Option<f64>,
    /// Bytes of the weights.
    pub weights: u64,
    /// Returns the bytes of a step, given its number of tokens.
    pub step: &'a dyn Fn(usize) -> u64,
    /// Bytes of all CUDA graphs; 0 before one was measured.
    pub graphs: u64,
    /// `--max-num-batched-tokens`.
    pub max_num_batched_tokens: usize,
    /// `--max-num-seqs`; `max_num_batched_tokens` must be greater.
    pub max_num_seqs: usize,
    /// Bytes of the smallest usable cache.
    pub min_cache: u64,
}

impl Budget<'_> {
    /// Returns the bytes for the cache and the reason.
    ///
    /// # Errors
    /// The memory does not suffice. The message names the flag to change and a value that fits.
    pub fn cache(&self) -> Result<(u64, String), EngineError> {
        let fixed = self.fixed(self.max_num_batched_tokens);
        if !self.memory.is_own {
            let (free, share) = (self.memory.available.saturating_sub(fixed), self.share.unwrap_or(FREE_SHARE));
            return Ok((
                (free as f64 * share) as u64,
                format!("{:.0} % of {} free memory", share * 100.0, Bytes(free)),
            ));
        }
        let (total, share) = (self.memory.total, self.share.unwrap_or(GPU_SHARE));
        let usable = (total as f64 * share) as u64;
        let taken = self.others() + fixed;
        match usable.checked_sub(taken) {
            Some(left) if left >= self.min_cache => {
                Ok((left, format!("what is left of {:.0} % of {}", share * 100.0, Bytes(total))))
            }
            _ => Err(self.not_enough(share)),
        }
    }

    /// Checks that a cache of `cache` bytes, as the user specifies, fits next to weights, graphs and a step.
    ///
    /// # Errors
    /// It does not fit. The message has the greatest value that does.
    pub fn check(&self, cache: u64) -> Result<(), EngineError> {
        let free = self.memory.total - self.others();
        let left = free.saturating_sub(self.fixed(self.max_num_batched_tokens));
        if !self.memory.is_own || cache <= left {
            return Ok(());
        }
        if left < self.min_cache {
            return Err(self.not_enough(1.0));
        }
        Err(bad("--kv-cache-memory-bytes", cache, format!("at most {left}: {}", self.account())))
    }

    /// Bytes of everything but the cache, with steps of `rows` tokens.
    fn fixed(&self, rows: usize) -> u64 {
        self.weights + self.graphs + (self.step)(rows)
    }

    /// Bytes that other programs use.
    fn others(&self) -> u64 {
        self.memory.total - self.memory.available.min(self.memory.total)
    }

    fn account(&self) -> String {
        format!(
            "of {} the weights take {}, a step of {} tokens {}, CUDA graphs {}, other programs {}",
            Bytes(self.memory.total),
            Bytes(self.weights),
            self.max_num_batched_tokens,
            Bytes((self.step)(self.max_num_batched_tokens)),
            Bytes(self.graphs),
            Bytes(self.others())
        )
    }

    fn not_enough(&self, share: f64) -> EngineError {
        let total = self.memory.total;
        let needed = |rows| self.others() + self.fixed(rows) + self.min_cache;
        let all = needed(self.max_num_batched_tokens);
        if all <= total {
            // Rounded up, so that the printed number is large enough.
            let enough = (all as f64 / total as f64 * 1000.0).ceil() / 1000.0;
            return bad("--gpu-memory-utilization", share, format!("at least {enough:.3}: {}", self.account()));
        }
        let smallest = self.max_num_seqs + 1;
        if needed(smallest) <= total {
            let (mut fits, mut not) = (smallest, self.max_num_batched_tokens);
            while not.saturating_sub(fits) > 1 {
                let middle = fits + (not - fits) / 2;
                if needed(middle) <= total { fits = middle } else { not = middle }
            }
            let expected = format!("at most {fits} (with --gpu-memory-utilization 1): {}", self.account());
            return bad("--max-num-batched-tokens", self.max_num_batched_tokens, expected);
        }
        let expected = format!(
            "a GPU with {} free for this model: {}; free some, use a smaller model or --dtype, lower --max-num-seqs, or use --device cpu",
            Bytes(needed(smallest) - self.others()),
            self.account()
        );
        bad("--device", "cuda", expected)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    const GB: u64 = 1 << 30;
    const GRAPHS: u64 = GB / 2;

    fn budget(memory: MemoryInfo, weights: u64, share: Option<f64>) -> Result<(u64, String), EngineError> {
        let step = |rows: usize| rows as u64 * (1 << 20);
        let (max_num_batched_tokens, max_num_seqs, graphs) = (2048, 16, GRAPHS);
        let (step, min_cache) = (&step, 1 << 20);
        Budget { memory, share, weights, step, graphs, max_num_batched_tokens, max_num_seqs, min_cache }.cache()
    }

    fn gpu(total: u64, available: u64) -> MemoryInfo {
        MemoryInfo { total: total * GB, available: available * GB, is_own: true }
    }

    #[test]
    fn a_gpu_is_filled_up_to_its_share_and_others_count() {
        // 0.5 of 80 GiB, less 4 of others, 16 of weights, 2 of a step, and the graphs.
        assert_eq!(budget(gpu(80, 76), 16 * GB, Some(0.5)).unwrap().0, 18 * GB - GRAPHS);
        assert_eq!(budget(gpu(80, 80), 16 * GB, None).unwrap().0, 54 * GB - GRAPHS);
    }

    #[test]
    fn insufficient_memory_names_the_flag_and_a_value_that_fits() {
        let message = |memory, weights, share| budget(memory, weights, share).unwrap_err().to_string();
        let more = message(gpu(80, 80), 50 * GB, Some(0.5));
        assert!(more.starts_with("--gpu-memory-utilization: found 0.5, expected at least 0.657"), "{more}");
        assert!(budget(gpu(80, 80), 50 * GB, Some(0.657)).is_ok());
        let fewer = message(gpu(80, 76), 75 * GB, None);
        assert!(fewer.starts_with("--max-num-batched-tokens: found 2048, expected at most 511"), "{fewer}");
        let none = message(gpu(80, 76), 77 * GB, None);
        assert!(none.starts_with("--device: found cuda, expected a GPU with 77.5"), "{none}");
        assert!(none.contains("--device cpu") && none.contains("other programs 4.00 GiB"), "{none}");
    }
}
