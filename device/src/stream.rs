//! The two streams of a device.

/// One of the two streams of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queue {
    /// Launches, and copies that are to be in order with them.
    Compute,
    /// Copies that run beside the launches.
    Copy,
}
