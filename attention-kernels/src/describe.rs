//! The registry as a table for people.

use std::fmt::Write;

use crate::needs::{Needs, list};
use crate::registry::{Operation, Variant, variants};
use crate::select::{KernelChoice, SelectError, select};

/// The registry as a table: what each variant can do, whether it can serve here, and which one was chosen and why.
///
/// # Errors
/// Those of [`select`].
pub fn describe(choice: &KernelChoice, needs: &Needs) -> Result<String, SelectError> {
    let chosen = select(choice, needs)?;
    let mut rows = vec![["operation", "variant", "chosen", "can", "here"].map(str::to_string)];
    for (operation, chosen) in Operation::ALL.into_iter().zip(chosen.all()) {
        for variant in variants(operation) {
            let mark = match (std::ptr::eq(variant, chosen), choice.name(operation)) {
                (false, _) => "",
                (true, "auto") => "auto",
                (true, _) => "by name",
            };
            let here = needs.unmet(variant).unwrap_or_else(|| "yes".to_string());
            rows.push([operation.key().into(), variant.name.into(), mark.into(), abilities(variant), here]);
        }
    }
    let widths: [usize; 5] = std::array::from_fn(|i| rows.iter().map(|row| row[i].len()).max().unwrap_or(0));
    let mut table = format!("caches: {}\n", chosen.format);
    for row in rows {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        let _ = writeln!(table, "{}", cells.join(" ").trim_end());
    }
    for line in WITHOUT_A_CHOICE {
        let _ = writeln!(table, "without a choice: {line}");
    }
    Ok(table)
}

/// What moves or converts caches and has one way to do it.
const WITHOUT_A_CHOICE: [&str; 2] = [
    "swap_blocks, to page-locked memory and back on the copy queue: every device, type and layout",
    "convert_fp8, a whole cache from f32, f16, bf16 to fp8_e4m3, fp8_e5m2, int8 and back: cuda, cuda-sim",
];

/// Everything that a variant claims, in one line.
fn abilities(variant: &Variant) -> String {
    let can = &variant.capabilities;
    let mut words = vec![list(can.dtypes)];
    if variant.operation != Operation::Linear {
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
        ("soft-cap", can.soft_cap),
        ("alibi", can.alibi),
        ("lse", can.lse),
        ("row-invariant", can.row_invariant.is_some()),
        ("unproven", !can.proven),
    ];
    words.extend(extras.into_iter().filter(|extra| extra.1).map(|extra| extra.0.to_string()));
    words.join(" ")
}
