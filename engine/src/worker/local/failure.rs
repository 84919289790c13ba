//! Why a step could not be computed.

use attention_kernels::KernelError;
use device::DeviceError;
use sampling::device::SampleError;
use sched::{RequestId, SeqId};

use crate::worker::adapters::SlotError;

/// See the [module](self).
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Adapter(#[from] SlotError),
    #[error("{0}: the request names an adapter, but the engine takes none (--enable-lora)")]
    NoAdapters(RequestId),
    #[error(transparent)]
    Sample(#[from] SampleError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error("{0}: the step awaits its last token, but the device does not draw for it")]
    NotOnDevice(SeqId),
    #[error("the step was submitted behind one that failed")]
    AfterFailed,
    #[error("no step is in flight")]
    NoStep,
}
