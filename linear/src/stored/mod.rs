//! Products with weights in the form in which checkpoints store them.
//!
//! A matrix is packed once, exactly: [`format`] defines the value of every weight, [`panels`] the memory layout, whose size is that
//! of the stored weights. Rows of floats are multiplied with weights that are unpacked a few blocks at a time, to memory that stays in
//! the L1 cache ([`unpack`]), with the bits of a product with unpacked weights. Rows that are rounded to 8-bit integers
//! ([`rounding`]) are multiplied with the codes as they lie ([`integer`]), and in the arithmetic of tiles so are rows of bfloat16
//! ([`steps`]).
//!
//! **Row-invariance**: an output is one running sum over the inputs in order, as in the other products. Sums pause after
//! a few blocks; the output holds them meanwhile.

mod format;
mod group;
mod integer;
mod panels;
mod product;
mod rounding;
mod steps;
mod task;
mod unpack;

pub use format::{Codes, Offset, Scale, StoredFormat, StoredRow, StoredRows};
pub(super) use panels::StoredPanels;
pub(super) use product::{Stored, run};
pub use rounding::Rounding;
