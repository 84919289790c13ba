//! What a product runs on.

use simd::int8::DotIsa;
use simd::{Isa, Pool};

/// Vectors, byte products and threads of a product.
#[derive(Clone, Copy)]
pub(super) struct Processor<'a> {
    pub isa: Isa,
    pub dot: DotIsa,
    pub pool: &'a Pool,
}
