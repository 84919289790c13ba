//! Weight matrices of devices that launch kernels: codes in the order in which tensor cores take them.
//!
//! A matrix consists of segments, one behind the other, which differ in form. A segment is an array of panels of 16 outputs, padded
//! with zeros:
//!
//! ```text
//! panel    codes    [ceil(k / 64)][V][32 lanes][16 bytes]     V = 1 for codes of 4 bits, 2 for 8 bits
//!          scales   [groups][16]   float32, or the half-precision type of the format
//!          offsets  [groups][16]   bytes (zero points) or float32 (minima), if the form has them
//! ```
//!
//! **Codes.** A tile has 64 inputs, which are four steps of `mma.m16n8k16`. With i = 32 h + 8 c + e for an input of the tile and
//! o = 8 u + g for an output of the panel, lane 4 g + c holds the code. It belongs to step s = 2 h + e / 4 and there to register
//! p = u + 2 (e / 2 % 2) of the fragment, to its lower half if e is even.
//!
//! ```text
//! 4 bits   word s of the lane's vector, bits 4 p (lower half) or 16 + 4 p
//! 8 bits   vector h, word 2 (s % 2) + p / 2, byte 2 (p % 2) + e % 2
//! ```
//!
//! Scales and offsets of a group are in the order of g, for each u = 0 and u = 1, so that a lane loads both of its outputs at once.
//!
//! So a lane loads 16 bytes, each code once, and activations need no other order than that of their row, 16 bytes per lane.
//! Inputs past the last have the last one's code, so that they are finite; kernels multiply them with zeros.

use device::{Buffer, Dtype, Features};
use simd::Isa;

use super::Quantization;
use super::byte_matrix::ByteMatrix;
use super::format::rows;
use super::pack::{PartForm, Purpose, StoredPart, WeightRows};
use super::quantize::{BLOCK, WeightBlock, quantize_row};
use super::stored::{Codes, Offset, Scale, StoredFormat, StoredRow, StoredRows};
use crate::error::LinearError;

/// Outputs of a panel.
pub const PANEL: usize = 16;
/// Inputs of a tile.
const TILE: usize = 64;
/// Inputs of a row whose codes a lane holds side by side.
const RUN: usize = 8;
/// Most bytes of a panel. A matrix with longer ones is unpacked.
const MOST: usize = 4 << 20;

/// What the codes of a segment are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TileCodes {
    /// Integers of 4 bits.
    Integers4,
    /// Integers of 8 bits.
    Integers8,
    /// Floats of 8 bits, as [`Codes::E4m3`].
    E4m3,
    /// 4-bit indices of a table, which follows the panels as float32.
    Table([f32; 16]),
}

/// What a group has beside its scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileOffset {
    /// Nothing.
    None,
    /// A byte that is subtracted from the codes.
    Zero,
    /// A float32 number that is added to the product.
    Minimum,
}

/// The form of a segment. A weight is `scale * (code - zero) + minimum`, rounded as [`StoredFormat`] rounds it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TileForm {
    /// The codes.
    pub codes: TileCodes,
    /// Groups of a row.
    pub groups: usize,
    /// Input i is in group `i >> group_shift`.
    pub group_shift: u32,
    /// Type of the scales.
    pub scale: Dtype,
    /// What else groups have.
    pub offset: TileOffset,
    /// Subtracted from all codes that are integers.
    pub zero: u8,
    k: usize,
}

impl TileForm {
    /// The form of rows of `k` inputs; `None` if there is none: groups are neither a power of two nor a row, a sum could be rounded
    /// twice, or it would take as many bytes as numbers of 16 bits.
    fn new(format: &StoredFormat, k: usize) -> Option<TileForm> {
        let codes = match format.codes {
            Codes::Integers { bits, .. } if bits <= 4 => TileCodes::Integers4,
            Codes::Integers { .. } => TileCodes::Integers8,
            Codes::E4m3 => TileCodes::E4m3,
            Codes::Table(table) => TileCodes::Table(table.map(f32::from)),
            Codes::Floats(table) => TileCodes::Table(*table),
        };
        let zero = u8::try_from(format.codes.zero()).ok()?;
        let offset = match format.offset {
            Offset::None => TileOffset::None,
            Offset::ZeroPoint => TileOffset::Zero,
            Offset::Minimum | Offset::ByteMinimum => TileOffset::Minimum,
        };
        // With a minimum the product must be exact: 19 bits of a scale and 5 of a code are.
        let is_exact = format.scale != Scale::F32 && format.codes.bits() <= 5;
        let group_shift = match format.group {
            group if group >= k => u32::BITS - 1,
            group => group.trailing_zeros(),
        };
        let fits = (format.group >= k || format.group.is_power_of_two() && format.group >= RUN)
            && (offset == TileOffset::None || format.codes.are_integers())
            && (offset != TileOffset::Minimum || is_exact);
        let scale = match format.scale {
            Scale::F16 => Dtype::F16,
            Scale::Bf16 | Scale::Exponent => Dtype::Bf16,
            Scale::F32 | Scale::Byte | Scale::SignedByte => Dtype::F32,
        };
        let form = TileForm { codes, groups: format.groups(k), group_shift, scale, offset, zero, k };
        let is_small = form.panel_bytes() < PANEL * k * Dtype::F16.bytes() && form.panel_bytes() <= MOST;
        (fits && is_small).then_some(form)
    }

    /// Bytes of a panel.
    pub fn panel_bytes(&self) -> usize {
        let offset = match self.offset {
            TileOffset::None => 0,
            TileOffset::Zero => 1,
            TileOffset::Minimum => size_of::<f32>(),
        };
        self.offsets() + self.groups * PANEL * offset
    }

    /// Byte of a panel at which its scales begin.
    pub fn scales(&self) -> usize {
        self.k.div_ceil(TILE) * PANEL * TILE * self.bits() / 8
    }

    /// Byte of a panel at which its offsets begin.
    pub fn offsets(&self) -> usize {
        self.scales() + self.groups * PANEL * self.scale.bytes()
    }

    /// Bytes of the table behind the panels.
    fn table_bytes(&self) -> usize {
        if matches!(self.codes, TileCodes::Table(_)) { 16 * size_of::<f32>() } else { 0 }
    }

    fn bits(&self) -> usize {
        if matches!(self.codes, TileCodes::Integers8 | TileCodes::E4m3) { 8 } else { 4 }
    }

    /// Writes one output of a panel that was zero.
    fn write(&self, format: &StoredFormat, row: &StoredRow, output: usize, panel: &mut [u8]) {
        let (u, g, vectors) = (output / 8, output % 8, self.bits() / 4);
        let last = row.codes.last().copied().unwrap_or_default();
        for run in 0..self.k.div_ceil(TILE) * TILE / RUN {
            let (tile, h, c) = (run / 8, run / 4 % 2, run % 4);
            for e in 0..RUN {
                let code = row.codes.get(run * RUN + e).copied().unwrap_or(last);
                let (s, p) = (2 * h + e / 4, u + 2 * (e / 2 % 2));
                let vector = tile * vectors + if vectors == 2 { h } else { 0 };
                let lane = &mut panel[(vector * 32 + 4 * g + c) * 16..][..16];
                match vectors {
                    2 => lane[(s % 2 * 2 + p / 2) * 4 + p % 2 * 2 + e % 2] = code,
                    _ => lane[s * 4 + e % 2 * 2 + p / 2] |= (code & 15) << (p % 2 * 4),
                }
            }
        }
        let mut put = |start: usize, group: usize, bytes: &[u8]| {
            panel[start + (group * PANEL + 2 * g + u) * bytes.len()..][..bytes.len()].copy_from_slice(bytes);
        };
        for group in 0..self.groups {
            let [outer, outer_minimum] = row.outer_of(format, group);
            let scale = row.scales.get(group).copied().unwrap_or_default();
            match self.scale {
                Dtype::F32 => put(self.scales(), group, &format.scale.value(scale, outer).to_le_bytes()),
                // A power of two, also the least, is the first half of its float32.
                Dtype::Bf16 if format.scale == Scale::Exponent => {
                    put(self.scales(), group, &format.scale.value(scale, outer).to_le_bytes()[2..]);
                }
                Dtype::F16 | Dtype::Bf16 => put(self.scales(), group, &(scale as u16).to_le_bytes()),
            }
            let offset = row.offsets.get(group).copied().unwrap_or_default();
            match self.offset {
                TileOffset::None => {}
                TileOffset::Zero => put(self.offsets(), group, &[offset as u8]),
                TileOffset::Minimum => {
                    put(self.offsets(), group, &format.offset.minimum(offset, outer_minimum).to_le_bytes());
                }
            }
        }
    }
}

/// Weights as codes on a device that launches kernels.
pub struct Tiles {
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// Type of the inputs of products.
    pub(crate) dtype: Dtype,
    pub(crate) segments: Vec<TileSegment>,
}

/// Some rows of a matrix, in one form.
pub struct TileSegment {
    /// Its first row.
    pub first: usize,
    /// Its number of rows.
    pub n: usize,
    /// Its form.
    pub form: TileForm,
    /// The panels, and the table of the codes if they have one.
    pub panels: Buffer,
}

impl Tiles {
    /// The segments, in the order of their rows. Stacked matrices are one segment, and each is a whole number of panels.
    pub fn segments(&self) -> &[TileSegment] {
        &self.segments
    }

    /// Returns the bytes of a matrix with rows of `k` weights on a device that launches kernels, given the number of rows and the
    /// form of each part; `None` if it becomes numbers of type `dtype`.
    pub fn stored_bytes(
        features: Features,
        purpose: Purpose,
        dtype: Dtype,
        k: usize,
        quantization: Option<Quantization>,
        parts: &[(usize, PartForm<'_>)],
    ) -> Option<usize> {
        if ByteMatrix::rounding_of(features, purpose, k, parts).is_some() {
            return Some(ByteMatrix::stored_bytes(k, parts));
        }
        let planned = plan(purpose, dtype, k, quantization, parts)?;
        Some(planned.iter().map(PlannedSegment::bytes).sum())
    }
}

/// A segment before it is packed.
pub(crate) struct PlannedSegment {
    pub parts: std::ops::Range<usize>,
    pub n: usize,
    pub form: TileForm,
}

impl PlannedSegment {
    /// Bytes of the panels and of the table.
    pub fn bytes(&self) -> usize {
        self.panels() * self.form.panel_bytes() + self.form.table_bytes()
    }

    pub fn panels(&self) -> usize {
        self.n.div_ceil(PANEL)
    }

    /// The table of the codes.
    pub fn table(&self) -> Vec<u8> {
        match self.form.codes {
            TileCodes::Table(table) => table.iter().flat_map(|number| number.to_le_bytes()).collect(),
            _ => Vec::new(),
        }
    }
}

/// The segments of a matrix; `None` if it becomes numbers.
pub(crate) fn plan(
    purpose: Purpose,
    dtype: Dtype,
    k: usize,
    quantization: Option<Quantization>,
    parts: &[(usize, PartForm<'_>)],
) -> Option<Vec<PlannedSegment>> {
    if purpose == Purpose::Numbers || dtype == Dtype::F32 {
        return None;
    }
    let mut planned: Vec<PlannedSegment> = Vec::new();
    for (index, (rows, form)) in parts.iter().enumerate() {
        let form = match (form, quantization) {
            (PartForm::Numbers(_), Some(quantization)) => TileForm::new(&format_of(quantization), k)?,
            (PartForm::Stored(part), None) if part.order.is_none() => TileForm::new(&part.format, k)?,
            _ => return None,
        };
        match planned.last_mut().filter(|last| last.form == form) {
            Some(last) => (last.parts.end, last.n) = (index + 1, last.n + rows),
            None => planned.push(PlannedSegment { parts: index..index + 1, n: *rows, form }),
        }
    }
    let whole = match purpose {
        Purpose::Stack(rows) => planned.len() == 1 && rows.is_multiple_of(PANEL),
        Purpose::Product | Purpose::Numbers => !planned.is_empty(),
    };
    whole.then_some(planned)
}

/// The form of weights that are quantised while loading.
fn format_of(quantization: Quantization) -> StoredFormat {
    let codes = match quantization {
        Quantization::Q8 => Codes::Integers { bits: 8, zero: 128 },
        Quantization::Q4 => Codes::Integers { bits: 4, zero: 8 },
    };
    StoredFormat { codes, group: BLOCK, scale: Scale::F16, offset: Offset::None }
}

/// Rows of numbers, quantised when they are read.
struct Quantised<'a> {
    quantization: Quantization,
    dtype: Dtype,
    data: &'a [u8],
}

impl StoredRows for Quantised<'_> {
    fn read(&self, row: usize, out: &mut StoredRow) {
        let k = out.codes.len();
        let (mut numbers, mut blocks) = (vec![0.0; k], vec![WeightBlock::ZERO; k.div_ceil(BLOCK)]);
        self.dtype.read_row(&self.data[row * k * self.dtype.bytes()..], &mut numbers);
        // A block that cannot be stored has a scale that is not finite.
        quantize_row(Isa::best(), self.quantization, &numbers, &mut blocks);
        let zero = format_of(self.quantization).codes.zero();
        for ((codes, scale), block) in out.codes.chunks_mut(BLOCK).zip(&mut out.scales).zip(&blocks) {
            codes.iter_mut().zip(block.values).for_each(|(code, value)| *code = (i32::from(value) + zero) as u8);
            *scale = block.scale.to_bits().into();
        }
    }
}

/// The stacked rows of parts of one form.
pub(crate) struct StackedRows<'a> {
    parts: Vec<(usize, StoredFormat, Source<'a>)>,
}

enum Source<'a> {
    Quantised(Quantised<'a>),
    Stored(&'a dyn StoredRows),
}

impl<'a> StackedRows<'a> {
    pub fn new(
        parts: &[WeightRows<'a>],
        quantization: Option<Quantization>,
        k: usize,
    ) -> Result<StackedRows<'a>, LinearError> {
        let mut stacked = Vec::new();
        for part in parts {
            match (*part, quantization) {
                (WeightRows::Numbers(dtype, data), Some(quantization)) => {
                    let source = Source::Quantised(Quantised { quantization, dtype, data });
                    stacked.push((rows(k, &[(dtype, data)])?, format_of(quantization), source));
                }
                (WeightRows::Stored(StoredPart { rows, format, source, .. }), _) => {
                    stacked.push((rows, format, Source::Stored(source)));
                }
                (WeightRows::Numbers(..), None) => return Err(LinearError::BadMatrix(k)),
            }
        }
        Ok(StackedRows { parts: stacked })
    }

    /// Writes a panel; whether its weights are finite.
    pub fn write(&self, form: &TileForm, panel: usize, to: &mut [u8]) -> bool {
        to.fill(0);
        let mut sound = true;
        for output in 0..PANEL {
            let mut row = panel * PANEL + output;
            for (rows, format, source) in &self.parts {
                if let Some(behind) = row.checked_sub(*rows) {
                    row = behind;
                    continue;
                }
                let mut stored = StoredRow::new(format, form.k);
                match source {
                    Source::Quantised(source) => source.read(row, &mut stored),
                    Source::Stored(source) => source.read(row, &mut stored),
                }
                sound &= stored.is_finite(format);
                form.write(format, &stored, output, to);
                break;
            }
        }
        sound
    }
}
