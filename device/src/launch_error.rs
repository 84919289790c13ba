//! Errors of launches that do not match their kernels.

/// Why a launch does not match its kernel. Nothing has run.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The module has no kernel of that name.
    #[error(
        "{module}: there is no kernel {kernel:?} among its {kernels}; build it again if it is older than the program"
    )]
    UnknownKernel {
        /// File that was searched.
        module: String,
        /// Name in the launch.
        kernel: String,
        /// Number of kernels in the file.
        kernels: usize,
    },
    /// The arguments do not have the sizes of the kernel's parameters.
    #[error("kernel {kernel}: found arguments of {found:?} bytes, expected {expected:?}")]
    Arguments {
        /// Name of the kernel.
        kernel: String,
        /// Sizes of the arguments in bytes.
        found: Vec<u32>,
        /// Sizes of the parameters in bytes.
        expected: Vec<u32>,
    },
    /// The kernel has more parameters than a launch has space for.
    #[error(
        "kernel {kernel}: found {arguments} arguments of {bytes} bytes, expected at most {most_arguments} of {most_bytes} bytes"
    )]
    TooLarge {
        /// Name of the kernel.
        kernel: String,
        /// Number of arguments.
        arguments: usize,
        /// Bytes of all arguments, each padded to 16 bytes.
        bytes: usize,
        /// Most arguments of a launch.
        most_arguments: usize,
        /// Most bytes of all arguments.
        most_bytes: usize,
    },
    /// A pointer argument lies outside its buffer.
    #[error("kernel {kernel}: argument {index} points at byte {offset} of a buffer of {bytes}")]
    Outside {
        /// Name of the kernel.
        kernel: String,
        /// Index of the argument, from 0.
        index: usize,
        /// Offset of the pointer in bytes.
        offset: usize,
        /// Size of the buffer in bytes.
        bytes: usize,
    },
    /// The copy engine does not support a tensor argument.
    #[error("kernel {kernel}: argument {index} is a tensor for the copy engine, which takes {what}")]
    Tensor {
        /// Name of the kernel.
        kernel: String,
        /// Index of the argument, from 0.
        index: usize,
        /// What the copy engine supports.
        what: &'static str,
    },
    /// The launch needs more dynamic shared memory than a block can have.
    #[error("kernel {kernel}: found {found} bytes of dynamic shared memory, expected at most {most} on this GPU")]
    SharedMemory {
        /// Name of the kernel.
        kernel: String,
        /// Bytes that the launch needs.
        found: u32,
        /// Bytes that a block can have on this GPU.
        most: u32,
    },
    /// The device cannot access a buffer.
    #[error("kernel {kernel}: argument {index} is a buffer of device {found}, the kernel runs on {expected}")]
    WrongDevice {
        /// Name of the kernel.
        kernel: String,
        /// Index of the argument, from 0.
        index: usize,
        /// Device of the buffer.
        found: &'static str,
        /// Device that runs the kernel.
        expected: &'static str,
    },
}

impl LaunchError {
    pub(crate) fn wrong_device(kernel: &str, index: usize, found: &'static str, expected: &'static str) -> LaunchError {
        LaunchError::WrongDevice { kernel: kernel.to_owned(), index, found, expected }
    }
}
