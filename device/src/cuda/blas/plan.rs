//! Descriptors of a product, and what the library says of algorithms for it.

use std::ffi::c_void;

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t as Compute, cublasLtEpilogue_t as Epilogue,
    cublasLtMatmulAlgoConfigAttributes_t as AlgorithmAttribute, cublasLtMatmulDescAttributes_t as Attribute,
    cublasLtMatmulHeuristicResult_t as Candidate, cublasLtMatmulPreferenceAttributes_t as Preference,
    cublasLtMatrixLayoutAttribute_t as LayoutAttribute, cublasStatus_t as Status, cudaDataType as DataType,
};

use super::library::{Library, Operands, WORKSPACE};
use crate::{Dtype, FactorType, ProductShape, Queue};

/// Columns of a wider matrix begin at multiples of this, in bytes. The library assumes 256 if it is not told.
const ALIGNMENT: u32 = 16;

/// Number of algorithms that the heuristics are asked for.
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

/// An algorithm of the library, with its configuration.
#[derive(Clone, Copy)]
pub(super) struct Algorithm(pub sys::cublasLtMatmulAlgo_t);

impl PartialEq for Algorithm {
    fn eq(&self, other: &Algorithm) -> bool {
        self.0.data == other.0.data
    }
}

/// What elements are summed as.
#[derive(Clone, Copy)]
enum Sums {
    Floats,
    Integers,
}

/// Descriptors of the products of a shape.
pub(super) struct Plan {
    pub shape: ProductShape,
    product: sys::cublasLtMatmulDesc_t,
    weights: sys::cublasLtMatrixLayout_t,
    /// The numbers of rows of this layout and of `y` are those of the last call.
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
    sums: Sums,
}

impl Plan {
    /// Makes the descriptors.
    pub fn new(shape: ProductShape) -> Result<Plan, CublasError> {
        let ProductShape { n, k, format, y_format, bias, stride, slices } = shape;
        let (of_y, of_slice, rows) = (stride as i64, k / slices.max(1), 1);
        let (operand, result_type, sums) = match format {
            FactorType::Numbers(dtype) => (data_type(dtype), data_type(y_format), Sums::Floats),
            FactorType::E4m3 => (DataType::CUDA_R_8F_E4M3, data_type(y_format), Sums::Floats),
            FactorType::Int8 => (DataType::CUDA_R_8I, DataType::CUDA_R_32I, Sums::Integers),
        };
        let (null, no_layout) = (std::ptr::null_mut(), std::ptr::null_mut());
        // Each descriptor is stored in the plan at once, so that it is destroyed if a later call fails.
        let mut plan = Plan { shape, product: null, weights: no_layout, x: no_layout, y: no_layout, sums };
        plan.product = match sums {
            Sums::Floats => result::create_matmul_desc(Compute::CUBLAS_COMPUTE_32F, DataType::CUDA_R_32F)?,
            Sums::Integers => result::create_matmul_desc(Compute::CUBLAS_COMPUTE_32I, DataType::CUDA_R_32I)?,
        };
        plan.weights = result::create_matrix_layout(operand, of_slice as u64, n as u64, k as i64)?;
        plan.x = result::create_matrix_layout(operand, of_slice as u64, rows, k as i64)?;
        plan.y = result::create_matrix_layout(result_type, n as u64, rows, of_y)?;
        if slices > 1 {
            for layout in [plan.weights, plan.x, plan.y] {
                set_layout(layout, LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &(slices as i32))?;
            }
            for layout in [plan.weights, plan.x] {
                let offset = LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
                set_layout(layout, offset, &(of_slice as i64))?;
            }
        }
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

    /// The factors 1 of the product and 0 of what was in `y`.
    fn factors(&self) -> [*const c_void; 2] {
        match self.sums {
            Sums::Floats => [address(&1.0f32), address(&0.0f32)],
            Sums::Integers => [address(&1i32), address(&0i32)],
        }
    }

    /// Whether elements are summed exactly, so that every order gives the same bits.
    pub fn is_exact(&self) -> bool {
        matches!(self.sums, Sums::Integers)
    }

    /// Makes this the number of rows of the following calls, as a part of `all` rows.
    fn set_rows(&self, rows: usize, all: usize) -> Result<(), CublasError> {
        for layout in [self.x, self.y] {
            set_layout(layout, LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_COLS, &(rows as u64))?;
        }
        if self.shape.slices > 1 {
            let offset = LayoutAttribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET;
            set_layout(self.y, offset, &((all * self.shape.n) as i64))?;
        }
        Ok(())
    }

    /// Enqueues a product of an algorithm that serves so many rows, which are a part of `all` rows.
    pub fn run(
        &self,
        library: &Library,
        algorithm: &Algorithm,
        [rows, all]: [usize; 2],
        operands: Operands,
    ) -> Result<(), CublasError> {
        self.set_rows(rows, all)?;
        if let Some(bias) = &operands.bias {
            // SAFETY: the descriptor exists; the attribute is an address, which the call copies.
            unsafe { set(self.product, Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias) }?;
        }
        let [one, zero] = self.factors();
        // SAFETY: descriptors and algorithm belong together; the buffers are as large as the layouts say
        // (`Product::check`), and their drops wait for the stream. With a factor of 0 the library does not read C, which is
        // D. The call copies the scalars and the layouts.
        unsafe {
            result::matmul(
                library.handle,
                self.product,
                one,
                zero,
                operands.weights as *const c_void,
                self.weights,
                operands.x as *const c_void,
                self.x,
                operands.y as *const c_void,
                self.y,
                operands.y as *mut c_void,
                self.y,
                &algorithm.0,
                library.workspace.address as *mut c_void,
                WORKSPACE,
                library.context.stream(Queue::Compute).cast(),
            )
        }
    }

    /// Returns algorithms for so many rows, the best first by the library's heuristics. `whole`: only those that do not split k.
    pub fn candidates(&self, library: &Library, rows: usize, whole: bool) -> Result<Vec<Algorithm>, CublasError> {
        self.set_rows(rows, rows)?;
        let preference = result::create_matmul_pref()?;
        let bytes = Preference::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let schemes = Preference::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK;
        let none = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_NONE as u32;
        let alignments = [
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
        ];
        let (mut candidates, mut count) = (vec![NO_CANDIDATE; CANDIDATES], 0);
        let mut query = || {
            // SAFETY: the preference and the descriptors exist; the attributes have the types of the library's header, and the
            // list has space for as many candidates.
            unsafe {
                result::set_matmul_pref_attribute(preference, bytes, address(&WORKSPACE), size_of::<usize>())?;
                if whole {
                    result::set_matmul_pref_attribute(preference, schemes, address(&none), size_of::<u32>())?;
                }
                if self.shape.stride != self.shape.n {
                    // C is D. The bias begins where D does.
                    for alignment in alignments {
                        let (value, size) = (address(&ALIGNMENT), size_of::<u32>());
                        result::set_matmul_pref_attribute(preference, alignment, value, size)?;
                    }
                }
                let (product, weights, x, y) = (self.product, self.weights, self.x, self.y);
                let (most, list) = (CANDIDATES as i32, candidates.as_mut_ptr());
                sys::cublasLtMatmulAlgoGetHeuristic(
                    library.handle,
                    product,
                    weights,
                    x,
                    y,
                    y,
                    preference,
                    most,
                    list,
                    &mut count,
                )
            }
            .result()
        };
        let found = query();
        // SAFETY: made above, destroyed once.
        let _ = unsafe { result::destroy_matmul_pref(preference) };
        match found {
            // The library has no algorithm at all.
            Err(CublasError(Status::CUBLAS_STATUS_NOT_SUPPORTED)) => return Ok(Vec::new()),
            found => found?,
        }
        candidates.truncate(count.unsigned_abs() as usize);
        candidates.retain(|candidate| candidate.state == Status::CUBLAS_STATUS_SUCCESS);
        let algorithms = candidates.into_iter().map(|candidate| Algorithm(candidate.algo));
        Ok(algorithms.filter(|algorithm| !whole || !splits(algorithm)).collect())
    }

    /// Whether an algorithm serves so many rows with the workspace.
    pub fn accepts(&self, library: &Library, algorithm: &Algorithm, rows: usize) -> Result<bool, CublasError> {
        self.set_rows(rows, rows)?;
        let (product, weights, x, y) = (self.product, self.weights, self.x, self.y);
        let mut found = NO_CANDIDATE;
        // SAFETY: the descriptors exist, and the heuristics have returned the algorithm.
        let status = unsafe {
            sys::cublasLtMatmulAlgoCheck(library.handle, product, weights, x, y, y, &algorithm.0, &mut found)
        };
        Ok(status == Status::CUBLAS_STATUS_SUCCESS && found.workspaceSize <= WORKSPACE)
    }
}

/// Whether an algorithm splits k into parts that it adds up.
fn splits(algorithm: &Algorithm) -> bool {
    let (mut parts, mut written) = (0u32, 0);
    let attribute = AlgorithmAttribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM;
    // SAFETY: the heuristics have returned the algorithm, and the attribute is a 32-bit number.
    let status = unsafe {
        let to = std::ptr::from_mut(&mut parts).cast();
        sys::cublasLtMatmulAlgoConfigGetAttribute(&algorithm.0, attribute, to, size_of::<u32>(), &mut written)
    };
    status != Status::CUBLAS_STATUS_SUCCESS || parts > 1
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

/// Sets an attribute of a layout of this module, whose type is `T`.
fn set_layout<T>(
    layout: sys::cublasLtMatrixLayout_t,
    attribute: LayoutAttribute,
    value: &T,
) -> Result<(), CublasError> {
    // SAFETY: the layout exists; the library checks the size of the attribute.
    unsafe { result::set_matrix_layout_attribute(layout, attribute, address(value), size_of::<T>()) }
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
