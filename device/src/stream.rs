//! The two queues of a device.

/// One of the two queues of a device, which work like CUDA streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// Launches, and copies that must be in order with them.
    Compute,
    /// Copies that run beside the launches.
    Copy,
}
