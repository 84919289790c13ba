//! Matrix products on a GPU with cuBLASLt, which is loaded at run time.
//!
//! The library works on column-major matrices; row-major `y = x·Wᵀ` is column-major `yᵀ = W·xᵀ`:
//!
//! ```text
//! A = W, stored [k × n], transposed        B = x, stored [k × rows]        D = y, stored [n × rows]
//! ```
//!
//! The algorithm that the library's heuristics choose for a shape and a bucket of row counts ([`super::buckets`]) is kept, so a
//! step with another number of rows asks for none. An algorithm determines the order in which an element is summed, by its
//! tiles and by whether it splits k. Products that must not depend on the number of rows use the same algorithm for any number:
//! the best for [`ROWS_OF_ALL`] rows that does not split k and that the library's check accepts for 1 to [`MOST_CHECKED_ROWS`]
//! rows. There is no other choice for some of the rows, because that would change their bits: a shape without such an algorithm
//! is an error, and so is a product with more rows that the library refuses.
//!
//! [`Blas::plan`] chooses all of this at start. Sums are in f32; for f32 operands too, without the shorter formats of the
//! tensor cores, and for floats of 8 bits without the faster sums of fewer bits. Integers of 8 bits are summed exactly, in 32 bits. All
//! products share one workspace, because they run one after the other on one stream.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t as Compute, cublasLtEpilogue_t as Epilogue, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulHeuristicResult_t as Candidate, cublasLtMatmulPreferenceAttributes_t as Preference,
    cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cublasStatus_t as Status, cudaDataType as DataType,
};
use cudarc::driver::sys::CUdeviceptr;

use super::buckets::{bucket, buckets};
use super::context::Context;
use super::error::CudaError;
use super::memory::DeviceMemory;
use crate::gemm::{FactorType, ProductShape};
use crate::{DeviceError, Dtype, Queue};

/// Minimum version, of CUDA 13.0, as `cublasLtGetVersion` reports it. Its binary interface is the one that cudarc declares.
const MIN_VERSION: usize = 130_000;

/// Size of the workspace in bytes, as NVIDIA recommends for Hopper.
pub(super) const WORKSPACE: usize = 32 << 20;

/// Number of rows for which the algorithm for any number of rows is chosen: more than a small decode has, whose time is that of
/// reading the weights in any case, and enough to fill the tiles of a prefill.
const ROWS_OF_ALL: usize = 128;

/// Such an algorithm must serve these many rows, and 1, 2, 4 and so on.
const MOST_CHECKED_ROWS: usize = 1 << 16;

/// Columns of a wider matrix begin at multiples of this, in bytes. The library assumes 256 if it is not told.
const ALIGNMENT: u32 = 16;

/// Number of algorithms that the heuristics are asked for. The first that can serve the smallest and the largest number of rows of a
/// bucket is taken.
const CANDIDATES: usize = 16;

const NO_CANDIDATE: Candidate = Candidate {
    algo: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
    workspaceSize: 0,
    state: Status::CUBLAS_STATUS_NOT_INITIALIZED,
    wavesCount: 0.0,
    reserved: [0; 4],
};

/// `CUBLAS_OP_T` of `cublas_api.h`.
const TRANSPOSED: i32 = 1;

/// Addresses of the operands on the GPU.
pub(super) struct Operands {
    pub weights: CUdeviceptr,
    pub x: CUdeviceptr,
    pub bias: Option<CUdeviceptr>,
    pub y: CUdeviceptr,
}

/// The library, loaded for one GPU.
pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    plans: HashMap<ProductShape, Plan>,
    workspace: DeviceMemory,
    deterministic: bool,
    context: Arc<Context>,
}

// SAFETY: any thread may use handles of the library, one at a time (`&mut self`), with the context current (`Context::enter`).
unsafe impl Send for Blas {}

/// Descriptors of a product, and its algorithms.
struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    weights: sys::cublasLtMatrixLayout_t,
    /// The numbers of rows of this layout and of `y` are those of the last call.
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
    sums: Sums,
    /// Whether `y` and the bias may begin at any multiple of [`ALIGNMENT`].
    is_part: bool,
    /// By [`chosen_for`].
    algorithms: BTreeMap<usize, sys::cublasLtMatmulAlgo_t>,
}

/// What elements are summed as.
#[derive(Clone, Copy)]
enum Sums {
    Floats,
    Integers,
}

impl Sums {
    /// The factors 1 of the product and 0 of what was in `y`.
    fn factors(self) -> [*const c_void; 2] {
        match self {
            Sums::Floats => [address(&1.0f32), address(&0.0f32)],
            Sums::Integers => [address(&1i32), address(&0i32)],
        }
    }
}

/// Returns the number of rows whose best algorithm computes products with `rows` rows.
fn chosen_for(rows: usize, deterministic: bool) -> usize {
    if deterministic { ROWS_OF_ALL } else { *bucket(rows).end() }
}

impl Blas {
    /// `deterministic`: the order of summation of an element does not depend on the number of rows.
    pub fn open(context: &Arc<Context>, deterministic: bool) -> Result<Blas, DeviceError> {
        // SAFETY: loading the library runs its initialisers, which are trusted.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoBlas.into());
        }
        // SAFETY: the function takes no argument and only reads.
        let version = unsafe { sys::cublasLtGetVersion() };
        if version < MIN_VERSION {
            return Err(CudaError::OldBlas(version).into());
        }
        context.enter()?;
        let workspace = DeviceMemory::zeroed(context, WORKSPACE)?;
        let handle = result::create_handle().map_err(refused("initialisation"))?;
        Ok(Blas { handle, plans: HashMap::new(), workspace, deterministic, context: Arc::clone(context) })
    }

    /// Returns whether the algorithm of a product is chosen.
    pub fn has_plan(&self, shape: &ProductShape, rows: usize) -> bool {
        let chosen = chosen_for(rows, self.deterministic);
        self.plans.get(shape).is_some_and(|plan| plan.algorithms.contains_key(&chosen))
    }

    /// Chooses the algorithms of products with 1 to `max_rows` rows.
    pub fn plan(&mut self, shape: ProductShape, max_rows: usize) -> Result<(), DeviceError> {
        self.context.enter()?;
        let mut rows = buckets(max_rows).map(|bucket| *bucket.end());
        Ok(rows.try_for_each(|rows| self.planned(shape, rows).map(drop))?)
    }

    /// Returns the plan and its algorithm for `rows` rows.
    fn planned(&mut self, shape: ProductShape, rows: usize) -> Result<(&Plan, &sys::cublasLtMatmulAlgo_t), CudaError> {
        let chosen = chosen_for(rows, self.deterministic);
        let failed = |error| refused(format_args!("the choice of an algorithm for {chosen} rows, {shape}"))(error);
        let plan = match self.plans.entry(shape) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(Plan::new(shape).map_err(failed)?),
        };
        if !plan.algorithms.contains_key(&chosen) {
            let found = match self.deterministic {
                false => plan.find(self.handle, chosen, WORKSPACE, None, [*bucket(rows).start()]),
                // Without a workspace and without a reduction, no algorithm can split k.
                true => {
                    let none = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32;
                    let others = (0..=MOST_CHECKED_ROWS.ilog2()).map(|power| 1 << power);
                    plan.find(self.handle, chosen, 0, Some(none), others)
                }
            };
            plan.algorithms.insert(chosen, found.map_err(failed)?);
        }
        let plan = &*plan;
        let algorithm = plan.algorithms.get(&chosen).ok_or(CublasError(Status::CUBLAS_STATUS_INTERNAL_ERROR));
        Ok((plan, algorithm.map_err(failed)?))
    }

    /// Enqueues a product on the compute stream.
    pub fn product(&mut self, shape: ProductShape, rows: usize, operands: Operands) -> Result<(), DeviceError> {
        self.context.enter()?;
        let (handle, workspace, stream) =
            (self.handle, self.workspace.address, self.context.stream(Queue::Compute).cast());
        let (plan, algorithm) = self.planned(shape, rows)?;
        let run = || {
            plan.set_rows(rows)?;
            if let Some(bias) = &operands.bias {
                // SAFETY: the descriptor exists; the attribute is an address, which the call copies.
                unsafe { set(plan.product, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias) }?;
            }
            let [one, zero] = plan.sums.factors();
            // SAFETY: descriptors and algorithm belong together; the buffers are as large as the layouts say
            // (`Product::check`), and their drops wait for the stream. With a factor of 0 the library does not read C, which is
            // D. The call copies the scalars and the layouts.
            unsafe {
                result::matmul(
                    handle,
                    plan.product,
                    one,
                    zero,
                    operands.weights as *const c_void,
                    plan.weights,
                    operands.x as *const c_void,
                    plan.x,
                    operands.y as *const c_void,
                    plan.y,
                    operands.y as *mut c_void,
                    plan.y,
                    algorithm,
                    workspace as *mut c_void,
                    WORKSPACE,
                    stream,
                )
            }
        };
        Ok(run().map_err(|error| refused(format_args!("the product of {rows} rows, {shape}"))(error))?)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        if self.context.finish_all().is_ok() {
            self.plans.clear();
            // SAFETY: made in `open`, and no product is running any more.
            let _ = unsafe { result::destroy_handle(self.handle) };
        }
    }
}

impl Plan {
    /// Makes a plan without algorithms.
    fn new(shape: ProductShape) -> Result<Plan, CublasError> {
        let ProductShape { n, k, format, y_format, bias, stride } = shape;
        let (is_part, stride) = (stride != n, stride as i64);
        let (n, k, rows) = (n as u64, k as u64, 1);
        let (operand, result_type, sums) = match format {
            FactorType::Numbers(dtype) => (data_type(dtype), data_type(y_format), Sums::Floats),
            FactorType::E4m3 => (DataType::CUDA_R_8F_E4M3, data_type(y_format), Sums::Floats),
            FactorType::Int8 => (DataType::CUDA_R_8I, DataType::CUDA_R_32I, Sums::Integers),
        };
        let (null, no_layout) = (std::ptr::null_mut(), std::ptr::null_mut());
        // Each descriptor is stored in the plan at once, so that it is destroyed if a later call fails.
        let mut plan = Plan {
            product: null,
            weights: no_layout,
            x: no_layout,
            y: no_layout,
            sums,
            is_part,
            algorithms: BTreeMap::new(),
        };
        plan.product = match sums {
            Sums::Floats => result::create_matmul_desc(Compute::CUBLAS_COMPUTE_32F, DataType::CUDA_R_32F)?,
            Sums::Integers => result::create_matmul_desc(Compute::CUBLAS_COMPUTE_32I, DataType::CUDA_R_32I)?,
        };
        plan.weights = result::create_matrix_layout(operand, k, n, k as i64)?;
        plan.x = result::create_matrix_layout(operand, k, rows, k as i64)?;
        plan.y = result::create_matrix_layout(result_type, n, rows, stride)?;
        let epilogue = if bias { Epilogue::CUBLASLT_EPILOGUE_BIAS } else { Epilogue::CUBLASLT_EPILOGUE_DEFAULT };
        // SAFETY: the descriptor exists, and the attributes have the types of the library's header.
        unsafe {
            set(plan.product, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
            set(plan.product, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            if bias {
                set(plan.product, Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &result_type)?;
            }
        }
        Ok(plan)
    }

    /// Makes this the number of rows of the following calls.
    fn set_rows(&self, rows: usize) -> Result<(), CublasError> {
        let (columns, rows) = (LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_COLS, rows as u64);
        for layout in [self.x, self.y] {
            // SAFETY: the layout exists, and the attribute is a 64-bit number.
            unsafe { result::set_matrix_layout_attribute(layout, columns, address(&rows), size_of::<u64>()) }?;
        }
        Ok(())
    }

    /// Returns the best algorithm for `rows` rows, by the library's heuristics, that uses at most `workspace` bytes and can also
    /// serve each of `others`. With `reductions`, an algorithm that splits k must use one of these schemes to add up the parts.
    fn find(
        &self,
        handle: sys::cublasLtHandle_t,
        rows: usize,
        workspace: usize,
        reductions: Option<u32>,
        others: impl IntoIterator<Item = usize>,
    ) -> Result<sys::cublasLtMatmulAlgo_t, CublasError> {
        self.set_rows(rows)?;
        let mut candidates = self.candidates(handle, workspace, reductions)?;
        for rows in others {
            self.set_rows(rows)?;
            candidates.retain(|candidate| self.accepts(handle, &candidate.algo, workspace));
        }
        let best = candidates.first().ok_or(CublasError(Status::CUBLAS_STATUS_NOT_SUPPORTED));
        best.map(|candidate| candidate.algo)
    }

    /// Returns algorithms for the current number of rows, the best first.
    fn candidates(
        &self,
        handle: sys::cublasLtHandle_t,
        workspace: usize,
        reductions: Option<u32>,
    ) -> Result<Vec<Candidate>, CublasError> {
        let preference = result::create_matmul_pref()?;
        let bytes = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let schemes = Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
        let alignments = [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        let (mut candidates, mut count) = (vec![NO_CANDIDATE; CANDIDATES], 0);
        let mut query = || {
            // SAFETY: the preference and the descriptors exist; the attributes have the types of the library's header, and the
            // list has space for as many candidates.
            unsafe {
                result::set_matmul_pref_attribute(preference, bytes, address(&workspace), size_of::<usize>())?;
                if let Some(mask) = &reductions {
                    result::set_matmul_pref_attribute(preference, schemes, address(mask), size_of::<u32>())?;
                }
                if self.is_part {
                    // C is D. The bias begins where D does.
                    for alignment in alignments {
                        let (value, size) = (address(&ALIGNMENT), size_of::<u32>());
                        result::set_matmul_pref_attribute(preference, alignment, value, size)?;
                    }
                }
                let (product, weights, x, y) = (self.product, self.weights, self.x, self.y);
                let (most, list) = (CANDIDATES as i32, candidates.as_mut_ptr());
                sys::cublasLtMatmulAlgoGetHeuristic(
                    handle, product, weights, x, y, y, preference, most, list, &mut count,
                )
                .result()
            }
        };
        let found = query();
        // SAFETY: made above, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        found?;
        candidates.truncate(count.unsigned_abs() as usize);
        candidates.retain(|candidate| candidate.state == Status::CUBLAS_STATUS_SUCCESS);
        Ok(candidates)
    }

    /// Whether an algorithm can serve the current number of rows with `workspace` bytes.
    fn accepts(&self, handle: sys::cublasLtHandle_t, algorithm: &sys::cublasLtMatmulAlgo_t, workspace: usize) -> bool {
        let (product, weights, x, y) = (self.product, self.weights, self.x, self.y);
        let mut found = NO_CANDIDATE;
        // SAFETY: the descriptors exist, and the heuristics have returned the algorithm.
        let status = unsafe { sys::cublasLtMatmulAlgoCheck(handle, product, weights, x, y, y, algorithm, &mut found) };
        status == Status::CUBLAS_STATUS_SUCCESS && found.workspaceSize <= workspace
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        for layout in [self.weights, self.x, self.y].into_iter().filter(|layout| !layout.is_null()) {
            // SAFETY: made in `new`, destroyed once.
            let _ = unsafe { result::destroy_matrix_layout(layout) };
        }
        if !self.product.is_null() {
            // SAFETY: as above.
            let _ = unsafe { result::destroy_matmul_desc(self.product) };
        }
    }
}

/// # Safety
/// The descriptor exists, and `T` is the type of the attribute.
unsafe fn set<T>(descriptor: sys::cublasLtMatmulDesc_t, attribute: Attribute, value: &T) -> Result<(), CublasError> {
    // SAFETY: as the caller promises.
    unsafe { result::set_matmul_desc_attribute(descriptor, attribute, address(value), size_of::<T>()) }
}

fn address<T>(value: &T) -> *const c_void {
    std::ptr::from_ref(value).cast()
}

fn data_type(format: Dtype) -> DataType {
    match format {
        Dtype::F32 => DataType::CUDA_R_32F,
        Dtype::F16 => DataType::CUDA_R_16F,
        Dtype::Bf16 => DataType::CUDA_R_16BF,
    }
}

/// Makes an error of the operation `what`, for `map_err`.
fn refused(what: impl fmt::Display) -> impl Fn(CublasError) -> CudaError {
    move |error| CudaError::Blas { what: what.to_string(), status: error.to_string() }
}
