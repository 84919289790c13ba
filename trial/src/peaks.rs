//! Peak rates of a device, measured in the same run and with the same threads or stream as what is compared with them.

use std::fmt;

use device::{Buffer, Device, DeviceError, Factor, FactorType, Product};
use simd::roofline;

use crate::numbers::{Random, round, to_bytes};
use crate::run::repeated;
use crate::time::time;
use attention_kernels::Dtype;
use attention_kernels::KernelError;
use attention_kernels::read_memory;

/// Several times the last-level cache of common CPUs, and more than four times the L2 cache of a GPU.
pub(super) const BEYOND_CACHES: usize = 256 << 20;

/// Peak rates; `None` where one cannot be measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Peaks {
    /// Bytes per second read from memory.
    pub read: Option<f64>,
    /// Bytes per second of a copy within memory, reads and writes added.
    pub copy: Option<f64>,
    /// Multiplications and additions per second in float32.
    pub f32: Option<f64>,
    /// The same in 8-bit integers.
    pub int8: Option<f64>,
    /// The same in 16 bits: on a GPU a large bf16 product of cuBLASLt, on a CPU bf16 tiles, or pairs if it has none.
    pub halves: Option<f64>,
}

impl Peaks {
    /// Measures the peaks in about a second. Measures nothing on `cuda-sim`, where times are meaningless.
    ///
    /// # Errors
    /// The device has not enough memory or lacks a kernel.
    pub fn measure(device: &dyn Device) -> Result<Peaks, KernelError> {
        match device.name() {
            "cpu" => Ok(Peaks {
                read: Some(roofline::read_bandwidth(device.pool(), BEYOND_CACHES)),
                copy: Some(copy(device, BEYOND_CACHES / 2)?),
                f32: Some(roofline::f32_peak(device.pool())),
                int8: Some(roofline::int8_peak(device.pool())),
                halves: roofline::tile_peak(device.pool()).or_else(|| Some(roofline::bf16_peak(device.pool()))),
            }),
            "cuda" => Ok(Peaks {
                read: Some(read(device, 4 * BEYOND_CACHES)?),
                copy: Some(copy(device, 4 * BEYOND_CACHES)?),
                halves: product(device)?,
                ..Peaks::default()
            }),
            _ => Ok(Peaks::default()),
        }
    }

    /// Returns the operations per second of products in a type, `quantized` if their weights are; `None` if they were not measured.
    pub fn operations(&self, dtype: Dtype, quantized: bool) -> Option<f64> {
        let of_type = if dtype == Dtype::F32 { self.f32 } else { self.halves };
        self.int8.filter(|_| quantized).or(of_type)
    }

    /// Returns the greater of each rate.
    pub fn max(&self, other: &Peaks) -> Peaks {
        let [read, copy, f32, int8, halves] =
            std::array::from_fn(|i| self.all()[i].into_iter().chain(other.all()[i]).reduce(f64::max));
        Peaks { read, copy, f32, int8, halves }
    }

    /// Returns how far the lowest of several measurements lies below the highest, as a share of the highest; the maximum
    /// over all rates.
    ///
    /// ```
    /// use trial::Peaks;
    /// let of = |read, f32| Peaks { read: Some(read), f32: Some(f32), ..Peaks::default() };
    /// assert_eq!(Peaks::moved(&[of(8.0, 5.0), of(10.0, 5.0), of(9.0, 4.9)]), 0.2);
    /// assert_eq!(Peaks::moved(&[]), 0.0);
    /// ```
    pub fn moved(measured: &[Peaks]) -> f64 {
        let by = |i: usize| {
            let values = measured.iter().filter_map(|peaks| peaks.all()[i]);
            let (least, most) = values.fold((f64::INFINITY, 0.0f64), |(a, b), value| (a.min(value), b.max(value)));
            if most > 0.0 { (most - least) / most } else { 0.0 }
        };
        (0..5).map(by).fold(0.0, f64::max)
    }

    fn all(&self) -> [Option<f64>; 5] {
        [self.read, self.copy, self.f32, self.int8, self.halves]
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
            self.halves.map(|halves| format!("bf16 {}", giga(halves, "GFLOP/s"))),
        ];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        f.write_str(&if parts.is_empty() { "none: time means nothing here".to_string() } else { parts.join(", ") })
    }
}

/// Number of repetitions, of which the median counts.
const REPEAT: usize = 11;

/// Thread blocks per launch: several for each multiprocessor of the largest GPU.
const BLOCKS: usize = 2048;

fn copy(device: &dyn Device, size: usize) -> Result<f64, KernelError> {
    let [from, mut to] = [filled(device, size)?, filled(device, size)?];
    let time = time(device, 2, REPEAT, |_| Ok(device.copy(&from, 0, &mut to, 0, size)?))?;
    Ok(2.0 * size as f64 / time.median().as_secs_f64())
}

fn read(device: &dyn Device, size: usize) -> Result<f64, KernelError> {
    let from = filled(device, size)?;
    let mut sums = device.alloc(BLOCKS * size_of::<u32>())?;
    let time = time(device, 2, REPEAT, |_| Ok(read_memory(device, &from, &mut sums)?))?;
    Ok(size as f64 / time.median().as_secs_f64())
}

/// Returns the rate of a product of square matrices; `None` without a library that computes it.
fn product(device: &dyn Device) -> Result<Option<f64>, KernelError> {
    const SIZE: usize = 8192;
    if device.load_products().is_err() {
        return Ok(None);
    }
    // A GPU is slower with random numbers than with zeros, since it takes more power.
    let mut random = Random::new(1);
    let rows: Vec<f32> = (0..256 * SIZE).map(|_| round(Dtype::Bf16, random.unit())).collect();
    let (rows, bytes) = (to_bytes(Dtype::Bf16, &rows), SIZE * SIZE * Dtype::Bf16.bytes());
    let [x, w] = [repeated(device, &rows, bytes)?, repeated(device, &rows, bytes)?];
    let mut y = device.alloc(bytes)?;
    let (y_format, bias, columns, slices) = (Dtype::Bf16, None, None, None);
    let weights = Factor { elements: &w, format: FactorType::Numbers(Dtype::Bf16), n: SIZE, k: SIZE };
    let time = time(device, 2, REPEAT, |_| {
        Ok(device.product(Product { x: &x, rows: SIZE, weights, bias, y: &mut y, y_format, columns, slices })?)
    })?;
    Ok(Some(2.0 * (SIZE as f64).powi(3) / time.median().as_secs_f64()))
}

/// Returns a buffer that repeats the same random bytes, which touches every page quickly.
fn filled(device: &dyn Device, size: usize) -> Result<Buffer, DeviceError> {
    repeated(device, &noise(size.min(16 << 20)), size)
}

fn noise(size: usize) -> Vec<u8> {
    let mut random = Random::new(size as u64);
    (0..size / 8).flat_map(|_| random.next().to_ne_bytes()).collect()
}
