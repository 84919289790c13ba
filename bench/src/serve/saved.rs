//! The result file of `vllm bench serve`, for the programs that read it.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::measure::{Record, Report};
use super::{Endpoint, ServeBenchArgs};
use crate::Error;
use crate::results::Results;

/// The file of `--save-result`.
pub struct Saved {
    results: Results,
    date: String,
}

/// Opens the file, if it is asked for. A file without a name gets one with that of the model.
///
/// # Errors
/// It cannot be written.
pub fn open(args: &ServeBenchArgs, model: &str) -> Result<Option<Saved>, Error> {
    if !args.save_result && !args.append_result {
        return Ok(None);
    }
    let date = date(SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()));
    let folder = args.result_dir.clone().unwrap_or_default();
    let name = args.result_filename.clone().unwrap_or_else(|| default_name(args, model, &date));
    if !folder.as_os_str().is_empty() {
        std::fs::create_dir_all(&folder)
            .map_err(|error| Error::Failed(format!("--result-dir {}: {error}; expected a folder", folder.display())))?;
    }
    let path = folder.join(name);
    if args.append_result && path.exists() {
        // The first write would replace the contents.
        let line_end = OpenOptions::new().append(true).open(&path).and_then(|mut file| writeln!(file));
        line_end.map_err(|error| Error::Failed(format!("--result-filename {}: {error}", path.display())))?;
        let results = Results::append("--result-filename", &path)?;
        return Ok(Some(Saved { results, date }));
    }
    let results = Results::open("--result-filename", Some(&path))?;
    Ok(results.map(|results| Saved { results, date }))
}

fn backend(args: &ServeBenchArgs) -> &'static str {
    if args.api() == Endpoint::Chat { "openai-chat" } else { "openai" }
}

fn default_name(args: &ServeBenchArgs, model: &str, date: &str) -> PathBuf {
    let label = args.label.as_deref().unwrap_or(backend(args));
    let concurrency = args.max_concurrency.map_or(String::new(), |count| format!("-concurrency{count}"));
    let model = model.rsplit('/').next().unwrap_or_default();
    format!("{label}-{}qps{concurrency}-{model}-{date}.json", args.request_rate).replace('/', "-").into()
}

impl Saved {
    /// Writes the figures as one line.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(
        &mut self,
        args: &ServeBenchArgs,
        model: &str,
        report: &Report,
        records: &[Record],
    ) -> Result<(), Error> {
        self.results.write(json!(figures(args, model, report, records, &self.date)))
    }
}

/// The figures under vLLM's names.
pub fn figures(
    args: &ServeBenchArgs,
    model: &str,
    report: &Report,
    records: &[Record],
    date: &str,
) -> Map<String, Value> {
    let mut all = Map::new();
    let mut put = |name: &str, value: Value| all.insert(name.to_string(), value);
    put("date", json!(date));
    put("endpoint_type", json!(backend(args)));
    put("backend", json!(backend(args)));
    put("label", json!(args.label));
    put("model_id", json!(model));
    put("tokenizer_id", json!(args.model.as_deref().unwrap_or(model)));
    put("num_prompts", json!(records.len()));
    for (name, value) in &args.metadata {
        put(name, json!(value));
    }
    // JSON has no infinity.
    put("request_rate", if args.request_rate.is_finite() { json!(args.request_rate) } else { json!("inf") });
    put("burstiness", json!(args.burstiness));
    put("max_concurrency", json!(args.max_concurrency));
    put("duration", json!(report.seconds));
    put("completed", json!(report.completed));
    put("failed", json!(report.failed));
    put("total_input_tokens", json!(report.prompt_tokens));
    put("total_output_tokens", json!(report.output_tokens));
    put("request_throughput", json!(report.request_throughput));
    put("request_goodput", json!(report.goodput));
    put("output_throughput", json!(report.output_throughput));
    put("total_token_throughput", json!(report.total_throughput));
    if args.save_detailed {
        let each = |of: &dyn Fn(&Record) -> Value| records.iter().map(of).collect::<Value>();
        put("input_lens", each(&|record| json!(record.prompt_tokens)));
        put("output_lens", each(&|record| json!(if record.is_complete() { record.output_tokens } else { 0 })));
        put("ttfts", each(&|record| json!(record.ttft().unwrap_or_default())));
        put("itls", each(&|record| record.itl().collect()));
        put("start_times", each(&|record| json!(record.sent)));
        put("generated_texts", each(&|record| json!(record.text)));
        put("errors", each(&|record| json!(record.problem.as_deref().unwrap_or_default())));
    }
    for (short, _, spread) in report.spreads(&args.percentile_metrics) {
        put(&format!("mean_{short}_ms"), json!(spread.mean));
        put(&format!("median_{short}_ms"), json!(spread.median));
        put(&format!("std_{short}_ms"), json!(spread.std));
        for (percent, value) in args.metric_percentiles.iter().zip(&spread.percentiles) {
            put(&format!("p{percent}_{short}_ms"), json!(value));
        }
    }
    all
}

/// A time as `20261127-221500`, in UTC.
fn date(seconds: u64) -> String {
    let (days, rest) = (seconds / 86400, seconds % 86400);
    // Howard Hinnant's civil_from_days, for days after 1970: years begin in March.
    let shifted = days + 719_468;
    let (era, day_of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let (month, carry) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = year_of_era + era * 400 + carry;
    format!("{year:04}{month:02}{day:02}-{:02}{:02}{:02}", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::date;

    #[test]
    fn a_time_is_a_date_of_the_calendar() {
        for (seconds, expected) in [
            (0, "19700101-000000"),
            (951_782_399, "20000228-235959"),
            (951_782_400, "20000229-000000"),
            (1_709_251_199, "20240229-235959"),
            (1_795_814_100, "20261127-211500"),
            (4_102_444_800, "21000101-000000"),
        ] {
            assert_eq!(date(seconds), expected);
        }
    }
}
