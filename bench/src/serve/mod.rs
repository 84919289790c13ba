//! `quire bench serve`: requests to any OpenAI server, and how long its answers took. Names and definitions are those of vLLM's
//! `vllm bench serve`.
//!
//! | file | what it owns |
//! |---|---|
//! | `dataset` | what is asked: random lengths, ShareGPT-like conversations, workload files |
//! | `load` | when: an open loop by a clock of its own, a closed loop by what is in flight |
//! | `talk` | one request: its times and its tokens |
//! | `measure` | what the times say: percentiles, throughput, goodput |
//! | `report` | table and JSON |
//! | `chart` | the SVG |
//!
//! In an open loop (a finite `--request-rate`) every time counts from when the request was *meant* to be sent. A server, or a client,
//! that falls behind so makes latencies longer instead of making the load lighter.

mod chart;
mod dataset;
mod load;
mod measure;
mod random;
mod report;
mod talk;

use std::io::{self, Write};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tokio::runtime::Builder;

use crate::Error;
use crate::client::Server;
use crate::results::Results;
use crate::values;
use measure::{Goal, Report};

/// Which API is spoken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Endpoint {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
}

/// `quire bench serve`.
#[derive(Debug, Args)]
pub struct ServeBenchArgs {
    /// Settings file: keys are flags without the dashes
    #[arg(long, value_name = "FILE", env = "QUIRE_CONFIG")]
    pub config: Option<PathBuf>,
    /// The server, without /v1
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub base_url: String,
    /// The model's name there [default: the first that the server lists]
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Key that the server wants
    #[arg(long, value_name = "KEY", value_parser = values::key, env = "QUIRE_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// completions or chat
    #[arg(long, value_enum, default_value = "completions")]
    pub endpoint: Endpoint,
    /// random, or a file: ShareGPT-like .json or .jsonl, or a workload with token ids
    #[arg(long, value_name = "NAME", default_value = "random")]
    pub dataset: String,
    /// Requests to send [default: 100, or all of a workload]
    #[arg(long, value_name = "N", value_parser = values::whole::<usize>)]
    pub num_prompts: Option<usize>,
    /// random: words of a prompt, or tokens where --random-vocab-size is given
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = values::whole::<usize>)]
    pub random_input_len: usize,
    /// random, and conversations without an answer: tokens of an answer
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = values::whole::<usize>)]
    pub random_output_len: usize,
    /// random: lengths differ by at most this share, 0 to 1
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    pub random_range_ratio: f64,
    /// random: prompts are token ids below this, for servers that take them
    #[arg(long, value_name = "N", value_parser = values::whole::<u32>)]
    pub random_vocab_size: Option<u32>,
    /// Requests a second, or inf: as fast as --max-concurrency allows
    #[arg(long, value_name = "RATE", default_value = "inf")]
    pub request_rate: f64,
    /// Shape of the gamma distribution of the pauses: 1 is a Poisson process, below is burstier
    #[arg(long, value_name = "SHAPE", default_value_t = 1.0)]
    pub burstiness: f64,
    /// Most requests in flight [default: no bound]
    #[arg(long, value_name = "N", value_parser = values::whole::<usize>)]
    pub max_concurrency: Option<usize>,
    /// Seed of lengths, prompts and pauses
    #[arg(long, default_value_t = 0, value_parser = values::whole::<u64>)]
    pub seed: u64,
    /// Ask the server to go on after the end-of-sequence token, so that every answer has its length
    #[arg(long)]
    pub ignore_eos: bool,
    /// Limits in ms that a request must keep to count, as ttft:200 tpot:50 e2el:2000 (itl: its longest pause)
    #[arg(long, value_name = "LIMITS", num_args = 1.., value_delimiter = ' ')]
    pub goodput: Vec<Goal>,
    /// Write all figures and every request to this file
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a chart to this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Sends the load, waits for all answers, reports.
pub fn run(args: &ServeBenchArgs) -> Result<(), Error> {
    check(args)?;
    let server = Server::new(&args.base_url, args.api_key.clone())
        .map_err(|problem| Error::Usage(format!("--base-url: {problem}")))?;
    let questions = dataset::read(args)?;
    let results = Results::open("--json", args.json.as_deref())?;
    let picture = Results::open("--svg", args.svg.as_deref())?;
    let arrivals = load::arrivals(questions.len(), args.request_rate, args.burstiness, args.seed);
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let (model, run) = runtime.block_on(async {
        let model = match &args.model {
            Some(name) => name.clone(),
            None => talk::first_model(&server).await.map_err(Error::Failed)?,
        };
        let asker = talk::Asker::new(server, &model, args.endpoint, args.ignore_eos);
        Ok::<_, Error>((model, load::run(asker, questions, arrivals, args.max_concurrency).await))
    })?;
    let report = Report::new(&run.records, run.seconds, &args.goodput);
    write!(io::stdout(), "{}", report::table(args, &model, &report))?;
    if let Some(mut results) = results {
        results.write(report::json(args, &model, &report, &run.records))?;
    }
    if let Some(mut picture) = picture {
        picture.write(chart::draw(&model, &report, &run.records))?;
    }
    match run.records.iter().find_map(|record| record.problem.as_ref()) {
        Some(problem) if report.completed == 0 => Err(Error::Failed(format!("no request was answered: {problem}"))),
        _ => Ok(()),
    }
}

fn check(args: &ServeBenchArgs) -> Result<(), Error> {
    let wrong = |flag: &str, found: f64, expected: &str| {
        Err(Error::Usage(format!("{flag}: found {found}, expected {expected}")))
    };
    if args.request_rate.is_nan() || args.request_rate <= 0.0 {
        return wrong("--request-rate", args.request_rate, "a number above 0, or inf");
    }
    if !(args.burstiness > 0.0 && args.burstiness.is_finite()) {
        return wrong("--burstiness", args.burstiness, "a number above 0");
    }
    if !(0.0..=1.0).contains(&args.random_range_ratio) {
        return wrong("--random-range-ratio", args.random_range_ratio, "a number from 0 to 1");
    }
    if args.max_concurrency == Some(0) {
        return wrong("--max-concurrency", 0.0, "at least 1");
    }
    Ok(())
}
