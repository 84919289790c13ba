//! Weights packed in the order in which the kernel reads them.

use crate::error::LinearError;
use std::borrow::Cow;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use device::Dtype;
use simd::tiles::least_exponent;
use simd::{Isa, LANES, Lanes, Pairs, Pool, dispatch};

use super::arithmetic::Arithmetic;
use super::blocks::Blocks;
use super::form::{Bytes, Nibbles};
use super::format::{find_row, in_panels, read_row, rows};
use super::quantization::Quantization;
use super::rows::RowBlock;
use super::stored::{Rounding, Stored, StoredFormat, StoredPanels, StoredRow, StoredRows};

pub(super) enum Panels {
    F32(Vec<[f32; LANES]>),
    Bf16(Halves),
    Q8(Blocks<Bytes>),
    Q4(Blocks<Nibbles>),
    Stored(Stored),
}

/// Panels of bfloat16, `[ceil(n / 16)][ceil(k / 2)]`: pairs of columns of sixteen outputs, padded with zeros.
pub(super) struct Halves {
    pub lines: Vec<Pairs>,
    /// If it rounds, products round activations too ([`super::rounded`]). Otherwise weights are widened.
    pub arithmetic: Arithmetic,
    least: OnceLock<Vec<u32>>,
}

impl Halves {
    /// Returns the exponent of the smallest number of each panel, of which each column has `pairs` pairs. Only vectors that compute the
    /// sums of tiles need it.
    pub fn least_exponents(&self, pool: &Pool, pairs: usize) -> &[u32] {
        self.least.get_or_init(|| {
            let mut least = vec![0; self.lines.len() / pairs];
            pool.chunks_mut(&mut least, 1, pairs * LANES, |panel, least| {
                let lines = &self.lines[panel * pairs..][..pairs];
                least.fill(least_exponent(lines.iter().flat_map(|line| line.0)));
            });
            least
        })
    }
}

/// What a matrix is for, which decides how a device that launches kernels stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Single rows are read, or its kernels take no codes: it becomes numbers.
    Numbers,
    /// Products with the whole matrix.
    Product,
    /// Products with each of several stacked matrices, each with this number of rows.
    Stack(usize),
}

/// Rows of a weight matrix, as a checkpoint stores them.
#[derive(Clone, Copy)]
pub enum WeightRows<'a> {
    /// Row-major `[rows, k]` numbers of a type.
    Numbers(Dtype, &'a [u8]),
    /// Codes with scales.
    Stored(StoredPart<'a>),
}

/// Rows in a stored form.
#[derive(Clone, Copy)]
pub struct StoredPart<'a> {
    /// Number of rows.
    pub rows: usize,
    /// The form.
    pub format: StoredFormat,
    /// The rows.
    pub source: &'a dyn StoredRows,
    /// `[k]`: column i of the rows belongs to input `order[i]`, a permutation; `None`: to input i.
    pub order: Option<&'a [u32]>,
    /// How products round their activations.
    pub rounding: Rounding,
}

/// The form of some rows of a weight matrix.
#[derive(Clone, Copy)]
pub enum PartForm<'a> {
    /// Numbers of a type.
    Numbers(Dtype),
    /// Codes with scales.
    Stored(StoredPart<'a>),
}

impl PartForm<'_> {
    /// Whether rows of these forms are packed together.
    fn joins(&self, other: &PartForm<'_>) -> bool {
        match (self, other) {
            (PartForm::Stored(a), PartForm::Stored(b)) => {
                (a.format, a.order, a.rounding) == (b.format, b.order, b.rounding)
            }
            (PartForm::Numbers(_), PartForm::Numbers(_)) => true,
            _ => false,
        }
    }
}

impl WeightRows<'_> {
    /// Number of rows of `k` weights.
    ///
    /// # Errors
    /// [`LinearError::BadMatrix`] if there are none, or numbers are not whole rows.
    pub(crate) fn rows(&self, k: usize) -> Result<usize, LinearError> {
        match self {
            WeightRows::Numbers(dtype, data) => rows(k, &[(*dtype, *data)]),
            WeightRows::Stored(part) => Ok(part.rows),
        }
    }

    pub(crate) fn form(&self) -> PartForm<'_> {
        match self {
            WeightRows::Numbers(dtype, _) => PartForm::Numbers(*dtype),
            WeightRows::Stored(part) => PartForm::Stored(*part),
        }
    }
}

impl StoredPart<'_> {
    /// The weights as float32 numbers, `[rows, k]` in the order of the inputs.
    ///
    /// # Errors
    /// [`LinearError::NotFinite`].
    pub(crate) fn numbers(&self, pool: &Pool, k: usize) -> Result<Vec<u8>, LinearError> {
        let sound = AtomicBool::new(true);
        let mut all = vec![0; self.rows * k * size_of::<f32>()];
        pool.chunks_mut(&mut all, (k * size_of::<f32>()).max(1), k * RowBlock::COST, |row, out| {
            let (mut stored, mut values) = (StoredRow::new(&self.format, k), vec![0.0f32; k]);
            self.source.read(row, &mut stored);
            stored.values(&self.format, &mut values);
            if !values.iter().all(|value| value.is_finite()) {
                sound.store(false, Ordering::Relaxed);
            }
            let out = out.as_chunks_mut::<4>().0;
            for (column, value) in values.iter().enumerate() {
                let input = self.order.map_or(column, |order| order[column] as usize);
                out[input] = value.to_le_bytes();
            }
        });
        if sound.into_inner() { Ok(all) } else { Err(LinearError::NotFinite) }
    }
}

/// A weight matrix `[n, k]`. It consists of segments, one behind the other, which differ in form; a matrix whose parts have the
/// same form is one segment. A segment is in panels of 16 outputs, padded with zeros. In panels of f32, `panel[p][i]` holds
/// column i of rows 16p..16p+16; in panels of bfloat16, columns 2i and 2i + 1.
pub struct PackedMatrix {
    n: usize,
    k: usize,
    pub(super) segments: Vec<Segment>,
}

/// Some rows of a matrix, in one form.
pub(super) struct Segment {
    /// Its first row.
    pub first: usize,
    /// Its number of rows.
    pub n: usize,
    pub panels: Panels,
}

impl PackedMatrix {
    /// Packs the stacked rows of the parts on the pool's threads, in their stored form. If the arithmetic rounds, numbers become
    /// bfloat16, and products round activations to it. Otherwise they become bfloat16 if all of them are, else f32.
    ///
    /// # Errors
    /// The errors of [`PackedMatrix::pack`], and [`LinearError::NotFinite`] for stored weights that are not finite.
    pub fn stored(
        pool: &Pool,
        arithmetic: Arithmetic,
        k: usize,
        parts: &[WeightRows<'_>],
    ) -> Result<PackedMatrix, LinearError> {
        let mut segments: Vec<Segment> = Vec::new();
        for run in parts.chunk_by(|a, b| a.form().joins(&b.form())) {
            let first = segments.last().map_or(0, |last| last.first + last.n);
            let (n, panels) = pack_run(pool, arithmetic, k, run)?;
            segments.push(Segment { first, n, panels });
        }
        let n = segments.last().map_or(0, |last| last.first + last.n);
        if n == 0 { Err(LinearError::BadMatrix(k)) } else { Ok(PackedMatrix { n, k, segments }) }
    }

    /// Packs the stacked rows of one or more row-major `[n_i, k]` matrices (as for fused QKV or gate-up weights) on the pool's
    /// threads. The result is bfloat16 if every part is, otherwise f32.
    ///
    /// # Errors
    /// [`LinearError::BadMatrix`] if there are no rows, or a part does not consist of whole rows of `k` numbers.
    pub fn pack(pool: &Pool, k: usize, parts: &[(Dtype, &[u8])]) -> Result<PackedMatrix, LinearError> {
        let n = rows(k, parts)?;
        Ok(PackedMatrix::of_one(n, k, pack_numbers(pool, Arithmetic::Exact, n, k, parts)))
    }

    fn of_one(n: usize, k: usize, panels: Panels) -> PackedMatrix {
        PackedMatrix { n, k, segments: vec![Segment { first: 0, n, panels }] }
    }

    /// Quantises the stacked rows of the parts on the pool's threads. Apart from the source, each thread holds one row of
    /// floats.
    ///
    /// # Errors
    /// [`LinearError::BadMatrix`] if there are no rows, or a part does not consist of whole rows of `k` numbers;
    /// [`LinearError::BadWeights`] if a weight is not finite, or its magnitude is above 65504 times 127 (q8) or 8 (q4).
    pub fn quantize(
        pool: &Pool,
        quantization: Quantization,
        k: usize,
        parts: &[(Dtype, &[u8])],
    ) -> Result<PackedMatrix, LinearError> {
        let n = rows(k, parts)?;
        let panels = match quantization {
            Quantization::Q8 => Blocks::pack(pool, n, k, parts).map(Panels::Q8),
            Quantization::Q4 => Blocks::pack(pool, n, k, parts).map(Panels::Q4),
        };
        Ok(PackedMatrix::of_one(n, k, panels.ok_or(LinearError::BadWeights(quantization))?))
    }

    /// Returns the size in bytes of a matrix with rows of `k` weights, given the number of rows and the form of each part.
    pub fn packed_bytes(
        arithmetic: Arithmetic,
        k: usize,
        quantization: Option<Quantization>,
        parts: &[(usize, PartForm<'_>)],
    ) -> usize {
        let rows = |parts: &[(usize, PartForm<'_>)]| parts.iter().map(|(rows, _)| rows).sum::<usize>();
        match quantization {
            Some(Quantization::Q8) => return Blocks::<Bytes>::packed_bytes(rows(parts), k),
            Some(Quantization::Q4) => return Blocks::<Nibbles>::packed_bytes(rows(parts), k),
            None => {}
        }
        let bytes = |run: &[(usize, PartForm<'_>)]| match run.first() {
            Some((_, PartForm::Stored(part))) => StoredPanels::packed_bytes(&part.format, rows(run), k),
            _ => {
                let dtypes =
                    run.iter().filter_map(|(_, form)| if let PartForm::Numbers(it) = form { Some(*it) } else { None });
                match become_bf16(arithmetic, dtypes) {
                    true => rows(run).div_ceil(LANES) * k.div_ceil(2) * size_of::<Pairs>(),
                    false => rows(run).div_ceil(LANES) * k * LANES * size_of::<f32>(),
                }
            }
        };
        parts.chunk_by(|(_, a), (_, b)| a.joins(b)).map(bytes).sum()
    }

    /// Number of outputs (rows of the weight matrix).
    pub fn n(&self) -> usize {
        self.n
    }

    /// Number of inputs (columns of the weight matrix).
    pub fn k(&self) -> usize {
        self.k
    }

    /// Returns whether products take quantised rows ([`Rows::Blocks`](super::Rows::Blocks)).
    pub fn takes_blocks(&self) -> bool {
        self.segments.iter().all(|segment| match &segment.panels {
            Panels::Q8(_) | Panels::Q4(_) => true,
            Panels::Stored(stored) => stored.rounding == Rounding::Blocks && stored.order.is_none(),
            Panels::F32(_) | Panels::Bf16(_) => false,
        })
    }

    /// Returns whether [`gemm_activated`](super::gemm_activated) multiplies with these weights: those of tiles, where halves of the
    /// outputs are whole panels.
    pub fn takes_activation(&self, isa: Isa) -> bool {
        let is_tiled = match &self.segments[..] {
            [Segment { panels: Panels::Bf16(halves), .. }] => halves.arithmetic == Arithmetic::Tiles,
            _ => false,
        };
        is_tiled && matches!(isa, Isa::Amx | Isa::Portable) && self.n().is_multiple_of(2 * LANES)
    }

    /// Returns the number of bytes that one pass over the matrix reads.
    pub fn bytes(&self) -> usize {
        let bytes = |segment: &Segment| match &segment.panels {
            Panels::F32(lines) => size_of_val(&lines[..]),
            Panels::Bf16(halves) => size_of_val(&halves.lines[..]),
            Panels::Q8(blocks) => blocks.bytes(),
            Panels::Q4(blocks) => blocks.bytes(),
            Panels::Stored(stored) => stored.panels.bytes(),
        };
        self.segments.iter().map(bytes).sum()
    }

    fn segment(&self, row: usize) -> &Segment {
        match self.segments.iter().find(|segment| row < segment.first + segment.n) {
            Some(segment) => segment,
            None => panic!("row {row} of {}", self.n),
        }
    }

    /// The product of stored weights with a row in the arithmetic of tiles; `None` for other weights or arithmetic.
    pub(super) fn stored_on_tiles(&self, row: usize, x: &[f32]) -> Option<f32> {
        let segment = self.segment(row);
        match &segment.panels {
            Panels::Stored(stored) => stored.on_tiles(row - segment.first, x),
            _ => None,
        }
    }

    /// How products with row `row` of numbers round and sum.
    pub(super) fn arithmetic(&self, row: usize) -> Arithmetic {
        match &self.segment(row).panels {
            Panels::Bf16(halves) => halves.arithmetic,
            _ => Arithmetic::Exact,
        }
    }

    /// Writes row `row` as floats, for example the embedding of a token whose matrix is also the output layer.
    ///
    /// # Panics
    /// If `row` is out of range or `out` is shorter than k.
    pub fn copy_row(&self, row: usize, out: &mut [f32]) {
        let segment = self.segment(row);
        let row = row - segment.first;
        let (out, lane) = (&mut out[..self.k], row % LANES);
        let panel = row / LANES;
        match &segment.panels {
            Panels::F32(lines) => out.iter_mut().zip(&lines[panel * self.k..]).for_each(|(x, line)| *x = line[lane]),
            Panels::Bf16(halves) => {
                for (two, line) in out.chunks_mut(2).zip(&halves.lines[panel * self.k.div_ceil(2)..]) {
                    let pair = line.0[lane];
                    two.iter_mut()
                        .zip([pair << 16, pair & 0xffff_0000])
                        .for_each(|(x, bits)| *x = f32::from_bits(bits));
                }
            }
            Panels::Q8(blocks) => blocks.copy_row(row, out),
            Panels::Q4(blocks) => blocks.copy_row(row, out),
            Panels::Stored(stored) => stored.copy_row(row, out),
        }
    }
}

/// Packs parts of one form; returns the number of rows too.
fn pack_run(
    pool: &Pool,
    arithmetic: Arithmetic,
    k: usize,
    parts: &[WeightRows<'_>],
) -> Result<(usize, Panels), LinearError> {
    let mut numbers = Vec::new();
    let mut stored = Vec::new();
    for part in parts {
        match part {
            WeightRows::Numbers(format, data) => numbers.push((*format, *data)),
            WeightRows::Stored(part) => stored.push(part),
        }
    }
    let Some(first) = stored.first() else {
        let n = rows(k, &numbers)?;
        return Ok((n, pack_numbers(pool, arithmetic, n, k, &numbers)));
    };
    let n = stored.iter().map(|part| part.rows).sum();
    let panels = StoredPanels::pack(pool, first.format, [n, k], |mut row, out| {
        for part in &stored {
            match row.checked_sub(part.rows) {
                None => return part.source.read(row, out),
                Some(behind) => row = behind,
            }
        }
    })?;
    let (rounding, order) = (first.rounding, first.order.map(Box::from));
    Ok((n, Panels::Stored(Stored { panels, rounding, order, on_tiles: arithmetic == Arithmetic::Tiles })))
}

fn pack_numbers(pool: &Pool, arithmetic: Arithmetic, n: usize, k: usize, parts: &[(Dtype, &[u8])]) -> Panels {
    let isa = Isa::best();
    if become_bf16(arithmetic, parts.iter().map(|(format, _)| *format)) {
        let (panels, pairs) = (n.div_ceil(LANES), k.div_ceil(2));
        let lines = in_panels(pool, panels, pairs, LANES * k, Pairs::ZERO, |panel, lines| {
            let rows: [Cow<'_, [u8]>; LANES] =
                std::array::from_fn(|lane| match find_row(parts, k, panel * LANES + lane) {
                    None => Cow::default(),
                    Some((Dtype::Bf16, row)) => row.into(),
                    Some((other, row)) => {
                        let mut halves = vec![0; k * Dtype::Bf16.bytes()];
                        Dtype::Bf16.convert(other, row, &mut halves);
                        halves.into()
                    }
                });
            let rows = rows.each_ref().map(|row| &row[..]);
            dispatch!(isa, pack_pairs(rows: [&[u8]; LANES], lines: &mut [Pairs]));
        });
        Panels::Bf16(Halves { lines, arithmetic, least: OnceLock::new() })
    } else {
        Panels::F32(in_panels(pool, n.div_ceil(LANES), k, LANES * k, [0.0; LANES], |panel, lines| {
            let mut rows = vec![0.0; LANES * k];
            rows.chunks_mut(k).enumerate().for_each(|(lane, row)| read_row(parts, panel * LANES + lane, row));
            let rows = &rows[..];
            dispatch!(isa, pack_f32(rows: &[f32], lines: &mut [[f32; LANES]]));
        }))
    }
}

/// Moves rows of bfloat16 to lines of pairs; rows that are missing are empty.
#[inline(always)]
fn pack_pairs<L: Lanes>(rows: [&[u8]; LANES], lines: &mut [Pairs]) {
    let words = rows.map(|row| row.as_chunks::<4>().0);
    let mut done = 0;
    while words.iter().all(|row| row.len() >= done + LANES) {
        let mut square = [L::splat(0.0); LANES];
        for (pairs, row) in square.iter_mut().zip(words) {
            let mut bits = [0.0; LANES];
            bits.iter_mut().zip(&row[done..]).for_each(|(bits, word)| *bits = f32::from_le_bytes(*word));
            *pairs = L::load(&bits);
        }
        for (line, pairs) in lines[done..].iter_mut().zip(L::transpose(square)) {
            let mut bits = [0.0; LANES];
            pairs.store(&mut bits);
            line.0 = bits.map(f32::to_bits);
        }
        done += LANES;
    }
    for (lane, row) in rows.iter().enumerate() {
        for (line, bytes) in lines[done..].iter_mut().zip(row.get(4 * done..).unwrap_or_default().chunks(4)) {
            // The last pair of an odd row has a zero.
            line.0[lane] = bytes.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
        }
    }
}

/// Moves the rows of a matrix `[16, k]` to lines.
#[inline(always)]
fn pack_f32<L: Lanes>(rows: &[f32], lines: &mut [[f32; LANES]]) {
    let k = lines.len();
    let (squares, rest) = lines.as_chunks_mut::<LANES>();
    let first = squares.len() * LANES;
    for (i, lines) in squares.iter_mut().enumerate() {
        let mut square = [L::splat(0.0); LANES];
        for (lane, numbers) in square.iter_mut().enumerate() {
            if let Some(row) = rows[lane * k + i * LANES..].first_chunk() {
                *numbers = L::load(row);
            }
        }
        for (line, numbers) in lines.iter_mut().zip(L::transpose(square)) {
            numbers.store(line);
        }
    }
    for (i, line) in rest.iter_mut().enumerate() {
        for (lane, number) in line.iter_mut().enumerate() {
            *number = rows[lane * k + first + i];
        }
    }
}

/// Returns whether numbers are packed as bfloat16.
fn become_bf16(arithmetic: Arithmetic, formats: impl IntoIterator<Item = Dtype>) -> bool {
    arithmetic.rounds() || formats.into_iter().all(|format| format == Dtype::Bf16)
}
