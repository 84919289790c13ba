//! From what a model needs and what the user asked for to one variant per operation.
//!
//! Decode, prefill, cache write and block copy share a cache, so they are chosen together: for each layout in turn, the
//! first of each that can serve, or the one that is named, until a layout has all four. Row-invariant sets also take decode
//! and prefill from one family of equal bits.

use std::path::PathBuf;

use device::Device;
use serde::{Deserialize, Serialize};

use crate::args::{AttentionArgs, BlockCopyArgs, CacheWriteArgs, LinearArgs};
use crate::error::KernelError;
use crate::format::{CacheFormat, Layout};
use crate::needs::{Needs, list};
use crate::plugin::{self, PluginError};
use crate::registry::variants;
use crate::variant::{Operation, Variant};

/// The `[kernels]` table: per operation `"auto"` or the name of a variant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct KernelChoice {
    /// Attention of single query tokens.
    pub decode: String,
    /// Attention of many query tokens.
    pub prefill: String,
    /// Keys and values into the cache.
    pub cache_write: String,
    /// Copies of whole blocks.
    pub block_copy: String,
    /// Matrix products.
    pub linear: String,
    /// Libraries whose variants are taken into the registry: `[[kernels.plugin]]`.
    pub plugin: Vec<PluginChoice>,
}

/// A plug-in to load.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PluginChoice {
    /// The shared library.
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
            plugin: Vec::new(),
        }
    }
}

impl KernelChoice {
    /// `"auto"` or a name.
    pub(crate) fn name(&self, operation: Operation) -> &str {
        match operation {
            Operation::Decode => &self.decode,
            Operation::Prefill => &self.prefill,
            Operation::CacheWrite => &self.cache_write,
            Operation::BlockCopy => &self.block_copy,
            Operation::Linear => &self.linear,
        }
    }
}

/// A name in `[kernels]` that does not exist, a plug-in that can not be taken, or variants that can not serve.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectError {
    /// A library that can not be taken.
    #[error(transparent)]
    Plugin(#[from] PluginError),
    /// No variant has that name.
    #[error("[kernels] {operation} = {name:?}: no such variant; there are: {known}")]
    Unknown {
        /// The operation.
        operation: Operation,
        /// What was asked for.
        name: String,
        /// What there is.
        known: String,
    },
    /// The variant exists but can not do this here.
    #[error("[kernels] {operation} = {name:?} can not serve: {reason}; these could: {able}")]
    Unable {
        /// The operation.
        operation: Operation,
        /// What was asked for.
        name: String,
        /// Why not.
        reason: String,
        /// What could.
        able: String,
    },
    /// Nothing registered can do it.
    #[error("no {operation} kernel can serve this model on device {device:?}: {reasons}")]
    None {
        /// The operation.
        operation: Operation,
        /// The backend.
        device: String,
        /// What hinders each variant of that backend.
        reasons: String,
    },
    /// Each could serve, but not with the others.
    #[error("[kernels] no set agrees on one cache layout{family}: {candidates}; name fewer of them")]
    Disagree {
        /// What else they had to agree on.
        family: &'static str,
        /// What could serve, per operation.
        candidates: String,
    },
}

/// One variant per operation, chosen at start-up.
#[derive(Clone, Copy)]
pub struct KernelSet {
    /// What the caches must look like.
    pub format: CacheFormat,
    /// For single query tokens.
    pub decode: &'static Variant,
    /// For many query tokens.
    pub prefill: &'static Variant,
    /// For new keys and values.
    pub cache_write: &'static Variant,
    /// For copy-on-write.
    pub block_copy: &'static Variant,
    /// For weights.
    pub linear: &'static Variant,
}

impl KernelSet {
    /// The chosen variants in the order of [`Operation::ALL`].
    pub fn all(&self) -> [&'static Variant; 5] {
        [self.decode, self.prefill, self.cache_write, self.block_copy, self.linear]
    }

    /// Attention of `args.seqs`, by the decode variant if each has one query row, else by the prefill variant.
    pub fn attention(&self, device: &dyn Device, args: AttentionArgs<'_>) -> Result<(), KernelError> {
        let starts = &args.batch.query_starts[args.seqs.start..=args.seqs.end];
        let decode = starts.windows(2).all(|pair| pair[1] - pair[0] == 1);
        if decode { self.decode } else { self.prefill }.attention(device, args)
    }

    /// Writes keys and values into their slots.
    pub fn cache_write(&self, device: &dyn Device, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
        self.cache_write.cache_write(device, args)
    }

    /// Copies blocks.
    pub fn block_copy(&self, device: &dyn Device, args: BlockCopyArgs<'_>) -> Result<(), KernelError> {
        self.block_copy.block_copy(device, args)
    }

    /// Multiplies with weights.
    pub fn linear(&self, device: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
        self.linear.linear(device, args)
    }
}

/// Loads the plug-ins that are named, and chooses one variant per operation.
///
/// # Errors
/// A plug-in that can not be taken, a name that does not exist or can not serve, alone or with the others, and an operation that nothing here does.
pub fn select(choice: &KernelChoice, needs: &Needs) -> Result<KernelSet, SelectError> {
    choice.plugin.iter().try_for_each(|plugin| plugin::load(&plugin.path))?;
    let candidates = |operation| candidates(operation, choice.name(operation), needs);
    let (format, [decode, prefill, cache_write, block_copy]) = share_a_cache(choice, needs)?;
    let linear = candidates(Operation::Linear)?[0];
    Ok(KernelSet { format, decode, prefill, cache_write, block_copy, linear })
}

/// The operations that work on one cache.
const ON_THE_CACHE: [Operation; 4] =
    [Operation::Decode, Operation::Prefill, Operation::CacheWrite, Operation::BlockCopy];

/// The part of [`select`] that must agree, in the order of [`ON_THE_CACHE`].
fn share_a_cache(choice: &KernelChoice, needs: &Needs) -> Result<(CacheFormat, [&'static Variant; 4]), SelectError> {
    let mut able: [Vec<&'static Variant>; 4] = Default::default();
    for (able, operation) in able.iter_mut().zip(ON_THE_CACHE) {
        *able = candidates(operation, choice.name(operation), needs)?;
    }
    for layout in Layout::ALL {
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
    let candidates: Vec<String> = ON_THE_CACHE
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

/// The variants that can serve, best first: at least one, and that one alone if it is named.
fn candidates(operation: Operation, name: &str, needs: &Needs) -> Result<Vec<&'static Variant>, SelectError> {
    let all = variants(operation);
    let able: Vec<&'static Variant> = all.iter().copied().filter(|v| needs.unmet(v).is_none()).collect();
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
