//! Where a checkpoint keeps the projections to queries, keys and values.

use crate::decoder::{Heads, Linear, Part, Pick, Role};

/// Tensors of the projections to queries, keys and values.
#[derive(Clone, Copy)]
pub(super) enum Packing {
    /// One tensor each.
    Separate([&'static str; 3]),
    /// One tensor: rows of the queries, of the keys, of the values.
    Rows(&'static str),
    /// One transposed tensor, `[inputs, outputs]`: columns of the queries, of the keys, of the values.
    Columns(&'static str),
    /// One tensor: for each key/value head the rows of its query heads, of its key, of its value.
    Groups(&'static str),
    /// One tensor each; that of the queries has for each head the rows of the queries, then those of the output gate.
    Gated([&'static str; 3]),
}

impl Packing {
    /// The projections of a module as one linear layer: queries, keys, values, gate.
    pub fn linear(self, module: &str, heads: Heads, inputs: usize) -> Linear {
        let (queries, keys, total) = (heads.query_width(), heads.key_width(), heads.qkv_width());
        let rows = [queries, keys, keys];
        let full = |name: &str| format!("{module}.{name}");
        let parts: Vec<Part> = match self {
            Packing::Separate(names) => {
                names.iter().zip(rows).map(|(name, rows)| Part::new(full(name), rows)).collect()
            }
            Packing::Rows(name) => vec![Part::new(full(name), total)],
            Packing::Columns(name) => {
                let pick = Pick { transposed: true, ..Pick::all(total) };
                vec![Part::picked(full(name), total, pick)]
            }
            Packing::Groups(name) => {
                let (dim, per_group) = (heads.head_dim, heads.num_heads / heads.num_kv_heads);
                let stride = (per_group + 2) * dim;
                let pick = |first: usize, run: usize| Pick::runs(total, first * dim, run * dim, stride);
                let picks = [pick(0, per_group), pick(per_group, 1), pick(per_group + 1, 1)];
                picks.into_iter().zip(rows).map(|(pick, rows)| Part::picked(full(name), rows, pick)).collect()
            }
            Packing::Gated([query, key, value]) => {
                let dim = heads.head_dim;
                let half = |first: usize| Pick::runs(2 * queries, first, dim, 2 * dim);
                vec![
                    Part::picked(full(query), queries, half(0)),
                    Part::new(full(key), keys),
                    Part::new(full(value), keys),
                    Part::picked(full(query), queries, half(dim)),
                ]
            }
        };
        Linear::new(inputs, Role::Column, parts)
    }
}
