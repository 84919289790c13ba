//! Common claims about paged KV caches and continuous batching, compared with the model's results.
//!
//! No constant of the model was chosen to meet a claim. The table lists the batch sizes at which a claim holds.

use crate::BATCHES;
use crate::sim::Policy;
use crate::sim::cost::CostModel;
use crate::sim::measure::Run;
use crate::sim::trace::{Arrival, Lengths, generate};

const QUIRE: Policy = Policy::Quire { max_in_flight: 1 };

/// A result at each batch size.
struct Series {
    what: String,
    values: Vec<f64>,
    holds: fn(f64) -> bool,
    format: fn(f64) -> String,
}

impl Series {
    fn print(&self) {
        let cells: Vec<String> = self.values.iter().map(|v| (self.format)(*v)).collect();
        let met: Vec<String> =
            BATCHES.iter().zip(&self.values).filter(|(_, v)| (self.holds)(**v)).map(|(b, _)| b.to_string()).collect();
        let met = match met.len() {
            0 => "nowhere".into(),
            n if n == BATCHES.len() => "everywhere".into(),
            _ => met.join(" "),
        };
        println!("| {} | {} | {met} |", self.what, cells.join(" | "));
    }
}

/// Runs the sweeps and prints the table.
pub fn print(gpu: &CostModel, seed: u64) {
    println!("\nClaims and this model's results, with all requests at once, by batch limit\n");
    print!("| |");
    BATCHES.iter().for_each(|b| print!(" {b} |"));
    println!(" holds at |\n|---|{}---|", "---:|".repeat(BATCHES.len()));
    for lengths in [Lengths::ShareGpt, Lengths::Alpaca] {
        let trace = generate(lengths, 500, f64::INFINITY, seed);
        let runs = |policy: Policy| BATCHES.map(|batch| policy.run(&trace, gpu, batch));
        let (longest, oracle, contiguous, quire) =
            (runs(Policy::StaticMax), runs(Policy::Static), runs(Policy::Contiguous), runs(QUIRE));
        let name = lengths.name();
        share(format!("{name}: cache used by Quire, claimed 96.4 %"), &quire, Run::kv_utilisation, |v| v >= 0.964);
        share(
            format!("{name}: cache used with contiguous reservations, claimed 23 %"),
            &contiguous,
            Run::kv_utilisation,
            |v| v <= 0.235,
        );
        ratio(format!("{name}: Quire / static with max-length, claimed 2 to 4 x"), &quire, &longest, |v| {
            (2.0..=4.0).contains(&v)
        });
        ratio(format!("{name}: Quire / static with an oracle, claimed 2 to 4 x"), &quire, &oracle, |v| {
            (2.0..=4.0).contains(&v)
        });
    }
    let trace = generate(Lengths::Uniform, 100, f64::INFINITY, seed);
    let longest = trace.iter().map(|a| a.output).max().unwrap_or(0) as f64;
    let mean = trace.iter().map(|a| a.output).sum::<usize>() as f64 / trace.len() as f64;
    let flat = CostModel::flat(gpu.max_model_len);
    for (cost, setting) in [(gpu, "on this GPU"), (&flat, "with equal steps")] {
        uniform(&trace, cost, setting);
    }
    println!(
        "\nuniform-50-2000 has 100 requests; with equal steps the ratio is at most longest / mean = {:.2} x.",
        longest / mean
    );
    println!("\"Slots busy\" is the fraction of the batch's slots that compute a requested token.");
}

fn uniform(trace: &[Arrival], cost: &CostModel, setting: &str) {
    let [stat, quire] = [Policy::Static, QUIRE].map(|policy| BATCHES.map(|batch| policy.run(trace, cost, batch)));
    let name = Lengths::Uniform.name();
    ratio(format!("{name} {setting}: Quire / static, claimed 2.27 x"), &quire, &stat, |v| v >= 2.27);
    share(format!("{name} {setting}: slots busy, static, claimed 62 %"), &stat, Run::slots_busy, |v| v <= 0.625);
    share(format!("{name} {setting}: slots busy, Quire, claimed 99 %"), &quire, Run::slots_busy, |v| v >= 0.985);
}

fn share(what: String, runs: &[Run], of: fn(&Run) -> f64, holds: fn(f64) -> bool) {
    let values = runs.iter().map(of).collect();
    Series { what, values, holds, format: |v| format!("{:.1} %", 100.0 * v) }.print();
}

fn ratio(what: String, runs: &[Run], to: &[Run], holds: fn(f64) -> bool) {
    let values = runs.iter().zip(to).map(|(run, to)| run.throughput() / to.throughput()).collect();
    Series { what, values, holds, format: |v| format!("{v:.2} x") }.print();
}
