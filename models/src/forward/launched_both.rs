//! Encoders on devices that launch kernels, which have none for attention to both sides.

use attention_kernels::KernelError;
use device::Device;

use crate::LoadError;
use crate::decoder::Decoder;

/// Refuses an encoder before any weight is read.
pub(super) fn check(decoder: &Decoder, device: &dyn Device) -> Result<(), LoadError> {
    match decoder.is_encoder() {
        false => Ok(()),
        true => {
            let problem = format!("{} has no kernels for encoders, found one; use --device cpu", device.name());
            Err(LoadError::Device(problem))
        }
    }
}

/// The error for an operation of encoders.
pub(super) fn unsupported(device: &dyn Device) -> KernelError {
    KernelError::Unsupported { variant: "encoders", found: device.name().to_string() }
}
