//! Resources of each kernel on each architecture, read from the messages of `ptxas -v` and checked against the manifest's limits.

use std::collections::BTreeMap;
use std::fmt::Write;

use super::manifest::Limits;

/// A kernel and its resources.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Unmangled name.
    pub name: String,
    /// The source or shard that defines it.
    pub unit: String,
    /// Limits of its manifest.
    pub limits: Limits,
    /// By architecture: `"sm_80"`.
    pub needs: BTreeMap<String, Needs>,
}

/// Resources that ptxas counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Registers per thread.
    pub registers: u32,
    /// Static shared memory per block, in bytes.
    pub shared_bytes: u32,
    /// Stack per thread, in bytes: arrays in local memory, and spills.
    pub stack_bytes: u32,
    /// Spilled registers per thread in bytes, stores and loads together.
    pub spill_bytes: u32,
}

/// Returns the kernels of one compiler run.
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

/// Checks that ptxas has kept the pipelines of a source: its messages from C7500 to C7599 say that `setmaxnreg` is ignored (C7508), that
/// `wgmma` products wait for each other (C7510 to C7516), or that a wait was inserted between them (C7517). They are no warnings to ptxas,
/// and the code is right but slow.
///
/// # Errors
/// The messages, each on a line with the source.
pub fn keeps_pipelines(log: &str, unit: &str) -> Result<(), String> {
    let message = |line: &str| line.find("(C75").map(|at| line[at..].to_owned());
    let lost: Vec<String> = log
        .lines()
        .filter_map(message)
        .map(|message| format!("{unit}: ptxas gives up a pipeline: {message}; mend the source"))
        .collect();
    if lost.is_empty() { Ok(()) } else { Err(lost.join("\n")) }
}

/// Returns the number before a word, or 0 if the line lacks the word.
fn before(line: &str, word: &str) -> u32 {
    let text = line.split_once(word).map_or("", |(before, _)| before);
    text.rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok()).unwrap_or(0)
}

/// Returns 90 for `sm_90a`: the order of architectures.
fn number(architecture: &str) -> u32 {
    let digits: String = architecture.chars().filter(char::is_ascii_digit).collect();
    digits.parse().unwrap_or(0)
}

/// Returns a table with one line per kernel: registers on each architecture, and the maximum of all other resources.
pub fn table(kernels: &[Kernel]) -> String {
    let mut text = String::new();
    let width = kernels.iter().map(|kernel| kernel.name.len()).max().unwrap_or(0).max("kernel".len());
    let mut line = |name: &str, shared: &str, stack: &str, spills: &str, registers: &str| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:width$} {shared:>8} {stack:>7} {spills:>7}  {registers}");
    };
    line("kernel", "shared B", "stack B", "spill B", "registers");
    for kernel in kernels {
        let most = |need: fn(&Needs) -> u32| kernel.needs.values().map(need).max().unwrap_or(0).to_string();
        let mut needs: Vec<_> = kernel.needs.iter().collect();
        needs.sort_by_key(|(name, _)| number(name));
        let registers: Vec<_> = needs.iter().map(|(name, needs)| format!("{name} {}", needs.registers)).collect();
        let (shared, stack, spills) = (most(|n| n.shared_bytes), most(|n| n.stack_bytes), most(|n| n.spill_bytes));
        line(&kernel.name, &shared, &stack, &spills, &registers.join(", "));
    }
    text
}

/// Returns a line per kernel and architecture, as `device::Resources` reads it:
///
/// ```text
/// kernel <tab> architecture <tab> registers <tab> bytes of static shared memory <tab> of stack <tab> of spills
/// ```
pub fn lines(kernels: &[Kernel]) -> String {
    let mut text = String::new();
    for (kernel, (architecture, needs)) in
        kernels.iter().flat_map(|kernel| kernel.needs.iter().map(move |it| (kernel, it)))
    {
        let Needs { registers, shared_bytes, stack_bytes, spill_bytes } = needs;
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{}\t{architecture}\t{registers}\t{shared_bytes}\t{stack_bytes}\t{spill_bytes}",
            kernel.name
        );
    }
    text
}

/// Checks every kernel against its limits.
///
/// # Errors
/// The kernels above a limit, or with other registers than they need, one per line.
pub fn within_limits(kernels: &[Kernel]) -> Result<(), String> {
    let mut over = Vec::new();
    for kernel in kernels {
        let limits = kernel.limits;
        for (architecture, needs) in &kernel.needs {
            for (what, key, found, limit) in [
                ("bytes of spilled registers", "max_spill_bytes", needs.spill_bytes, limits.spill_bytes),
                ("registers", "max_registers", needs.registers, limits.registers),
            ] {
                if found > limit {
                    over.push(format!(
                        "{} ({}): found {found} {what} on {architecture}, expected at most {limit}; reduce them, or raise {key} in kernels.toml",
                        kernel.name, kernel.unit
                    ));
                }
            }
            if let Some(exact) = limits.entry_registers.filter(|exact| *exact != needs.registers) {
                over.push(format!(
                    "{} ({}): found {} registers at entry on {architecture}, expected exactly {exact}: its warps exchange registers (setmaxnreg) and wait for ever if ptxas assigns fewer; correct the launch bounds or the exchange in the source, and entry_registers in kernels.toml",
                    kernel.name, kernel.unit, needs.registers
                ));
            }
        }
    }
    if over.is_empty() { Ok(()) } else { Err(over.join("\n")) }
}
