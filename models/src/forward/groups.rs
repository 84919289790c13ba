//! Groups of layers that share a block table, because they attend to the same positions.
//!
//! Layers with the same window form a kind. The groups of all kinds draw pages of equal size from one pool, so a kind with many
//! layers is cut into groups of equal size; the last one may leave places of its pages unused:
//!
//! ```text
//! 8 full layers, 4 with a window, 4 layers a page      group 0   f0 f1 f2 f3
//! a sequence has one table per group, and a block      group 1   f4 f5 f6 f7
//! of any table is a page of the pool                   group 2   w0 w1 w2 w3
//! ```
//!
//! **State groups.** A page of a group of recurrent layers holds states: the page of block b that after the last computed token
//! of block b. Tokens of block b update it in place; the first token of block b + 1 starts from it and writes page b + 1; the
//! first token of a sequence starts from zero. So a full block's page is a checkpoint at the block's end, and a query at
//! position p reads the pages of p and p − 1: to the block pool this is a sliding window of 2.

use attention_kernels::CacheFormat;

use crate::decoder::{Attention, Decoder, Mixer, Recurrent};

/// Greatest number of groups that layers are cut into; each costs a block table per sequence.
const MAX_GROUPS: usize = 8;

/// What a position reads in a state group: the states after the position before it and after itself.
const STATE_WINDOW: usize = 2;

/// Layers that share a block table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerGroup {
    /// `Some(w)`: position i attends only to i-w+1..=i.
    pub window: Option<usize>,
    /// Whether pages hold states of recurrent layers instead of keys and values. The window is then 2.
    pub state: bool,
    /// Indices in [`Decoder::paged`], at most [`PageLayout::layers_per_page`].
    pub layers: Vec<usize>,
}

/// Assignment of a model's layers to groups and to places in pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageLayout {
    /// Groups, in the order of every sequence's block tables.
    pub groups: Vec<LayerGroup>,
    /// Number of layers that a page has places for.
    pub layers_per_page: usize,
}

impl PageLayout {
    /// The layout with the fewest unused places, and among those the fewest groups.
    pub fn new(decoder: &Decoder) -> PageLayout {
        let mut kinds: Vec<LayerGroup> = Vec::new();
        let kind_of = |mixer: &Mixer| match mixer {
            Mixer::Attention(attention) => (attention.window, false),
            _ => (Some(STATE_WINDOW), true),
        };
        for (layer, (window, state)) in decoder.paged().map(kind_of).enumerate() {
            match kinds.iter_mut().find(|kind| (kind.window, kind.state) == (window, state)) {
                Some(kind) => kind.layers.push(layer),
                None => kinds.push(LayerGroup { window, state, layers: vec![layer] }),
            }
        }
        let most = kinds.iter().map(|kind| kind.layers.len()).max().unwrap_or(1);
        let groups = |places: usize| kinds.iter().map(|kind| kind.layers.len().div_ceil(places)).sum::<usize>();
        let fits = |places: &usize| groups(*places) <= MAX_GROUPS.max(kinds.len());
        let layers_per_page = (1..=most).filter(fits).min_by_key(|p| (groups(*p) * p, groups(*p))).unwrap_or(most);
        let cut = |kind: &LayerGroup| {
            let (window, state) = (kind.window, kind.state);
            let chunks = kind.layers.chunks(layers_per_page);
            chunks.map(|layers| LayerGroup { window, state, layers: layers.to_vec() }).collect::<Vec<_>>()
        };
        PageLayout { groups: kinds.iter().flat_map(cut).collect(), layers_per_page }
    }

    /// Group of a layer and its place in a page.
    pub(super) fn place(&self, layer: usize) -> Option<(usize, usize)> {
        let in_group = |(g, group): (usize, &LayerGroup)| Some((g, group.layers.iter().position(|l| *l == layer)?));
        self.groups.iter().enumerate().find_map(in_group)
    }

    /// Bytes of a token's keys and values in all layers of latent attention if each head had its own; `None` for other attention.
    pub fn expanded_bytes_per_token(&self, decoder: &Decoder, format: &CacheFormat) -> Option<u64> {
        let layer = |attention: &Attention| {
            let latent = attention.latent.as_ref()?;
            let head = format.row_bytes(latent.nope_dim + latent.rope_dim) + format.row_bytes(latent.value_dim);
            Some((attention.heads.num_heads * head) as u64)
        };
        decoder.attention().map(layer).sum()
    }

    /// Whether a group holds states, so that slots of a page cannot be overwritten one by one.
    pub fn has_states(&self) -> bool {
        self.groups.iter().any(|group| group.state)
    }

    /// Least power of two of tokens per block with which the states of recurrent layers fit into a page; 1 without such layers.
    pub fn least_block_size(decoder: &Decoder, format: &CacheFormat) -> usize {
        let heads = decoder.heads();
        let row = heads.num_kv_heads * format.row_bytes(heads.head_dim);
        let bytes = |layer: &Recurrent| layer.heads_in_keys() * layer.head_state() * size_of::<f32>();
        let most = decoder.recurrent().map(bytes).max().unwrap_or(0);
        most.div_ceil(row.max(1)).max(1).next_power_of_two()
    }

    /// Bytes of one token's keys and values in one page, in this cache format.
    pub fn page_bytes_per_token(&self, decoder: &Decoder, format: &CacheFormat) -> u64 {
        let heads = decoder.heads();
        // A latent is key and value.
        let vectors = if decoder.latent_dim().is_some() { 1 } else { 2 };
        (vectors * self.layers_per_page * heads.num_kv_heads * format.row_bytes(heads.head_dim)) as u64
    }
}
