//! The registry as text: all variants, which can serve, and which were selected.

use std::fmt;

use serde::Serialize;

use crate::format::Dtype;
use crate::needs::{Needs, list};
use crate::registry::variants;
use crate::select::{KernelChoice, SelectError, select};
use crate::variant::{Latents, Operation, Variant};

/// Width of the table in columns.
const WIDTH: usize = 100;

/// The registry for one model, device and choice. `Display` prints a table of at most 100 columns.
#[derive(Clone, Debug, Serialize)]
pub struct Description {
    /// Element types and layout of the caches.
    pub caches: String,
    /// All variants by operation, in the order in which `auto` tries them.
    pub variants: Vec<Described>,
}

/// One variant of the registry.
#[derive(Clone, Debug, Serialize)]
pub struct Described {
    /// Key of its operation in the `[kernels]` table.
    pub operation: &'static str,
    /// Name.
    pub variant: &'static str,
    /// How it was selected, `auto` or `by name`; `None` if it was not.
    pub chosen: Option<&'static str>,
    /// Why it cannot serve here; `None` if it can.
    pub unmet: Option<String>,
    /// All its capabilities.
    pub can: Vec<String>,
}

/// Returns a description of the registry.
///
/// # Errors
/// As for [`select`].
pub fn describe(choice: &KernelChoice, needs: &Needs) -> Result<Description, SelectError> {
    let chosen = select(choice, needs)?;
    let of = |(operation, chosen): (Operation, &Variant)| {
        let by = if choice.name(operation) == "auto" { "auto" } else { "by name" };
        let described = |variant: &&'static Variant| Described {
            operation: operation.key(),
            variant: variant.name,
            chosen: std::ptr::eq(*variant, chosen).then_some(by),
            unmet: needs.unmet(variant),
            can: abilities(variant),
        };
        variants(operation).iter().map(described).collect::<Vec<_>>()
    };
    let variants = Operation::ALL.into_iter().zip(chosen.all()).flat_map(of).collect();
    Ok(Description { caches: chosen.format.to_string(), variants })
}

impl Description {
    /// Returns the table with the capabilities of each variant.
    pub fn verbose(&self) -> String {
        self.table(true)
    }

    fn table(&self, verbose: bool) -> String {
        let mut lines = vec![format!("caches: {}", self.caches)];
        for of_operation in self.variants.chunk_by(|a, b| a.operation == b.operation) {
            lines.push(format!("\n{}", of_operation[0].operation));
            for variant in of_operation {
                let here = match (variant.chosen, &variant.unmet) {
                    (Some(by), _) => format!("chosen ({by})"),
                    (None, None) => "can serve".to_string(),
                    (None, Some(why)) => format!("cannot serve: {why}"),
                };
                wrap(&mut lines, &format!("  {:<24} ", variant.variant), here.split(' '));
                if verbose {
                    wrap(&mut lines, "      ", variant.can.iter().map(String::as_str));
                }
            }
        }
        if verbose {
            lines.push("\nwithout a choice".into());
            WITHOUT_A_CHOICE.iter().for_each(|line| wrap(&mut lines, "  ", line.split(' ')));
        }
        let chosen = self.variants.iter().filter(|variant| variant.chosen.is_some());
        let chosen: Vec<String> = chosen.map(|it| format!("{} {}", it.operation, it.variant)).collect();
        lines.push(String::new());
        wrap(&mut lines, "chosen: ", chosen.join(", ").split(' '));
        lines.push(
            "To choose another: a [kernels] table in the file of --config, such as decode = \"cpu.portable\"".into(),
        );
        lines.join("\n")
    }
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.table(false))
    }
}

/// Operations on caches that have only one implementation.
const WITHOUT_A_CHOICE: [&str; 2] = [
    "swap_blocks: to page-locked memory and back on the copy queue, on every device, type and layout",
    "convert_fp8: a whole cache from f32, f16, bf16 to fp8_e4m3, fp8_e5m2, int8 and back, on cuda and cuda-sim",
];

/// Appends `begin` and words, wrapped into lines with the indentation of `begin`.
fn wrap<'a>(lines: &mut Vec<String>, begin: &str, words: impl Iterator<Item = &'a str>) {
    let indent = " ".repeat(begin.len());
    let (mut line, mut is_empty) = (begin.to_string(), true);
    for word in words {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > WIDTH {
            lines.push(std::mem::replace(&mut line, indent.clone()));
            is_empty = true;
        }
        line += if is_empty { "" } else { " " };
        line += word;
        is_empty = false;
    }
    lines.push(line.trim_end().to_string());
}

/// Returns all capabilities of a variant.
fn abilities(variant: &Variant) -> Vec<String> {
    let can = &variant.capabilities;
    let mut words = vec![list(can.dtypes)];
    if can.arithmetic.rounds() {
        words.push(format!("rounds to {}, sums in {}", Dtype::Bf16, can.arithmetic));
    }
    if variant.operation.is_on_caches() {
        words.push(format!("kv={}", list(can.kv_dtypes)));
        words.push(format!("heads={}", can.head_sizes));
        words.push(format!("blocks={}", can.block_sizes));
        words.push(list(can.layouts));
    }
    if can.compute_capability > (0, 0) {
        let relation = if can.exact_compute_capability { "=" } else { ">=" };
        words.push(format!("sm{relation}{}.{}", can.compute_capability.0, can.compute_capability.1));
    }
    if variant.operation.is_attention() && can.max_query_len != usize::MAX {
        words.push(format!("rows<={}", can.max_query_len));
    }
    let extras = [
        ("window", can.window),
        ("block-sparse", can.block_sparse),
        ("soft-cap", can.soft_cap),
        ("alibi", can.alibi),
        ("sinks", can.sinks),
        ("lse", can.lse),
        ("latent", can.latent != Latents::None),
        ("row-invariant", can.row_invariant.is_some()),
        ("unproven", !can.proven),
    ];
    words.extend(extras.into_iter().filter(|extra| extra.1).map(|extra| extra.0.to_string()));
    words
}
