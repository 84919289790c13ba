//! `quire bench serve`: sends requests to any OpenAI server and measures latencies and throughput. Names and definitions are those of
//! `vllm bench serve`.
//!
//! | module | what it owns |
//! |---|---|
//! | [`flags`] | flags and parsers of their values |
//! | [`dataset`] | prompts: random lengths, ShareGPT-like conversations, sonnets, workload files |
//! | [`load`] | times of requests: an open loop with its own clock, or a closed loop of bounded concurrency |
//! | [`request`] | one request: its times and tokens |
//! | [`measure`] | figures: percentiles, throughput, goodput |
//! | [`report`], [`saved`] | table and JSON; the JSON of vLLM |
//! | [`chart`] | SVG |
//!
//! In an open loop (a finite `--request-rate`) latencies are measured from the *scheduled* time of a request. If the server or this
//! client falls behind, latencies grow; the load does not shrink.

pub mod chart;
pub mod dataset;
pub mod flags;
pub mod load;
pub mod measure;
pub mod report;
pub mod request;
pub mod saved;

use std::io::{self, Write};
use std::time::Instant;

use tokio::runtime::Builder;

use crate::Error;
use crate::client::Server;
use crate::results::Results;
pub use flags::{Endpoint, ServeBenchArgs};
use measure::Report;

/// Generates the load, waits for all answers and reports the figures.
///
/// # Errors
/// An invalid flag, a file that cannot be read or written, or no request was answered.
pub fn run(args: &ServeBenchArgs) -> Result<(), Error> {
    check(args)?;
    let server = Server::checked(&args.url(), args.api_key.clone(), !args.insecure)
        .map_err(|problem| Error::Usage(format!("--base-url: {problem}")))?;
    let server = server.with_headers(args.header.clone());
    let questions = dataset::read(args)?;
    let results = Results::open("--json", args.json.as_deref())?;
    let picture = Results::open("--svg", args.svg.as_deref())?;
    // The name of a file that has none holds the model, which the server may have to tell.
    let saved = args.result_filename.as_ref().map(|_| saved::open(args, "")).transpose()?.flatten();
    let arrivals = load::arrivals(questions.len(), args.request_rate, args.burstiness, args.seed);
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let (model, run) = runtime.block_on(async {
        let model = match args.served_model_name.as_ref().or(args.model.as_ref()) {
            Some(name) => name.clone(),
            None => request::first_model(&server).await.map_err(Error::Failed)?,
        };
        let sender = request::Sender::new(server, &model, args.api(), args.fields());
        for question in questions.iter().cycle().take(args.num_warmups) {
            let now = Instant::now();
            if let Some(problem) = sender.send(question, now, now).await.problem {
                return Err(Error::Failed(format!("--num-warmups: {problem}")));
            }
        }
        Ok::<_, Error>((model, load::run(sender, questions, arrivals, args.max_concurrency).await))
    })?;
    let report = Report::new(&run.records, run.seconds, &args.goodput, &args.metric_percentiles);
    write!(io::stdout(), "{}", report::table(args, &model, &report))?;
    if let Some(mut results) = results {
        results.write(report::json(args, &model, &report, &run.records))?;
    }
    let saved = match saved {
        None => saved::open(args, &model)?,
        saved => saved,
    };
    if let Some(mut saved) = saved {
        saved.write(args, &model, &report, &run.records)?;
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
