//! Tensor maps for the copy engine, which the driver encodes.

use std::ffi::c_void;

use cudarc::driver::sys::{
    self, CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle,
};

use crate::DeviceError;
use crate::driver::refused;
use crate::tensor::{Map, Tensor};

/// Encodes the map of a checked tensor at an address of the GPU. Takes well under a microsecond.
pub(super) fn map(tensor: &Tensor<'_>, address: u64) -> Result<Map, DeviceError> {
    let mut map = CUtensorMap { opaque: [0; 16] };
    let (sizes, strides) = (tensor.sizes.map(|size| size as u64), tensor.strides.map(|stride| stride as u64));
    // SAFETY: the arrays have as many numbers as the driver reads for 4 dimensions, and it writes only the map.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map,
            CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
            4,
            address as *mut c_void,
            sizes.as_ptr(),
            strides.as_ptr(),
            tensor.tile.as_ptr(),
            [1; 4].as_ptr(),
            CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(refused("encoding a tensor map"))?;
    Ok(map.opaque)
}
