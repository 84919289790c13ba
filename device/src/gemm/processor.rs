//! What a product runs on.

use crate::simd::int8::DotIsa;
use crate::{Isa, Pool};

/// Panels per task: enough to feed the widest tile several times, few enough to share among threads.
pub(super) const PANELS_PER_TASK: usize = 16;

/// Vectors, byte products and threads of a product.
#[derive(Clone, Copy)]
pub(super) struct Processor<'a> {
    pub isa: Isa,
    pub dot: DotIsa,
    pub pool: &'a Pool,
}
