//! Memory for linear layers whose operands are rewritten before [`Device::product`]: rows that are rounded to 8 bits, and weights that are
//! unpacked for many rows.

use device::gemm::{FactorType, PANEL, ProductShape, TileSegment};
use device::{Buffer, Device, DeviceError, Matrix};

use crate::format::Dtype;

/// Most bytes of either buffer, unless a single row or a panel of outputs needs more. Matrices and steps that do not fit are multiplied
/// in parts, each of them large enough to be bound by operations.
const MOST: usize = 64 << 20;
/// Numbers of rows and of outputs of a part are multiples of this.
const STEP: usize = 64;

/// Fewest rows for which weights are unpacked (`src/cuda/unpacked.rs` says why).
pub(crate) const LEAST_ROWS: usize = 257;

/// How operands of a linear layer are rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rewritten {
    /// Rows of `x` become 8 bits.
    Rows,
    /// Codes of weights become numbers, from 257 rows on.
    Weights,
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
            Rewritten::Weights if max_rows >= LEAST_ROWS => {
                let row = k * Dtype::F16.bytes();
                self.wide = self.wide.max(n.next_multiple_of(PANEL).min(fitting(row)) * row);
            }
            Rewritten::Weights => {}
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

/// Memory that the linear layers of a model share; they run one after the other.
pub struct LinearScratch {
    /// Codes of rows, then a scale for each.
    pub(crate) rows: Buffer,
    /// Sums of products of rounded rows, or weights as numbers.
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

/// The products that a linear layer asks of the device in steps of at most `max_rows` rows, each with its greatest number of rows, for
/// [`Device::plan_product`].
pub fn linear_products(
    weights: &Matrix,
    bias: bool,
    output: Dtype,
    scratch: Option<&LinearScratch>,
    max_rows: usize,
) -> Vec<(ProductShape, usize)> {
    let (n, k) = (weights.n(), weights.k());
    let whole = |format| ProductShape { n, k, format, y_format: output, bias, stride: n };
    if let Ok(factor) = weights.factor() {
        return vec![(whole(factor.format), max_rows)];
    }
    let Some(scratch) = scratch else { return Vec::new() };
    if let Some(matrix) = weights.bytes_and_scales() {
        let shape = ProductShape { y_format: Dtype::F32, bias: false, ..whole(matrix.factor().format) };
        return vec![(shape, max_rows.min(scratch.rounded_rows([n, k])))];
    }
    if max_rows < LEAST_ROWS || !scratch.unpacks(weights, output) {
        return Vec::new();
    }
    let most = scratch.unpacked_outputs(k, weights.dtype());
    let segments = weights.tiles().map_or(&[][..], |tiles| tiles.segments());
    let strips = segments.iter().flat_map(|segment| strips(segment, most));
    let shape = whole(FactorType::Numbers(weights.dtype()));
    let mut shapes: Vec<_> = strips.map(|(_, n)| (ProductShape { n, ..shape }, max_rows)).collect();
    shapes.dedup();
    shapes
}

/// The first output of each strip of at most `most` outputs of a segment, within it, and their number.
pub(crate) fn strips(segment: &TileSegment, most: usize) -> impl Iterator<Item = (usize, usize)> {
    let n = segment.n;
    (0..n).step_by(most.max(1)).map(move |first| (first, most.min(n - first)))
}
