//! The figures as a table of at most 100 columns and as JSON. Names are those of vLLM's result files.

use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::ServeBenchArgs;
use super::measure::{Record, Report};

/// Formats the table.
pub fn table(args: &ServeBenchArgs, model: &str, report: &Report) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{name:<40}{value:>12}");
    };
    line("Model", shorten(model, MODEL_WIDTH));
    line("Load", load(args));
    line("Successful requests", report.completed.to_string());
    line("Failed requests", report.failed.to_string());
    line("Duration (s)", format!("{:.2}", report.seconds));
    line("Prompt tokens", report.prompt_tokens.to_string());
    line("Output tokens", report.output_tokens.to_string());
    if report.uncounted > 0 {
        line("  requests counted by pieces, not usage", report.uncounted.to_string());
    }
    line("Request throughput (req/s)", format!("{:.2}", report.request_throughput));
    if let Some(goodput) = report.goodput {
        line("Request goodput (req/s)", format!("{goodput:.2}"));
    }
    line("Output token throughput (tok/s)", format!("{:.2}", report.output_throughput));
    line("Total token throughput (tok/s)", format!("{:.2}", report.total_throughput));
    line("Sent after the scheduled time, max (ms)", format!("{:.2}", report.late.max));
    let heads: String = args.metric_percentiles.iter().map(|p| format!("{:>12}", format!("p{p}"))).collect();
    let _ = writeln!(text, "\n{:<28}{:>12}{heads}{:>12}", "ms", "mean", "max");
    for (short, name, spread) in report.spreads(&args.percentile_metrics) {
        let percentiles: String = spread.percentiles.iter().map(|value| format!("{value:>12.2}")).collect();
        let name = format!("{name} ({short})");
        let _ = writeln!(text, "{name:<28}{:>12.2}{percentiles}{:>12.2}", spread.mean, spread.max);
    }
    text
}

/// Columns for the model's name.
const MODEL_WIDTH: usize = 60;

/// The end of a text that is too wide: that of a path names the model.
fn shorten(text: &str, width: usize) -> String {
    match text.chars().count().checked_sub(width) {
        None | Some(0) => text.to_string(),
        Some(excess) => format!("…{}", text.chars().skip(excess + 1).collect::<String>()),
    }
}

fn load(args: &ServeBenchArgs) -> String {
    match (args.request_rate.is_finite(), args.max_concurrency) {
        (true, _) => format!("{} req/s", args.request_rate),
        (false, Some(count)) => format!("{count} at once"),
        (false, None) => "all at once".to_string(),
    }
}

/// Formats all figures and requests as JSON. Times of requests are seconds since the start.
pub fn json(args: &ServeBenchArgs, model: &str, report: &Report, records: &[Record]) -> String {
    let mut all = Map::new();
    let mut put = |name: &str, value: Value| all.insert(name.to_string(), value);
    put("model_id", json!(model));
    put("dataset", json!(args.dataset));
    // JSON has no infinity; vLLM writes "inf" too.
    put("request_rate", if args.request_rate.is_finite() { json!(args.request_rate) } else { json!("inf") });
    put("burstiness", json!(args.burstiness));
    put("max_concurrency", json!(args.max_concurrency));
    put("seed", json!(args.seed));
    put("duration", json!(report.seconds));
    put("completed", json!(report.completed));
    put("failed", json!(report.failed));
    put("total_input_tokens", json!(report.prompt_tokens));
    put("total_output_tokens", json!(report.output_tokens));
    put("counted_by_pieces", json!(report.uncounted));
    put("request_throughput", json!(report.request_throughput));
    put("request_goodput", json!(report.goodput));
    put("output_throughput", json!(report.output_throughput));
    put("total_token_throughput", json!(report.total_throughput));
    for (short, _, spread) in report.spreads(&args.percentile_metrics).into_iter().chain([("late", "", &report.late)]) {
        put(&format!("mean_{short}_ms"), json!(spread.mean));
        put(&format!("max_{short}_ms"), json!(spread.max));
        for (percent, value) in args.metric_percentiles.iter().zip(&spread.percentiles) {
            put(&format!("p{percent}_{short}_ms"), json!(value));
        }
    }
    let request = |record: &Record| {
        json!({
            "meant": record.meant, "sent": record.sent, "end": record.end, "pieces": record.pieces,
            "prompt_tokens": record.prompt_tokens, "output_tokens": record.output_tokens, "error": record.problem,
        })
    };
    put("requests", records.iter().map(request).collect());
    format!("{:#}\n", Value::Object(all))
}
