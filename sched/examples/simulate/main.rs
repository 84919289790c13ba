//! Replays a trace of requests against a cost model of a GPU, under static batching, continuous batching with
//! contiguous reservations, and Quire's scheduler. Prints tables and writes a chart.
//!
//! ```text
//! cargo run --release -p sched --example simulate -- [--trace sharegpt | alpaca | uniform-50-2000 | FILE.csv]
//!     [--requests 500] [--rate 2] [--batch 256] [--seed 1] [--svg simulate.svg]
//! ```
//!
//! `simulate fleet` simulates a fleet of replicas; `docs/fleet.md` has its results.
//!
//! A CSV file has a line `arrival seconds, prompt tokens, output tokens` per request. `sim` contains the model and
//! documents what it ignores.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod chart;
mod claims;
mod fleet;
mod sim;

use std::process::ExitCode;

use sim::Policy;
use sim::cost::CostModel;
use sim::measure::Run;
use sim::trace::{Arrival, Lengths, generate, parse_csv};

/// Batch sizes of the sweeps.
const BATCHES: [usize; 9] = [1, 2, 4, 8, 16, 32, 64, 128, 256];

struct Options {
    trace: String,
    requests: usize,
    rate: f64,
    batch: usize,
    seed: u64,
    svg: String,
}

impl Options {
    fn parse(args: impl Iterator<Item = String>) -> Result<Options, String> {
        let (trace, svg) = ("sharegpt".to_string(), "simulate.svg".to_string());
        let mut options = Options { trace, requests: 500, rate: 2.0, batch: 256, seed: 1, svg };
        let mut args = args.peekable();
        while let Some(flag) = args.next() {
            let value = args.next().ok_or(format!("{flag}: expected a value"))?;
            let number = |e: &dyn std::fmt::Display| format!("{flag} {value}: {e}");
            match flag.as_str() {
                "--trace" => options.trace = value,
                "--svg" => options.svg = value,
                "--requests" => options.requests = value.parse().map_err(|e| number(&e))?,
                "--rate" => options.rate = value.parse().map_err(|e| number(&e))?,
                "--batch" => options.batch = value.parse().map_err(|e| number(&e))?,
                "--seed" => options.seed = value.parse().map_err(|e| number(&e))?,
                _ => {
                    return Err(format!(
                        "unknown flag {flag}: expected --trace, --requests, --rate, --batch, --seed or --svg"
                    ));
                }
            }
        }
        let is_valid = options.requests > 0 && options.rate > 0.0 && options.batch > 0;
        if is_valid { Ok(options) } else { Err("--requests, --rate and --batch must be greater than 0".into()) }
    }

    fn trace(&self, cost: &CostModel) -> Result<Vec<Arrival>, String> {
        if let Some(lengths) = Lengths::ALL.into_iter().find(|l| l.name() == self.trace) {
            return Ok(generate(lengths, self.requests, self.rate, self.seed));
        }
        let text = std::fs::read_to_string(&self.trace).map_err(|e| {
            format!("--trace {}: {e}; expected a CSV file, sharegpt, alpaca or uniform-50-2000", self.trace)
        })?;
        parse_csv(&text, cost.max_model_len).map_err(|e| format!("--trace {}: {e}", self.trace))
    }
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1).peekable();
    let result = match args.next_if_eq("fleet") {
        Some(_) => fleet::report(args),
        None => Options::parse(args).and_then(|options| report(&options)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("simulate: {message}");
            ExitCode::from(2)
        }
    }
}

fn report(options: &Options) -> Result<(), String> {
    let cost = CostModel::opt_13b_on_a100();
    let trace = options.trace(&cost)?;
    println!(
        "{}: {:.0} GB/s, {:.0} TFLOP/s, {:.0} launches of {:.0} µs and {:.1} ms of host time per step,\n\
         {:.1} GB of weights, {:.0} KB of cache per token, a cache of {} tokens, contexts of {} tokens",
        cost.name,
        cost.bandwidth / 1e9,
        cost.peak / 1e12,
        cost.launches,
        cost.launch_seconds * 1e6,
        cost.host_seconds * 1e3,
        cost.weights / 1e9,
        cost.kv_bytes_per_token / 1024.0,
        cost.kv_capacity,
        cost.max_model_len,
    );
    let mean = |of: fn(&Arrival) -> usize| trace.iter().map(of).sum::<usize>() as f64 / trace.len() as f64;
    println!(
        "\nTrace {}: {} requests over {:.0} s, {:.0} input and {:.0} output tokens on average; at most {} sequences\n",
        options.trace,
        trace.len(),
        trace.last().map_or(0.0, |a| a.at),
        mean(|a| a.prompt),
        mean(|a| a.output),
        options.batch,
    );
    let runs = Policy::ALL.map(|policy| (policy, policy.run(&trace, &cost, options.batch)));
    print_runs(&runs);

    let at_once: Vec<Arrival> = trace.iter().map(|a| Arrival { at: 0.0, ..*a }).collect();
    let sweep = BATCHES.map(|batch| Policy::ALL.map(|policy| policy.run(&at_once, &cost, batch)));
    println!("\nThe same requests, all at once: output tokens per second by batch limit\n");
    print!("| batch |");
    Policy::ALL.iter().for_each(|p| print!(" {} |", p.name()));
    println!("\n|---:|{}", "---:|".repeat(Policy::ALL.len()));
    for (batch, runs) in BATCHES.iter().zip(&sweep) {
        print!("| {batch} |");
        runs.iter().for_each(|run| print!(" {:.0} ({}) |", run.throughput(), run.largest_batch));
        println!();
    }
    println!("\nIn brackets: the largest batch that fit into memory.");
    claims::print(&cost, options.seed);

    let svg = chart::draw(&options.trace, &cost, &BATCHES, &sweep);
    std::fs::write(&options.svg, svg).map_err(|e| format!("--svg {}: {e}", options.svg))?;
    println!("\nchart: {}", options.svg);
    Ok(())
}

fn print_runs(runs: &[(Policy, Run)]) {
    println!(
        "| | tokens/s | device busy | slots busy | queueing p50, p99 s | end to end p50, p99 s | KV used | KV wasted | batch | preempted |"
    );
    println!("|---|{}", "---:|".repeat(9));
    for (policy, run) in runs {
        let both = |seconds: &[f64]| format!("{:.1}, {:.1}", Run::quantile(seconds, 0.5), Run::quantile(seconds, 0.99));
        println!(
            "| {} | {:.0} | {:.1} % | {:.1} % | {} | {} | {:.1} % | {:.1} % | {} | {} |",
            policy.name(),
            run.throughput(),
            100.0 * run.device_busy(),
            100.0 * run.slots_busy(),
            both(&run.queueing),
            both(&run.end_to_end),
            100.0 * run.kv_utilisation(),
            100.0 * (1.0 - run.kv_utilisation()),
            run.largest_batch,
            run.preemptions,
        );
    }
}
