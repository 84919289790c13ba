//! Matrix products of a GPU: cuBLASLt, opened at run time.
//!
//! Row-major `y = x·Wᵀ` is column-major `yᵀ = W·xᵀ`, which is how the library is asked:
//!
//! ```text
//! A = W, stored [k × n], transposed        B = x, stored [k × rows]        D = y, stored [n × rows]
//! ```
//!
//! What the library's heuristics answer for a shape is kept. An algorithm fixes the order in which an element's sum is taken:
//! its tiles, and whether k is split. So products that must not depend on the number of rows take for all of them the one that
//! is found for [`ROWS_OF_ALL`], among those that do not split k.
//!
//! Sums are in float32; for float32 operands too, without the
//! tensor cores' shorter ones. One workspace serves all products, which follow each other on one stream.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
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
use crate::Dtype;
use crate::{DeviceError, Queue};

/// Bytes of workspace: what NVIDIA recommends for Hopper.
pub(super) const WORKSPACE: usize = 32 << 20;

/// Rows for which an algorithm is chosen that serves every number of them: more than a small decode has, whose time is that
/// of reading the weights in any case, and enough to fill the tiles of a prefill.
const ROWS_OF_ALL: usize = 128;

/// `CUBLAS_OP_T` of `cublas_api.h`, which the library's own header takes over.
const TRANSPOSED: i32 = 1;

/// What an algorithm is chosen for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub n: usize,
    pub k: usize,
    pub rows: usize,
    pub format: Dtype,
    pub y_format: Dtype,
    pub bias: bool,
}

/// Addresses on the GPU, each with as many numbers as the shape says.
pub(super) struct Operands {
    pub weights: CUdeviceptr,
    pub x: CUdeviceptr,
    /// Where the shape has one.
    pub bias: Option<CUdeviceptr>,
    pub y: CUdeviceptr,
}

/// The library on one GPU.
pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    plans: HashMap<Shape, Plan>,
    workspace: DeviceMemory,
    deterministic: bool,
    context: Arc<Context>,
}

// SAFETY: handles of the library may be used from any thread, one at a time, with the context current: `&mut self`, and
// `Context::enter`.
unsafe impl Send for Blas {}

/// A product, described, and the algorithm for it.
struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    weights: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Blas {
    /// `deterministic`: an element's order of summation is one for all numbers of rows.
    pub fn open(context: &Arc<Context>, deterministic: bool) -> Result<Blas, DeviceError> {
        // SAFETY: opening the library runs its initialisers, which is what it is for.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoBlas.into());
        }
        context.enter()?;
        let workspace = DeviceMemory::zeroed(context, WORKSPACE)?;
        let handle = result::create_handle().map_err(refused("starting"))?;
        Ok(Blas { handle, plans: HashMap::new(), workspace, deterministic, context: Arc::clone(context) })
    }

    /// Whether there was such a product before.
    pub fn knows(&self, shape: &Shape) -> bool {
        self.plans.contains_key(shape)
    }

    /// Gives a product to the compute stream.
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
                // SAFETY: the descriptor is the plan's; the attribute is an address, and copied.
                unsafe { set(plan.product, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias) }?;
            }
            let (one, zero) = (1.0f32, 0.0f32);
            // SAFETY: descriptors and algorithm belong together; the addresses are of buffers that hold what the
            // layouts say (`Product::check`) and wait for the stream when they are dropped. With a factor of 0 the
            // library does not read C, which is D. Scalars are copied by the call.
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
            // SAFETY: made in `open`; no product of it runs any more.
            let _ = unsafe { result::destroy_handle(self.handle) };
        }
    }
}

impl Plan {
    fn new(handle: sys::cublasLtHandle_t, shape: Shape, deterministic: bool) -> Result<Plan, CublasError> {
        let mut plan = Plan::described(shape)?;
        plan.algorithm = match deterministic {
            false => plan.find(handle, WORKSPACE, None)?,
            // Without a workspace and without a reduction no algorithm can split k.
            true => {
                let none = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE;
                Plan::described(Shape { rows: ROWS_OF_ALL, ..shape })?.find(handle, 0, Some(none as u32))?
            }
        };
        Ok(plan)
    }

    /// Without an algorithm.
    fn described(shape: Shape) -> Result<Plan, CublasError> {
        let (n, k, rows) = (shape.n as u64, shape.k as u64, shape.rows as u64);
        let (operand, result_type) = (data_type(shape.format), data_type(shape.y_format));
        let (null, no_layout) = (std::ptr::null_mut(), std::ptr::null_mut());
        // What is made stands in the plan at once, so that it goes if the next is refused.
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
        // SAFETY: the descriptor is alive, and the attributes have the types that the library's header gives them.
        unsafe {
            set(plan.product, Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &TRANSPOSED)?;
            set(plan.product, Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
            if shape.bias {
                set(plan.product, Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, &result_type)?;
            }
        }
        Ok(plan)
    }

    /// The best algorithm by the library's heuristics that takes at most so many bytes of workspace and, if that is given,
    /// adds up parts of k by one of these schemes alone.
    fn find(
        &self,
        handle: sys::cublasLtHandle_t,
        workspace: usize,
        reductions: Option<u32>,
    ) -> Result<sys::cublasLtMatmulAlgo_t, CublasError> {
        let preference = result::create_matmul_pref()?;
        let bytes = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let schemes = Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
        let ask = || {
            // SAFETY: the preference and the descriptors are alive; the attributes have the types that the library's header
            // gives them.
            unsafe {
                result::set_matmul_pref_attribute(preference, bytes, address(&workspace), size_of::<usize>())?;
                if let Some(mask) = &reductions {
                    result::set_matmul_pref_attribute(preference, schemes, address(mask), size_of::<u32>())?;
                }
                let (product, weights, x, y) = (self.product, self.weights, self.x, self.y);
                result::get_matmul_algo_heuristic(handle, product, weights, x, y, y, preference)
            }
        };
        let found = ask();
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
/// The descriptor is alive, and `T` is the attribute's type.
unsafe fn set<T>(descriptor: sys::cublasLtMatmulDesc_t, attribute: Attribute, value: &T) -> Result<(), CublasError> {
    // SAFETY: the caller's promise.
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

/// For `map_err`: what was asked.
fn refused(what: impl std::fmt::Debug) -> impl Fn(CublasError) -> CudaError {
    move |error| CudaError::Blas { what: format!("{what:?}"), status: error.to_string() }
}
