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
//! **Two sizes of heads.** Layers of a kind have keys and values of one size. If the kinds of a model differ, a place of a page has
//! room for a whole number of layers of each kind, its *parts*: the layer in part j of p sees the cache as one of `p * num_blocks`
//! blocks, of which page b holds its block `p * b + j`. For attention a group and a part are a [`View`] of the cache.
//!
//! ```text
//! full layers of 2 heads of 64, windows of 2 of 32     group 0   f0 f1      one part
//!                                                      group 1   w0w1 w2    two parts
//! ```
//!
//! **No pages.** Layers that see both sides have no cache: a step computes all tokens of their sequences.
//!
//! **State groups.** A page of a group of recurrent layers holds states: the page of block b that after the last computed token
//! of block b. Tokens of block b update it in place; the first token of block b + 1 starts from it and writes page b + 1; the
//! first token of a sequence starts from zero. So a full block's page is a checkpoint at the block's end, and a query at
//! position p reads the pages of p and p − 1: to the block pool this is a sliding window of 2. The rows of drafts
//! ([`ForwardBatch::drafts`](super::ForwardBatch::drafts)) go on from a copy of the state and change no page.

use attention_kernels::{CacheFormat, KvShape};

use super::GroupBatch;
use crate::decoder::{Attention, Decoder, Heads, LayerGroup, Mixer, Recurrent};

/// Greatest number of groups that layers are cut into; each costs a block table per sequence.
const MAX_GROUPS: usize = 8;

/// What a position reads in a state group: the states after the position before it and after itself.
const STATE_WINDOW: usize = 2;

/// A group's block tables as the layers in one part of every place use them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct View {
    pub group: usize,
    pub parts: usize,
    pub part: usize,
}

impl View {
    /// Fills `to` with the batch of the view, given that of its group.
    pub fn load(self, from: &GroupBatch, block_size: usize, to: &mut GroupBatch) {
        let View { parts, part, .. } = self;
        let attention = &mut to.attention;
        attention.query_starts.clone_from(&from.attention.query_starts);
        attention.context_lens.clone_from(&from.attention.context_lens);
        attention.block_tables.clear();
        for table in from.attention.block_tables.iter() {
            let block = |block: &i32| if *block < 0 { *block } else { *block * parts as i32 + part as i32 };
            attention.block_tables.push_blocks(table.iter().map(block));
        }
        let (size, slots) = (block_size as i64, &mut to.slot_mapping);
        slots.clear();
        slots.extend(from.slot_mapping.iter().map(|slot| match slot {
            ..0 => *slot,
            slot => (slot / size * parts as i64 + part as i64) * size + slot % size,
        }));
    }
}

/// Assignment of a model's layers to groups and to places in pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageLayout {
    /// Groups, in the order of every sequence's block tables.
    pub groups: Vec<LayerGroup>,
    /// Number of places in a page.
    pub places: usize,
    /// Shape of the keys that one token stores in a page slot: heads and head size.
    pub(super) place_heads: (usize, usize),
    /// The views of all groups, in order.
    pub(super) views: Vec<View>,
}

impl PageLayout {
    /// The layout with the fewest unused places, and among those the fewest groups.
    pub fn new(decoder: &Decoder) -> PageLayout {
        if let Some(stage) = &decoder.stage {
            let places = stage.groups.iter().map(|group| group.layers.len().div_ceil(group.parts)).max();
            return PageLayout::of(stage.groups.clone(), places.unwrap_or(0).max(1), stage.place_heads);
        }
        let keys = |heads: Heads| (heads.num_kv_heads, heads.head_dim);
        if decoder.is_encoder() {
            return PageLayout::without_pages();
        }
        // Layers that read those of another have no pages.
        let own = |(_, mixer): &(usize, &Mixer)| !matches!(mixer, Mixer::Attention(layer) if layer.shares.is_some());
        let mut kinds: Vec<(LayerGroup, (usize, usize))> = Vec::new();
        for (layer, mixer) in decoder.paged().enumerate().filter(own) {
            let (window, state, heads) = match mixer {
                Mixer::Attention(attention) => (attention.window, false, keys(attention.heads)),
                _ => (Some(STATE_WINDOW), true, keys(decoder.heads())),
            };
            let same = |(kind, its): &&mut (LayerGroup, _)| (kind.window, kind.state, *its) == (window, state, heads);
            match kinds.iter_mut().find(same) {
                Some((kind, _)) => kind.layers.push(layer),
                None => kinds.push((LayerGroup { window, state, parts: 1, layers: vec![layer] }, heads)),
            }
        }
        let widths = kinds.iter().map(|(_, (heads, dim))| heads * dim);
        let width = widths.reduce(least_common_multiple).unwrap_or(0);
        for (kind, (heads, dim)) in &mut kinds {
            kind.parts = width / (*heads * *dim).max(1);
        }
        let place_heads = kinds.first().map_or((0, 0), |(kind, (heads, dim))| (kind.parts * heads, *dim));
        let kinds: Vec<LayerGroup> = kinds.into_iter().map(|(kind, _)| kind).collect();
        let needs = |kind: &LayerGroup| kind.layers.len().div_ceil(kind.parts);
        let most = kinds.iter().map(needs).max().unwrap_or(1);
        let groups = |places: usize| kinds.iter().map(|kind| needs(kind).div_ceil(places)).sum::<usize>();
        let fits = |places: &usize| groups(*places) <= MAX_GROUPS.max(kinds.len());
        let places = (1..=most).filter(fits).min_by_key(|p| (groups(*p) * p, groups(*p))).unwrap_or(most);
        let cut = |kind: &LayerGroup| {
            let chunks = kind.layers.chunks(places * kind.parts);
            chunks.map(|layers| LayerGroup { layers: layers.to_vec(), ..kind.clone() }).collect::<Vec<_>>()
        };
        PageLayout::of(kinds.iter().flat_map(cut).collect(), places, place_heads)
    }

    /// The layout of an encoder: no layer has a place. A step still lists its sequences in a group, whose blocks have no bytes.
    fn without_pages() -> PageLayout {
        let group = LayerGroup { window: None, state: false, parts: 1, layers: Vec::new() };
        PageLayout::of(vec![group], 0, (0, 0))
    }

    fn of(groups: Vec<LayerGroup>, places: usize, place_heads: (usize, usize)) -> PageLayout {
        let parts = groups.iter().map(|group| group.parts).enumerate();
        let views = parts.flat_map(|(group, parts)| (0..parts).map(move |part| View { group, parts, part })).collect();
        PageLayout { groups, places, place_heads, views }
    }

    /// The shape of the cache of one place.
    pub(super) fn shape(&self, num_blocks: usize, block_size: usize) -> KvShape {
        let (num_kv_heads, head_dim) = self.place_heads;
        KvShape { num_blocks, num_kv_heads, block_size, head_dim }
    }

    /// Whether views differ from groups.
    pub(super) fn has_parts(&self) -> bool {
        self.groups.iter().any(|group| group.parts > 1)
    }

    /// The place of a layer in a page, and the index of its view.
    pub(super) fn place(&self, layer: usize) -> Option<(usize, usize)> {
        let mut first_view = 0;
        for group in &self.groups {
            if let Some(at) = group.layers.iter().position(|other| *other == layer) {
                return Some((at / group.parts, first_view + at % group.parts));
            }
            first_view += group.parts;
        }
        None
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

    /// Whether a slot of a page is the same memory for all layers, so that slots can be overwritten one by one. Pages of states have
    /// no slots, and layers of two sizes have their own.
    pub fn has_slots(&self) -> bool {
        self.groups.iter().all(|group| !group.state && group.parts == 1)
    }

    /// Least power of two of tokens per block with which the states of recurrent layers fit into a page; 1 without such layers.
    pub fn least_block_size(decoder: &Decoder, format: &CacheFormat) -> usize {
        let (heads, dim) = PageLayout::new(decoder).place_heads;
        let row = heads * format.row_bytes(dim);
        let bytes = |layer: &Recurrent| layer.heads_in_keys() * layer.head_state() * size_of::<f32>();
        let most = decoder.recurrent().map(bytes).max().unwrap_or(0);
        most.div_ceil(row.max(1)).max(1).next_power_of_two()
    }

    /// Bytes of one token's keys and values in one page, in this cache format.
    pub fn page_bytes_per_token(&self, decoder: &Decoder, format: &CacheFormat) -> u64 {
        let (heads, dim) = self.place_heads;
        // A latent is key and value.
        let vectors = if decoder.latent_dim().is_some() { 1 } else { 2 };
        (vectors * self.places * heads * format.row_bytes(dim)) as u64
    }
}

fn least_common_multiple(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x.max(1) * b
}
