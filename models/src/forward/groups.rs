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

use attention_kernels::CacheFormat;

use crate::decoder::Decoder;

/// Greatest number of groups that layers are cut into; each costs a block table per sequence.
const MAX_GROUPS: usize = 8;

/// Layers that share a block table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerGroup {
    /// `Some(w)`: position i attends only to i-w+1..=i.
    pub window: Option<usize>,
    /// Indices of attention layers, at most [`PageLayout::layers_per_page`].
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
        for (layer, window) in decoder.attention().map(|attention| attention.window).enumerate() {
            match kinds.iter_mut().find(|kind| kind.window == window) {
                Some(kind) => kind.layers.push(layer),
                None => kinds.push(LayerGroup { window, layers: vec![layer] }),
            }
        }
        let most = kinds.iter().map(|kind| kind.layers.len()).max().unwrap_or(1);
        let groups = |places: usize| kinds.iter().map(|kind| kind.layers.len().div_ceil(places)).sum::<usize>();
        let fits = |places: &usize| groups(*places) <= MAX_GROUPS.max(kinds.len());
        let layers_per_page = (1..=most).filter(fits).min_by_key(|p| (groups(*p) * p, groups(*p))).unwrap_or(most);
        let cut = |kind: &LayerGroup| {
            let window = kind.window;
            let chunks = kind.layers.chunks(layers_per_page);
            chunks.map(|layers| LayerGroup { window, layers: layers.to_vec() }).collect::<Vec<_>>()
        };
        PageLayout { groups: kinds.iter().flat_map(cut).collect(), layers_per_page }
    }

    /// Group of a layer and its place in a page.
    pub(super) fn place(&self, layer: usize) -> Option<(usize, usize)> {
        let in_group = |(g, group): (usize, &LayerGroup)| Some((g, group.layers.iter().position(|l| *l == layer)?));
        self.groups.iter().enumerate().find_map(in_group)
    }

    /// Bytes of one token's keys and values in one page, in this cache format.
    pub fn page_bytes_per_token(&self, decoder: &Decoder, format: &CacheFormat) -> u64 {
        let heads = decoder.heads();
        (2 * self.layers_per_page * heads.num_kv_heads * format.row_bytes(heads.head_dim)) as u64
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::ModelConfig;
    use crate::decoder::Mixer;

    fn layout(full: usize, windowed: usize) -> (usize, Vec<usize>) {
        let mut decoder = ModelConfig::load(&crate::demo()).unwrap().decoder;
        let layer = |window| {
            let mut layer = decoder.layers[0].clone();
            for branch in &mut layer.branches {
                if let Mixer::Attention(attention) = &mut branch.mixer {
                    attention.window = window;
                }
            }
            layer
        };
        decoder.layers = [vec![layer(None); full], vec![layer(Some(64)); windowed]].concat();
        let layout = PageLayout::new(&decoder);
        let mut layers: Vec<usize> = layout.groups.iter().flat_map(|g| g.layers.clone()).collect();
        layers.sort_unstable();
        assert_eq!(layers, (0..full + windowed).collect::<Vec<_>>(), "each layer has one place");
        assert!((0..full + windowed).all(|layer| {
            let (group, place) = layout.place(layer).unwrap();
            layout.groups[group].layers[place] == layer
        }));
        (layout.layers_per_page, layout.groups.iter().map(|g| g.layers.len()).collect())
    }

    #[test]
    fn layers_of_one_kind_are_one_group_and_two_kinds_share_pages_of_equal_size() {
        assert_eq!(layout(24, 0), (24, vec![24]));
        assert_eq!(layout(0, 5), (5, vec![5]));
        assert_eq!(layout(12, 12), (12, vec![12, 12]));
        assert_eq!(layout(8, 4), (4, vec![4, 4, 4]));
        assert_eq!(layout(1, 5), (1, vec![1, 1, 1, 1, 1, 1]));
    }

    #[test]
    fn places_are_left_empty_rather_than_having_many_groups() {
        let (places, groups) = layout(33, 1);
        assert!(groups.len() <= MAX_GROUPS, "{groups:?}");
        assert!(places * groups.len() <= 40, "{places} places a page, {groups:?}");
    }
}
