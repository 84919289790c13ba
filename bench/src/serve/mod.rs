//! `quire bench serve`: sends requests to any OpenAI server and measures latencies and throughput. Names and definitions are those of
//! `vllm bench serve`.
//!
//! | module | what it owns |
//! |---|---|
//! | [`dataset`] | prompts: random lengths, ShareGPT-like conversations, workload files |
//! | [`load`] | times of requests: an open loop with its own clock, or a closed loop of bounded concurrency |
//! | [`request`] | one request: its times and tokens |
//! | [`measure`] | figures: percentiles, throughput, goodput |
//! | [`report`] | table and JSON |
//! | [`chart`] | SVG |
//!
//! In an open loop (a finite `--request-rate`) latencies are measured from the *scheduled* time of a request. If the server or this
//! client falls behind, latencies grow; the load does not shrink.

pub mod chart;
pub mod dataset;
pub mod load;
pub mod measure;
pub mod report;
pub mod request;

use std::io::{self, Write};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use tokio::runtime::Builder;

use crate::client::Server;
use crate::results::Results;
use crate::{Error, values};
use measure::{Goal, Report};

/// API that receives the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Endpoint {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
}

/// Flags of `quire bench serve`.
#[derive(Debug, Args)]
pub struct ServeBenchArgs {
    /// Settings file; its keys are flags without the leading dashes
    #[arg(long, value_name = "FILE", env = "QUIRE_CONFIG")]
    pub config: Option<PathBuf>,
    /// Address of the server, without /v1
    #[arg(long, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub base_url: String,
    /// Name of the model on the server [default: the first one that it lists]
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// API key for the server
    #[arg(long, value_name = "KEY", value_parser = values::key, env = "QUIRE_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// API to call: completions or chat
    #[arg(long, value_enum, default_value = "completions")]
    pub endpoint: Endpoint,
    /// Prompts: random, or a file (ShareGPT-like .json or .jsonl, or a workload with token ids)
    ///
    /// ShareGPT-like records have `conversations`, `messages` or `prompt`; a workload has `requests` with token ids in
    /// `prompt` and `output_len`. The second name is vLLM's.
    #[arg(long, visible_alias = "dataset-name", value_name = "NAME", default_value = "random")]
    pub dataset: String,
    /// Number of requests [default: 100, or all of a workload]
    ///
    /// A dataset with fewer records is repeated from its beginning.
    #[arg(long, value_name = "N", value_parser = values::whole::<usize>)]
    pub num_prompts: Option<usize>,
    /// Words per random prompt, or tokens if --random-vocab-size is set
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = values::whole::<usize>)]
    pub random_input_len: usize,
    /// Tokens to generate for random prompts and for conversations without an answer
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = values::whole::<usize>)]
    pub random_output_len: usize,
    /// Greatest relative deviation of random lengths, 0 to 1
    #[arg(long, value_name = "RATIO", default_value_t = 0.0)]
    pub random_range_ratio: f64,
    /// Make random prompts of token ids below this number, for servers that accept token ids
    #[arg(long, value_name = "N", value_parser = values::whole::<u32>)]
    pub random_vocab_size: Option<u32>,
    /// Requests per second; inf sends as fast as --max-concurrency allows
    ///
    /// A number is an open loop, in which every latency counts from the time at which the request was scheduled; `inf` is a
    /// closed loop.
    #[arg(long, value_name = "RATE", default_value = "inf")]
    pub request_rate: f64,
    /// Shape of the gamma-distributed intervals: 1 is a Poisson process, less is burstier
    #[arg(long, value_name = "SHAPE", default_value_t = 1.0)]
    pub burstiness: f64,
    /// Maximum number of requests in flight [default: no limit]
    ///
    /// In an open loop the time that a request waits for this limit counts towards its latency.
    #[arg(long, value_name = "N", value_parser = values::whole::<usize>)]
    pub max_concurrency: Option<usize>,
    /// Seed of random lengths, prompts and intervals
    #[arg(long, default_value_t = 0, value_parser = values::whole::<u64>)]
    pub seed: u64,
    /// Ask the server to ignore the end-of-sequence token, so that every answer has its full length
    #[arg(long)]
    pub ignore_eos: bool,
    /// Report goodput: requests per second that meet these limits in ms, such as ttft:200 tpot:50 e2el:2000
    /// (itl: the longest interval of a request)
    #[arg(long, value_name = "LIMITS", num_args = 1.., value_delimiter = ' ')]
    pub goodput: Vec<Goal>,
    /// Write all figures and requests to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a chart to this file as SVG
    ///
    /// It has times to the first token, intervals between tokens, and throughput over the run.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

/// Generates the load, waits for all answers and reports the figures.
///
/// # Errors
/// An invalid flag, a file that cannot be read or written, or no request was answered.
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
            None => request::first_model(&server).await.map_err(Error::Failed)?,
        };
        let sender = request::Sender::new(server, &model, args.endpoint, args.ignore_eos);
        Ok::<_, Error>((model, load::run(sender, questions, arrivals, args.max_concurrency).await))
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
