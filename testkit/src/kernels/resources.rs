//! What each kernel needs on each architecture, read from what ptxas says with `-v`, and held to the manifest's limits.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::manifest::Limits;

/// A kernel and its needs.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Unmangled.
    pub name: String,
    /// The source that it stands in, or the shard.
    pub unit: String,
    /// What its manifest allows.
    pub limits: Limits,
    /// By architecture: `"sm_80"`.
    pub needs: BTreeMap<String, Needs>,
}

/// What ptxas counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Of each thread.
    pub registers: u32,
    /// Static shared memory of a block, in bytes.
    pub shared_bytes: u32,
    /// Stack of a thread, in bytes: arrays in local memory, and spills.
    pub stack_bytes: u32,
    /// Spilled registers of a thread in bytes, stores and loads together.
    pub spill_bytes: u32,
}

/// The kernels of one compiler run.
pub fn kernels(log: &str, unit: &str, limits: Limits) -> Vec<Kernel> {
    let mut kernels: BTreeMap<&str, BTreeMap<String, Needs>> = BTreeMap::new();
    let mut current: Option<&mut Needs> = None;
    for line in log.lines() {
        if let Some((_, entry)) = line.split_once("Compiling entry function '") {
            let mut parts = entry.split('\'');
            let (name, architecture) = (parts.next().unwrap_or_default(), parts.nth(1).unwrap_or_default());
            current = Some(kernels.entry(name).or_default().entry(architecture.to_owned()).or_default());
        } else if let Some(needs) = &mut current {
            if line.contains("Used ") {
                needs.registers = before(line, " registers");
                needs.shared_bytes = before(line, " bytes smem");
            } else if line.contains("bytes stack frame") {
                needs.stack_bytes = before(line, " bytes stack frame");
                needs.spill_bytes = before(line, " bytes spill stores") + before(line, " bytes spill loads");
            }
        }
    }
    let kernel = |(name, needs): (&str, _)| Kernel { name: name.into(), unit: unit.into(), limits, needs };
    kernels.into_iter().map(kernel).collect()
}

/// The number before a word, 0 if the line lacks the word.
fn before(line: &str, word: &str) -> u32 {
    let text = line.split_once(word).map_or("", |(before, _)| before);
    text.rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

/// 90 for `sm_90a`: the order of architectures.
fn number(architecture: &str) -> u32 {
    let digits: String = architecture.chars().filter(char::is_ascii_digit).collect();
    digits.parse().unwrap_or(0)
}

/// One line for each kernel: registers on each architecture, and the most of everything else.
pub fn table(kernels: &[Kernel]) -> String {
    let mut text = String::new();
    let width = kernels.iter().map(|kernel| kernel.name.len()).max().unwrap_or(0).max("kernel".len());
    let mut line = |name: &str, shared: &str, stack: &str, spills: &str, registers: &str| {
        // Writing to a String can not fail.
        let _ = writeln!(text, "{name:width$} {shared:>8} {stack:>7} {spills:>7}  {registers}");
    };
    line("kernel", "shared B", "stack B", "spill B", "registers");
    for kernel in kernels {
        let most = |need: fn(&Needs) -> u32| kernel.needs.values().map(need).max().unwrap_or(0).to_string();
        let mut needs: Vec<_> = kernel.needs.iter().collect();
        needs.sort_by_key(|(name, _)| number(name));
        let registers = needs.iter().map(|(name, needs)| format!("{name} {}", needs.registers));
        let registers = registers.collect::<Vec<_>>().join(", ");
        line(&kernel.name, &most(|n| n.shared_bytes), &most(|n| n.stack_bytes), &most(|n| n.spill_bytes), &registers);
    }
    text
}

/// Holds every kernel to its limits.
///
/// # Errors
/// Each kernel that needs more, one line each.
pub fn within_limits(kernels: &[Kernel]) -> Result<(), String> {
    let mut over = Vec::new();
    for kernel in kernels {
        let Limits { spill_bytes, registers } = kernel.limits;
        for (architecture, needs) in &kernel.needs {
            let mut hold = |what: &str, key: &str, found: u32, limit: u32| {
                if found > limit {
                    over.push(format!(
                        "{} ({}) {what} {found} on {architecture}, the limit is {limit}: mend it, or raise {key} in kernels.toml",
                        kernel.name, kernel.unit
                    ));
                }
            };
            hold("spills bytes:", "max_spill_bytes", needs.spill_bytes, spill_bytes);
            hold("needs registers:", "max_registers", needs.registers, registers);
        }
    }
    if over.is_empty() { Ok(()) } else { Err(over.join("\n")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'scale' for 'sm_80'
ptxas info    : Function properties for scale
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes stack frame, 528 bytes smem, 380 bytes cmem[0]
ptxas info    : Compiling entry function 'scale' for 'sm_100'
ptxas info    : Function properties for scale
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
";

    #[test]
    fn needs_are_read_for_each_architecture_and_held_to_the_limits() {
        let limits = Limits { spill_bytes: 19, registers: 39 };
        let found = kernels(LOG, "a", limits);
        let expected = Needs { registers: 40, shared_bytes: 528, stack_bytes: 16, spill_bytes: 20 };
        assert_eq!(found[0].needs["sm_80"], expected);
        assert_eq!(found[0].needs["sm_100"], Needs { registers: 32, ..Needs::default() });
        let problem = within_limits(&found).unwrap_err();
        assert_eq!(problem.lines().count(), 2, "{problem}");
        assert!(problem.contains("scale (a) spills bytes: 20 on sm_80, the limit is 19"), "{problem}");
        assert!(problem.contains("needs registers: 40 on sm_80, the limit is 39"), "{problem}");
        let generous = kernels(LOG, "a", Limits { spill_bytes: 20, registers: 40 });
        assert_eq!(within_limits(&generous), Ok(()));
    }

    #[test]
    fn the_table_has_a_line_for_each_kernel() {
        let table = table(&kernels(LOG, "a", Limits { spill_bytes: 0, registers: 255 }));
        let line = table.lines().nth(1).unwrap_or_default();
        assert_eq!(line.split_whitespace().collect::<Vec<_>>().join(" "), "scale 528 16 20 sm_80 40, sm_100 32");
    }
}
