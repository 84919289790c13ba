//! Stored numbers, implemented independently of the kernels, and the permitted errors.

use std::sync::LazyLock;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use attention_kernels::Capabilities;
use attention_kernels::{CacheFormat, Dtype, KvDtype};

/// Returns the stored bytes of floats, rounded to nearest, ties to even.
pub fn to_bytes(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().map(|v| v.to_le_bytes()).collect::<Vec<_>>().into_flattened(),
        Dtype::F16 => {
            let mut halves = vec![f16::ZERO; values.len()];
            halves.convert_from_f32_slice(values);
            halves.into_iter().map(f16::to_le_bytes).collect::<Vec<_>>().into_flattened()
        }
        Dtype::Bf16 => values.iter().map(|v| bf16::from_f32(*v).to_le_bytes()).collect::<Vec<_>>().into_flattened(),
    }
}

/// Returns the bytes and the scale of a row in [`KvDtype::Int8PerToken`].
pub fn int8_row(row: &[f32]) -> (Vec<u8>, f32) {
    let nan = row.iter().any(|value| value.is_nan());
    let scale = if nan { f32::NAN } else { row.iter().fold(0.0, |m: f32, value| m.max(value.abs())) / 127.0 };
    if scale == 0.0 {
        return (vec![0; row.len()], scale);
    }
    (row.iter().map(|value| to_byte(KvDtype::Int8, value / scale)).collect(), scale)
}

/// Returns the floats that are stored in bytes.
pub fn from_bytes(dtype: Dtype, bytes: &[u8]) -> Vec<f32> {
    let (pairs, _) = bytes.as_chunks::<2>();
    match dtype {
        Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        Dtype::F16 => pairs.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        Dtype::Bf16 => pairs.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
    }
}

/// Returns the nearest number of the type.
pub fn round(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::F32 => value,
        Dtype::F16 => f16::from_f32(value).to_f32(),
        Dtype::Bf16 => bf16::from_f32(value).to_f32(),
    }
}

/// Returns the type of a cache's elements if they have 16 bits or more.
pub fn element(format: CacheFormat) -> Option<Dtype> {
    match format.kv_dtype {
        KvDtype::Same => Some(format.dtype),
        KvDtype::F16 => Some(Dtype::F16),
        KvDtype::Bf16 => Some(Dtype::Bf16),
        KvDtype::Fp8E4m3 | KvDtype::Fp8E5m2 | KvDtype::Int8 | KvDtype::Int8PerToken => None,
    }
}

/// Returns the value that a byte of an 8-bit cache represents, before scaling. NaN for types of other widths.
pub fn from_byte(kv_dtype: KvDtype, byte: u8) -> f32 {
    let (exponent_bits, mantissa_bits, bias) = match kv_dtype {
        KvDtype::Int8 | KvDtype::Int8PerToken => return f32::from(byte as i8),
        KvDtype::Fp8E4m3 => (4, 3, 7),
        KvDtype::Fp8E5m2 => (5, 2, 15),
        KvDtype::Same | KvDtype::F16 | KvDtype::Bf16 => return f32::NAN,
    };
    let (exponent, mantissa) = (byte >> mantissa_bits & ((1 << exponent_bits) - 1), byte & ((1 << mantissa_bits) - 1));
    let fraction = f32::from(mantissa) / f32::from(1u8 << mantissa_bits);
    let magnitude = match (kv_dtype, exponent) {
        (KvDtype::Fp8E4m3, 15) if mantissa == 7 => f32::NAN,
        (KvDtype::Fp8E5m2, 31) => {
            if mantissa == 0 {
                f32::INFINITY
            } else {
                f32::NAN
            }
        }
        (_, 0) => fraction * 2f32.powi(1 - bias),
        _ => (1.0 + fraction) * 2f32.powi(i32::from(exponent) - bias),
    };
    if byte >> 7 == 1 { -magnitude } else { magnitude }
}

/// Values of the codes of non-negative numbers in ascending order, for e4m3 and e5m2.
static POSITIVE: LazyLock<[Vec<f32>; 2]> = LazyLock::new(|| {
    let values = |kv_dtype, greatest| (0..=greatest).map(|code| from_byte(kv_dtype, code)).collect();
    [values(KvDtype::Fp8E4m3, 0x7e), values(KvDtype::Fp8E5m2, 0x7b)]
});

/// Returns the byte nearest to a value, ties to even, clamped to the greatest finite one. NaN becomes the format's NaN, or
/// −127 in int8.
pub fn to_byte(kv_dtype: KvDtype, value: f32) -> u8 {
    if matches!(kv_dtype, KvDtype::Int8 | KvDtype::Int8PerToken) {
        return if value.is_nan() { -127i8 as u8 } else { value.clamp(-127.0, 127.0).round_ties_even() as i8 as u8 };
    }
    if value.is_nan() {
        return 0x7f;
    }
    let values = &POSITIVE[usize::from(kv_dtype == KvDtype::Fp8E5m2)];
    let (greatest, magnitude) = (values.len() - 1, value.abs());
    let above = values.partition_point(|&value| value < magnitude);
    let code = if above == 0 || above > greatest {
        above.min(greatest)
    } else {
        let (down, up) = (magnitude - values[above - 1], values[above] - magnitude);
        if down < up || (down == up && above % 2 == 1) { above - 1 } else { above }
    } as u8;
    if value.is_sign_negative() { code | 0x80 } else { code }
}

/// Returns the distance between neighbouring numbers of the type at a magnitude.
pub fn ulp(dtype: Dtype, magnitude: f64) -> f64 {
    let (mantissa_bits, least) = match dtype {
        Dtype::F32 => (23, -126),
        Dtype::F16 => (10, -14),
        Dtype::Bf16 => (7, -126),
    };
    // The exponent field: `log2` and `powi` cost more than a kernel that is checked.
    let exponent = ((magnitude.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(least);
    f64::from_bits(((exponent - mantissa_bits + 1023) as u64) << 52)
}

/// Permitted errors against float64.
pub struct Tolerance {
    /// Error of an output element, in ulps of the output's type, at the mean of |v| under the row's weights.
    pub output: f64,
    /// Error of the log of a sum; absolute, or relative where it exceeds 1.
    pub lse: f64,
}

/// Returns the permitted errors; no test has others. Rounding the output costs half an ulp. Sums and exponentials in f32
/// cost far less, except for float32 output, where a score of a few units is off by an ulp of its own and errors add up
/// over a context. Tensor cores take weights rounded to the type of the query: half an ulp more, and as much in the log of
/// their sum. Values times the scales of their rows are rounded to that type too: another half.
pub fn tolerance(can: &Capabilities, format: CacheFormat) -> Tolerance {
    let dtype = format.dtype;
    let scaled_rows = if format.kv_dtype == KvDtype::Int8PerToken { 0.5 } else { 0.0 };
    let f32_sums = 32.0 * ulp(Dtype::F32, 1.0);
    match dtype {
        // The weights are rounded, but their sum and the output are not.
        Dtype::F32 if can.arithmetic.rounds() => {
            Tolerance { output: ulp(Dtype::Bf16, 1.0) / ulp(dtype, 1.0) + 32.0, lse: f32_sums }
        }
        Dtype::F32 => Tolerance { output: 32.0, lse: f32_sums },
        _ if can.rounds_weights => Tolerance { output: 1.25 + scaled_rows, lse: ulp(dtype, 1.0) + f32_sums },
        _ => Tolerance { output: 0.6, lse: f32_sums },
    }
}

/// Returns how far a sum of `k` products of e4m3 numbers on tensor cores may be from the exact one. `span` is the difference of the
/// greatest and the least partial sum, 0 included: no product and no sum of adjacent products is larger.
///
/// Hopper adds 32 products and the sum so far at a time: it shifts them to the exponent of the largest and keeps the 14 highest bits
/// of each (DeepSeek-V3 Technical Report, arXiv 2412.19437, section 3.5.2). So each term loses less than `2^-13 × span`. The sums
/// so far, one per 32 products, may all lose it in one direction. Products lose it towards zero, those of either sign as often:
/// five standard deviations of `k` losses evenly spread over that interval are `5 √(k / 3)`, less than `3 √k`, of them. At k = 4096
/// this is 4 % of `span`; the report measured nearly 2 % of the result (section 3.3.2).
pub fn e4m3_sum_error(k: usize, span: f64) -> f64 {
    let k = k as f64;
    (k / 32.0 + 3.0 * k.sqrt()) * 2f64.powi(-13) * span
}

/// Returns the difference of the greatest and the least partial sum of some numbers, 0 included.
pub fn span(numbers: impl Iterator<Item = f64>) -> f64 {
    let mut sum = 0.0;
    let (least, greatest) = numbers.fold((0.0f64, 0.0f64), |(least, greatest), number| {
        sum += number;
        (least.min(sum), greatest.max(sum))
    });
    greatest - least
}

/// A small pseudo-random number generator (xorshift64).
pub struct Random(u64);

impl Random {
    /// Creates a generator from a seed.
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Returns 64 random bits.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns a number less than `n`.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.next() >> 33) % n as u64) as usize
    }

    /// Returns a number from −1 to 1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// Shuffles items.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}
