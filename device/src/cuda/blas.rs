//! Matrix products on a GPU with cuBLASLt, which is loaded at run time.
//!
//! The library works on column-major matrices; row-major `y = x·Wᵀ` is column-major `yᵀ = W·xᵀ`:
//!
//! ```text
//! A = W, stored [k × n], transposed        B = x, stored [k × rows]        D = y, stored [n × rows]
//! ```
//!
//! The algorithm that the library's heuristics choose for a shape is kept. An algorithm determines the order in which an
//! element is summed, by its tiles and by whether it splits k. Products that must not depend on the number of rows use the same
//! algorithm for any number: the one chosen for [`ROWS_OF_ALL`] rows among those that do not split k.
//!
//! Sums are in f32; for f32 operands too, without the shorter formats of the tensor cores. All products share one workspace,
//! because they run one after the other on one stream.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t as Compute, cublasLtEpilogue_t as Epilogue, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulPreferenceAttributes_t as Preference, cudaDataType as DataType,
};
use cudarc::driver::sys::CUdeviceptr;

use super::context::Context;
use super::error::CudaError;
use super::memory::DeviceMemory;
use crate::{DeviceError, Dtype, Queue, gemm};

/// Size of the workspace in bytes, as NVIDIA recommends for Hopper.
pub(super) const WORKSPACE: usize = 32 << 20;

/// Number of rows for which the algorithm for any number of rows is chosen: more than a small decode has, whose time is that of
/// reading the weights in any case, and enough to fill the tiles of a prefill.
const ROWS_OF_ALL: usize = 128;

/// `CUBLAS_OP_T` of `cublas_api.h`.
const TRANSPOSED: i32 = 1;

/// What an algorithm is chosen for.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub product: gemm::Shape,
    pub y_format: Dtype,
    pub bias: bool,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gemm::Shape { rows, n, k, format } = self.product;
        let bias = if self.bias { "with" } else { "without" };
        write!(f, "the product of {rows} rows, n = {n}, k = {k}, {format} to {} {bias} bias", self.y_format)
    }
}

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
    plans: HashMap<Shape, Plan>,
    workspace: DeviceMemory,
    deterministic: bool,
    context: Arc<Context>,
}

// SAFETY: any thread may use handles of the library, one at a time (`&mut self`), with the context current (`Context::enter`).
unsafe impl Send for Blas {}

/// Descriptors of a product, and its algorithm.
struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    weights: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Blas {
    /// `deterministic`: the order of summation of an element does not depend on the number of rows.
    pub fn open(context: &Arc<Context>, deterministic: bool) -> Result<Blas, DeviceError> {
        // SAFETY: loading the library runs its initialisers, which are trusted.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoBlas.into());
        }
        context.enter()?;
        let workspace = DeviceMemory::zeroed(context, WORKSPACE)?;
        let handle = result::create_handle().map_err(refused("initialisation"))?;
        Ok(Blas { handle, plans: HashMap::new(), workspace, deterministic, context: Arc::clone(context) })
    }

    /// Returns whether a product of this shape has run before.
    pub fn has_plan(&self, shape: &Shape) -> bool {
        self.plans.contains_key(shape)
    }

    /// Enqueues a product on the compute stream.
    pub fn product(&mut self, shape: Shape, operands: Operands) -> Result<(), DeviceError> {
        self.context.enter()?;
        let plan = match self.plans.entry(shape) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => {
                new.insert(Plan::new(self.handle, shape, self.deterministic).map_err(refused(shape))?)
            }
        };
        let run = || {
            if let Some(bias) = &operands.bias {
                // SAFETY: the descriptor exists; the attribute is an address, which the call copies.
                unsafe { set(plan.product, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias) }?;
            }
            let (one, zero) = (1.0f32, 0.0f32);
            // SAFETY: descriptors and algorithm belong together; the buffers are as large as the layouts say
            // (`Product::check`), and their drops wait for the stream. With a factor of 0 the library does not read C, which is
            // D. The call copies the scalars.
            unsafe {
                result::matmul(
                    self.handle,
                    plan.product,
                    address(&one),
                    address(&zero),
                    operands.weights as *const c_void,
                    plan.weights,
                    operands.x as *const c_void,
                    plan.x,
                    operands.y as *const c_void,
                    plan.y,
                    operands.y as *mut c_void,
                    plan.y,
                    &plan.algorithm,
                    self.workspace.address as *mut c_void,
                    WORKSPACE,
                    self.context.stream(Queue::Compute).cast(),
                )
            }
        };
        Ok(run().map_err(refused(shape))?)
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
    fn new(handle: sys::cublasLtHandle_t, shape: Shape, deterministic: bool) -> Result<Plan, CublasError> {
        let mut plan = Plan::described(shape)?;
        plan.algorithm =
            match deterministic {
                false => plan.find(handle, WORKSPACE, None)?,
                // Without a workspace and without a reduction, no algorithm can split k.
                true => {
                    let none = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE;
                    Plan::described(Shape { product: gemm::Shape { rows: ROWS_OF_ALL, ..shape.product }, ..shape })?
                        .find(handle, 0, Some(none as u32))?
                }
            };
        Ok(plan)
    }

    /// Makes a plan without an algorithm.
    fn described(shape: Shape) -> Result<Plan, CublasError> {
        let gemm::Shape { rows, n, k, format } = shape.product;
        let (n, k, rows) = (n as u64, k as u64, rows as u64);
        let (operand, result_type) = (data_type(format), data_type(shape.y_format));
        let (null, no_layout) = (std::ptr::null_mut(), std::ptr::null_mut());
        // Each descriptor is stored in the plan at once, so that it is destroyed if a later call fails.
        let algorithm = sys::cublasLtMatmulAlgo_t { data: [0; 8] };
        let mut plan = Plan { product: null, weights: no_layout, x: no_layout, y: no_layout, algorithm };
        plan.product = result::create_matmul_desc(Compute::CUBLAS_COMPUTE_32F, DataType::CUDA_R_32F)?;
        plan.weights = result::create_matrix_layout(operand, k, n, k as i64)?;
        plan.x = result::create_matrix_layout(operand, k, rows, k as i64)?;
        plan.y = result::create_matrix_layout(result_type, n, rows, n as i64)?;
        let epilogue = match shape.bias {
            true => Epilogue::CUBLASLT_EPILOGUE_BIAS,
            false => Epilogue::CUBLASLT_EPILOGUE_DEFAULT,
        };
        // SAFETY: the descriptor exists, and the attributes have the types of the library's header.
        unsafe {
            set(plan.product, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
            set(plan.product, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            if shape.bias {
                set(plan.product, Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &result_type)?;
            }
        }
        Ok(plan)
    }

    /// Returns the best algorithm, by the library's heuristics, that uses at most `workspace` bytes. With `reductions`, an
    /// algorithm that splits k must use one of these schemes to add up the parts.
    fn find(
        &self,
        handle: sys::cublasLtHandle_t,
        workspace: usize,
        reductions: Option<u32>,
    ) -> Result<sys::cublasLtMatmulAlgo_t, CublasError> {
        let preference = result::create_matmul_pref()?;
        let bytes = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let schemes = Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
        let query = || {
            // SAFETY: the preference and the descriptors exist; the attributes have the types of the library's header.
            unsafe {
                result::set_matmul_pref_attribute(preference, bytes, address(&workspace), size_of::<usize>())?;
                if let Some(mask) = &reductions {
                    result::set_matmul_pref_attribute(preference, schemes, address(mask), size_of::<u32>())?;
                }
                let (product, weights, x, y) = (self.product, self.weights, self.x, self.y);
                result::get_matmul_algo_heuristic(handle, product, weights, x, y, y, preference)
            }
        };
        let found = query();
        // SAFETY: made above, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        Ok(found?.algo)
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
