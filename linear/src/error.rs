//! Errors of weight matrices; each is one line.

use device::DeviceError;

use crate::Quantization;

/// An error of a weight matrix.
#[derive(Debug, thiserror::Error)]
pub enum LinearError {
    /// Weights that are not whole rows, or no rows at all.
    #[error("a weight matrix with {0} columns: found no rows or an incomplete row, expected one or more whole rows")]
    BadMatrix(usize),
    /// Stored weights that are not finite.
    #[error(
        "a weight matrix: found a weight or a scale that is not finite, expected numbers; the checkpoint is damaged"
    )]
    NotFinite,
    /// A weight cannot be stored in the quantised format.
    #[error(
        "a weight matrix holds numbers that {0} cannot store (not finite, or too large); load it without --quantization"
    )]
    BadWeights(Quantization),
    /// The backend does not quantise weights in the type that was chosen, or that have fewer bits already.
    #[error(
        "--quantization: device {device} has no {quantization} weights for products in float32; leave it out, or use \
         --dtype bfloat16 or --device cpu"
    )]
    NoQuantization {
        /// Backend name.
        device: &'static str,
        /// The requested format.
        quantization: Quantization,
    },
    /// An error of the device.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
