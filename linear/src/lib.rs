//! y = x·Wᵀ: weight matrices in every storage form, and the matrix product of every linear layer.
//!
//! An [`Uploader`] makes a [`Matrix`] of the rows of a checkpoint: packed weights on `cpu`, which [`gemm`] multiplies with, and codes
//! or numbers on devices that launch kernels.
//!
//! ```
//! use device::Dtype;
//! use linear::{Gemm, Purpose, Rows, Uploader, WeightRows, gemm};
//!
//! let device = device::open("cpu", Some(1))?;
//! let rows = [1.0f32, 2.0, 3.0, 4.0].map(f32::to_le_bytes);
//! let rows = [WeightRows::Numbers(Dtype::F32, rows.as_flattened())];
//! let matrix = Uploader::new(&*device)?.matrix(None, Dtype::F32, [2, 2], &rows, Purpose::Product)?;
//! let mut y = [0.0; 2];
//! let product = Gemm { x: Rows::Numbers(&[1.0, 10.0]), weights: matrix.host()?, bias: None, y: &mut y };
//! gemm(simd::Isa::best(), device.pool(), product);
//! assert_eq!(y, [21.0, 43.0]);
//! # Ok::<(), linear::LinearError>(())
//! ```
//!
//! `x` is `[rows, k]`, `W` is `[n, k]` as checkpoints store it, `y` is `[rows, n]`, all row-major.
//!
//! **Row-invariance.** Every output element is one running sum over k = 0, 1, 2, …, whatever the number of rows, the
//! tile or the threads: vectors run across n, never across k. So the result of a token does not depend on the rest of
//! the batch.
//!
//! ```text
//! W packed in panels of 16 outputs            one tile: M rows × P panels
//!   panel 0            panel 1                     k →
//!   k0: w[0..16][0]    k0: w[16..32][0]       x row m ─ broadcast ─┐
//!   k1: w[0..16][1]    k1: …                  panel p ─ 16 lanes ──┴─▶ acc[m][p]
//! ```
//!
//! Memory traffic: one pass over the packed weights for up to 12 rows with AVX-512 (6 with AVX2). Quantised weights
//! ([`Quantization`]) are read from memory once for any number of rows.

mod activation;
mod activations;
mod arithmetic;
mod blocks;
mod byte_matrix;
mod byte_tiles;
mod error;
mod form;
mod format;
pub mod gptq;
mod integer;
mod kernel;
mod low_rank;
mod matrix;
mod operands;
mod output;
mod pack;
mod pair_tiles;
mod processor;
mod quantization;
mod quantize;
mod rounded;
mod rows;
mod scaled_tiles;
mod stored;
mod tile;
mod tiled;
mod tiles;
mod upload;

pub use activation::{Activation, sigmoid};
pub use activations::scratch_bytes;
pub use arithmetic::Arithmetic;
pub use byte_matrix::{ByteMatrix, RowRounding};
pub use byte_tiles::band_bytes;
pub use error::LinearError;
pub use low_rank::{AdapterRows, DownFactor, LowRank, LowRankProduct, UpFactor, UpPart, low_rank};
pub use matrix::Matrix;
pub use operands::Gemm;
pub use pack::{PackedMatrix, PartForm, Purpose, StoredPart, WeightRows};
pub use quantization::Quantization;
pub use quantize::{WeightBlock, quantize_row};
pub use rows::{RowBlock, Rows};
pub use stored::{Codes, Offset, Rounding, Scale, StoredFormat, StoredRow, StoredRows};
pub use tiles::{PANEL, TileCodes, TileForm, TileOffset, TileSegment, Tiles};
pub use upload::Uploader;

use pack::{Panels, Segment};
use simd::int8::DotIsa;
use simd::tiles::{GROUP, add_group};
use simd::{Isa, LANES, Pool, pairs};

/// Computes the product with vectors of `isa` and the best byte products that go with it, split over the pool's threads by
/// columns.
///
/// # Panics
/// If the shapes do not match, quantised rows meet unquantised weights, or this CPU does not have `isa`.
pub fn gemm(isa: Isa, pool: &Pool, args: Gemm<'_>) {
    gemm_with(isa, DotIsa::best_for(isa), pool, args);
}

/// As [`gemm`], with the byte products of `dot` for quantised weights. [`DotIsa::Amx`] is emulated on a CPU that does not have
/// it, and with [`Isa::Portable`].
///
/// # Panics
/// As [`gemm`], and if this CPU does not have `dot`.
pub fn gemm_with(isa: Isa, dot: DotIsa, pool: &Pool, args: Gemm<'_>) {
    assert!(isa.is_available() && dot.vectors().is_available(), "this CPU does not have {isa} and {dot}");
    let rows = args.rows(args.weights.n());
    if rows > 0 {
        kernel::run(processor::Processor { isa, dot, pool }, rows, args);
    }
}

/// As [`gemm`], for a first half of the outputs that is the gate of the second: `y`, of half as many columns, becomes
/// `activation(gate) * up`, with the bits of the two steps.
///
/// # Panics
/// As [`gemm`], and if the weights do not [take an activation](PackedMatrix::takes_activation) with this instruction set.
pub fn gemm_activated(isa: Isa, pool: &Pool, args: Gemm<'_>, activation: Activation) {
    assert!(isa.is_available() && args.weights.takes_activation(isa), "no product with {isa} computes an activation");
    let rows = args.rows(args.weights.n() / 2);
    if let [Segment { panels: Panels::Bf16(halves), n, .. }] = &args.weights.segments[..]
        && rows > 0
    {
        let (x, out) = ((args.x.numbers(), rows), (output::Output::new(args.y, n / 2, 0, n / 2), *n));
        let processor = processor::Processor { isa, dot: DotIsa::best_for(isa), pool };
        tiled::run(processor, args.weights.k(), x, halves, (args.bias, Some(activation)), out);
    }
}

/// Computes the product with plain loops, as the reference for [`gemm`], with the same bits where activations are rounded to
/// bfloat16. Activations that stored weights take in 8 bits are not rounded.
///
/// # Panics
/// If the shapes do not match, or quantised rows meet unquantised weights.
pub fn gemm_reference(args: Gemm<'_>) {
    let (n, k) = (args.weights.n(), args.weights.k());
    let rows = args.rows(n);
    match &args.weights.segments[..] {
        [Segment { panels: Panels::Q8(blocks), .. }] => {
            return integer::reference((args.x, args.y, args.bias), (n, k), blocks);
        }
        [Segment { panels: Panels::Q4(blocks), .. }] => {
            return integer::reference((args.x, args.y, args.bias), (n, k), blocks);
        }
        _ => {}
    }
    let (x, mut weights) = (args.x.numbers(), vec![0.0; k]);
    for column in 0..n {
        args.weights.copy_row(column, &mut weights);
        let arithmetic = args.weights.arithmetic(column);
        for row in 0..rows {
            let (mut sum, x) = (0.0f32, &x[row * k..][..k]);
            let bias = args.bias.map_or(0.0, |bias| bias[column]);
            if let Some(product) = args.weights.stored_on_tiles(column, x) {
                args.y[row * n + column] = product + bias;
                continue;
            }
            let pair = |two: &[f32]| pairs::pair([two[0], two.get(1).copied().unwrap_or_default()]);
            let paired = |x: &[f32], weights: &[f32]| {
                let pairs = x.chunks(2).zip(weights.chunks(2)).map(|(x, weights)| (pair(x), pair(weights)));
                pairs.collect::<Vec<_>>()
            };
            match arithmetic {
                Arithmetic::Exact => x.iter().zip(&weights).for_each(|(x, weight)| sum += x * weight),
                Arithmetic::Pairs => {
                    for (x, weights) in paired(x, &weights) {
                        sum = pairs::dot(sum, x, weights);
                    }
                }
                Arithmetic::Tiles => {
                    for (x, weights) in x.chunks(GROUP).zip(weights.chunks(GROUP)) {
                        let zeros = std::iter::repeat((0, 0));
                        sum = add_group(sum, paired(x, weights).into_iter().chain(zeros).take(LANES));
                    }
                }
            }
            args.y[row * n + column] = sum + bias;
        }
    }
}
