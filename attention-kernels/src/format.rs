//! Element types and layouts of caches. Nothing here accesses memory.

use std::fmt;

pub use device::Dtype;
use simd::LANES;

use crate::error::{KernelError, expect};
use crate::shape::KvShape;

/// Type of the elements of a cache. Values are rounded to nearest, ties to even. An element of 8 bits represents its value
/// times a scale; it is stored as value / scale, clamped to the greatest finite number of the type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KvDtype {
    /// The type of the query.
    #[default]
    Same,
    /// 8 bits, 4 of exponent, 3 of mantissa, no infinities ("FP8 Formats for Deep Learning", Micikevicius et al., 2022).
    Fp8E4m3,
    /// 8 bits, 5 of exponent, 2 of mantissa (the same paper).
    Fp8E5m2,
    /// Signed 8-bit integers, −127..=127.
    Int8,
    /// IEEE 754 half precision, for float32 queries.
    F16,
    /// bfloat16, for float32 queries.
    Bf16,
    /// Signed 8-bit integers with a float32 scale for each token and head, greatest magnitude / 127. The scale is computed
    /// from that row alone when it is written, and stored in the page. In [`Layout::Hnd`] each block and head has first the
    /// rows, `[block_size, head_dim]`, then the scales, `[block_size]`, little-endian.
    /// Keys of most models are stored in another basis ([`CacheFormat::mixes_keys`]).
    Int8PerToken,
}

impl KvDtype {
    /// All types.
    pub const ALL: [KvDtype; 7] = [
        KvDtype::Same,
        KvDtype::Fp8E4m3,
        KvDtype::Fp8E5m2,
        KvDtype::Int8,
        KvDtype::F16,
        KvDtype::Bf16,
        KvDtype::Int8PerToken,
    ];

    /// Types that plug-ins can support, in the order of the header's numbers.
    pub const COMMON: [KvDtype; 4] = [KvDtype::Same, KvDtype::Fp8E4m3, KvDtype::Fp8E5m2, KvDtype::Int8];

    /// Types that the CUDA kernels support, in the order of `KvFormat` in `csrc/args.cuh`.
    pub const ON_GPU: [KvDtype; 5] =
        [KvDtype::Same, KvDtype::Fp8E4m3, KvDtype::Fp8E5m2, KvDtype::Int8, KvDtype::Int8PerToken];

    /// Returns the name in the table of variants.
    pub fn name(self) -> &'static str {
        match self {
            KvDtype::Same => "same",
            KvDtype::Fp8E4m3 => "fp8_e4m3",
            KvDtype::Fp8E5m2 => "fp8_e5m2",
            KvDtype::Int8 => "int8",
            KvDtype::F16 => "f16",
            KvDtype::Bf16 => "bf16",
            KvDtype::Int8PerToken => "int8_per_token_head",
        }
    }

    /// Whether elements have 8 bits.
    pub fn is_byte(self) -> bool {
        self.takes_scales() || self == KvDtype::Int8PerToken
    }

    /// Returns the greatest number that a byte represents before scaling; `None` for wider types.
    pub fn greatest(self) -> Option<f32> {
        match self {
            KvDtype::Same | KvDtype::F16 | KvDtype::Bf16 => None,
            KvDtype::Fp8E4m3 => Some(448.0),
            KvDtype::Fp8E5m2 => Some(57344.0),
            KvDtype::Int8 | KvDtype::Int8PerToken => Some(127.0),
        }
    }

    /// Whether scales are given with the cache ([`KvScales`](crate::KvScales)).
    pub fn takes_scales(self) -> bool {
        matches!(self, KvDtype::Fp8E4m3 | KvDtype::Fp8E5m2 | KvDtype::Int8)
    }
}

impl fmt::Display for KvDtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Order of the dimensions of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Layout {
    /// `[num_blocks, num_kv_heads, block_size, head_dim]`, the default.
    #[default]
    Hnd,
    /// `[num_blocks, block_size, num_kv_heads, head_dim]`: the heads of a token are contiguous.
    Nhd,
    /// Pairs of bfloat16 as a CPU multiplies them ([`simd::pairs`]), in blocks and heads as in [`Layout::Hnd`]. Keys are
    /// `[block_size / 16, head_dim / 2, 16, 2]`: the pair of two elements of sixteen tokens. Values are
    /// `[block_size / 2, head_dim / 16, 16, 2]`: the pair of two tokens in sixteen columns.
    ///
    /// ```text
    /// keys      k0[0..2] k1[0..2] … k15[0..2] │ k0[2..4] k1[2..4] … k15[2..4] │ …
    /// values    v0[0] v1[0] v0[1] v1[1] … v0[15] v1[15] │ v0[16] v1[16] …
    /// ```
    Pairs,
}

/// Distance, in elements, from one block, head or token of a cache to the next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    /// Between blocks.
    pub block: usize,
    /// Between heads.
    pub head: usize,
    /// Between tokens.
    pub token: usize,
}

impl Layout {
    /// All layouts, in the order in which a set of kernels prefers them.
    pub const ALL: [Layout; 3] = [Layout::Pairs, Layout::Hnd, Layout::Nhd];

    /// Layouts that CUDA kernels and plug-ins can support, in the order of the header's numbers.
    pub const COMMON: [Layout; 2] = [Layout::Hnd, Layout::Nhd];

    /// Returns the name in the table of variants.
    pub fn name(self) -> &'static str {
        match self {
            Layout::Hnd => "HND",
            Layout::Nhd => "NHD",
            Layout::Pairs => "pairs",
        }
    }

    /// Whether a cache can have the layout: one of pairs holds keys and values of bfloat16, and whole vectors of both.
    pub fn suits(self, kv_dtype: KvDtype, block_size: usize, head_dim: usize, latent: bool) -> bool {
        let whole = block_size.is_multiple_of(LANES) && head_dim.is_multiple_of(LANES);
        self != Layout::Pairs || kv_dtype == KvDtype::Bf16 && whole && !latent
    }

    /// Returns the index of an element of a dense cache of keys (`which` is 0) or values (1). The token is that of a slot, block ×
    /// block_size + offset.
    ///
    /// ```
    /// use attention_kernels::{KvShape, Layout};
    /// let shape = KvShape { num_blocks: 9, num_kv_heads: 1, block_size: 16, head_dim: 64 };
    /// assert_eq!([0, 1].map(|which| Layout::Hnd.index(&shape, which, 3, 0, 2)), [3 * 64 + 2; 2]);
    /// assert_eq!([0, 1].map(|which| Layout::Pairs.index(&shape, which, 3, 0, 2)), [32 + 2 * 3, 2 * 64 + 2 * 2 + 1]);
    /// ```
    pub fn index(self, shape: &KvShape, which: usize, slot: usize, head: usize, column: usize) -> usize {
        let (dim, at) = (shape.head_dim, slot % shape.block_size);
        let unit = (slot / shape.block_size * shape.num_kv_heads + head) * shape.block_size * dim;
        match (self, which) {
            (Layout::Hnd, _) => unit + at * dim + column,
            (Layout::Nhd, _) => (slot * shape.num_kv_heads + head) * dim + column,
            (Layout::Pairs, 0) => {
                unit + at / LANES * LANES * dim + column / 2 * 2 * LANES + at % LANES * 2 + column % 2
            }
            (Layout::Pairs, _) => unit + at / 2 * 2 * dim + column * 2 + at % 2,
        }
    }

    /// Returns the strides of a dense cache of that shape. In [`Layout::Pairs`] no row is contiguous; the stride between tokens is
    /// then the number of elements of a row.
    ///
    /// ```
    /// use attention_kernels::{KvShape, Layout};
    /// let shape = KvShape { num_blocks: 9, num_kv_heads: 2, block_size: 16, head_dim: 64 };
    /// assert_eq!(Layout::Hnd.strides(&shape).token, 64);
    /// assert_eq!(Layout::Nhd.strides(&shape).token, 128);
    /// ```
    pub fn strides(self, shape: &KvShape) -> Strides {
        let (block, dim) = (shape.block_elements(), shape.head_dim);
        match self {
            Layout::Hnd | Layout::Pairs => Strides { block, head: shape.block_size * dim, token: dim },
            Layout::Nhd => Strides { block, head: dim, token: shape.num_kv_heads * dim },
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Format of a cache, on which its readers and writers must agree. The default is float32 throughout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CacheFormat {
    /// Type of queries and outputs.
    pub dtype: Dtype,
    /// Type of the cache.
    pub kv_dtype: KvDtype,
    /// Order of the cache's dimensions.
    pub layout: Layout,
}

impl CacheFormat {
    /// Whether a model multiplies queries and keys of heads of this size by a Hadamard matrix, after all else that it does to them
    /// ("QuaRot", Ashkboos et al., 2024). Scores do not change, since the matrix is orthogonal, but each element of a key becomes a sum
    /// of all elements, so that a few large ones no longer set the scale of the whole row. Kernels of attention and of cache writes
    /// take rows as they are given.
    pub fn mixes_keys(&self, head_dim: usize) -> bool {
        self.kv_dtype == KvDtype::Int8PerToken && head_dim.is_power_of_two() && head_dim >= LANES
    }

    /// Returns the bytes of one element of the cache.
    pub fn element_bytes(&self) -> usize {
        match self.kv_dtype {
            KvDtype::Same => self.dtype.bytes(),
            KvDtype::F16 | KvDtype::Bf16 => 2,
            KvDtype::Fp8E4m3 | KvDtype::Fp8E5m2 | KvDtype::Int8 | KvDtype::Int8PerToken => 1,
        }
    }

    /// Returns the bytes of one token's keys (or values) in one head, including a scale that is stored in the page.
    ///
    /// ```
    /// use attention_kernels::{CacheFormat, KvDtype};
    /// let int8 = CacheFormat { kv_dtype: KvDtype::Int8PerToken, ..CacheFormat::default() };
    /// assert_eq!((CacheFormat::default().row_bytes(64), int8.row_bytes(64)), (256, 68));
    /// ```
    pub fn row_bytes(&self, head_dim: usize) -> usize {
        let scale = if self.kv_dtype == KvDtype::Int8PerToken { size_of::<f32>() } else { 0 };
        head_dim * self.element_bytes() + scale
    }

    /// Returns the number of the cache's type for CUDA kernels or plug-ins: its index in a list, [`KvDtype::ON_GPU`] or
    /// [`KvDtype::COMMON`].
    ///
    /// # Errors
    /// The type is not in the list; `variant` is named in the error.
    pub fn kv_code(&self, variant: &'static str, known: &[KvDtype]) -> Result<u32, KernelError> {
        let code = known.iter().position(|known| *known == self.kv_dtype);
        code.map(|code| code as u32).ok_or_else(|| KernelError::Unsupported { variant, found: self.to_string() })
    }

    /// Returns the strides of the rows of a cache of that shape: those of its [`Layout`], except that scales in the page
    /// follow the rows of each block and head.
    pub fn strides(&self, shape: &KvShape) -> Strides {
        let dense = self.layout.strides(shape);
        if self.kv_dtype != KvDtype::Int8PerToken {
            return dense;
        }
        let head = shape.block_size * self.row_bytes(shape.head_dim);
        Strides { block: shape.num_kv_heads * head, head, ..dense }
    }

    /// Checks that the CUDA kernels can read a cache with scales in its pages: its layout is that of
    /// [`KvDtype::Int8PerToken`], and the rows and the scales of a head's block are whole vectors of 16 bytes (any block
    /// size that is a multiple of 4 if head sizes are multiples of 16).
    ///
    /// # Errors
    /// They cannot; `variant` is named in the error.
    pub fn check_scaled_rows(&self, variant: &'static str, shape: &KvShape) -> Result<(), KernelError> {
        if self.kv_dtype != KvDtype::Int8PerToken {
            return Ok(());
        }
        if self.layout != Layout::Hnd {
            return Err(KernelError::Unsupported { variant, found: self.to_string() });
        }
        expect("bytes of a head's block modulo 16", self.strides(shape).head % 16, 0)
    }

    /// Returns the bytes of one block of one layer's keys (or values).
    pub fn block_bytes(&self, shape: &KvShape) -> usize {
        shape.num_kv_heads * shape.block_size * self.row_bytes(shape.head_dim)
    }
}

impl fmt::Display for CacheFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, cache {}, {}", self.dtype, self.kv_dtype, self.layout)
    }
}
