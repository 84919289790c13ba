//! What the device could do at best, measured with the same threads or stream as what is compared with it, in the same run.

use std::fmt;

use device::{Device, roofline};

use super::numbers::Random;
use super::run::{buffer, bytes};
use super::time::time;
use crate::args::KernelError;
use crate::cuda::{READERS, read_memory};

/// Several times any last cache of a CPU that is met with, and more than four times the L2 cache of a GPU.
pub(super) const BEYOND_CACHES: usize = 256 << 20;

/// What was measured; `None`: it can not be measured here.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Peaks {
    /// Bytes a second that are read from memory.
    pub read: Option<f64>,
    /// Bytes a second, read and written together, of a copy within memory.
    pub copy: Option<f64>,
    /// Multiplications and additions a second in float32.
    pub f32: Option<f64>,
    /// The same of 8-bit integers.
    pub int8: Option<f64>,
}

impl Peaks {
    /// Takes about a second. Nothing on `cuda-sim`, where time means nothing.
    ///
    /// # Errors
    /// Not enough memory, or a kernel that is not there.
    pub fn measure(device: &dyn Device) -> Result<Peaks, KernelError> {
        match device.name() {
            "cpu" => Ok(Peaks {
                read: Some(roofline::read_bandwidth(device.pool(), BEYOND_CACHES)),
                copy: Some(copy(device, BEYOND_CACHES / 2)?),
                f32: Some(roofline::f32_peak(device.pool())),
                int8: Some(roofline::int8_peak(device.pool())),
            }),
            "cuda" => Ok(Peaks {
                read: Some(read(device, 4 * BEYOND_CACHES)?),
                copy: Some(copy(device, 4 * BEYOND_CACHES)?),
                ..Peaks::default()
            }),
            _ => Ok(Peaks::default()),
        }
    }
}

impl fmt::Display for Peaks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let giga = |value: f64, unit: &str| format!("{:.*} {unit}", if value < 1e11 { 1 } else { 0 }, value / 1e9);
        let parts = [
            self.read.map(|read| format!("read {}", giga(read, "GB/s"))),
            self.copy.map(|copy| format!("copy {} (bytes read and written)", giga(copy, "GB/s"))),
            self.f32.map(|f32| format!("f32 {}", giga(f32, "GFLOP/s"))),
            self.int8.map(|int8| format!("int8 {}", giga(int8, "GOP/s"))),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        f.write_str(&if parts.is_empty() { "none: time means nothing here".to_string() } else { parts.join(", ") })
    }
}

/// Times enough for a median.
const REPEAT: usize = 11;

fn copy(device: &dyn Device, size: usize) -> Result<f64, KernelError> {
    // Filled, so that every page is there.
    let [from, mut to] = [buffer(device, &noise(size))?, buffer(device, &vec![1; size])?];
    let time = time(device, 2, REPEAT, |_| Ok(device.copy(&from, 0, &mut to, 0, size)?))?;
    Ok(2.0 * size as f64 / time.median().as_secs_f64())
}

fn read(device: &dyn Device, size: usize) -> Result<f64, KernelError> {
    let from = buffer(device, &noise(size))?;
    let mut sums = device.alloc(READERS * size_of::<u32>())?;
    let time = time(device, 2, REPEAT, |_| Ok(read_memory(device, &from, &mut sums)?))?;
    Ok(size as f64 / time.median().as_secs_f64())
}

fn noise(size: usize) -> Vec<u8> {
    let mut random = Random::new(size as u64);
    (0..size / 8).flat_map(|_| random.next().to_ne_bytes()).collect()
}

/// The xor of all words of random memory of `size` bytes, as the device's kernel finds it, and as it is.
///
/// # Errors
/// A device without the kernel.
pub fn read_and_fold(device: &dyn Device, size: usize) -> Result<[u32; 2], KernelError> {
    let noise = noise(size);
    let fold = |bytes: &[u8]| bytes.as_chunks::<4>().0.iter().fold(0, |sum, word| sum ^ u32::from_ne_bytes(*word));
    let mut sums = buffer(device, &vec![0x55; READERS * size_of::<u32>()])?;
    read_memory(device, &buffer(device, &noise)?, &mut sums)?;
    Ok([fold(&bytes(device, &sums)?), fold(&noise[..size / 16 * 16])])
}
