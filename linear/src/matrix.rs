//! Weight matrices in the forms of all backends.

use device::{Buffer, DeviceError, Dtype, Factor, FactorType};

use crate::byte_matrix::ByteMatrix;
use crate::error::LinearError;
use crate::pack::PackedMatrix;
use crate::tiles::Tiles;

/// Row-major weights of one type.
pub(crate) struct Dense {
    pub numbers: Buffer,
    pub format: Dtype,
    pub n: usize,
    pub k: usize,
}

/// A weight matrix on a device, made by [`Uploader::matrix`](crate::Uploader::matrix) or [`Matrix::dense`].
pub struct Matrix(pub(crate) Stored);

pub(crate) enum Stored {
    Packed(PackedMatrix),
    Dense(Dense),
    Tiles(Tiles),
    Bytes(ByteMatrix),
}

impl Matrix {
    /// Number of outputs.
    pub fn n(&self) -> usize {
        match &self.0 {
            Stored::Packed(packed) => packed.n(),
            Stored::Dense(dense) => dense.n,
            Stored::Tiles(tiles) => tiles.n,
            Stored::Bytes(matrix) => matrix.n,
        }
    }

    /// Number of inputs.
    pub fn k(&self) -> usize {
        match &self.0 {
            Stored::Packed(packed) => packed.k(),
            Stored::Dense(dense) => dense.k,
            Stored::Tiles(tiles) => tiles.k,
            Stored::Bytes(matrix) => matrix.k,
        }
    }

    /// Type of the inputs of products.
    pub fn dtype(&self) -> Dtype {
        match &self.0 {
            Stored::Packed(_) => Dtype::F32,
            Stored::Dense(dense) => dense.format,
            Stored::Tiles(tiles) => tiles.dtype,
            Stored::Bytes(matrix) => matrix.dtype,
        }
    }

    /// Size of the stored weights in bytes, scales included.
    pub fn bytes(&self) -> usize {
        match &self.0 {
            Stored::Packed(packed) => packed.bytes(),
            Stored::Dense(dense) => dense.numbers.len_bytes(),
            Stored::Tiles(tiles) => tiles.segments.iter().map(|segment| segment.panels.len_bytes()).sum(),
            Stored::Bytes(matrix) => matrix.codes.len_bytes() + matrix.scales.len_bytes(),
        }
    }

    /// Returns the packed weights, for CPU code.
    ///
    /// # Errors
    /// [`DeviceError::NotOnHost`] for weights of a device that launches kernels.
    pub fn host(&self) -> Result<&PackedMatrix, DeviceError> {
        if let Stored::Packed(packed) = &self.0 { Ok(packed) } else { Err(DeviceError::NotOnHost(self.device())) }
    }

    /// Name of the device that has the weights.
    fn device(&self) -> &'static str {
        match &self.0 {
            Stored::Packed(_) => "cpu",
            Stored::Dense(dense) => dense.numbers.device(),
            Stored::Tiles(tiles) => tiles.segments.first().map_or("cuda", |segment| segment.panels.device()),
            Stored::Bytes(matrix) => matrix.codes.device(),
        }
    }

    /// Wraps row-major weights `[n, k]` of one type, for [`Device::product`](device::Device::product).
    ///
    /// # Errors
    /// [`LinearError::BadMatrix`] if the buffer does not hold exactly `n * k` numbers.
    pub fn dense(format: Dtype, n: usize, k: usize, numbers: Buffer) -> Result<Matrix, LinearError> {
        if numbers.len_bytes() != n * k * format.bytes() {
            return Err(LinearError::BadMatrix(k));
        }
        Ok(Matrix(Stored::Dense(Dense { numbers, format, n, k })))
    }

    /// Returns the codes of the weights, for kernels that multiply them; `None` for weights in another form.
    pub fn tiles(&self) -> Option<&Tiles> {
        if let Stored::Tiles(tiles) = &self.0 { Some(tiles) } else { None }
    }

    /// Returns weights of 8 bits whose products round their inputs; `None` for weights in another form.
    pub fn bytes_and_scales(&self) -> Option<&ByteMatrix> {
        if let Stored::Bytes(matrix) = &self.0 { Some(matrix) } else { None }
    }

    /// Returns the buffer of [`Matrix::dense`] weights, for kernels that read rows of it; `None` for weights in another form.
    pub fn numbers(&self) -> Option<&Buffer> {
        if let Stored::Dense(dense) = &self.0 { Some(&dense.numbers) } else { None }
    }

    /// Returns [`Matrix::dense`] weights as a factor of a product.
    ///
    /// # Errors
    /// [`DeviceError::NoMatrices`] for weights in another form.
    pub fn factor(&self) -> Result<Factor<'_>, DeviceError> {
        match &self.0 {
            Stored::Dense(Dense { numbers, format, n, k }) => {
                Ok(Factor { elements: numbers, format: FactorType::Numbers(*format), n: *n, k: *k })
            }
            Stored::Packed(_) | Stored::Tiles(_) | Stored::Bytes(_) => Err(DeviceError::NoMatrices(self.device())),
        }
    }
}
