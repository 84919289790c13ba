//! Some consecutive layers of a decoder, which one stage of a pipeline computes.

use serde::Serialize;

/// What a stage of a pipeline differs in from a whole decoder: others compute the layers before and behind its own.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Stage {
    /// The residual stream comes from the stage before, instead of from the embedding.
    pub receives: bool,
    /// It goes to the stage behind, instead of to the head.
    pub sends: bool,
    /// The groups of all stages, with the layers of this one: every stage has the block tables of all groups.
    pub groups: Vec<LayerGroup>,
    /// Shape of the keys that one token stores in a page slot: heads and head size.
    pub place_heads: (usize, usize),
}

/// Layers that share a block table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LayerGroup {
    /// `Some(w)`: position i attends only to i-w+1..=i.
    pub window: Option<usize>,
    /// Whether pages hold states of recurrent layers instead of keys and values. The window is then 2.
    pub state: bool,
    /// Number of layers that a place of a page has room for.
    pub parts: usize,
    /// Indices in [`Decoder::paged`](super::Decoder::paged), at most `parts` for each of the
    /// [`PageLayout::places`](crate::PageLayout::places).
    pub layers: Vec<usize>,
}
