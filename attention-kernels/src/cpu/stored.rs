//! How the elements of a cache become float32 and back, one type for each kind of cache, and where a block's rows are.
//!
//! ```text
//! one head of one block        row 0 │ row 1 │ … │ row block_size-1 │ scales of the rows, where the type has them
//! ```

use device::Element;
use device::simd::{Ahead, LANES, Lanes, small_float};

use crate::args::{KvCache, KvScales};
use crate::error::KernelError;
use crate::format::{Dtype, KvDtype, Layout};
use crate::shape::KvShape;

/// A kind of element.
pub(super) trait Stored {
    /// As it lies in memory.
    type Raw: Element;
    /// Elements behind the rows of a block's head that the scale of one row takes.
    const SCALE: usize = 0;

    /// Sixteen of them.
    fn load<L: Lanes>(from: &[Self::Raw; LANES]) -> L;
    /// One of them, to the same bits.
    fn widen(raw: Self::Raw) -> f32;
    /// The nearest one to a number.
    fn narrow(value: f32) -> Self::Raw;

    /// The scale of a row; 1 for the types that have none.
    #[inline(always)]
    fn scale(_: &[Self::Raw]) -> f32 {
        1.0
    }
    /// Writes a row whose scale, if it is given from outside, is `scale`.
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
    /// IEEE 754 single.
    F32, f32, load, std::convert::identity, std::convert::identity
);
stored!(
    /// IEEE 754 half.
    F16, u16, load_f16, small_float::f16_to_f32, small_float::f32_to_f16
);
stored!(
    /// The upper half of a single.
    Bf16, u16, load_bf16, small_float::bf16_to_f32, small_float::f32_to_bf16
);
stored!(
    /// 8 bits, 3 of mantissa.
    E4m3, u8, load_e4m3, small_float::e4m3_to_f32, small_float::f32_to_e4m3
);
stored!(
    /// 8 bits, 2 of mantissa.
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
        // Of the bits: those of magnitudes are in the order of their numbers, and NaN is above all.
        let greatest = source.iter().fold(0, |greatest: u32, value| greatest.max(value.to_bits() & 0x7fff_ffff));
        let of_row = f32::from_bits(greatest) / 127.0;
        // A row of zeros (or of numbers that vanish beside the least) has scale 0 and holds zeros.
        let divisor = if of_row == 0.0 { f32::INFINITY } else { of_row };
        for (raw, &value) in row.iter_mut().zip(source) {
            *raw = Self::narrow(value / divisor);
        }
        scale.copy_from_slice(&of_row.to_le_bytes());
    }
}

/// The elements of a cache by their type: keys, values.
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

/// Calls `$each` with the elements of a cache and their kind; `Pages` is the caller's, for reading or for writing.
macro_rules! by_kind {
    ($pages:expr, |$elements:ident, $kind:ident| $each:expr) => {
        $crate::cpu::stored::by_kind!($pages, $elements, $kind, $each, F32 F16 Bf16 E4m3 E5m2 Int8 Int8PerToken)
    };
    ($pages:expr, $elements:ident, $kind:ident, $each:expr, $($name:ident)*) => {
        match $pages {
            $(Pages::$name($elements) => {
                type $kind = $crate::cpu::stored::$name;
                $each
            })*
        }
    };
}

pub(super) use by_kind;

impl<'a> Pages<'a> {
    /// The elements of a cache, after its check.
    ///
    /// # Errors
    /// A cache of another device or in a format that no variant of the CPU claims.
    pub fn of(cache: &'a KvCache) -> Result<Pages<'a>, KernelError> {
        expect_ours(cache)?;
        let (keys, values) = (&cache.keys, &cache.values);
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

    /// Keys (0) or values (1) of sixteen slots, turned round: `to[d][i]` becomes number `d` of slot `i`.
    #[inline(always)]
    pub fn turned<L: Lanes>(
        &self,
        which: usize,
        shape: &KvShape,
        slots: &[Slot; LANES],
        kv_head: usize,
        to: &mut [[f32; LANES]],
    ) {
        by_kind!(self, |pages, S| turned::<L, S>(pages[which], shape, slots, kv_head, to))
    }

    /// Keys (0) or values (1) of `tokens` neighbouring slots of a block in float32, where they lie or brought into `tile`:
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
            return &pages[which][place::<F32>(shape, slot, kv_head).0..][..len];
        }
        let tile = &mut tile[..len];
        by_kind!(self, |pages, S| widen::<L, S>(&pages[which][place::<S>(shape, slot, kv_head).0..][..len], tile));
        tile
    }

    /// Keys (0) or values (1) of some slots in float32, where they lie or brought into `tile`; `starts` becomes where the row of
    /// each begins in what is given back.
    #[inline(always)]
    pub fn rows<'t, L: Lanes>(
        &self,
        which: usize,
        shape: &KvShape,
        slots: &[Slot],
        kv_head: usize,
        tile: &'t mut [f32],
        starts: &mut [usize],
    ) -> &'t [f32]
    where
        'a: 't,
    {
        if let Pages::F32(pages) = self {
            for (start, &slot) in starts.iter_mut().zip(slots) {
                *start = place::<F32>(shape, slot, kv_head).0;
            }
            return pages[which];
        }
        for (i, start) in starts.iter_mut().enumerate() {
            *start = i * shape.head_dim;
        }
        by_kind!(self, |pages, S| widened::<L, S>(pages[which], shape, slots, kv_head, tile));
        tile
    }

    /// The scales of the rows of some slots; `false`, and nothing is written, where the type has none.
    #[inline(always)]
    pub fn scales(&self, which: usize, shape: &KvShape, slots: &[Slot], kv_head: usize, to: &mut [f32]) -> bool {
        let Pages::Int8PerToken(pages) = self else { return false };
        for (scale, &slot) in to.iter_mut().zip(slots) {
            *scale = Int8PerToken::scale(&pages[which][place::<Int8PerToken>(shape, slot, kv_head).1..]);
        }
        true
    }

    /// The rows of `tokens` neighbouring slots of a block, to be asked for; their scales are, at once.
    #[inline(always)]
    pub fn ahead(&self, which: usize, shape: &KvShape, slot: Slot, kv_head: usize, tokens: usize) -> Ahead {
        by_kind!(self, |pages, S| ahead::<S>(pages[which], shape, slot, kv_head, tokens))
    }
}

#[inline(always)]
fn ahead<S: Stored>(elements: &[S::Raw], shape: &KvShape, slot: Slot, kv_head: usize, tokens: usize) -> Ahead {
    let (row, scale) = place::<S>(shape, slot, kv_head);
    let scales = &elements[scale..][..tokens * S::SCALE];
    Ahead::of(scales, scales.len()).ask(0, 1);
    Ahead::of(&elements[row..][..tokens * shape.head_dim], shape.head_dim)
}

#[inline(always)]
fn turned<L: Lanes, S: Stored>(
    elements: &[S::Raw],
    shape: &KvShape,
    slots: &[Slot; LANES],
    kv_head: usize,
    to: &mut [[f32; LANES]],
) {
    let dim = shape.head_dim;
    let mut rows = [&elements[..0]; LANES];
    for (row, &slot) in rows.iter_mut().zip(slots) {
        *row = &elements[place::<S>(shape, slot, kv_head).0..][..dim];
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
fn widened<L: Lanes, S: Stored>(
    elements: &[S::Raw],
    shape: &KvShape,
    slots: &[Slot],
    kv_head: usize,
    tile: &mut [f32],
) {
    for (&slot, to) in slots.iter().zip(tile.chunks_exact_mut(shape.head_dim)) {
        widen::<L, S>(&elements[place::<S>(shape, slot, kv_head).0..][..shape.head_dim], to);
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

/// That a cache is one of those that the CPU's variants claim.
pub(super) fn expect_ours(cache: &KvCache) -> Result<(), KernelError> {
    if (cache.format.dtype, cache.format.layout) == (Dtype::F32, Layout::Hnd) {
        Ok(())
    } else {
        Err(KernelError::Unsupported { variant: "cpu", found: cache.format.to_string() })
    }
}

/// The scales that are given with a cache: one for all KV heads, or one each.
#[derive(Clone, Copy)]
pub(super) struct GivenScales<'a> {
    /// Of keys.
    pub keys: &'a [f32],
    /// Of values.
    pub values: &'a [f32],
}

impl<'a> GivenScales<'a> {
    /// Those of a cache with elements of that type, after its check.
    pub fn of(scales: Option<&'a KvScales>, kv_dtype: KvDtype) -> Result<GivenScales<'a>, KernelError> {
        Ok(match scales {
            Some(scales) if kv_dtype.takes_scales() => {
                GivenScales { keys: scales.keys.host()?, values: scales.values.host()? }
            }
            _ => GivenScales { keys: &[1.0], values: &[1.0] },
        })
    }

    /// Of keys and of values.
    pub fn head(&self, kv_head: usize) -> [f32; 2] {
        [self.keys, self.values].map(|scales| of_head(scales, kv_head))
    }
}

/// The scale of a head among those of all.
#[inline(always)]
pub(super) fn of_head(scales: &[f32], kv_head: usize) -> f32 {
    scales[kv_head.min(scales.len() - 1)]
}

/// Elements of one head of one block.
#[inline(always)]
fn unit<S: Stored>(shape: &KvShape) -> usize {
    shape.block_size * (shape.head_dim + S::SCALE)
}

/// Where a token lies: a block, and a row in it. Made once for keys, values and all heads, because a division by a block size
/// that is known at run time alone costs as much as a row.
#[derive(Clone, Copy, Default)]
pub(super) struct Slot {
    block: u32,
    at: u32,
}

impl Slot {
    /// The rows of its block from it on.
    #[inline(always)]
    pub fn rows_left(self, block_size: usize) -> usize {
        block_size - self.at as usize
    }

    /// A slot as slot mappings number them.
    #[inline(always)]
    pub fn of(number: usize, block_size: usize) -> Slot {
        Slot { block: (number / block_size) as u32, at: (number % block_size) as u32 }
    }

    /// That of a token of a sequence.
    #[inline(always)]
    pub fn of_token(table: &[i32], block_size: usize, token: usize) -> Slot {
        Slot { block: table[token / block_size] as u32, at: (token % block_size) as u32 }
    }

    /// Those of neighbouring tokens, from `first` on.
    #[inline(always)]
    pub fn of_tokens(table: &[i32], block_size: usize, first: usize, slots: &mut [Slot]) {
        let (mut block, mut at) = (first / block_size, first % block_size);
        for slot in slots {
            *slot = Slot { block: table[block] as u32, at: at as u32 };
            at += 1;
            if at == block_size {
                (block, at) = (block + 1, 0);
            }
        }
    }
}

/// First element of the row of a slot, and of its scale.
#[inline(always)]
pub(super) fn place<S: Stored>(shape: &KvShape, slot: Slot, kv_head: usize) -> (usize, usize) {
    let (block, at) = (slot.block as usize, slot.at as usize);
    let first = (block * shape.num_kv_heads + kv_head) * unit::<S>(shape);
    (first + at * shape.head_dim, first + shape.block_size * shape.head_dim + at * S::SCALE)
}
