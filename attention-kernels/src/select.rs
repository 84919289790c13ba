//! From what a model needs and what the user asked for to one variant per operation.

use std::fmt::Write;

use device::Device;
use serde::Deserialize;

use crate::args::{AttentionArgs, BlockCopyArgs, CacheWriteArgs, KernelError, LinearArgs};
use crate::registry::{Kernel, Operation, Variant, variants};

/// The `[kernels]` table: per operation `"auto"` or the name of a variant.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
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
}

impl Default for KernelChoice {
    fn default() -> Self {
        let auto = || "auto".to_string();
        KernelChoice { decode: auto(), prefill: auto(), cache_write: auto(), block_copy: auto(), linear: auto() }
    }
}

impl KernelChoice {
    fn name(&self, operation: Operation) -> &str {
        match operation {
            Operation::Decode => &self.decode,
            Operation::Prefill => &self.prefill,
            Operation::CacheWrite => &self.cache_write,
            Operation::BlockCopy => &self.block_copy,
            Operation::Linear => &self.linear,
        }
    }
}

/// What a model asks of its kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Needs {
    /// Backend.
    pub device: String,
    /// Elements per head.
    pub head_dim: usize,
    /// Some layer has a sliding window.
    pub window: bool,
}

/// A name in `[kernels]` that does not exist, or a variant that can not serve.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectError {
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
    #[error("no {operation} kernel can serve this model on device {device:?}")]
    None {
        /// The operation.
        operation: Operation,
        /// The backend.
        device: String,
    },
}

/// One variant per operation, chosen at start-up.
#[derive(Clone, Copy)]
pub struct KernelSet {
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
        match if decode { self.decode.kernel } else { self.prefill.kernel } {
            Kernel::Attention(run) => run(device, args),
            _ => unreachable!("{WRONG_KIND}"),
        }
    }

    /// Writes keys and values into their slots.
    pub fn cache_write(&self, device: &dyn Device, args: CacheWriteArgs<'_>) -> Result<(), KernelError> {
        match self.cache_write.kernel {
            Kernel::CacheWrite(run) => run(device, args),
            _ => unreachable!("{WRONG_KIND}"),
        }
    }

    /// Copies blocks.
    pub fn block_copy(&self, device: &dyn Device, args: BlockCopyArgs<'_>) -> Result<(), KernelError> {
        match self.block_copy.kernel {
            Kernel::BlockCopy(run) => run(device, args),
            _ => unreachable!("{WRONG_KIND}"),
        }
    }

    /// Multiplies with weights.
    pub fn linear(&self, device: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
        match self.linear.kernel {
            Kernel::Linear(run) => run(device, args),
            _ => unreachable!("{WRONG_KIND}"),
        }
    }
}

const WRONG_KIND: &str = "select() takes only variants whose function fits their operation";

/// Chooses one variant per operation.
pub fn select(choice: &KernelChoice, needs: &Needs) -> Result<KernelSet, SelectError> {
    let pick = |operation| pick(operation, choice.name(operation), needs);
    Ok(KernelSet {
        decode: pick(Operation::Decode)?,
        prefill: pick(Operation::Prefill)?,
        cache_write: pick(Operation::CacheWrite)?,
        block_copy: pick(Operation::BlockCopy)?,
        linear: pick(Operation::Linear)?,
    })
}

fn pick(operation: Operation, name: &str, needs: &Needs) -> Result<&'static Variant, SelectError> {
    let all = variants(operation);
    let able: Vec<&'static Variant> = all.iter().copied().filter(|v| unable(v, needs).is_none()).collect();
    if name == "auto" {
        return able.first().copied().ok_or_else(|| SelectError::None { operation, device: needs.device.clone() });
    }
    let name = name.to_string();
    match all.iter().find(|v| v.name == name) {
        None => Err(SelectError::Unknown { operation, name, known: names(&all) }),
        Some(variant) => match unable(variant, needs) {
            Some(reason) => Err(SelectError::Unable { operation, name, reason, able: names(&able) }),
            None => Ok(variant),
        },
    }
}

/// Why a variant can not serve, if it can not.
fn unable(variant: &Variant, needs: &Needs) -> Option<String> {
    let can = &variant.capabilities;
    let attention = matches!(variant.operation, Operation::Decode | Operation::Prefill);
    let fits = match variant.kernel {
        Kernel::Attention(_) => attention,
        Kernel::CacheWrite(_) => variant.operation == Operation::CacheWrite,
        Kernel::BlockCopy(_) => variant.operation == Operation::BlockCopy,
        Kernel::Linear(_) => variant.operation == Operation::Linear,
    };
    if !fits {
        Some(format!("its function is not one for {}", variant.operation))
    } else if can.device != needs.device {
        Some(format!("it runs on {}, the device is {}", can.device, needs.device))
    } else if !can.isa.is_available() {
        Some(format!("this CPU has no {}", can.isa))
    } else if attention && needs.head_dim > can.max_head_dim {
        Some(format!("its heads have at most {} elements, the model's have {}", can.max_head_dim, needs.head_dim))
    } else if attention && needs.window && !can.window {
        Some("the model has sliding windows".to_string())
    } else {
        None
    }
}

fn names(variants: &[&Variant]) -> String {
    let names: Vec<&str> = variants.iter().map(|v| v.name).collect();
    if names.is_empty() { "none".to_string() } else { names.join(", ") }
}

/// The registry as a table: what each variant can do here, and which one was chosen and why.
pub fn describe(choice: &KernelChoice, needs: &Needs) -> Result<String, SelectError> {
    let chosen = select(choice, needs)?;
    let mut table = format!("{:<12} {:<15} {:<9} {:<37} {}\n", "operation", "variant", "chosen", "can", "here");
    for (operation, chosen) in Operation::ALL.into_iter().zip(chosen.all()) {
        for variant in variants(operation) {
            let can = &variant.capabilities;
            let mark = match (std::ptr::eq(variant, chosen), choice.name(operation)) {
                (false, _) => "",
                (true, "auto") => "auto",
                (true, _) => "by name",
            };
            let extras = [
                ("window", can.window),
                ("soft-cap", can.soft_cap),
                ("alibi", can.alibi),
                ("row-invariant", can.row_invariant),
            ];
            let extras: Vec<&str> = extras.into_iter().filter(|e| e.1).map(|e| e.0).collect();
            let here = unable(variant, needs).unwrap_or_else(|| "yes".to_string());
            let _ = writeln!(
                table,
                "{:<12} {:<15} {:<9} {:<37} {}",
                operation.key(),
                variant.name,
                mark,
                extras.join(" "),
                here
            );
        }
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn needs(device: &str, head_dim: usize) -> Needs {
        Needs { device: device.to_string(), head_dim, window: true }
    }

    #[test]
    fn what_a_variant_can_not_do_is_said_with_those_that_could() {
        let choice = KernelChoice { prefill: "cpu.portable".into(), ..Default::default() };
        let error = select(&choice, &needs("cpu", 1024)).err().unwrap();
        let message = error.to_string();
        assert!(message.contains("at most 512 elements, the model's have 1024"), "{message}");
        assert!(message.ends_with("these could: cpu.reference"), "{message}");
        let error = select(&choice, &needs("abacus", 64)).err().unwrap().to_string();
        assert!(error.contains("no decode kernel") && error.contains("abacus"), "{error}");
    }

    #[test]
    fn auto_takes_the_greatest_rank_that_can_serve() {
        let auto = KernelChoice::default();
        assert_eq!(select(&auto, &needs("cpu", 1024)).unwrap().decode.name, "cpu.reference");
        let best = variants(Operation::Decode).into_iter().find(|v| v.capabilities.isa.is_available()).unwrap();
        assert_eq!(select(&auto, &needs("cpu", 64)).unwrap().decode.name, best.name);
    }
}
