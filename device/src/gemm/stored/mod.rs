//! Products with weights in the form in which checkpoints store them.
//!
//! A matrix is packed once, exactly: [`format`] defines the value of every weight, [`panels`] the memory layout, whose size is that
//! of the stored weights. A task unpacks a few blocks at a time ([`unpack`]) to memory that stays in the L1 cache, and multiplies
//! them with all rows: as floats, with the bits of a product with unpacked weights, or as bytes with rows that are rounded to
//! 8-bit integers ([`rounding`]).
//!
//! **Row-invariance**: an output is one running sum over the inputs in order, as in the other products. Sums pause at the end of
//! unpacked blocks; the output holds them meanwhile.

mod format;
mod panels;
mod product;
mod rounding;
mod unpack;

pub use format::{Codes, Offset, Scale, StoredFormat, StoredRow, StoredRows};
pub(super) use panels::StoredPanels;
pub(super) use product::{Stored, run};
pub use rounding::Rounding;
