//! The records of a [`device::Profile`] as a table, and as a trace for `chrome://tracing` and Perfetto.
//!
//! For each operation and phase the table shows its own time, without that of operations within it, so the rows of a track add up
//! to the time of the steps. The remaining time of a device is shown as the row `idle`.

mod trace;

use std::fmt::{self, Write};
use std::time::Duration;

use attention_kernels::{Dtype, Operation, variants};
use device::profile::{ExpertCounts, Recorded, Total, Track};
use trial::Peaks;

pub use trace::trace;

/// Peak rates of a device, for comparison; `None` if unknown.
#[derive(Clone, Copy, Debug, Default)]
pub struct Best {
    /// Bytes per second from memory.
    pub bytes: Option<f64>,
    /// Multiplications and additions per second.
    pub operations: Option<f64>,
    /// The same for variants that round to bfloat16.
    pub rounded: Option<f64>,
}

impl Best {
    /// Selects from measured peaks. `quantized` says that products are of 8-bit integers.
    pub fn of(peaks: &Peaks, quantized: bool) -> Best {
        let of = |dtype| peaks.operations(dtype, quantized);
        Best { bytes: peaks.read, operations: of(Dtype::F32).or(of(Dtype::Bf16)), rounded: of(Dtype::Bf16) }
    }

    /// Lower bound of the time of a row in seconds; `None` if its cost or the device's peak is unknown.
    fn seconds(&self, row: &TableRow) -> Option<f64> {
        let least = |amount: u64, rate: Option<f64>| (amount > 0).then(|| rate.map(|rate| amount as f64 / rate))?;
        let (rate, cost) = (if row.rounds { self.rounded } else { self.operations }, &row.total.cost);
        let (bytes, operations) = (least(cost.bytes, self.bytes), least(cost.operations, rate));
        bytes.into_iter().chain(operations).reduce(f64::max)
    }
}

/// A line of the table.
struct TableRow {
    track: Track,
    name: String,
    /// Whether its variant rounds to bfloat16.
    rounds: bool,
    total: Total,
}

/// Formats the table, on each track by descending time. The text has no final line break.
pub fn table(recorded: &Recorded, best: &Best) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write_table(&mut text, recorded, best);
    text
}

fn write_table(out: &mut String, recorded: &Recorded, best: &Best) -> fmt::Result {
    let rows = rows(recorded);
    let whole = whole(recorded);
    writeln!(
        out,
        "profile of {} steps, {:.3} s; times exclude nested operations",
        recorded.steps,
        whole.as_secs_f64()
    )?;
    let width = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0);
    write!(out, "{:width$}  {:>9} {:>11} {:>11} {:>7}", "", "calls", "total ms", "mean us", "share")?;
    write!(out, " {:>9} {:>9} {:>12}", "GB/s", "GOP/s", "of roofline")?;
    for (track, title) in [(Track::Host, "host"), (Track::Compute, "device"), (Track::Copy, "copies beside")] {
        if !rows.iter().any(|row| row.track == track && row.total.calls > 0) {
            continue;
        }
        write!(out, "\n{title}")?;
        for row in rows.iter().filter(|row| row.track == track) {
            let TableRow { name, total: Total { calls, own, cost, .. }, .. } = row;
            let (calls, seconds) = (*calls, own.as_secs_f64());
            let share = 100.0 * seconds / whole.as_secs_f64().max(f64::MIN_POSITIVE);
            write!(out, "\n{name:width$}  ")?;
            match calls {
                0 => write!(out, "{:>9} {:>11.3} {:>11}", "", seconds * 1e3, "")?,
                calls => write!(out, "{calls:>9} {:>11.3} {:>11.2}", seconds * 1e3, seconds * 1e6 / calls as f64)?,
            }
            write!(out, " {share:>5.1} %")?;
            let rate = |amount: u64| match amount {
                0 => String::new(),
                amount => format!("{:.1}", amount as f64 / seconds.max(1e-9) / 1e9),
            };
            let bound =
                best.seconds(row).map_or(String::new(), |least| format!("{:.0} %", 100.0 * least / seconds.max(1e-9)));
            let cells = format!(" {:>9} {:>9} {bound:>12}", rate(cost.bytes), rate(cost.operations));
            out.push_str(cells.trim_end());
        }
    }
    write_experts(out, &recorded.experts)?;
    if recorded.lost > 0 {
        write!(out, "\n{} spans have no time: the device failed", recorded.lost)?;
    }
    Ok(())
}

/// Greatest number of experts whose rows are listed.
const MAX_EXPERTS: usize = 64;

fn write_experts(out: &mut String, counts: &ExpertCounts) -> fmt::Result {
    let mut sorted = counts.rows.clone();
    sorted.sort_unstable();
    let (Some(least), Some(most)) = (sorted.first(), sorted.last()) else { return Ok(()) };
    let touched = counts.touched as f64 / counts.calls.max(1) as f64;
    write!(out, "\ntokens per expert, all layers: least {least}, median {}, most {most}", sorted[sorted.len() / 2])?;
    write!(out, "; experts with tokens per layer and step: {touched:.1}")?;
    if counts.rows.len() <= MAX_EXPERTS {
        let rows: Vec<String> = counts.rows.iter().map(ToString::to_string).collect();
        write!(out, "\n  by expert: {}", rows.join(" "))?;
    }
    Ok(())
}

/// Total time of all steps.
fn whole(recorded: &Recorded) -> Duration {
    let steps = recorded.totals.iter().filter(|(name, _)| name.track == Track::Host && name.operation == "step");
    steps.map(|(_, total)| total.time).sum()
}

/// The totals by name and the idle time of each track, by descending time.
fn rows(recorded: &Recorded) -> Vec<TableRow> {
    let mut rows = Vec::new();
    for (name, total) in &recorded.totals {
        let text = match (name.track, name.operation) {
            (Track::Host, "step") => "  rest of the step".to_string(),
            _ => format!("  {:<11} {}", name.operation, name.variant).trim_end().to_string(),
        };
        let operation = Operation::ALL.into_iter().find(|operation| operation.key() == name.operation);
        let rounds = operation
            .into_iter()
            .flat_map(variants)
            .any(|variant| variant.name == name.variant && variant.capabilities.arithmetic.rounds());
        rows.push(TableRow { track: name.track, name: text, rounds, total: *total });
    }
    for track in [Track::Compute, Track::Copy] {
        let busy: Duration = rows.iter().filter(|row| row.track == track).map(|row| row.total.own).sum();
        let own = whole(recorded).saturating_sub(busy);
        rows.push(TableRow {
            track,
            name: "  idle".to_string(),
            rounds: false,
            total: Total { own, ..Total::default() },
        });
    }
    rows.sort_by_key(|row| (row.track, std::cmp::Reverse(row.total.own)));
    rows
}
