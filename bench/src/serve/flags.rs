//! The flags of `quire bench serve`, with the names of `vllm bench serve`, and parsers of their values.

use std::path::PathBuf;

use clap::Args;
use serde_json::{Map, Value, json};

use super::measure::{Goal, Metric};
use crate::values;

/// API that receives the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`.
    Chat,
}

fn endpoint(text: &str) -> Result<Endpoint, String> {
    match text {
        "completions" | "/v1/completions" => Ok(Endpoint::Completions),
        "chat" | "/v1/chat/completions" => Ok(Endpoint::Chat),
        _ => Err("expected completions or chat, or the path of one".to_string()),
    }
}

/// The API that a backend of vLLM calls.
fn backend(text: &str) -> Result<Endpoint, String> {
    match text {
        "vllm" | "openai" | "sglang" | "lmdeploy" | "llama.cpp" => Ok(Endpoint::Completions),
        "openai-chat" | "vllm-chat" | "sglang-oai-chat" => Ok(Endpoint::Chat),
        _ => Err("expected vllm, openai, sglang, lmdeploy, llama.cpp or openai-chat".to_string()),
    }
}

fn percents(text: &str) -> Result<f64, String> {
    let percent = text.trim().parse().ok().filter(|percent| (0.0..=100.0).contains(percent));
    percent.ok_or_else(|| "expected numbers from 0 to 100, such as 50,90,99".to_string())
}

fn metric(text: &str) -> Result<Metric, String> {
    Metric::named(text.trim()).ok_or_else(|| "expected some of ttft,tpot,itl,e2el".to_string())
}

fn pair(text: &str) -> Result<(String, String), String> {
    let pair = text.split_once('=').filter(|(name, _)| !name.is_empty());
    pair.map(|(name, value)| (name.to_string(), value.to_string())).ok_or_else(|| "expected NAME=VALUE".to_string())
}

/// A header, whose name and value HTTP allows.
fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = pair(text)?;
    let is_valid =
        hyper::header::HeaderName::try_from(&name).is_ok() && hyper::header::HeaderValue::try_from(&value).is_ok();
    if is_valid { Ok((name, value)) } else { Err("expected NAME=VALUE of a header".to_string()) }
}

fn object(text: &str) -> Result<Map<String, Value>, String> {
    serde_json::from_str(text).map_err(|error| format!("expected a JSON object such as {{\"top_k\": 20}}: {error}"))
}

/// Flags of `quire bench serve`.
#[derive(Debug, Args)]
pub struct ServeBenchArgs {
    /// Settings file; its keys are flags without the leading dashes
    #[arg(long, value_name = "FILE", env = "QUIRE_CONFIG")]
    pub config: Option<PathBuf>,
    /// Address of the server, without /v1 [default: that of --host and --port]
    ///
    /// With `https://` the certificate is checked against Mozilla's, or those of the file that `SSL_CERT_FILE` names.
    #[arg(long, value_name = "URL")]
    pub base_url: Option<String>,
    /// Host of the server, without --base-url
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// Port of the server, without --base-url
    #[arg(long, default_value_t = 8000, value_parser = values::whole::<u16>)]
    pub port: u16,
    /// Accept any certificate of the server
    #[arg(long)]
    pub insecure: bool,
    /// Name of the model on the server [default: the first one that it lists]
    ///
    /// Requests have the name of --served-model-name if both are given, as with vLLM, where this one is a checkpoint.
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Name of the model in requests [default: --model]
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
    /// API key for the server
    #[arg(long, value_name = "KEY", value_parser = values::key, env = "QUIRE_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Header of every request; can be given several times
    #[arg(long, value_name = "NAME=VALUE", num_args = 1.., value_parser = header)]
    pub header: Vec<(String, String)>,
    /// API to call: completions or chat, or its path [default: that of --backend]
    #[arg(long, value_parser = endpoint)]
    pub endpoint: Option<Endpoint>,
    /// Kind of server, as vLLM calls it: vllm, openai and others for completions, openai-chat for chats [default: openai]
    #[arg(long, value_name = "NAME", visible_alias = "endpoint-type", value_parser = backend)]
    pub backend: Option<Endpoint>,
    /// Prompts: random; sharegpt, sonnet or custom with --dataset-path; or a file (ShareGPT-like .json or .jsonl, or a workload
    /// with token ids)
    ///
    /// ShareGPT-like records have `conversations`, `messages` or `prompt`; a workload has `requests` with token ids in
    /// `prompt` and `output_len`. The second name is vLLM's.
    #[arg(long, visible_alias = "dataset-name", value_name = "NAME", default_value = "random")]
    pub dataset: String,
    /// File of the prompts, for a --dataset that is no file
    #[arg(long, value_name = "FILE")]
    pub dataset_path: Option<PathBuf>,
    /// Number of requests [default: 100, or all of a workload]
    ///
    /// A dataset with fewer records is repeated from its beginning.
    #[arg(long, value_name = "N", value_parser = values::whole::<usize>)]
    pub num_prompts: Option<usize>,
    /// Requests that are sent, one after another, before the time counts
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = values::whole::<usize>)]
    pub num_warmups: usize,
    /// Words per random prompt, or tokens if --random-vocab-size is set
    #[arg(long, visible_alias = "input-len", value_name = "N", default_value_t = 128, value_parser = values::whole::<usize>)]
    pub random_input_len: usize,
    /// Tokens to generate for random prompts and for conversations without an answer
    #[arg(long, visible_alias = "output-len", value_name = "TOKENS", default_value_t = 128, value_parser = values::whole::<usize>)]
    pub random_output_len: usize,
    /// Words, or tokens, that all random prompts begin with, in addition to their length
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = values::whole::<usize>)]
    pub random_prefix_len: usize,
    /// Greatest relative deviation of random lengths, 0 to 1
    #[arg(long, value_name = "RATIO", default_value_t = 0.0)]
    pub random_range_ratio: f64,
    /// Make random prompts of token ids below this number, for servers that accept token ids
    #[arg(long, value_name = "N", value_parser = values::whole::<u32>)]
    pub random_vocab_size: Option<u32>,
    /// Tokens to generate for records of a file [default: as the record says]
    #[arg(long, visible_alias = "custom-output-len", value_name = "TOKENS", value_parser = values::whole::<usize>)]
    pub sharegpt_output_len: Option<usize>,
    /// About this many tokens per prompt of sonnet: lines of the file, in random order
    ///
    /// A token is counted as four characters, since only the server has the tokenizer.
    #[arg(long, value_name = "TOKENS", default_value_t = 550, value_parser = values::whole::<usize>)]
    pub sonnet_input_len: usize,
    /// Tokens to generate for sonnet
    #[arg(long, value_name = "TOKENS", default_value_t = 150, value_parser = values::whole::<usize>)]
    pub sonnet_output_len: usize,
    /// About this many tokens that all prompts of sonnet begin with
    #[arg(long, value_name = "TOKENS", default_value_t = 200, value_parser = values::whole::<usize>)]
    pub sonnet_prefix_len: usize,
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
    /// Softmax temperature of the requests
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f64,
    /// Further fields of every request, as a JSON object such as {"top_k": 20}
    #[arg(long, value_name = "JSON", value_parser = object)]
    pub extra_body: Option<Map<String, Value>>,
    /// Report goodput: requests per second that meet these limits in ms, such as ttft:200 tpot:50 e2el:2000
    /// (itl: the longest interval of a request)
    #[arg(long, value_name = "LIMITS", num_args = 1.., value_delimiter = ' ')]
    pub goodput: Vec<Goal>,
    /// Latencies to report: some of ttft,tpot,itl,e2el
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "ttft,tpot,itl,e2el", value_parser = metric)]
    pub percentile_metrics: Vec<Metric>,
    /// Percentiles to report, such as 50,90,99
    #[arg(long, value_name = "PERCENTS", value_delimiter = ',', default_value = "50,90,95,99", value_parser = percents)]
    pub metric_percentiles: Vec<f64>,
    /// Write all figures and requests to this file as JSON
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write a chart to this file as SVG
    ///
    /// It has times to the first token, intervals between tokens, and throughput over the run.
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Write the figures to a file as JSON, with the keys of vLLM's
    #[arg(long)]
    pub save_result: bool,
    /// Add the times, lengths and texts of every request to that file
    #[arg(long)]
    pub save_detailed: bool,
    /// Append a line to that file if it exists, instead of replacing it
    #[arg(long)]
    pub append_result: bool,
    /// Folder of that file [default: the current one]
    #[arg(long, value_name = "FOLDER")]
    pub result_dir: Option<PathBuf>,
    /// Name of that file [default: backend, rate, model and time, as vLLM names it]
    #[arg(long, value_name = "NAME")]
    pub result_filename: Option<PathBuf>,
    /// Key of that file; several can follow
    #[arg(long, value_name = "NAME=VALUE", num_args = 1.., value_parser = pair)]
    pub metadata: Vec<(String, String)>,
    /// Name of the run in that file and in its name
    #[arg(long, value_name = "NAME")]
    pub label: Option<String>,
}

impl ServeBenchArgs {
    /// The API to call.
    pub fn api(&self) -> Endpoint {
        self.endpoint.or(self.backend).unwrap_or(Endpoint::Completions)
    }

    /// Address of the server.
    pub fn url(&self) -> String {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        self.base_url.clone().unwrap_or_else(|| format!("http://{host}:{}", self.port))
    }

    /// Fields of every request beside its prompt.
    pub fn fields(&self) -> Map<String, Value> {
        let mut fields = Map::from_iter([("temperature".to_string(), json!(self.temperature))]);
        if self.ignore_eos {
            fields.insert("ignore_eos".to_string(), json!(true));
        }
        fields.extend(self.extra_body.clone().unwrap_or_default());
        fields
    }
}
