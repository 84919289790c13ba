//! The choice of algorithms.
//!
//! An algorithm determines the order in which an element is summed: by the inputs that an instruction adds, and by whether it
//! splits k. Of the algorithms that do not split k nearly all add in the same order, whatever their tiles, but a few do not, and
//! nothing in the library says which. So where bits must not depend on the number of rows, each algorithm is tried before it is
//! used: it computes a product of up to [`PROBE_ROWS`] rows, and it is dropped unless every row has the bits that the shape's first
//! algorithm gave it. Each bucket of row counts then has the fastest of those that are left:
//!
//! ```text
//! heuristics, for the bucket and for some other row counts    candidates
//!   without those that split k, or do not accept the bucket
//!   without those whose bits differ in the probe              proven
//!     up to 256 rows: the one that took the least time        chosen
//!     more rows: the first, by the heuristics
//! ```
//!
//! A sum in another order differs in the last bits of float32, which a result in 16 bits rarely shows. So the numbers of a probe
//! cancel each other ([`Probe::load`]): what is left of a sum is about as large as its rounding errors. A matrix too large for the
//! probe's memory has so many outputs that random rows and the real weights show it.
//!
//! For few rows the heuristics alone are no guide: without algorithms that split k they put kernels first that take seven times as
//! long as others of their list (`docs/benchmarks/`). The times decide between equal bits only, so they may differ from one start
//! to the next.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use cudarc::cublaslt::result::CublasError;
use cudarc::driver::sys::{self as driver, CUdeviceptr};
use simd::small_float::{f32_to_bf16, f32_to_e4m3, f32_to_f16};

use super::library::{Library, Operands, refused};
use super::plan::{Algorithm, Plan};
use crate::cuda::buckets::{bucket, buckets};
use crate::driver::{Context, CudaError, DeviceMemory, Point};
use crate::{DeviceError, Dtype, FactorType, ProductShape, Queue};

/// Most rows of a probe. An algorithm that is the first of a shape serves any smaller number.
pub(super) const PROBE_ROWS: usize = 128;
/// Most rows of the buckets whose algorithms are timed.
const TIMED_ROWS: usize = 256;
/// Row counts whose candidates are tried for every bucket that is timed.
const POOL: [usize; 3] = [16, 64, PROBE_ROWS];
/// Runs of an algorithm in one measurement of its time, and measurements of which the shortest counts.
const RUNS: usize = 4;
const ROUNDS: usize = 2;

/// Returns the best algorithm for a bucket of row counts by the heuristics, if any serves all of it.
pub(super) fn first(
    library: &Library,
    plan: &Plan,
    bucket: RangeInclusive<usize>,
) -> Result<Option<Algorithm>, CublasError> {
    for algorithm in plan.candidates(library, *bucket.end(), false)? {
        if plan.accepts(library, &algorithm, *bucket.start())? {
            return Ok(Some(algorithm));
        }
    }
    Ok(None)
}

/// The algorithms of a shape.
#[derive(Default)]
pub(super) struct Choices {
    /// By the last row count of a bucket; `None`: no algorithm serves it.
    chosen: BTreeMap<usize, Option<Algorithm>>,
    /// `Some(None)`: no algorithm can be the first.
    proof: Option<Option<Proof>>,
}

/// What is known of the bits of a shape.
struct Proof {
    first: Algorithm,
    /// A hash of the bits of each row of the probe.
    rows: Vec<u64>,
    /// Candidates of [`POOL`].
    pool: Vec<Algorithm>,
    /// Algorithms that were tried, and whether they gave these bits.
    tried: Vec<(Algorithm, bool)>,
}

impl Choices {
    /// Returns what was chosen for so many rows.
    pub fn of(&self, rows: usize) -> Option<Option<Algorithm>> {
        self.chosen.get(bucket(rows).end()).copied()
    }

    /// Keeps what was chosen for the bucket of so many rows.
    pub fn keep(&mut self, rows: usize, chosen: Option<Algorithm>) -> Option<Algorithm> {
        self.chosen.insert(*bucket(rows).end(), chosen);
        chosen
    }

    /// Returns whether some algorithm serves the shape; `false` is the same for every number of rows.
    pub fn any(&self) -> bool {
        matches!(self.proof, Some(Some(_)))
    }

    /// Returns the fastest algorithm for a bucket whose bits do not depend on the number of rows.
    pub fn proven(
        &mut self,
        library: &Library,
        plan: &Plan,
        probe: &mut Probe,
        weights: CUdeviceptr,
        bucket: RangeInclusive<usize>,
    ) -> Result<Option<Algorithm>, CudaError> {
        let failed =
            |error| refused(format_args!("the choice of an algorithm for {bucket:?} rows, {}", plan.shape))(error);
        if plan.is_exact() {
            return first(library, plan, bucket.clone()).map_err(failed);
        }
        let weights = probe.load(&plan.shape)?.unwrap_or(weights);
        let on = Bench { library, plan, probe, weights };
        if self.proof.is_none() {
            self.proof = Some(on.prove()?);
        }
        let Some(Some(proof)) = &mut self.proof else { return Ok(None) };
        let is_timed = *bucket.end() <= TIMED_ROWS.min(on.most_rows());
        let mut candidates = plan.candidates(library, *bucket.end(), true).map_err(failed)?;
        candidates.extend(proof.pool.iter().filter(|_| is_timed));
        candidates.push(proof.first);
        let mut able: Vec<Algorithm> = Vec::new();
        for algorithm in candidates {
            let accepts = |rows: &usize| plan.accepts(library, &algorithm, *rows).map_err(failed);
            if !able.contains(&algorithm)
                && accepts(bucket.start())?
                && accepts(bucket.end())?
                && on.holds(proof, algorithm, *bucket.end())?
            {
                able.push(algorithm);
            }
        }
        if !is_timed || able.len() < 2 {
            return Ok(able.first().copied());
        }
        let mut fastest: Option<(Duration, Algorithm)> = None;
        for algorithm in able {
            let time = on.time(&algorithm, *bucket.end())?;
            if fastest.is_none_or(|(least, _)| time < least) {
                fastest = Some((time, algorithm));
            }
        }
        Ok(fastest.map(|(_, algorithm)| algorithm))
    }
}

/// Memory for the products that prove algorithms: rows `x`, weights if there is space, then the result.
pub(super) struct Probe {
    memory: DeviceMemory,
    /// The shape whose rows and weights the memory holds.
    holds: Option<ProductShape>,
}

impl Probe {
    /// Size of the memory.
    pub const BYTES: usize = 48 << 20;
    /// Most bytes of weights.
    const WEIGHTS: usize = 16 << 20;
    const ALIGNMENT: usize = 256;

    pub fn new(context: &Arc<Context>) -> Result<Probe, DeviceError> {
        Ok(Probe { memory: DeviceMemory::zeroed(context, Probe::BYTES)?, holds: None })
    }

    /// Bytes of the weights of a shape; 0: too many.
    fn weight_bytes(shape: &ProductShape) -> usize {
        let bytes = shape.n * shape.k * shape.format.bytes();
        if bytes <= Probe::WEIGHTS { bytes.next_multiple_of(Probe::ALIGNMENT) } else { 0 }
    }

    /// Number of rows of a shape for which the memory has space.
    fn rows(shape: &ProductShape) -> usize {
        let ProductShape { k, format, y_format, stride, slices, .. } = *shape;
        let left = Probe::BYTES - Probe::ALIGNMENT - Probe::weight_bytes(shape);
        (left / (k * format.bytes() + slices * stride * y_format.bytes()).max(1)).min(TIMED_ROWS)
    }

    /// Bytes at which the weights and the result begin.
    fn places(shape: &ProductShape) -> [usize; 2] {
        let weights = (Probe::rows(shape) * shape.k * shape.format.bytes()).next_multiple_of(Probe::ALIGNMENT);
        [weights, weights + Probe::weight_bytes(shape)]
    }

    /// Fills the memory for a shape, unless it holds that, and returns the address of the weights; `None`: there is no space for them.
    ///
    /// The second half of a row of weights repeats the first, and the second half of a row of `x` is the first with the other sign,
    /// but for every eighth input of both, whose numbers are small and do not cancel.
    fn load(&mut self, shape: &ProductShape) -> Result<Option<CUdeviceptr>, CudaError> {
        let [weights_at, _] = Probe::places(shape);
        let has_weights = Probe::weight_bytes(shape) > 0;
        let weights = has_weights.then_some(self.memory.address + weights_at as CUdeviceptr);
        if self.holds != Some(*shape) {
            let of_slice = (shape.k / shape.slices).max(1);
            let mut numbers = Numbers::default();
            let x =
                numbers.rows(shape.format, Probe::rows(shape) * shape.slices, of_slice, has_weights.then_some(-1.0));
            self.upload(0, &x)?;
            if has_weights {
                self.upload(weights_at, &numbers.rows(shape.format, shape.n * shape.slices, of_slice, Some(1.0)))?;
            }
            self.holds = Some(*shape);
        }
        Ok(weights)
    }

    /// Copies bytes to a place of the memory.
    fn upload(&self, at: usize, bytes: &[u8]) -> Result<(), CudaError> {
        let context = &self.memory.context;
        // SAFETY: the memory is larger, and the stream has copied the bytes before this returns.
        unsafe {
            let (to, stream) = (self.memory.address + at as CUdeviceptr, context.stream(Queue::Compute));
            driver::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), stream)
        }
        .result()
        .map_err(crate::driver::refused("copying to the GPU"))?;
        context.finish(Queue::Compute)
    }
}

/// Random numbers, by a linear congruential generator.
struct Numbers(u64);

impl Default for Numbers {
    fn default() -> Numbers {
        Numbers(0x9e37_79b9_7f4a_7c15)
    }
}

impl Numbers {
    /// Returns a number from −1 to 1.
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Returns rows of `width` numbers. With `factor`, the second half of a row is the first half times it; for −1 every eighth
    /// number of both is small instead.
    fn rows(&mut self, format: FactorType, rows: usize, width: usize, factor: Option<f32>) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(rows * width * format.bytes());
        let mut row = vec![0.0f32; width];
        // In 8 bits sums are exact, and what is smaller is 0.
        let small = if format.bytes() == 1 { 1.0 / 32.0 } else { 1.0 / 4096.0 };
        for _ in 0..rows {
            row.iter_mut().for_each(|number| *number = self.next());
            if let Some(factor) = factor {
                let half = width / 2;
                let (first, second) = row.split_at_mut(half);
                second.iter_mut().zip(first).for_each(|(to, from)| *to = *from * factor);
                if factor < 0.0 {
                    let halves = row.chunks_mut(half.max(1)).take(2);
                    halves.flat_map(|half| half.iter_mut().step_by(8)).for_each(|number| *number = self.next() * small);
                }
            }
            for number in &row {
                match format {
                    FactorType::Numbers(Dtype::F32) => bytes.extend(number.to_ne_bytes()),
                    FactorType::Numbers(Dtype::F16) => bytes.extend(f32_to_f16(*number).to_ne_bytes()),
                    FactorType::Numbers(Dtype::Bf16) => bytes.extend(f32_to_bf16(*number).to_ne_bytes()),
                    FactorType::E4m3 => bytes.push(f32_to_e4m3(*number)),
                    FactorType::Int8 => bytes.push((*number * 127.0) as i8 as u8),
                }
            }
        }
        bytes
    }
}

/// A shape with what its probes need.
struct Bench<'a> {
    library: &'a Library,
    plan: &'a Plan,
    probe: &'a Probe,
    weights: CUdeviceptr,
}

impl Bench<'_> {
    fn most_rows(&self) -> usize {
        Probe::rows(&self.plan.shape)
    }

    /// Address of the result.
    fn result(&self) -> CUdeviceptr {
        let [_, result] = Probe::places(&self.plan.shape);
        self.probe.memory.address + result as CUdeviceptr
    }

    fn failed(&self, rows: usize) -> impl Fn(CublasError) -> CudaError {
        refused(format!("the probe of an algorithm with {rows} rows, {}", self.plan.shape))
    }

    fn run(&self, algorithm: &Algorithm, rows: usize) -> Result<(), CublasError> {
        let (x, y) = (self.probe.memory.address, self.result());
        // The bias is added behind the sum; any numbers serve.
        let bias = self.plan.shape.bias.then_some(x);
        self.plan.run(self.library, algorithm, [rows, rows], Operands { weights: self.weights, x, bias, y })
    }

    /// Finds the first algorithm of the shape, and the bits that others must give.
    fn prove(&self) -> Result<Option<Proof>, CudaError> {
        let rows = self.most_rows().min(PROBE_ROWS);
        let failed = self.failed(rows);
        let mut pool = Vec::new();
        for rows in POOL {
            pool.extend(self.plan.candidates(self.library, rows, true).map_err(&failed)?);
        }
        // The candidates for the most rows are last. They are tried first, because they usually serve fewer rows too.
        'next: for first in pool.iter().rev().copied() {
            for bucket in buckets(PROBE_ROWS) {
                for rows in [*bucket.start(), *bucket.end()] {
                    if !self.plan.accepts(self.library, &first, rows).map_err(&failed)? {
                        continue 'next;
                    }
                }
            }
            if rows == 0 || self.run(&first, rows).is_err() {
                continue;
            }
            let (rows, differ) = self.bits(rows)?;
            if !differ {
                // The weights are zeros, and the probe shows nothing.
                pool.clear();
            }
            return Ok(Some(Proof {
                first,
                rows: if differ { rows } else { Vec::new() },
                pool,
                tried: vec![(first, true)],
            }));
        }
        Ok(None)
    }

    /// Returns whether an algorithm that serves so many rows gives every row of the probe its bits.
    fn holds(&self, proof: &mut Proof, algorithm: Algorithm, rows: usize) -> Result<bool, CudaError> {
        if let Some((_, holds)) = proof.tried.iter().find(|(tried, _)| *tried == algorithm) {
            return Ok(*holds);
        }
        let rows = rows.min(proof.rows.len());
        let serves = rows > 0 && self.plan.accepts(self.library, &algorithm, rows).map_err(self.failed(rows))?;
        // An algorithm that fails is dropped like one that differs.
        let holds = serves && self.run(&algorithm, rows).is_ok() && self.bits(rows)?.0 == proof.rows[..rows];
        proof.tried.push((algorithm, holds));
        Ok(holds)
    }

    /// Returns a hash of each row of the last result, and whether any row differs from zeros.
    fn bits(&self, rows: usize) -> Result<(Vec<u64>, bool), CudaError> {
        let ProductShape { n, y_format, stride, slices, .. } = self.plan.shape;
        let (row_bytes, context) = (stride * y_format.bytes(), &self.library.context);
        let mut result = vec![0u8; slices * rows * row_bytes];
        // SAFETY: the memory holds that many bytes of the result, and the stream has copied them before they are read.
        unsafe {
            let stream = context.stream(Queue::Compute);
            driver::cuMemcpyDtoHAsync_v2(result.as_mut_ptr().cast(), self.result(), result.len(), stream)
        }
        .result()
        .map_err(crate::driver::refused("copying from the GPU"))?;
        context.finish(Queue::Compute)?;
        let mut hashes = vec![DefaultHasher::new(); rows];
        let mut differ = false;
        for slice in result.chunks(rows * row_bytes) {
            for (hash, row) in hashes.iter_mut().zip(slice.chunks(row_bytes)) {
                let row = &row[..n * y_format.bytes()];
                hash.write(row);
                differ |= row.iter().any(|byte| *byte != 0);
            }
        }
        Ok((hashes.into_iter().map(|hash| hash.finish()).collect(), differ))
    }

    /// Returns the time of some runs.
    fn time(&self, algorithm: &Algorithm, rows: usize) -> Result<Duration, CudaError> {
        let run = || self.run(algorithm, rows).map_err(self.failed(rows));
        let context = &self.library.context;
        run()?;
        let mut least = Duration::MAX;
        for _ in 0..ROUNDS {
            let start = Point::record(context, Queue::Compute)?;
            (0..RUNS).try_for_each(|_| run())?;
            let end = Point::record(context, Queue::Compute)?;
            end.synchronize()?;
            least = least.min(end.since(&start)?);
        }
        Ok(least)
    }
}
