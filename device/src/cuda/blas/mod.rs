//! Matrix products on a GPU with cuBLASLt, which is loaded at run time.
//!
//! The library works on column-major matrices; row-major `y = x·Wᵀ` is column-major `yᵀ = W·xᵀ`:
//!
//! ```text
//! A = W, stored [k × n], transposed        B = x, stored [k × rows]        D = y, stored [n × rows]
//! ```
//!
//! An algorithm is chosen for a shape and a bucket of row counts ([`super::buckets`]) and kept, so a step with a new row count in
//! a known bucket needs no choice. Without `deterministic` it is the first that the library's heuristics name. With it, the bits of
//! a row must not depend on the number of rows, and [`choice`] proves every algorithm by its bits before it is used.
//!
//! [`Blas::plan`] chooses all of this at start. Sums are in f32; for f32 operands too, without the shorter formats of the
//! tensor cores, and for floats of 8 bits without the faster sums of fewer bits. Integers of 8 bits are summed exactly, in 32 bits. All
//! products share one workspace, because they run one after the other on one stream.

mod choice;
mod library;
mod plan;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use cudarc::cublaslt::{result, sys};
use cudarc::driver::sys::CUdeviceptr;

use super::buckets::{bucket, buckets};
use crate::driver::{Context, CudaError, DeviceMemory, symbols};
use crate::{DeviceError, ProductShape};
use choice::{Choices, Probe};
pub(super) use library::Operands;
use library::{Library, WORKSPACE, refused};
use plan::{Algorithm, Plan};

/// Minimum version, of CUDA 13.0, as `cublasLtGetVersion` reports it. Its binary interface is the one that cudarc declares.
const MIN_VERSION: usize = 130_000;

/// The library, loaded for one GPU.
pub(super) struct Blas {
    shapes: HashMap<ProductShape, (Plan, Choices)>,
    /// Operands of products that prove algorithms; only deterministic products need them.
    probe: Option<Probe>,
    library: Library,
}

// SAFETY: any thread may use handles of the library, one at a time (`&mut self`), with the context current (`Context::enter`).
unsafe impl Send for Blas {}

impl Blas {
    /// `deterministic`: the order of summation of an element does not depend on the number of rows.
    pub fn open(context: &Arc<Context>, deterministic: bool) -> Result<Blas, DeviceError> {
        symbols::check_blas()?;
        // SAFETY: the function takes no argument and only reads.
        let version = unsafe { sys::cublasLtGetVersion() };
        if version < MIN_VERSION {
            return Err(CudaError::OldBlas(version).into());
        }
        context.enter()?;
        let workspace = DeviceMemory::zeroed(context, WORKSPACE)?;
        let probe = if deterministic { Some(Probe::new(context)?) } else { None };
        let handle = result::create_handle().map_err(refused("initialisation"))?;
        Ok(Blas { shapes: HashMap::new(), probe, library: Library { handle, workspace, context: Arc::clone(context) } })
    }

    /// Bytes of device memory that [`Blas::open`] allocates.
    pub fn bytes(deterministic: bool) -> usize {
        WORKSPACE + if deterministic { Probe::BYTES } else { 0 }
    }

    /// Returns whether the algorithm of a product is chosen.
    pub fn has_plan(&self, shape: &ProductShape, rows: usize) -> bool {
        self.shapes.get(shape).is_some_and(|(_, choices)| choices.of(rows).is_some())
    }

    /// Chooses the algorithms of products with 1 to `max_rows` rows. A shape that no algorithm serves is not an error here.
    pub fn plan(&mut self, shape: ProductShape, weights: CUdeviceptr, max_rows: usize) -> Result<(), DeviceError> {
        let chosen = buckets(max_rows).try_for_each(|bucket| self.choose(shape, weights, *bucket.end()).map(drop));
        Ok(chosen?)
    }

    /// Returns the plan of a shape and its choice for so many rows.
    fn choose(&mut self, shape: ProductShape, weights: CUdeviceptr, rows: usize) -> Result<Chosen<'_>, CudaError> {
        let Blas { shapes, probe, library } = self;
        library.context.enter()?;
        let failed = |error| refused(format_args!("the choice of an algorithm for {rows} rows, {shape}"))(error);
        let (plan, choices) = match shapes.entry(shape) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert((Plan::new(shape).map_err(failed)?, Choices::default())),
        };
        let algorithm = match choices.of(rows) {
            Some(chosen) => chosen,
            None => {
                let found = match probe {
                    None => choice::first(library, plan, bucket(rows)).map_err(failed)?,
                    Some(probe) => choices.proven(library, plan, probe, weights, bucket(rows))?,
                };
                choices.keep(rows, found)
            }
        };
        Ok(Chosen { library, plan, algorithm, serves_few: choices.any() })
    }

    /// Enqueues a product on the compute stream. Rows that are more than any algorithm serves are computed in parts, if their bits
    /// do not depend on that.
    pub fn product(&mut self, shape: ProductShape, rows: usize, operands: Operands) -> Result<(), DeviceError> {
        let chosen = self.choose(shape, operands.weights, rows)?;
        let part = match chosen {
            Chosen { algorithm: Some(_), .. } => rows,
            Chosen { serves_few: true, .. } if rows > choice::PROBE_ROWS => choice::PROBE_ROWS,
            _ => return Err(CudaError::NoAlgorithm(shape.to_string()).into()),
        };
        for first in (0..rows).step_by(part) {
            let count = part.min(rows - first);
            let after = |address: CUdeviceptr, row: usize| address + (first * row) as CUdeviceptr;
            let x = after(operands.x, shape.k * shape.format.bytes());
            let y = after(operands.y, shape.stride * shape.y_format.bytes());
            let Chosen { library, plan, algorithm, .. } = self.choose(shape, operands.weights, count)?;
            let algorithm = algorithm.ok_or_else(|| CudaError::NoAlgorithm(shape.to_string()))?;
            let ran = plan.run(library, &algorithm, [count, rows], Operands { x, y, ..operands });
            ran.map_err(|error| refused(format_args!("the product of {count} rows, {shape}"))(error))?;
        }
        Ok(())
    }
}

/// What was chosen for a product.
struct Chosen<'a> {
    library: &'a Library,
    plan: &'a Plan,
    /// `None`: no algorithm serves so many rows.
    algorithm: Option<Algorithm>,
    /// Whether up to [`choice::PROBE_ROWS`] rows have an algorithm whose bits do not depend on their number.
    serves_few: bool,
}

impl Drop for Blas {
    fn drop(&mut self) {
        if self.library.context.finish_all().is_ok() {
            self.shapes.clear();
            // SAFETY: made in `open`, and no product is running any more.
            let _ = unsafe { result::destroy_handle(self.library.handle) };
        }
    }
}
