//! A grid of shapes, and for every variant that supports them: time or counts, bytes, share of the peak, and error.
//!
//! Inputs are generated once for all variants of an operation. The device holds as many copies as together exceed every
//! cache ([`peaks`](super::Peaks)), and repetitions use them in turn, so reads come from memory. Errors are those of a
//! sample of rows spread over the batch, including the last: computing all rows in float64 would take far longer than the
//! kernels.

use std::sync::Arc;
use std::time::Duration;

use device::Device;
use device::sim::Tally;
use linear::Quantization;

pub use crate::cell::{Cell, Shape};
use crate::cells::{self, Runs};
use crate::peaks::Peaks;
use attention_kernels::KernelError;
use attention_kernels::variants;
use attention_kernels::{Dtype, KvDtype};
use attention_kernels::{Operation, Variant};

/// Measurements to make: the product of all lists that apply to an operation.
#[derive(Clone, Debug)]
pub struct Grid {
    /// Operations to measure.
    pub operations: Vec<Operation>,
    /// Names of variants; empty: all that support a shape.
    pub variants: Vec<String>,
    /// Types in which operations compute; see [`Shape::dtype`].
    pub dtypes: Vec<Dtype>,
    /// Types of caches.
    pub kv_dtypes: Vec<KvDtype>,
    /// Number of query heads.
    pub heads: usize,
    /// Number of KV heads, a divisor of the number of query heads.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_sizes: Vec<usize>,
    /// Tokens per block.
    pub block_sizes: Vec<usize>,
    /// Numbers of sequences.
    pub batches: Vec<usize>,
    /// Context lengths in tokens, query rows included.
    pub contexts: Vec<usize>,
    /// Query rows of each sequence, for prefill, cache writes and matrix products.
    pub query_lens: Vec<usize>,
    /// Outputs of matrix products, whose inputs are as many as an output of attention has elements; 0: as many.
    pub outputs: Vec<usize>,
    /// What weights of matrix products are quantised to; `None`: they are numbers.
    pub weights: Vec<Option<Quantization>>,
    /// Number of untimed runs.
    pub warmup: usize,
    /// Number of timed runs; fewer if they take more than a second.
    pub repeat: usize,
    /// Counts of the device's launches ([`device::Options::counts`]). Variants then run once and are counted instead of timed.
    pub tally: Option<Arc<Tally>>,
}

impl Grid {
    /// Returns a small default grid for a device, which takes about ten seconds.
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
            outputs: vec![0],
            weights: vec![None],
            warmup: if sim { 0 } else { 2 },
            repeat: if sim { 1 } else { 20 },
            tally: None,
        }
    }

    /// Returns the shapes of an operation, which ignore the lists that do not apply to it.
    pub fn shapes(&self, operation: Operation) -> Vec<Shape> {
        let one = [1];
        let query_lens = match operation {
            Operation::Decode | Operation::BlockCopy => &one[..],
            _ => &self.query_lens,
        };
        let contexts: &[usize] = match operation {
            Operation::Linear | Operation::LowRank | Operation::CacheWrite => &one,
            _ => &self.contexts,
        };
        let (kv_dtypes, block_sizes): (&[KvDtype], &[usize]) = match operation {
            Operation::Linear | Operation::LowRank => (&[KvDtype::Same], &one),
            _ => (&self.kv_dtypes, &self.block_sizes),
        };
        let (outputs, weights): (&[usize], &[Option<Quantization>]) = match operation {
            Operation::Linear => (&self.outputs, &self.weights),
            _ => (&[0], &[None]),
        };
        let none = Shape {
            dtype: Dtype::F32,
            kv_dtype: KvDtype::Same,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_size: 0,
            block_size: 0,
            batch: 0,
            context: 0,
            query_len: 0,
            outputs: 0,
            weights: None,
        };
        let shapes = vary(vec![none], &self.dtypes, |shape, dtype| shape.dtype = dtype);
        let shapes = vary(shapes, kv_dtypes, |shape, kv_dtype| shape.kv_dtype = kv_dtype);
        let shapes = vary(shapes, &self.head_sizes, |shape, size| shape.head_size = size);
        let shapes = vary(shapes, block_sizes, |shape, size| shape.block_size = size);
        let shapes = vary(shapes, &self.batches, |shape, batch| shape.batch = batch);
        let shapes = vary(shapes, contexts, |shape, context| shape.context = context);
        let shapes = vary(shapes, weights, |shape, weights| shape.weights = weights);
        let shapes = vary(shapes, outputs, |shape, outputs| {
            shape.outputs = if outputs == 0 { shape.inputs() } else { outputs };
        });
        let mut distinct: Vec<Shape> = Vec::new();
        for mut shape in vary(shapes, query_lens, |shape, len| shape.query_len = len) {
            shape.context = shape.context.max(shape.query_len);
            if !distinct.contains(&shape) {
                distinct.push(shape);
            }
        }
        distinct
    }

    /// Returns why variants cannot be measured: one line for each variant and reason, of the named variants or of those for
    /// this device.
    ///
    /// # Errors
    /// The grid is empty or names an unknown variant, or no variant can run on this device.
    pub fn check(&self, device: &dyn Device) -> Result<Vec<String>, GridError> {
        let sizes = [&self.head_sizes, &self.block_sizes, &self.batches, &self.contexts, &self.query_lens];
        let none = sizes.iter().any(|sizes| sizes.is_empty() || sizes.contains(&0));
        let none = none || self.outputs.is_empty() || self.weights.is_empty();
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
                    // Variants of other devices are reported only if they were named.
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

    /// Measures the grid and passes each cell to `found` at once. `measure` is called before each operation, and once after the
    /// last; shares refer to the greatest peaks so far.
    ///
    /// # Errors
    /// As for [`Grid::check`]; also, the device or a kernel fails.
    pub fn run(
        &self,
        device: &Arc<dyn Device>,
        measure: &mut dyn FnMut() -> Result<Peaks, KernelError>,
        found: &mut dyn FnMut(&Measurement),
    ) -> Result<(), GridError> {
        self.check(&**device)?;
        let runs = Runs { warmup: self.warmup, repeat: self.repeat, tally: self.tally.as_deref() };
        let mut peaks = Peaks::default();
        for &operation in &self.operations {
            peaks = peaks.max(&measure()?);
            for shape in self.shapes(operation) {
                let mut able = self.named(operation);
                able.retain(|variant| shape.needs(&**device).unmet(variant).is_none());
                cells::run(device, operation, &shape, &able, runs, &mut |variant, cell| {
                    let share = peaks.share(operation, &shape, &cell);
                    found(&Measurement { operation, variant: variant.name, shape: shape.clone(), cell, share });
                })?;
            }
        }
        measure().map(drop)?;
        Ok(())
    }
}

/// Returns each shape with each of the values.
fn vary<T: Copy>(shapes: Vec<Shape>, values: &[T], set: impl Fn(&mut Shape, T)) -> Vec<Shape> {
    let with = |(mut shape, value): (Shape, T)| {
        set(&mut shape, value);
        shape
    };
    shapes.iter().flat_map(|shape| values.iter().map(|value| with((shape.clone(), *value)))).collect()
}

/// Why a grid was not measured, or not completely.
#[derive(Debug, thiserror::Error)]
pub enum GridError {
    /// A list is empty or contains 0.
    #[error("--heads, --kv-heads, --head-size, --block-size, --batch, --context and --query-len take numbers from 1")]
    Empty,
    /// The heads cannot be grouped evenly.
    #[error("--heads: found {heads}, expected a multiple of --kv-heads {kv_heads}; change one of them")]
    Heads {
        /// Number of query heads.
        heads: usize,
        /// Number of KV heads.
        kv_heads: usize,
    },
    /// No variant of these operations has the name.
    #[error("--variant {name:?}: there is no such variant; use one of: {known}")]
    Unknown {
        /// Name as given.
        name: String,
        /// Names of all variants of these operations.
        known: String,
    },
    /// No variant supports any of the shapes.
    #[error("no requested kernel supports any of these shapes on {device}: {reasons}")]
    Nothing {
        /// Backend name.
        device: &'static str,
        /// Reason for each variant.
        reasons: String,
    },
    /// The device or a kernel failed.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// Measurement of one variant at one shape: a row of the table.
#[derive(Clone, Debug)]
pub struct Measurement {
    /// Operation.
    pub operation: Operation,
    /// Name of the variant.
    pub variant: &'static str,
    /// Shape.
    pub shape: Shape,
    /// Time or counts, bytes and error.
    pub cell: Cell,
    /// Share of the peak that bounds the operation: the time at the measured peak over the time taken. `None` if that peak
    /// was not measured.
    pub share: Option<f64>,
}

impl Measurement {
    /// Returns the bytes per second.
    pub fn bytes_per_second(&self) -> f64 {
        self.cell.bytes as f64 / self.cell.time.median().max(Duration::from_nanos(1)).as_secs_f64()
    }
}

impl Peaks {
    /// Returns the share of the peak that bounds a call: the least time that the peaks allow over the time taken. `None` if that
    /// peak was not measured.
    pub fn share(&self, operation: Operation, shape: &Shape, cell: &Cell) -> Option<f64> {
        let bytes = cell.bytes as f64;
        let memory = match operation {
            Operation::CacheWrite | Operation::BlockCopy => bytes / self.copy?,
            _ => bytes / self.read?,
        };
        let peak = self.operations(shape.dtype, shape.weights.is_some());
        // Many rows at once are bound by arithmetic, so without its peak there is no bound.
        let arithmetic = match operation {
            Operation::Prefill | Operation::Linear if shape.batch * shape.query_len > 1 => {
                cell.operations as f64 / peak?
            }
            _ => peak.map_or(0.0, |peak| cell.operations as f64 / peak),
        };
        Some(memory.max(arithmetic) / cell.time.median().as_secs_f64().max(1e-9))
    }
}
