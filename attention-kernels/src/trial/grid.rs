//! A grid of shapes, and every variant that can do them: how long, how many bytes, how near to the best, how exact.
//!
//! A problem is made once for all variants of its operation. It stands on the device as often as its inputs are beyond every
//! cache ([`peaks`](super::Peaks)), and repetitions take turns, so that what is read comes from memory. Errors are those of a
//! sample of rows, spread over the batch with its last one: a float64 truth of all would take far longer than the kernels.

use std::sync::Arc;
use std::time::Duration;

use device::Device;

pub use super::cell::{Cell, Shape};
use super::cells;
use super::peaks::Peaks;
use crate::error::KernelError;
use crate::format::{Dtype, KvDtype};
use crate::registry::variants;
use crate::variant::{Operation, Variant};

/// What to run. Every list is combined with every other, where the operation has use for it.
#[derive(Clone, Debug)]
pub struct Grid {
    /// Operations.
    pub operations: Vec<Operation>,
    /// Names of variants; none: all that can do a shape.
    pub variants: Vec<String>,
    /// Types of queries.
    pub dtypes: Vec<Dtype>,
    /// Types of caches.
    pub kv_dtypes: Vec<KvDtype>,
    /// Query heads.
    pub heads: usize,
    /// KV heads, a divisor of the former.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_sizes: Vec<usize>,
    /// Tokens per block.
    pub block_sizes: Vec<usize>,
    /// Sequences.
    pub batches: Vec<usize>,
    /// Tokens of each sequence, query rows included.
    pub contexts: Vec<usize>,
    /// Query rows of each sequence: of prefill, cache writes and matrix products.
    pub query_lens: Vec<usize>,
    /// Runs before the clock counts.
    pub warmup: usize,
    /// Runs that count, at most: the first second of them.
    pub repeat: usize,
}

impl Grid {
    /// Small defaults for a device: some ten seconds.
    pub fn of(device: &dyn Device) -> Grid {
        let sim = device.name() == "cuda-sim";
        let pick = |slow: &[usize], fast: &[usize]| if sim { slow.to_vec() } else { fast.to_vec() };
        Grid {
            operations: Operation::ALL.to_vec(),
            variants: Vec::new(),
            dtypes: vec![if device.name() == "cpu" { Dtype::F32 } else { Dtype::Bf16 }],
            kv_dtypes: vec![KvDtype::Same],
            heads: if sim { 4 } else { 32 },
            kv_heads: if sim { 2 } else { 8 },
            head_sizes: pick(&[64], &[128]),
            block_sizes: vec![16],
            batches: pick(&[2], &[1, 8]),
            contexts: pick(&[100, 600], &[512, 4096]),
            query_lens: pick(&[20], &[128]),
            warmup: if sim { 0 } else { 2 },
            repeat: if sim { 1 } else { 20 },
        }
    }

    /// The shapes of an operation, without what it does not look at.
    pub fn shapes(&self, operation: Operation) -> Vec<Shape> {
        let one = [1];
        let query_lens = match operation {
            Operation::Decode | Operation::BlockCopy => &one[..],
            _ => &self.query_lens,
        };
        let contexts: &[usize] = match operation {
            Operation::Linear | Operation::CacheWrite => &one,
            _ => &self.contexts,
        };
        let (kv_dtypes, block_sizes): (&[KvDtype], &[usize]) = match operation {
            Operation::Linear => (&[KvDtype::Same], &one),
            _ => (&self.kv_dtypes, &self.block_sizes),
        };
        let mut shapes = Vec::new();
        for (&dtype, &kv_dtype) in self.dtypes.iter().flat_map(|dtype| kv_dtypes.iter().map(move |kv| (dtype, kv))) {
            for (&head_size, &block_size) in
                self.head_sizes.iter().flat_map(|size| block_sizes.iter().map(move |block| (size, block)))
            {
                for (&batch, &context) in
                    self.batches.iter().flat_map(|batch| contexts.iter().map(move |context| (batch, context)))
                {
                    for &query_len in query_lens {
                        let context = context.max(query_len);
                        let (heads, kv_heads) = (self.heads, self.kv_heads);
                        let shape = Shape {
                            dtype,
                            kv_dtype,
                            heads,
                            kv_heads,
                            head_size,
                            block_size,
                            batch,
                            context,
                            query_len,
                        };
                        if !shapes.contains(&shape) {
                            shapes.push(shape);
                        }
                    }
                }
            }
        }
        shapes
    }

    /// What no shape allows a variant, a line for each of those that were named, or that run on this device.
    ///
    /// # Errors
    /// A grid that is empty or names what does not exist, and one of which nothing can be done here.
    pub fn check(&self, device: &dyn Device) -> Result<Vec<String>, GridError> {
        let sizes = [&self.head_sizes, &self.block_sizes, &self.batches, &self.contexts, &self.query_lens];
        let none = sizes.iter().any(|sizes| sizes.is_empty() || sizes.contains(&0));
        if none || self.heads == 0 || self.kv_heads == 0 {
            return Err(GridError::Empty);
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(GridError::Heads { heads: self.heads, kv_heads: self.kv_heads });
        }
        let known: Vec<&Variant> = self.operations.iter().flat_map(|&operation| variants(operation)).collect();
        if let Some(name) = self.variants.iter().find(|name| known.iter().all(|variant| variant.name != name.as_str()))
        {
            let mut names: Vec<&str> = known.iter().map(|variant| variant.name).collect();
            names.sort_unstable();
            names.dedup();
            return Err(GridError::Unknown { name: name.clone(), known: names.join(", ") });
        }
        let (mut left_out, mut able) = (Vec::new(), false);
        for &operation in &self.operations {
            for shape in self.shapes(operation) {
                for variant in self.named(operation) {
                    let Some(reason) = shape.needs(device).unmet(variant) else {
                        able = true;
                        continue;
                    };
                    let line = format!("{} {}: {reason}", operation.key(), variant.name);
                    // Those of other devices are no news.
                    let ours = variant.capabilities.devices.contains(&device.name()) || !self.variants.is_empty();
                    if ours && !left_out.contains(&line) {
                        left_out.push(line);
                    }
                }
            }
        }
        if able {
            Ok(left_out)
        } else {
            Err(GridError::Nothing { device: device.name(), reasons: left_out.join("; ") })
        }
    }

    fn named(&self, operation: Operation) -> Vec<&'static Variant> {
        let mut found = variants(operation);
        found.retain(|variant| self.variants.is_empty() || self.variants.iter().any(|name| name == variant.name));
        found
    }

    /// Runs it. `measure` is asked for the device's peaks before the first operation and after each: the shares of an
    /// operation's measurements, which `found` then gets, are of the greater of the two around it. So neither a lull of the
    /// machine's other tenants during one of them nor a change of the clock makes a share of more than there is.
    ///
    /// # Errors
    /// Those of [`Grid::check`], and whatever goes wrong on the device.
    pub fn run(
        &self,
        device: &Arc<dyn Device>,
        measure: &mut dyn FnMut() -> Result<Peaks, KernelError>,
        found: &mut dyn FnMut(&Measurement),
    ) -> Result<(), GridError> {
        self.check(&**device)?;
        let mut before = measure()?;
        for &operation in &self.operations {
            let mut cells = Vec::new();
            for shape in self.shapes(operation) {
                let mut able = self.named(operation);
                able.retain(|variant| shape.needs(&**device).unmet(variant).is_none());
                cells::run(device, operation, &shape, &able, (self.warmup, self.repeat), &mut |variant, cell| {
                    cells.push((variant.name, shape.clone(), cell));
                })?;
            }
            let after = measure()?;
            let peaks = before.max(&after);
            for (variant, shape, cell) in cells {
                let share = peaks.share(operation, &shape, &cell);
                found(&Measurement { operation, variant, shape, cell, share });
            }
            before = after;
        }
        Ok(())
    }
}

/// Why nothing was measured, or not all.
#[derive(Debug, thiserror::Error)]
pub enum GridError {
    /// A list without a size, or with the size 0.
    #[error("--heads, --kv-heads, --head-size, --block-size, --batch, --context and --query-len take numbers from 1")]
    Empty,
    /// Heads that do not fall into groups.
    #[error("--heads {heads} is no multiple of --kv-heads {kv_heads}")]
    Heads {
        /// Query heads.
        heads: usize,
        /// KV heads.
        kv_heads: usize,
    },
    /// No variant of these operations has that name.
    #[error("--variant {name:?}: no such variant; there are: {known}")]
    Unknown {
        /// As given.
        name: String,
        /// What there is.
        known: String,
    },
    /// No variant can do any of the shapes.
    #[error("no kernel that was asked for can do any of these shapes on {device}: {reasons}")]
    Nothing {
        /// Backend name.
        device: &'static str,
        /// By variant.
        reasons: String,
    },
    /// The device, or a kernel.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// One row of the table.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// What was done.
    pub operation: Operation,
    /// By which variant.
    pub variant: &'static str,
    /// On what.
    pub shape: Shape,
    /// How.
    pub cell: Cell,
    /// Of what the device could do at best: the time that its measured peaks ask for over the time taken. `None` where
    /// what bounds this was not measured.
    pub share: Option<f64>,
}

impl Measurement {
    /// Bytes a second.
    pub fn bytes_per_second(&self) -> f64 {
        self.cell.bytes as f64 / self.cell.time.median().max(Duration::from_nanos(1)).as_secs_f64()
    }
}

impl Peaks {
    /// Share of the peak that bounds a call: the least time that the peaks allow over the time taken. `None` where the peak
    /// was not measured.
    pub fn share(&self, operation: Operation, shape: &Shape, cell: &Cell) -> Option<f64> {
        let bytes = cell.bytes as f64;
        let memory = match operation {
            Operation::CacheWrite | Operation::BlockCopy => bytes / self.copy?,
            _ => bytes / self.read?,
        };
        let peak = if shape.dtype == Dtype::F32 { self.f32 } else { self.tensor };
        // Many rows at once are bound by arithmetic; without its peak there is nothing to compare with.
        let arithmetic = match operation {
            Operation::Prefill | Operation::Linear if shape.batch * shape.query_len > 1 => {
                cell.operations as f64 / peak?
            }
            _ => peak.map_or(0.0, |peak| cell.operations as f64 / peak),
        };
        Some(memory.max(arithmetic) / cell.time.median().as_secs_f64().max(1e-9))
    }
}
