//! The modules of a decoder that adapters may target.
//!
//! A linear layer of the decoder stacks the rows of several modules (queries, keys, values), and a module of the checkpoint may be
//! spread over several parts of it (a packed `qkv_proj` whose rows are picked). So a module is a list of [`Place`]s.

use std::collections::{BTreeMap, BTreeSet};

use attention_kernels::{Dtype, LowRankSize};
use linear::LowRank;

use super::AdapterLimits;
use crate::Decoder;
use crate::checkpoint::weights::spellings;
use crate::decoder::{Linear, Pick};

/// Rows of a module in a linear layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Place {
    /// Index in [`Decoder::linears`].
    pub linear: usize,
    /// The layer's output that is the first of the rows.
    pub first_output: usize,
    /// Number of rows.
    pub rows: usize,
    /// Which rows and inputs of the module they are.
    pub pick: Pick,
    /// Number of inputs of the layer.
    pub inputs: usize,
}

impl Place {
    /// Number of inputs of the module.
    pub fn module_inputs(&self) -> usize {
        self.pick.inputs.map_or(self.inputs, |(_, all)| all)
    }
}

/// The modules of a decoder by name.
pub(super) struct Modules {
    /// In order of their names, so that the contents of adapters have one order.
    pub places: BTreeMap<String, Vec<Place>>,
    /// Other spellings of the names.
    spellings: BTreeMap<String, String>,
    /// Modules that adapters may not target.
    others: BTreeSet<String>,
}

impl Modules {
    pub fn new(decoder: &Decoder) -> Modules {
        let mut modules = Modules { places: BTreeMap::new(), spellings: BTreeMap::new(), others: BTreeSet::new() };
        for (linear, declared) in decoder.linears().enumerate().filter(|(_, linear)| linear.adapters) {
            let mut first_output = 0;
            for part in &declared.parts {
                let (rows, inputs) = (part.rows, declared.inputs);
                let place = Place { linear, first_output, rows, pick: part.pick, inputs };
                if !part.bare && part.pick.matrix.is_none() {
                    modules.places.entry(part.name.clone()).or_default().push(place);
                }
                if let Some((own, pick)) = &part.own {
                    let place = Place { pick: *pick, ..place };
                    modules.places.entry(own.clone()).or_default().push(place);
                }
                first_output += rows;
            }
        }
        for name in modules.places.keys() {
            modules.spellings.extend(spellings(name).into_iter().map(|spelling| (spelling, name.clone())));
        }
        let others = decoder.all_linears().flat_map(|linear| &linear.parts).map(|part| &part.name);
        let others = others.filter(|name| !modules.places.contains_key(*name));
        modules.others = others.flat_map(|name| spellings(name)).collect();
        modules
    }

    /// The module with this name, in any spelling.
    pub fn find(&self, name: &str) -> Option<(&str, &[Place])> {
        let name = self.spellings.get(name)?;
        self.places.get_key_value(name).map(|(name, places)| (name.as_str(), &places[..]))
    }

    /// Whether this is a module that adapters may not target.
    pub fn is_other(&self, name: &str) -> bool {
        self.others.contains(name)
    }
}

fn targets(decoder: &Decoder) -> impl Iterator<Item = &Linear> {
    decoder.linears().filter(|linear| linear.adapters)
}

/// Upper bound of the bytes of an adapter in memory.
pub fn most_adapter_bytes(decoder: &Decoder, limits: &AdapterLimits) -> u64 {
    let bytes = |linear: &Linear| LowRank::most_bytes(linear.inputs, linear.rows(), linear.parts.len(), limits.rank);
    targets(decoder).map(|linear| bytes(linear) as u64).sum()
}

/// The greatest addition to each of the decoder's linear layers; `None` for those that take no adapters.
pub(crate) fn adapter_sizes(decoder: &Decoder, limits: &AdapterLimits) -> impl Iterator<Item = Option<LowRankSize>> {
    let rank = limits.rank;
    decoder.linears().map(move |linear| {
        let (inputs, outputs, parts) = (linear.inputs, linear.rows(), linear.parts.len());
        linear.adapters.then_some(LowRankSize { inputs, outputs, parts, rank })
    })
}

/// Bytes of all slots on a device that launches kernels and computes in a type.
pub fn adapter_slot_bytes(decoder: &Decoder, limits: &AdapterLimits, dtype: Dtype) -> u64 {
    let sizes = adapter_sizes(decoder, limits).flatten();
    sizes.map(|size| (limits.slots * size.slot_bytes(dtype)) as u64).sum()
}

/// Greatest number of ranks of a linear layer, padded as [`LowRank`] pads them.
pub fn most_adapter_width(decoder: &Decoder, limits: &AdapterLimits) -> usize {
    targets(decoder).map(|linear| LowRank::most_width(linear.parts.len(), limits.rank)).max().unwrap_or(0)
}
