//! The other operations of a layer on a CPU, row by row: norms, rotation, activations, the recurrences, attention without a cache. They are
//! here so that all loops over numbers are compiled with full optimisation; what calls them need not be.

mod both_sides;
mod recurrence;
mod rows;

pub use linear::Activation;

pub use both_sides::{BothSides, both_sides};
pub use recurrence::{Convolution, Update, convolve, scan, update};
pub use rows::{
    Activate, NormRow, activate, activate_by, activate_q8, add, gate, mix_heads, mixing_factors, norm, norm_heads,
    norm_q8, rotate_heads, scale,
};
