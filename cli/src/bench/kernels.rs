//! `quire bench kernels`: times or counts every supporting variant over a grid of shapes; a table and lines of JSON.
//!
//! A row is printed, and its line of JSON written, as soon as it has been measured. `trial::grid` defines what is measured and how.

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use engine::kernels::{Device, Dtype, Grid, KvDtype, Measurement, Operation, Peaks, load_plugin};
use engine::{EngineConfig, Quantization};
use serde_json::{Value, json};

use super::counted::{self, Counting};
use crate::args::CommonArgs;
use crate::error::CliError;
use crate::values;
use ::bench::results::Results;

#[derive(Debug, Args)]
pub struct KernelArgs {
    /// Operations: decode, prefill, cache_write, block_copy, linear, low_rank [default: all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', value_parser = operation)]
    pub op: Vec<Operation>,
    /// Variants, named as by `quire kernels` [default: all that support a shape]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub variant: Vec<String>,
    /// Types to compute in: float32, float16, bfloat16; auto is float32 on cpu, otherwise bfloat16 [default: auto]
    #[arg(long, value_name = "TYPES", value_delimiter = ',', value_parser = dtype, env = "QUIRE_DTYPE")]
    pub dtype: Vec<Option<Dtype>>,
    /// Types of caches: same (the type to compute in), fp8_e4m3, fp8_e5m2, int8 [default: same]
    ///
    /// Also `f16`, `bf16` and `int8_per_token_head`.
    #[arg(long, value_name = "TYPES", value_delimiter = ',', value_parser = kv_dtype)]
    pub kv_dtype: Vec<KvDtype>,
    /// Number of query heads [default: 32]
    #[arg(long, value_name = "N", value_parser = values::whole::<usize>)]
    pub heads: Option<usize>,
    /// Number of key/value heads [default: 8]
    ///
    /// It must divide the number of query heads.
    #[arg(long, value_name = "N", value_parser = values::whole::<usize>)]
    pub kv_heads: Option<usize>,
    /// Elements per head [default: 128]
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = values::whole::<usize>)]
    pub head_size: Vec<usize>,
    /// Tokens per block [default: 16]
    ///
    /// 8 and more.
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = values::whole::<usize>, env = "QUIRE_BLOCK_SIZE")]
    pub block_size: Vec<usize>,
    /// Numbers of sequences [default: 1,8]
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', value_parser = values::whole::<usize>)]
    pub batch: Vec<usize>,
    /// Context lengths of the sequences [default: 512,4096]
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = values::whole::<usize>)]
    pub context: Vec<usize>,
    /// Query rows per sequence in prefill, cache_write, linear and low_rank [default: 128]
    ///
    /// Adapters have rank 16 and are different in up to 8 sequences.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = values::whole::<usize>)]
    pub query_len: Vec<usize>,
    /// Outputs of the weight matrices in linear [default: heads times elements per head, which their inputs are]
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', value_parser = values::whole::<usize>)]
    pub outputs: Vec<usize>,
    /// Weights of linear: numbers, or quantised to q8 or q4 [default: numbers]
    ///
    /// `q8` and `q4` are for kernels that multiply codes.
    #[arg(long, value_name = "FORMS", value_delimiter = ',', value_parser = weights)]
    pub weights: Vec<Option<Quantization>>,
    /// Number of runs before those that are timed [default: 2]
    #[arg(long, value_name = "N", value_parser = values::whole::<usize>)]
    pub warmup: Option<usize>,
    /// Maximum number of timed runs; at most one second of them [default: 20]
    ///
    /// After the first three, timing stops when one second has passed.
    #[arg(long, value_name = "N", value_parser = values::whole::<usize>)]
    pub repeat: Option<usize>,
    /// Count what each kernel does on cuda-sim, instead of timing
    ///
    /// See [measuring](kernels.md#measuring).
    #[arg(long, conflicts_with_all = ["warmup", "repeat"])]
    pub counts: bool,
    /// Write a line of JSON for the device, each row, and the peaks to this file
    #[arg(long, value_name = "FILE", value_parser = values::file)]
    pub json: Option<PathBuf>,
    #[command(flatten)]
    pub common: CommonArgs,
}

fn operation(text: &str) -> Result<Operation, String> {
    let keys = Operation::ALL.map(Operation::key).join(", ");
    Operation::ALL.into_iter().find(|op| op.key() == text).ok_or_else(|| format!("expected some of {keys}"))
}

fn dtype(text: &str) -> Result<Option<Dtype>, String> {
    match text {
        "f32" => Ok(Some(Dtype::F32)),
        "f16" => Ok(Some(Dtype::F16)),
        "bf16" => Ok(Some(Dtype::Bf16)),
        long => Ok(values::dtype(long)?.0),
    }
}

fn weights(text: &str) -> Result<Option<Quantization>, String> {
    match text {
        "numbers" => Ok(None),
        _ => text.parse().map(Some).map_err(|_| "expected some of numbers, q8, q4".to_string()),
    }
}

fn kv_dtype(text: &str) -> Result<KvDtype, String> {
    let names = KvDtype::ALL.map(KvDtype::name).join(", ");
    KvDtype::ALL.into_iter().find(|kv| kv.name() == text).ok_or_else(|| format!("expected some of {names}"))
}

impl KernelArgs {
    /// Opens the device, with what `--counts` needs if it is given.
    fn open(&self) -> Result<(Arc<dyn Device>, Option<Counting>), CliError> {
        if !self.counts {
            return Ok((self.common.open()?, None));
        }
        let (device, counting) = Counting::open(&self.common.device_name(), self.common.options())?;
        Ok((device, Some(counting)))
    }

    /// The grid of the flags, with the defaults of a device for flags that are not given.
    fn grid(&self, default: Grid) -> Grid {
        fn or<T: Clone>(given: &[T], default: Vec<T>) -> Vec<T> {
            if given.is_empty() { default } else { given.to_vec() }
        }
        let dtypes = self.dtype.iter().map(|dtype| dtype.unwrap_or(default.dtypes[0])).collect::<Vec<_>>();
        Grid {
            operations: or(&self.op, default.operations),
            variants: self.variant.clone(),
            dtypes: or(&dtypes, default.dtypes),
            kv_dtypes: or(&self.kv_dtype, default.kv_dtypes),
            heads: self.heads.unwrap_or(default.heads),
            kv_heads: self.kv_heads.unwrap_or(default.kv_heads),
            head_sizes: or(&self.head_size, default.head_sizes),
            block_sizes: or(&self.block_size, default.block_sizes),
            batches: or(&self.batch, default.batches),
            contexts: or(&self.context, default.contexts),
            query_lens: or(&self.query_len, default.query_lens),
            outputs: or(&self.outputs, default.outputs),
            weights: or(&self.weights, default.weights),
            warmup: self.warmup.unwrap_or(default.warmup),
            repeat: self.repeat.unwrap_or(default.repeat),
            tally: None,
        }
    }
}

pub fn run(args: KernelArgs, config: &EngineConfig) -> Result<(), CliError> {
    config.kernels.plugin.iter().try_for_each(|plugin| load_plugin(&plugin.path)).map_err(CliError::failed)?;
    let mut lines = Results::open("--json", args.json.as_deref())?;
    let (device, counting) = args.open()?;
    let tally = counting.as_ref().map(|counting| Arc::clone(&counting.tally));
    let grid = Grid { tally, ..args.grid(Grid::of(&*device)) };
    let left_out = grid.check(&*device).map_err(CliError::failed)?;
    let mut out = io::stdout().lock();
    writeln!(out, "device: {}, {}", device.name(), device.description())?;
    if device.name() == "cuda-sim" {
        writeln!(out, "cuda-sim runs GPU code on the CPU: its errors are meaningful, its times are not")?;
    }
    match &counting {
        Some(_) => writeln!(out, "{}", counted::HEAD)?,
        None => writeln!(out, "{}", HEAD.trim_end())?,
    }
    let mut say = |line: Value| lines.as_mut().map_or(Ok(()), |lines| lines.write(format_args!("{line}\n")));
    say(json!({
        "kind": "device",
        "quire": env!("CARGO_PKG_VERSION"),
        "device": device.name(),
        "description": device.description(),
        "times_mean_something": device.name() != "cuda-sim" && counting.is_none(),
    }))?;
    for what in &left_out {
        say(json!({ "kind": "not_measured", "what": what }))?;
    }
    let (mut problem, mut peaks) = (None, Vec::new());
    let mut measure = || {
        let measured = if counting.is_none() { Peaks::measure(&*device)? } else { Peaks::default() };
        peaks.push(measured);
        Ok(measured)
    };
    let outcome = grid.run(&device, &mut measure, &mut |row| {
        let text = match &counting {
            Some(counting) => counting.lines(&shape(row), row),
            None => line(row),
        };
        // If the reader has closed the pipe, keep measuring for the file and report the error at the end.
        let written = writeln!(out, "{text}").map_err(CliError::from);
        let written = say(record(row, counting.as_ref())).map_err(CliError::from).and(written);
        problem = problem.take().or(written.err());
    });
    let best = peaks.iter().fold(Peaks::default(), |best, measured| best.max(measured));
    let measured = peaks.iter().map(super::roofline::record).collect::<Vec<_>>();
    say(json!({ "kind": "peaks", "best": super::roofline::record(&best), "measured": measured }))?;
    outcome.map_err(CliError::failed)?;
    if counting.is_none() {
        writeln!(out, "peaks, the best of {}: {best}", peaks.len())?;
    }
    // Other programs on the machine change its peaks, and the rows measured in between.
    let moved = Peaks::moved(&peaks);
    if moved > STEADY {
        writeln!(
            out,
            "peaks changed by {:.0}% during this run, so other programs were running; compare rows with care",
            moved * 100.0
        )?;
    }
    for line in &left_out {
        writeln!(out, "not measured: {line}")?;
    }
    problem.map_or(Ok(()), Err)
}

/// Greatest change of the peaks on an otherwise idle machine.
const STEADY: f64 = 0.1;

const HEAD: &str = "operation   variant                 types          heads  size block batch context rows  \
                    median us  spread    GB/s of peak    ulps";

/// The first columns of a row.
fn shape(row: &Measurement) -> String {
    let shape = &row.shape;
    let types = match shape.weights {
        None => format!("{}/{}", shape.dtype, shape.kv_dtype),
        Some(weights) => format!("{}/{weights}", shape.dtype),
    };
    let heads = format!("{}/{}", shape.heads, shape.kv_heads);
    format!(
        "{:<11} {:<23} {types:<13} {heads:>6} {:>5} {:>5} {:>5} {:>7} {:>4}",
        row.operation.key(),
        row.variant,
        shape.head_size,
        shape.block_size,
        shape.batch,
        shape.context,
        shape.query_len,
    )
}

fn line(row: &Measurement) -> String {
    let time = &row.cell.time;
    let share = row.share.map_or("-".to_string(), |share| format!("{:.0}%", share * 100.0));
    format!(
        "{} {:>10.1} {:>6.1}% {:>7.1} {share:>7} {:>7.2}",
        shape(row),
        time.median().as_secs_f64() * 1e6,
        time.spread() * 100.0,
        row.bytes_per_second() / 1e9,
        row.cell.ulps,
    )
}

/// A row as JSON: the shape and the error, and times or counts.
fn record(row: &Measurement, counting: Option<&Counting>) -> Value {
    let (shape, cell) = (&row.shape, &row.cell);
    let mut record = json!({
        "kind": "cell",
        "operation": row.operation.key(),
        "variant": row.variant,
        "dtype": shape.dtype.name(),
        "kv_dtype": shape.kv_dtype.name(),
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "head_size": shape.head_size,
        "block_size": shape.block_size,
        "batch": shape.batch,
        "context": shape.context,
        "query_len": shape.query_len,
        "outputs": shape.outputs,
        "weights": shape.weights.map(|weights| weights.to_string()),
        "bytes": cell.bytes,
        "operations": cell.operations,
        // JSON has no infinity: a result without any correct digit is null.
        "max_error_ulps": cell.ulps.is_finite().then_some(cell.ulps),
    });
    let figures = match counting {
        Some(counting) => counting.row(row),
        None => json!({
            "median_seconds": cell.time.median().as_secs_f64(),
            "spread": cell.time.spread(),
            "bytes_per_second": row.bytes_per_second(),
            "share_of_peak": row.share,
        }),
    };
    if let (Value::Object(record), Value::Object(figures)) = (&mut record, figures) {
        record.extend(figures);
    }
    record
}
