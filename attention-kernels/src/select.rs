//! Selection: from a model's needs and the user's choice to one variant per operation.
//!
//! Decode, prefill, cache write and block copy share a cache, so they are selected together: for each layout in turn, the
//! first variant of each operation that can serve, or the one that is named, until a layout has all four. In a
//! row-invariant set decode and prefill are also of one family, whose variants compute equal bits.

use std::path::PathBuf;

use device::Device;
use linear::Arithmetic;
use serde::{Deserialize, Serialize};

use crate::args::AttentionArgs;
use crate::batch::AttentionBatch;
use crate::error::KernelError;
use crate::format::{CacheFormat, Layout};
use crate::needs::{Needs, list};
use crate::plugin::{self, PluginError};
use crate::registry::variants;
use crate::variant::{Operation, Variant};

/// The `[kernels]` table: `"auto"` or the name of a variant for each operation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KernelChoice {
    /// Variant for attention of single query tokens.
    pub decode: String,
    /// Variant for attention of many query tokens.
    pub prefill: String,
    /// Variant that writes keys and values into the cache.
    pub cache_write: String,
    /// Variant that copies whole blocks.
    pub block_copy: String,
    /// Variant for matrix products.
    pub linear: String,
    /// Variant for low-rank additions to matrix products (LoRA).
    pub low_rank: String,
    /// Libraries whose variants are added to the registry: `[[kernels.plugin]]`.
    pub plugin: Vec<PluginChoice>,
}

/// A plug-in to load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PluginChoice {
    /// Path of the shared library.
    pub path: PathBuf,
}

impl Default for KernelChoice {
    fn default() -> Self {
        let auto = || "auto".to_string();
        KernelChoice {
            decode: auto(),
            prefill: auto(),
            cache_write: auto(),
            block_copy: auto(),
            linear: auto(),
            low_rank: auto(),
            plugin: Vec::new(),
        }
    }
}

impl KernelChoice {
    /// Returns `"auto"` or the name of a variant.
    pub(crate) fn name(&self, operation: Operation) -> &str {
        match operation {
            Operation::Decode => &self.decode,
            Operation::Prefill => &self.prefill,
            Operation::CacheWrite => &self.cache_write,
            Operation::BlockCopy => &self.block_copy,
            Operation::Linear => &self.linear,
            Operation::LowRank => &self.low_rank,
        }
    }
}

/// Why no set of variants could be selected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectError {
    /// A plug-in could not be loaded.
    #[error(transparent)]
    Plugin(#[from] PluginError),
    /// No variant has the name.
    #[error("[kernels] {operation} = {name:?}: there is no such variant; use one of: {known}")]
    Unknown {
        /// Operation.
        operation: Operation,
        /// Name in the `[kernels]` table.
        name: String,
        /// Names of all variants of the operation.
        known: String,
    },
    /// The named variant cannot serve.
    #[error("[kernels] {operation} = {name:?} cannot serve: {reason}; use one of: {able}")]
    Unable {
        /// Operation.
        operation: Operation,
        /// Name in the `[kernels]` table.
        name: String,
        /// Reason.
        reason: String,
        /// Names of the variants that can serve.
        able: String,
    },
    /// No variant can serve.
    #[error("no {operation} kernel can serve this model on device {device:?}: {reasons}")]
    None {
        /// Operation.
        operation: Operation,
        /// Name of the backend.
        device: String,
        /// Reason for each variant of that backend.
        reasons: String,
    },
    /// Variants can serve for each operation, but no set of them agrees.
    #[error("[kernels] no variants agree on one cache layout{family}: {candidates}; name fewer of them")]
    Disagree {
        /// What they had to agree on beside the layout.
        family: &'static str,
        /// Variants that can serve, for each operation.
        candidates: String,
    },
}

/// One variant for each operation.
#[derive(Clone, Copy)]
pub struct KernelSet {
    /// Format of the caches.
    pub format: CacheFormat,
    /// How products with weights round and sum: as the variant for them does, or in pairs if it takes any matrix and the model
    /// computes in bfloat16.
    pub arithmetic: Arithmetic,
    /// Attention of single query tokens.
    pub decode: &'static Variant,
    /// Attention of many query tokens.
    pub prefill: &'static Variant,
    /// Write of new keys and values.
    pub cache_write: &'static Variant,
    /// Copy of blocks (copy-on-write).
    pub block_copy: &'static Variant,
    /// Products with weights.
    pub linear: &'static Variant,
    /// Low-rank additions to these products.
    pub low_rank: &'static Variant,
}

impl KernelSet {
    /// Returns the variants in the order of [`Operation::ALL`].
    pub fn all(&self) -> [&'static Variant; 6] {
        [self.decode, self.prefill, self.cache_write, self.block_copy, self.linear, self.low_rank]
    }

    /// Returns how many of the first sequences have so few query rows that [`KernelSet::attention`] computes them with the
    /// decode variant.
    pub fn decodes(&self, batch: &AttentionBatch) -> usize {
        let few = |pair: &&[u32]| (pair[1] - pair[0]) as usize <= self.decode.capabilities.decode_rows;
        batch.query_starts.windows(2).take_while(few).count()
    }

    /// Computes attention of `args.seqs`: with the decode variant if each sequence has few query rows
    /// ([`Capabilities::decode_rows`](crate::Capabilities::decode_rows)), else with the prefill variant.
    pub fn attention(&self, device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
        let starts = &args.batch.query_starts[args.seqs.start..=args.seqs.end];
        let most = self.decode.capabilities.decode_rows;
        let decode = starts.windows(2).all(|pair| (pair[1] - pair[0]) as usize <= most);
        if decode { self.decode } else { self.prefill }.attention(device, args)
    }
}

/// Loads the plug-ins that are named and selects one variant for each operation.
///
/// # Errors
/// A plug-in cannot be loaded, a name does not exist or cannot serve, alone or with the others, or no variant of an
/// operation can serve.
pub fn select(choice: &KernelChoice, needs: &Needs) -> Result<KernelSet, SelectError> {
    choice.plugin.iter().try_for_each(|plugin| plugin::load(&plugin.path))?;
    let candidates = |operation| candidates(operation, choice.name(operation), needs);
    let linear = candidates(Operation::Linear);
    let products = linear.as_ref().map_or(Arithmetic::Exact, |able| needs.products_of(able[0]));
    let (format, [decode, prefill, cache_write, block_copy]) = share_a_cache(choice, needs, products)?;
    let [linear, low_rank] = [linear?[0], candidates(Operation::LowRank)?[0]];
    Ok(KernelSet { format, arithmetic: products, decode, prefill, cache_write, block_copy, linear, low_rank })
}

/// Selects the variants of the operations on caches, in the order of [`Operation::ON_CACHES`]. Attention on tiles is preferred where
/// products are on tiles, and else the last choice.
fn share_a_cache(
    choice: &KernelChoice,
    needs: &Needs,
    products: Arithmetic,
) -> Result<(CacheFormat, [&'static Variant; 4]), SelectError> {
    let mut able: [Vec<&'static Variant>; 4] = Default::default();
    for (able, operation) in able.iter_mut().zip(Operation::ON_CACHES) {
        *able = candidates(operation, choice.name(operation), needs)?;
        able.sort_by_key(|v| v.capabilities.arithmetic == Arithmetic::Tiles && products != Arithmetic::Tiles);
    }
    for layout in Layout::ALL.into_iter().filter(|layout| needs.suit(*layout)) {
        let [decodes, prefills, writes, copies] = able
            .each_ref()
            .map(|able| able.iter().copied().filter(|v| v.capabilities.layouts.contains(&layout)).collect::<Vec<_>>());
        let agree = |a: &Variant, b: &Variant| {
            !needs.row_invariant || a.capabilities.row_invariant == b.capabilities.row_invariant
        };
        let attention = decodes.iter().find_map(|d| prefills.iter().find(|p| agree(d, p)).map(|p| (*d, *p)));
        if let (Some((decode, prefill)), Some(write), Some(copy)) = (attention, writes.first(), copies.first()) {
            return Ok((needs.format(layout), [decode, prefill, write, copy]));
        }
    }
    let family = if needs.row_invariant { " and one family of row-invariant attention" } else { "" };
    let candidates: Vec<String> = Operation::ON_CACHES
        .iter()
        .zip(&able)
        .map(|(operation, able)| {
            let each: Vec<String> =
                able.iter().map(|v| format!("{} ({})", v.name, list(v.capabilities.layouts))).collect();
            format!("{operation}: {}", each.join(", "))
        })
        .collect();
    Err(SelectError::Disagree { family, candidates: candidates.join("; ") })
}

/// Returns the variants that can serve, best first. There is at least one, and only one if it is named.
fn candidates(operation: Operation, name: &str, needs: &Needs) -> Result<Vec<&'static Variant>, SelectError> {
    let all = variants(operation);
    let mut able: Vec<&'static Variant> = all.iter().copied().filter(|v| needs.unmet(v).is_none()).collect();
    // The simulator stands for any GPU.
    able.sort_by_key(|v| v.capabilities.exact_compute_capability && needs.compute_capability.is_none());
    if name == "auto" {
        if able.is_empty() {
            let here = all.iter().filter(|v| v.capabilities.devices.contains(&needs.device.as_str()));
            let reasons: Vec<String> = here.filter_map(|v| Some(format!("{}: {}", v.name, needs.unmet(v)?))).collect();
            let reasons = if reasons.is_empty() { "it has none".to_string() } else { reasons.join("; ") };
            return Err(SelectError::None { operation, device: needs.device.clone(), reasons });
        }
        return Ok(able);
    }
    let named = all.iter().find(|v| v.name == name);
    let (variant, name) = match named {
        Some(variant) => (*variant, name.to_string()),
        None => return Err(SelectError::Unknown { operation, name: name.to_string(), known: names(&all) }),
    };
    match needs.unmet(variant) {
        Some(reason) => Err(SelectError::Unable { operation, name, reason, able: names(&able) }),
        None => Ok(vec![variant]),
    }
}

fn names(variants: &[&Variant]) -> String {
    let names: Vec<&str> = variants.iter().map(|v| v.name).collect();
    if names.is_empty() { "none".to_string() } else { names.join(", ") }
}
