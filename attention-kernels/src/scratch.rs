//! Memory for linear layers that are more than a [`Device::product`]: rows that are rounded to 8 bits, weights that are unpacked for
//! many rows, and sums of slices of k.

use std::ops::RangeInclusive;

use device::{Buffer, Device, DeviceError, Factor, FactorType, Features, ProductShape};
use linear::{Matrix, PANEL, TileSegment};

use crate::format::Dtype;

/// Most bytes of either buffer, unless a single row or a panel of outputs needs more. Matrices and steps that do not fit are multiplied
/// in parts, each of them large enough to be bound by operations.
const MOST: usize = 64 << 20;
/// Numbers of rows and of outputs of a part are multiples of this.
const STEP: usize = 64;

/// Fewest rows for which weights are unpacked (`src/cuda/unpacked.rs` says why).
pub(crate) const LEAST_ROWS: usize = 65;

/// The numbers of rows for which `csrc/linear_sm90.cu` is used where a row's bits may depend on the number of rows.
pub(crate) const WIDE_ROWS: RangeInclusive<usize> = 9..=256;
/// Most rows that it multiplies at a time, and the least of a block; both and all blocks between are powers of two.
const MOST_WIDE_ROWS: usize = 512;
const LEAST_WIDE_BLOCK: usize = 16;

/// Number of slices of k whose products `csrc/linear_sm90.cu` adds in order: for as many blocks of 128 outputs as an H200 runs at once,
/// each with at least 512 inputs. `rows`: where a row's bits may depend on their number, blocks of more than 128 rows count twice.
pub(crate) fn wide_slices([n, k]: [usize; 2], rows: Option<usize>) -> usize {
    const BLOCKS: usize = 264;
    let blocks = if rows.is_some_and(|rows| rows > 128) { BLOCKS / 2 } else { BLOCKS };
    let slices = (blocks / n.div_ceil(128)).min(k / 512).clamp(1, 8);
    // As many as have inputs: a slice is a multiple of 256.
    k.div_ceil(k.div_ceil(slices).next_multiple_of(256).max(256))
}

/// Number of equal slices of k whose products are added in order where the bits of a row must not depend on the number of rows. The
/// shape alone determines it.
///
/// A GPU's library splits k at will if there are too few outputs to keep it busy. Where that is forbidden, two slices take its time or
/// less on an H100 for up to 256 rows, and one takes up to a third more on an H200 (14336 inputs, 4096 outputs, bf16).
pub fn slices(features: Features, [n, k]: [usize; 2], format: FactorType) -> usize {
    /// Outputs from which on one slice is enough.
    const MANY: usize = 6144;
    /// Fewest inputs of which a slice saves time.
    const LONG: usize = 4096;
    // Elements of 16 bytes, at whose multiples the rows of a slice begin.
    let vector = 16 / format.bytes();
    let is_long = k >= LONG && k >= 2 * n && n <= MANY && k.is_multiple_of(2 * vector) && n.is_multiple_of(4);
    let is_sliced = features.deterministic
        && features.launches
        && matches!(format, FactorType::Numbers(dtype) if dtype != Dtype::F32);
    if is_sliced && is_long { 2 } else { 1 }
}

/// What a linear layer needs the memory for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rewritten {
    /// Rows of `x` become 8 bits.
    Rows,
    /// Rows of `x` are brought to the order in which weights are stored as codes.
    Order,
    /// Codes of weights become numbers, from 65 rows on.
    Weights,
    /// The sums of so many slices of k.
    Slices(usize),
}

/// Sizes of a [`LinearScratch`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScratchSizes {
    rows: usize,
    wide: usize,
}

impl ScratchSizes {
    /// Makes the memory large enough for a layer with `n` outputs and `k` inputs in steps of at most `max_rows` rows.
    pub fn add(&mut self, rewritten: Rewritten, [n, k]: [usize; 2], max_rows: usize) {
        let fitting = |bytes: usize| (MOST / bytes.max(1) / STEP * STEP).max(STEP);
        match rewritten {
            Rewritten::Rows => {
                let rows = max_rows.min(fitting(row_bytes(k)).min(fitting(n * size_of::<f32>())));
                self.rows = self.rows.max(rows * row_bytes(k));
                self.wide = self.wide.max(rows * n * size_of::<f32>());
            }
            Rewritten::Order => {
                let sums = slices_bytes(n, wide_slices([n, k], None));
                let rows = max_rows.min(MOST_WIDE_ROWS).min(fitting(sums));
                self.rows = self.rows.max(rows.next_power_of_two().max(LEAST_WIDE_BLOCK) * k * Dtype::F16.bytes());
                self.wide = self.wide.max(rows * sums);
            }
            Rewritten::Weights if max_rows >= LEAST_ROWS => {
                let row = k * Dtype::F16.bytes();
                self.wide = self.wide.max(n.next_multiple_of(PANEL).min(fitting(row)) * row);
            }
            Rewritten::Weights => {}
            Rewritten::Slices(slices) => {
                let row = slices * n * size_of::<f32>();
                self.wide = self.wide.max(max_rows.min(fitting(row)) * row);
            }
        }
    }

    /// Bytes of the memory.
    pub fn bytes(&self) -> usize {
        self.rows + self.wide
    }
}

/// Bytes of a rounded row and its scale.
fn row_bytes(k: usize) -> usize {
    k + size_of::<f32>()
}

/// Bytes of the sums of a row for slices of k; 0 if there is one slice.
fn slices_bytes(n: usize, slices: usize) -> usize {
    if slices > 1 { slices * n * size_of::<f32>() } else { 0 }
}

/// Memory that the linear layers of a model share; they run one after the other.
pub struct LinearScratch {
    /// Codes of rows, then a scale for each.
    pub(crate) rows: Buffer,
    /// Sums of products of rounded rows or of slices, or weights as numbers.
    pub(crate) wide: Buffer,
    /// Whether weights may be unpacked: the bits of a row then depend on the number of rows.
    unpacks: bool,
}

impl LinearScratch {
    /// Allocates the memory.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(device: &dyn Device, sizes: ScratchSizes) -> Result<LinearScratch, DeviceError> {
        let unpacks = !device.features().deterministic;
        Ok(LinearScratch { rows: device.alloc(sizes.rows)?, wide: device.alloc(sizes.wide)?, unpacks })
    }

    /// Rows that are rounded at a time.
    pub(crate) fn rounded_rows(&self, [n, k]: [usize; 2]) -> usize {
        (self.rows.len_bytes() / row_bytes(k)).min(self.wide.len_bytes() / (n * size_of::<f32>()))
    }

    /// Rows that are brought to the order of codes at a time: the memory has the whole blocks of so many.
    pub(crate) fn ordered_rows(&self, [n, k]: [usize; 2], slices: usize) -> usize {
        let rows = self.rows.len_bytes() / (k * Dtype::F16.bytes()).max(1);
        let blocks = rows.checked_ilog2().map_or(0, |log| 1 << log);
        let rows = if blocks < LEAST_WIDE_BLOCK { 0 } else { blocks };
        rows.min(self.wide.len_bytes().checked_div(slices_bytes(n, slices)).unwrap_or(rows))
    }

    /// Rows whose slices are summed at a time.
    pub(crate) fn sliced_rows(&self, n: usize, slices: usize) -> usize {
        self.wide.len_bytes() / (slices * n * size_of::<f32>()).max(1)
    }

    /// Outputs whose weights are unpacked at a time.
    pub(crate) fn unpacked_outputs(&self, k: usize, dtype: Dtype) -> usize {
        self.wide.len_bytes() / (k * dtype.bytes()) / PANEL * PANEL
    }

    /// Whether weights that are codes are unpacked for many rows: the memory suffices, and parts of rows, of `y` and of the bias begin
    /// where vectors may.
    pub(crate) fn unpacks(&self, weights: &Matrix, output: Dtype) -> bool {
        const VECTOR: usize = 16;
        let (n, k, dtype) = (weights.n(), weights.k(), weights.dtype());
        let segments = weights.tiles().map_or(&[][..], |tiles| tiles.segments());
        let begins = |segment: &TileSegment| (segment.first * output.bytes()).is_multiple_of(VECTOR);
        let is_fit = (k * dtype.bytes()).is_multiple_of(VECTOR) && (n * output.bytes()).is_multiple_of(VECTOR);
        self.unpacks && is_fit && self.unpacked_outputs(k, dtype) >= PANEL && segments.iter().all(begins)
    }
}

/// A product that a linear layer asks of the device, for [`Device::plan_product`].
pub struct PlannedProduct<'a> {
    /// Its shape.
    pub shape: ProductShape,
    /// Weights of this shape.
    pub weights: &'a Buffer,
    /// Greatest number of rows.
    pub max_rows: usize,
}

/// The products that a linear layer asks of the device in steps of at most `max_rows` rows.
pub fn linear_products<'a>(
    features: Features,
    weights: &'a Matrix,
    bias: bool,
    output: Dtype,
    scratch: &'a LinearScratch,
    max_rows: usize,
) -> Vec<PlannedProduct<'a>> {
    let (n, k) = (weights.n(), weights.k());
    let whole = |format| ProductShape { n, k, format, y_format: output, bias, stride: n, slices: 1 };
    let sums = |factor: Factor<'a>, slices, most: usize| {
        let shape = ProductShape { y_format: Dtype::F32, bias: false, slices, ..whole(factor.format) };
        vec![PlannedProduct { shape, weights: factor.elements, max_rows: max_rows.min(most) }]
    };
    if let Ok(factor) = weights.factor() {
        return match slices(features, [n, k], factor.format) {
            1 => vec![PlannedProduct { shape: whole(factor.format), weights: factor.elements, max_rows }],
            slices => sums(factor, slices, scratch.sliced_rows(n, slices)),
        };
    }
    if let Some(matrix) = weights.bytes_and_scales() {
        return sums(matrix.factor(), 1, scratch.rounded_rows([n, k]));
    }
    if max_rows < LEAST_ROWS || !scratch.unpacks(weights, output) {
        return Vec::new();
    }
    let most = scratch.unpacked_outputs(k, weights.dtype());
    let segments = weights.tiles().map_or(&[][..], |tiles| tiles.segments());
    let strips = segments.iter().flat_map(|segment| strips(segment, most));
    let shape = whole(FactorType::Numbers(weights.dtype()));
    let mut shapes: Vec<_> = strips.map(|(_, n)| ProductShape { n, ..shape }).collect();
    shapes.dedup();
    shapes.into_iter().map(|shape| PlannedProduct { shape, weights: &scratch.wide, max_rows }).collect()
}

/// The first output of each strip of at most `most` outputs of a segment, within it, and their number.
pub(crate) fn strips(segment: &TileSegment, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let n = segment.n;
    (0..n).step_by(most.max(1)).map(move |first| (first, most.min(n - first)))
}
