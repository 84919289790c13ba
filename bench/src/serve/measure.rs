//! Figures from recorded times, without I/O, so that every definition is tested on given times.
//!
//! `t` is the scheduled time of a request, `p1 … pk` are the times of its pieces of text, and `n` is the number of its output tokens:
//!
//! | figure | definition (vLLM's) |
//! |---|---|
//! | TTFT | `p1 - t` |
//! | TPOT | `(pk - p1) / (n - 1)`, of requests with `n > 1` |
//! | ITL | every `p(i+1) - pi` of every request; a piece may carry several tokens |
//! | E2EL | `pk - t` |
//! | throughput | completed requests, their output tokens, and all their tokens, per second of the run |
//! | goodput | completed requests per second that meet every limit; `itl` limits a request's longest interval |

use std::str::FromStr;

use crate::statistics::{mean, percentile};

/// Times and tokens of one request. Times are seconds since the start of the run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// Scheduled time, from which latencies are measured.
    pub meant: f64,
    /// Time at which the request was sent.
    pub sent: f64,
    /// Arrival time of each piece of text.
    pub pieces: Vec<f64>,
    /// Time at which the stream ended.
    pub end: f64,
    /// Tokens of the prompt, or its length if the server does not report usage.
    pub prompt_tokens: usize,
    /// Tokens of the answer, or its number of pieces if the server does not report usage.
    pub output_tokens: usize,
    /// Whether the server reported the number of tokens.
    pub counted_by_usage: bool,
    /// The answer.
    pub text: String,
    /// Reason why the request failed.
    pub problem: Option<String>,
}

impl Record {
    /// Whether the answer is complete.
    pub fn is_complete(&self) -> bool {
        self.problem.is_none() && !self.pieces.is_empty()
    }

    /// Time to first token in seconds.
    pub fn ttft(&self) -> Option<f64> {
        Some(self.pieces.first()? - self.meant)
    }

    /// End-to-end latency in seconds.
    pub fn e2el(&self) -> Option<f64> {
        Some(self.pieces.last()? - self.meant)
    }

    /// Time per output token after the first, in seconds.
    pub fn tpot(&self) -> Option<f64> {
        let span = self.pieces.last()? - self.pieces.first()?;
        (self.output_tokens > 1).then(|| span / (self.output_tokens - 1) as f64)
    }

    /// Inter-token latencies in seconds.
    pub fn itl(&self) -> impl Iterator<Item = f64> + '_ {
        self.pieces.windows(2).map(|pair| pair[1] - pair[0])
    }

    fn meets(&self, goal: &Goal) -> bool {
        let seconds = match goal.metric {
            Metric::Ttft => self.ttft(),
            Metric::Tpot => self.tpot(),
            Metric::Itl => self.itl().max_by(f64::total_cmp),
            Metric::E2el => self.e2el(),
        };
        // A request without this metric meets the limit.
        seconds.is_none_or(|seconds| seconds * 1000.0 <= goal.millis)
    }
}

/// A latency metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Time to first token.
    Ttft,
    /// Time per output token after the first.
    Tpot,
    /// Inter-token latency.
    Itl,
    /// End-to-end latency.
    E2el,
}

impl Metric {
    /// The metric with this name of vLLM.
    pub fn named(name: &str) -> Option<Metric> {
        match name {
            "ttft" => Some(Metric::Ttft),
            "tpot" => Some(Metric::Tpot),
            "itl" => Some(Metric::Itl),
            "e2el" | "e2e" => Some(Metric::E2el),
            _ => None,
        }
    }
}

/// A latency limit, for goodput.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goal {
    /// The limited metric.
    pub metric: Metric,
    /// Greatest accepted value in milliseconds.
    pub millis: f64,
}

impl FromStr for Goal {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Goal, &'static str> {
        const EXPECTED: &str = "expected limits in ms, such as ttft:200 tpot:50 itl:100 e2el:2000";
        let (name, millis) = text.split_once(':').ok_or(EXPECTED)?;
        let metric = Metric::named(name).ok_or(EXPECTED)?;
        let millis = millis.parse().ok().filter(|millis| *millis > 0.0).ok_or(EXPECTED)?;
        Ok(Goal { metric, millis })
    }
}

/// Distribution of times, in milliseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Spread {
    /// Number of times.
    pub count: usize,
    /// Mean.
    pub mean: f64,
    /// Median.
    pub median: f64,
    /// Standard deviation.
    pub std: f64,
    /// The percentiles that the report was asked for.
    pub percentiles: Vec<f64>,
    /// Maximum.
    pub max: f64,
}

impl Spread {
    fn of(seconds: impl Iterator<Item = f64>, percents: &[f64]) -> Spread {
        let mut millis: Vec<f64> = seconds.map(|seconds| seconds * 1000.0).collect();
        millis.sort_by(f64::total_cmp);
        if millis.is_empty() {
            // A sum of no numbers is -0.
            return Spread { percentiles: vec![0.0; percents.len()], ..Spread::default() };
        }
        let average = mean(&millis);
        let squares: Vec<f64> = millis.iter().map(|value| (value - average).powi(2)).collect();
        Spread {
            count: millis.len(),
            mean: average,
            median: percentile(&millis, 50.0),
            std: mean(&squares).sqrt(),
            percentiles: percents.iter().map(|percent| percentile(&millis, *percent)).collect(),
            max: millis.last().copied().unwrap_or_default(),
        }
    }
}

/// The figures of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Requests whose answer was complete.
    pub completed: usize,
    /// All other requests.
    pub failed: usize,
    /// Seconds from the start to the end of the last request.
    pub seconds: f64,
    /// Prompt tokens of completed requests.
    pub prompt_tokens: usize,
    /// Output tokens of completed requests.
    pub output_tokens: usize,
    /// Completed requests for which the server did not report the number of tokens.
    pub uncounted: usize,
    /// Completed requests per second.
    pub request_throughput: f64,
    /// Output tokens per second.
    pub output_throughput: f64,
    /// Prompt and output tokens per second.
    pub total_throughput: f64,
    /// Requests per second that meet every limit; `None` without limits.
    pub goodput: Option<f64>,
    /// Time to first token.
    pub ttft: Spread,
    /// Time per output token after the first.
    pub tpot: Spread,
    /// Inter-token latency.
    pub itl: Spread,
    /// End-to-end latency.
    pub e2el: Spread,
    /// Delay of sending after the scheduled time: that of the load generator itself, and the wait for a permit.
    pub late: Spread,
}

impl Report {
    /// Computes the statistics of a run that took `seconds`, with these percentiles.
    pub fn new(records: &[Record], seconds: f64, goals: &[Goal], percents: &[f64]) -> Report {
        let done: Vec<&Record> = records.iter().filter(|record| record.is_complete()).collect();
        let sum = |of: fn(&Record) -> usize| done.iter().map(|record| of(record)).sum::<usize>();
        let (prompt_tokens, output_tokens) = (sum(|r| r.prompt_tokens), sum(|r| r.output_tokens));
        let rate = |count: usize| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let good = done.iter().filter(|record| goals.iter().all(|goal| record.meets(goal))).count();
        Report {
            completed: done.len(),
            failed: records.len() - done.len(),
            seconds,
            prompt_tokens,
            output_tokens,
            uncounted: done.iter().filter(|record| !record.counted_by_usage).count(),
            request_throughput: rate(done.len()),
            output_throughput: rate(output_tokens),
            total_throughput: rate(prompt_tokens + output_tokens),
            goodput: (!goals.is_empty()).then(|| rate(good)),
            ttft: Spread::of(done.iter().filter_map(|record| record.ttft()), percents),
            tpot: Spread::of(done.iter().filter_map(|record| record.tpot()), percents),
            itl: Spread::of(done.iter().flat_map(|record| record.itl()), percents),
            e2el: Spread::of(done.iter().filter_map(|record| record.e2el()), percents),
            late: Spread::of(records.iter().map(|record| record.sent - record.meant), percents),
        }
    }

    /// Latency distributions with their short and long names.
    pub fn spreads(&self, metrics: &[Metric]) -> Vec<(&'static str, &'static str, &Spread)> {
        let of = |metric: &Metric| match metric {
            Metric::Ttft => ("ttft", "Time to first token", &self.ttft),
            Metric::Tpot => ("tpot", "Time per output token", &self.tpot),
            Metric::Itl => ("itl", "Inter-token latency", &self.itl),
            Metric::E2el => ("e2el", "End-to-end latency", &self.e2el),
        };
        metrics.iter().map(of).collect()
    }
}
