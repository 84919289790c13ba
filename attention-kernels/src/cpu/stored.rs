//! Conversion of cache elements to float32 and back, one type for each kind of cache, and the offsets of rows in a block.
//!
//! ```text
//! one head of one block        row 0 │ row 1 │ … │ row block_size-1 │ scales of the rows, where the type has them
//! ```

use device::{Buffer, Element};
use simd::pairs::Pairs;
use simd::{Ahead, LANES, Lanes, small_float};

use crate::args::KvCache;
use crate::error::KernelError;
use crate::format::{Dtype, KvDtype, Layout};
use crate::shape::KvShape;

/// A kind of cache element.
pub(super) trait Stored {
    /// Representation in memory.
    type Raw: Element;
    /// Number of elements behind the rows of a block's head that hold the scale of one row.
    const SCALE: usize = 0;

    /// Loads sixteen elements.
    fn load<L: Lanes>(from: &[Self::Raw; LANES]) -> L;
    /// Converts one element, to the same bits as [`Stored::load`].
    fn widen(raw: Self::Raw) -> f32;
    /// Returns the element nearest to a number.
    fn narrow(value: f32) -> Self::Raw;

    /// Returns the scale of a row; 1 for types without scales in the page.
    #[inline(always)]
    fn scale(_: &[Self::Raw]) -> f32 {
        1.0
    }
    /// Writes a row. `scale` is the scale that is given with the cache.
    #[inline(always)]
    fn write(source: &[f32], scale: f32, row: &mut [Self::Raw], _: &mut [Self::Raw]) {
        for (raw, &value) in row.iter_mut().zip(source) {
            *raw = Self::narrow(value / scale);
        }
    }
}

macro_rules! stored {
    ($(#[$doc:meta])* $name:ident, $raw:ty, $load:ident, $widen:expr, $narrow:expr) => {
        $(#[$doc])*
        pub(super) struct $name;
        impl Stored for $name {
            type Raw = $raw;
            #[inline(always)]
            fn load<L: Lanes>(from: &[$raw; LANES]) -> L {
                L::$load(from)
            }
            #[inline(always)]
            fn widen(raw: $raw) -> f32 {
                $widen(raw)
            }
            #[inline(always)]
            fn narrow(value: f32) -> $raw {
                $narrow(value)
            }
        }
    };
}

stored!(
    /// IEEE 754 single precision.
    F32, f32, load, std::convert::identity, std::convert::identity
);
stored!(
    /// IEEE 754 half precision.
    F16, u16, load_f16, small_float::f16_to_f32, small_float::f32_to_f16
);
stored!(
    /// bfloat16.
    Bf16, u16, load_bf16, small_float::bf16_to_f32, small_float::f32_to_bf16
);
stored!(
    /// FP8 with 3 bits of mantissa.
    E4m3, u8, load_e4m3, small_float::e4m3_to_f32, small_float::f32_to_e4m3
);
stored!(
    /// FP8 with 2 bits of mantissa.
    E5m2, u8, load_e5m2, small_float::e5m2_to_f32, small_float::f32_to_e5m2
);
stored!(
    /// Signed bytes.
    Int8, u8, load_i8, int8_to_f32, small_float::f32_to_int8
);

fn int8_to_f32(byte: u8) -> f32 {
    f32::from(byte as i8)
}

/// Signed bytes, each row with a scale of its own: its greatest magnitude / 127.
pub(super) struct Int8PerToken;

impl Stored for Int8PerToken {
    type Raw = u8;
    const SCALE: usize = size_of::<f32>();

    #[inline(always)]
    fn load<L: Lanes>(from: &[u8; LANES]) -> L {
        L::load_i8(from)
    }
    #[inline(always)]
    fn widen(raw: u8) -> f32 {
        int8_to_f32(raw)
    }
    #[inline(always)]
    fn narrow(value: f32) -> u8 {
        small_float::f32_to_int8(value)
    }
    #[inline(always)]
    fn scale(at: &[u8]) -> f32 {
        at.first_chunk().map_or(1.0, |bytes| f32::from_le_bytes(*bytes))
    }
    #[inline(always)]
    fn write(source: &[f32], _: f32, row: &mut [u8], scale: &mut [u8]) {
        // Compares bits: those of magnitudes have the order of the numbers, with NaN above all.
        let greatest = source.iter().fold(0, |greatest: u32, value| greatest.max(value.to_bits() & 0x7fff_ffff));
        let of_row = f32::from_bits(greatest) / 127.0;
        // A row of zeros, or of numbers that underflow, has scale 0 and stores zeros.
        let divisor = if of_row == 0.0 { f32::INFINITY } else { of_row };
        for (raw, &value) in row.iter_mut().zip(source) {
            *raw = Self::narrow(value / divisor);
        }
        scale.copy_from_slice(&of_row.to_le_bytes());
    }
}

/// The elements of a cache by type: keys, values.
#[derive(Clone, Copy)]
pub(super) enum Pages<'a> {
    F32([&'a [f32]; 2]),
    F16([&'a [u16]; 2]),
    Bf16([&'a [u16]; 2]),
    E4m3([&'a [u8]; 2]),
    E5m2([&'a [u8]; 2]),
    Int8([&'a [u8]; 2]),
    Int8PerToken([&'a [u8]; 2]),
}

/// Evaluates `$each` with `$kind` as the [`Stored`] type of a cache's elements.
macro_rules! by_kv_dtype {
    ($kv_dtype:expr, |$kind:ident| $each:expr) => {
        $crate::cpu::stored::by_kv_dtype!(
            $kv_dtype, $kind, $each,
            Same F32, F16 F16, Bf16 Bf16, Fp8E4m3 E4m3, Fp8E5m2 E5m2, Int8 Int8, Int8PerToken Int8PerToken
        )
    };
    ($kv_dtype:expr, $kind:ident, $each:expr, $($name:ident $stored:ident),*) => {
        match $kv_dtype {
            $($crate::format::KvDtype::$name => {
                type $kind = $crate::cpu::stored::$stored;
                $each
            })*
        }
    };
}
pub(super) use by_kv_dtype;

/// Evaluates `$each` with the elements of [`Pages`] and their kind.
macro_rules! by_kind {
    ($pages:expr, |$elements:ident, $kind:ident| $each:expr) => {
        by_kind!($pages, $elements, $kind, $each, F32 F16 Bf16 E4m3 E5m2 Int8 Int8PerToken)
    };
    ($pages:expr, $elements:ident, $kind:ident, $each:expr, $($name:ident)*) => {
        match $pages {
            $(Pages::$name($elements) => {
                type $kind = $name;
                $each
            })*
        }
    };
}

/// Keys and values in bfloat16 that are multiplied in pairs.
#[derive(Clone, Copy)]
pub(super) enum Halves<'a> {
    /// In rows ([`Layout::Hnd`]).
    Rows([&'a [u16]; 2]),
    /// In pairs ([`Layout::Pairs`]).
    Pairs([&'a [Pairs]; 2]),
}

impl<'a> Halves<'a> {
    /// Returns the elements of a checked cache; `None` if it has another type.
    pub fn of(cache: &'a KvCache) -> Result<Option<Halves<'a>>, KernelError> {
        let (keys, values) = (&cache.keys, cache.values());
        Ok(match (cache.format.kv_dtype, cache.format.layout) {
            (KvDtype::Bf16, Layout::Pairs) => Some(Halves::Pairs([keys.host()?, values.host()?])),
            (KvDtype::Bf16, _) => Some(Halves::Rows([keys.host()?, values.host()?])),
            _ => None,
        })
    }
}

impl<'a> Pages<'a> {
    /// Returns the elements of a checked cache.
    ///
    /// # Errors
    /// The cache is on another device or in a format that no CPU variant supports.
    pub fn of(cache: &'a KvCache) -> Result<Pages<'a>, KernelError> {
        expect_ours(cache)?;
        let (keys, values) = (&cache.keys, cache.values());
        Ok(match cache.format.kv_dtype {
            KvDtype::Same => Pages::F32([keys.host()?, values.host()?]),
            KvDtype::F16 => Pages::F16([keys.host()?, values.host()?]),
            KvDtype::Bf16 => Pages::Bf16([keys.host()?, values.host()?]),
            KvDtype::Fp8E4m3 => Pages::E4m3([keys.host()?, values.host()?]),
            KvDtype::Fp8E5m2 => Pages::E5m2([keys.host()?, values.host()?]),
            KvDtype::Int8 => Pages::Int8([keys.host()?, values.host()?]),
            KvDtype::Int8PerToken => Pages::Int8PerToken([keys.host()?, values.host()?]),
        })
    }

    /// Transposes keys (0) or values (1) of sixteen slots: `to[d][i]` becomes element `d` of slot `i`.
    #[inline(always)]
    pub fn transposed<L: Lanes>(
        &self,
        which: usize,
        shape: &KvShape,
        slots: &[Slot; LANES],
        kv_head: usize,
        to: &mut [[f32; LANES]],
    ) {
        by_kind!(self, |pages, S| transposed::<L, S>(pages[which], shape, slots, kv_head, to))
    }

    /// Returns keys (0) or values (1) of `tokens` adjacent slots of a block in float32, in place or converted into `tile`:
    /// `[tokens, head_dim]`.
    #[inline(always)]
    pub fn run<'t, L: Lanes>(
        &self,
        which: usize,
        shape: &KvShape,
        slot: Slot,
        kv_head: usize,
        tokens: usize,
        tile: &'t mut [f32],
    ) -> &'t [f32]
    where
        'a: 't,
    {
        let len = tokens * shape.head_dim;
        if let Pages::F32(pages) = self {
            return &pages[which][offsets::<F32>(shape, slot, kv_head).0..][..len];
        }
        let tile = &mut tile[..len];
        by_kind!(self, |pages, S| widen::<L, S>(&pages[which][offsets::<S>(shape, slot, kv_head).0..][..len], tile));
        tile
    }

    /// Returns the first `dim` elements of keys (0) or values (1) of some slots in float32, in place or converted into
    /// `tile`. `starts` receives the index of each slot's row in the result.
    #[inline(always)]
    pub fn rows<'t, L: Lanes>(
        &self,
        which: usize,
        shape: &KvShape,
        slots: &[Slot],
        (kv_head, dim): (usize, usize),
        tile: &'t mut [f32],
        starts: &mut [usize],
    ) -> &'t [f32]
    where
        'a: 't,
    {
        if let Pages::F32(pages) = self {
            for (start, &slot) in starts.iter_mut().zip(slots) {
                *start = offsets::<F32>(shape, slot, kv_head).0;
            }
            return pages[which];
        }
        for (i, start) in starts.iter_mut().enumerate() {
            *start = i * dim;
        }
        by_kind!(self, |pages, S| {
            for (&slot, to) in slots.iter().zip(tile.chunks_exact_mut(dim)) {
                widen::<L, S>(&pages[which][offsets::<S>(shape, slot, kv_head).0..][..dim], to);
            }
        });
        tile
    }

    /// Reads the scales of the rows of some slots. Returns `false`, and writes nothing, if the type has none.
    #[inline(always)]
    pub fn scales(&self, which: usize, shape: &KvShape, slots: &[Slot], kv_head: usize, to: &mut [f32]) -> bool {
        let Pages::Int8PerToken(pages) = self else { return false };
        for (scale, &slot) in to.iter_mut().zip(slots) {
            *scale = Int8PerToken::scale(&pages[which][offsets::<Int8PerToken>(shape, slot, kv_head).1..]);
        }
        true
    }

    /// Prefetches the scales of `tokens` adjacent slots of a block, and returns their rows to be prefetched.
    #[inline(always)]
    pub fn ahead(&self, which: usize, shape: &KvShape, slot: Slot, kv_head: usize, tokens: usize) -> Ahead {
        by_kind!(self, |pages, S| {
            let (row, scale) = offsets::<S>(shape, slot, kv_head);
            let scales = &pages[which][scale..][..tokens * S::SCALE];
            Ahead::of(scales, scales.len()).ask(0, 1);
            Ahead::of(&pages[which][row..][..tokens * shape.head_dim], shape.head_dim)
        })
    }
}

#[inline(always)]
fn transposed<L: Lanes, S: Stored>(
    elements: &[S::Raw],
    shape: &KvShape,
    slots: &[Slot; LANES],
    kv_head: usize,
    to: &mut [[f32; LANES]],
) {
    let dim = shape.head_dim;
    let mut rows = [&elements[..0]; LANES];
    for (row, &slot) in rows.iter_mut().zip(slots) {
        *row = &elements[offsets::<S>(shape, slot, kv_head).0..][..dim];
    }
    let squares = dim / LANES;
    for i in 0..squares {
        let mut square = [L::splat(0.0); LANES];
        for (vector, row) in square.iter_mut().zip(rows) {
            *vector = S::load(&row.as_chunks::<LANES>().0[i]);
        }
        for (vector, to) in L::transpose(square).into_iter().zip(&mut to[i * LANES..]) {
            vector.store(to);
        }
    }
    for d in squares * LANES..dim {
        for (to, row) in to[d].iter_mut().zip(rows) {
            *to = S::widen(row[d]);
        }
    }
}

#[inline(always)]
fn widen<L: Lanes, S: Stored>(raw: &[S::Raw], to: &mut [f32]) {
    let (vectors, tail) = raw.as_chunks::<LANES>();
    let (to, to_tail) = to.as_chunks_mut::<LANES>();
    for (to, vector) in to.iter_mut().zip(vectors) {
        S::load::<L>(vector).store(to);
    }
    for (to, raw) in to_tail.iter_mut().zip(tail) {
        *to = S::widen(*raw);
    }
}

/// Checks that CPU variants support the format of a cache. Those that support one layout only are not called with another.
pub(super) fn expect_ours(cache: &KvCache) -> Result<(), KernelError> {
    if cache.format.dtype == Dtype::F32 && cache.format.layout != Layout::Nhd {
        Ok(())
    } else {
        Err(KernelError::Unsupported { variant: "cpu", found: cache.format.to_string() })
    }
}

/// Scales given with a cache: one for all KV heads, or one each.
#[derive(Clone, Copy)]
pub(super) struct GivenScales<'a> {
    /// Scales of keys.
    pub keys: &'a [f32],
    /// Scales of values.
    pub values: &'a [f32],
}

impl<'a> GivenScales<'a> {
    /// Reads scales of keys and of values ([`KvCache::given_scales`]); 1 if there are none.
    pub fn of(given: Option<[&'a Buffer; 2]>) -> Result<GivenScales<'a>, KernelError> {
        Ok(match given {
            Some([keys, values]) => GivenScales { keys: keys.host()?, values: values.host()? },
            None => GivenScales { keys: &[1.0], values: &[1.0] },
        })
    }

    /// Returns the scales of keys and of values of a head.
    pub fn head(&self, kv_head: usize) -> [f32; 2] {
        [self.keys, self.values].map(|scales| of_head(scales, kv_head))
    }
}

/// Returns the scale of a head.
#[inline(always)]
pub(super) fn of_head(scales: &[f32], kv_head: usize) -> f32 {
    scales[kv_head.min(scales.len() - 1)]
}

/// Slot of a token: a block, and a row in it. Computed once for keys, values and all heads, because a division by a block
/// size that is known only at run time costs as much as reading a row.
#[derive(Clone, Copy, Default)]
pub(super) struct Slot {
    block: u32,
    at: u32,
}

impl Slot {
    /// Returns the number of rows of the block from this one on.
    #[inline(always)]
    pub fn rows_left(self, block_size: usize) -> usize {
        block_size - self.at as usize
    }

    /// Returns slot `number` of a slot mapping.
    #[inline(always)]
    pub fn of(number: usize, block_size: usize) -> Slot {
        Slot { block: (number / block_size) as u32, at: (number % block_size) as u32 }
    }

    /// Returns the slot of a token of a sequence.
    #[inline(always)]
    pub fn of_token(table: &[i32], block_size: usize, token: usize) -> Slot {
        Slot { block: table[token / block_size] as u32, at: (token % block_size) as u32 }
    }

    /// Computes the slots of adjacent tokens, from `first` on: block by block, in vectors.
    #[inline(always)]
    pub fn of_tokens(table: &[i32], block_size: usize, first: usize, mut slots: &mut [Slot]) {
        let (mut index, mut at) = (first / block_size, first % block_size);
        while !slots.is_empty() {
            let (run, rest) = slots.split_at_mut(slots.len().min(block_size - at));
            let block = table[index] as u32;
            for (slot, at) in run.iter_mut().zip(at as u32..) {
                *slot = Slot { block, at };
            }
            (slots, index, at) = (rest, index + 1, 0);
        }
    }
}

/// Returns the offset of the panel of sixteen tokens that a slot is one of, in keys and in values, and its index in the panel.
#[inline(always)]
pub(super) fn panel_offset(shape: &KvShape, slot: Slot, kv_head: usize) -> (usize, usize) {
    let (block, at) = (slot.block as usize, slot.at as usize);
    let panel = (block * shape.num_kv_heads + kv_head) * (shape.block_size / LANES) + at / LANES;
    (panel * shape.head_dim / 2, at % LANES)
}

/// Returns the offset of a slot's row, and that of its scale.
#[inline(always)]
pub(super) fn offsets<S: Stored>(shape: &KvShape, slot: Slot, kv_head: usize) -> (usize, usize) {
    let (block, at) = (slot.block as usize, slot.at as usize);
    let first = (block * shape.num_kv_heads + kv_head) * shape.block_size * (shape.head_dim + S::SCALE);
    (first + at * shape.head_dim, first + shape.block_size * shape.head_dim + at * S::SCALE)
}
