//! How many bytes become pages: what the user says, or a share of the memory.
//!
//! A GPU is the engine's to fill, so there the share is of all its memory, and weights, a step and what other programs
//! hold come out of it. Elsewhere memory is everyone's, and the share is of what is free beside the weights.

use device::MemoryInfo;

use super::bytes::Bytes;
use crate::error::{EngineError, bad};

/// Share of a GPU's memory that is used where nothing is said, as in vLLM.
const GPU_SHARE: f64 = 0.9;
/// Share of the free memory of a CPU that becomes cache.
const FREE_SHARE: f64 = 0.4;

/// What a start needs to know to share out memory.
pub(crate) struct Budget<'a> {
    /// Of the device, before anything is loaded.
    pub memory: MemoryInfo,
    /// It has memory of its own.
    pub gpu: bool,
    /// `--gpu-memory-utilization`.
    pub share: Option<f64>,
    /// Bytes of the weights.
    pub weights: u64,
    /// Bytes of a step of so many tokens.
    pub step: &'a dyn Fn(usize) -> u64,
    /// Bytes of all CUDA graphs, once one was measured.
    pub graphs: u64,
    /// `--max-num-batched-tokens`.
    pub max_num_batched_tokens: usize,
    /// `--max-num-seqs`, less than which no step is.
    pub max_num_seqs: usize,
    /// Bytes of the least cache that is of use.
    pub least: u64,
}

impl Budget<'_> {
    /// Bytes for pages, and why so many.
    ///
    /// # Errors
    /// It does not fit: the flag to turn, and the value that would fit.
    pub fn cache(&self) -> Result<(u64, String), EngineError> {
        let fixed = self.weights + self.graphs + (self.step)(self.max_num_batched_tokens);
        if !self.gpu {
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
            Some(left) if left >= self.least => {
                let why = format!("what {:.0} % of {} leave", share * 100.0, Bytes(total));
                Ok((left, why))
            }
            _ => Err(self.too_little(share)),
        }
    }

    /// Whether a cache of so many bytes, which the user asks for, fits beside the rest.
    ///
    /// # Errors
    /// It does not: the value that would fit.
    pub fn fits(&self, cache: u64) -> Result<(), EngineError> {
        let free = self.memory.total - self.others();
        let left = free.saturating_sub(self.weights + self.graphs + (self.step)(self.max_num_batched_tokens));
        if !self.gpu || cache <= left {
            return Ok(());
        }
        if left < self.least {
            return Err(self.too_little(1.0));
        }
        Err(bad("--kv-cache-memory-bytes", cache, format!("at most {left}: {}", self.account())))
    }

    /// Bytes that other programs hold.
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

    fn too_little(&self, share: f64) -> EngineError {
        let total = self.memory.total;
        let needed = |rows| self.others() + self.weights + self.graphs + (self.step)(rows) + self.least;
        let all = needed(self.max_num_batched_tokens);
        if all <= total {
            // Rounded up, so that the number as it is printed is enough.
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
            "a GPU with {} free for this model: {}; free some, take a smaller model or --dtype, lower --max-num-seqs, or use --device cpu",
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
        let (gpu, step, least) = (true, &step, 1 << 20);
        Budget { memory, gpu, share, weights, step, graphs, max_num_batched_tokens, max_num_seqs, least }.cache()
    }

    fn gpu(total: u64, available: u64) -> MemoryInfo {
        MemoryInfo { total: total * GB, available: available * GB }
    }

    #[test]
    fn a_gpu_is_filled_up_to_its_share_and_others_count() {
        // 0.5 of 80 GiB, less 4 of others, 16 of weights, 2 of a step, and the graphs.
        assert_eq!(budget(gpu(80, 76), 16 * GB, Some(0.5)).unwrap().0, 18 * GB - GRAPHS);
        assert_eq!(budget(gpu(80, 80), 16 * GB, None).unwrap().0, 54 * GB - GRAPHS);
    }

    #[test]
    fn too_little_memory_names_the_flag_and_a_value_that_fits() {
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
