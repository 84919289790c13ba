//! Why a launch does not fit its kernel.

/// Why a launch does not fit its kernel. Nothing has run.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// No kernel of that name.
    #[error(
        "{module}: there is no kernel {kernel:?} among its {kernels}; build it anew if it is older than the program"
    )]
    UnknownKernel {
        /// The file that was searched.
        module: String,
        /// What was asked for.
        kernel: String,
        /// How many there are.
        kernels: usize,
    },
    /// Arguments that are not the parameters of the kernel.
    #[error("kernel {kernel}: found arguments of {found:?} bytes, expected {expected:?}")]
    Arguments {
        /// The kernel.
        kernel: String,
        /// Sizes of what was given.
        found: Vec<u32>,
        /// Sizes of the parameters.
        expected: Vec<u32>,
    },
    /// A pointer that lies outside of its buffer.
    #[error("kernel {kernel}: argument {index} points at byte {offset} of a buffer of {bytes}")]
    Outside {
        /// The kernel.
        kernel: String,
        /// Which argument, from 0.
        index: usize,
        /// Where it points.
        offset: usize,
        /// The size of the buffer.
        bytes: usize,
    },
    /// A tensor that the copy engine can not take.
    #[error("kernel {kernel}: argument {index} is a tensor for the copy engine, which takes {what}")]
    Tensor {
        /// The kernel.
        kernel: String,
        /// Which argument, from 0.
        index: usize,
        /// What it takes.
        what: &'static str,
    },
    /// More dynamic shared memory than a block can have.
    #[error("kernel {kernel}: found {found} bytes of dynamic shared memory, expected at most {most} on this GPU")]
    SharedMemory {
        /// The kernel.
        kernel: String,
        /// What the launch asks for.
        found: u32,
        /// What there is.
        most: u32,
    },
    /// A buffer that the device can not reach.
    #[error("kernel {kernel}: argument {index} is a buffer of device {found}, the kernel runs on {expected}")]
    WrongDevice {
        /// The kernel.
        kernel: String,
        /// Which argument, from 0.
        index: usize,
        /// Where the buffer is.
        found: &'static str,
        /// Where the kernel runs.
        expected: &'static str,
    },
}

impl LaunchError {
    pub(crate) fn wrong_device(kernel: &str, index: usize, found: &'static str, expected: &'static str) -> LaunchError {
        LaunchError::WrongDevice { kernel: kernel.to_owned(), index, found, expected }
    }
}
