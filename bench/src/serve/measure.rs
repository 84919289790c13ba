//! What the recorded times say. Pure: from records to figures, so every definition is tested on given times.
//!
//! With `t` the time that a request was meant to be sent, `p1 … pk` the times of its pieces and `n` its output tokens:
//!
//! | figure | definition (vLLM's) |
//! |---|---|
//! | TTFT | `p1 - t` |
//! | TPOT | `(pk - p1) / (n - 1)`, of requests with `n > 1` |
//! | ITL | every `p(i+1) - pi` of every request; a piece may carry several tokens |
//! | E2EL | `pk - t` |
//! | throughput | completed requests, their output tokens and all their tokens, over the run's seconds |
//! | goodput | completed requests a second that keep every limit; `itl` limits a request's longest pause |
//!
//! Percentiles are interpolated linearly between the two nearest ranks, as numpy does.

use crate::statistics::percentile;
use std::str::FromStr;

/// One request. Times are seconds since the run began.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Record {
    /// When it was meant to be sent: its clock starts here.
    pub meant: f64,
    /// When it was sent.
    pub sent: f64,
    /// When each piece of text came.
    pub pieces: Vec<f64>,
    /// When its stream ended.
    pub end: f64,
    /// Tokens of the prompt, or its length as known here.
    pub prompt_tokens: usize,
    /// Tokens of the answer, or its pieces.
    pub output_tokens: usize,
    /// The server counted the tokens.
    pub counted_by_usage: bool,
    /// Why it was not answered.
    pub problem: Option<String>,
}

impl Record {
    fn is_complete(&self) -> bool {
        self.problem.is_none() && !self.pieces.is_empty()
    }

    /// Seconds to the first piece.
    pub fn ttft(&self) -> Option<f64> {
        Some(self.pieces.first()? - self.meant)
    }

    /// Seconds to the last piece.
    pub fn e2el(&self) -> Option<f64> {
        Some(self.pieces.last()? - self.meant)
    }

    /// Seconds for each token after the first.
    pub fn tpot(&self) -> Option<f64> {
        let span = self.pieces.last()? - self.pieces.first()?;
        (self.output_tokens > 1).then(|| span / (self.output_tokens - 1) as f64)
    }

    /// Seconds between pieces.
    pub fn itl(&self) -> impl Iterator<Item = f64> + '_ {
        self.pieces.windows(2).map(|pair| pair[1] - pair[0])
    }

    fn keeps(&self, goal: &Goal) -> bool {
        let seconds = match goal.metric {
            Metric::Ttft => self.ttft(),
            Metric::Tpot => self.tpot(),
            Metric::Itl => self.itl().max_by(f64::total_cmp),
            Metric::E2el => self.e2el(),
        };
        // A request without such a time has none that is too long.
        seconds.is_none_or(|seconds| seconds * 1000.0 <= goal.millis)
    }
}

/// A time of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// To the first token.
    Ttft,
    /// Per output token after the first.
    Tpot,
    /// Between pieces.
    Itl,
    /// To the last token.
    E2el,
}

/// A limit that a request has to keep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goal {
    /// Of which time.
    pub metric: Metric,
    /// At most.
    pub millis: f64,
}

impl FromStr for Goal {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Goal, &'static str> {
        const EXPECTED: &str = "expected limits in ms, as ttft:200 tpot:50 itl:100 e2el:2000";
        let (name, millis) = text.split_once(':').ok_or(EXPECTED)?;
        let metric = match name {
            "ttft" => Metric::Ttft,
            "tpot" => Metric::Tpot,
            "itl" => Metric::Itl,
            "e2el" | "e2e" => Metric::E2el,
            _ => return Err(EXPECTED),
        };
        let millis = millis.parse().ok().filter(|millis| *millis > 0.0).ok_or(EXPECTED)?;
        Ok(Goal { metric, millis })
    }
}

/// A distribution of times, in milliseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Spread {
    /// Times.
    pub count: usize,
    /// Their mean.
    pub mean: f64,
    /// Percentiles 50, 90, 95 and 99.
    pub percentiles: [f64; 4],
    /// The longest.
    pub max: f64,
}

/// The percentiles of a [`Spread`].
pub const PERCENTILES: [f64; 4] = [50.0, 90.0, 95.0, 99.0];

impl Spread {
    fn of(seconds: impl Iterator<Item = f64>) -> Spread {
        let mut millis: Vec<f64> = seconds.map(|seconds| seconds * 1000.0).collect();
        millis.sort_by(f64::total_cmp);
        let Some(max) = millis.last().copied() else { return Spread::default() };
        let mean = millis.iter().sum::<f64>() / millis.len() as f64;
        Spread { count: millis.len(), mean, percentiles: PERCENTILES.map(|p| percentile(&millis, p)), max }
    }
}

/// The figures of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Requests with an answer that came to its end.
    pub completed: usize,
    /// The others.
    pub failed: usize,
    /// From the start to the end of the last.
    pub seconds: f64,
    /// Prompt tokens of the completed.
    pub prompt_tokens: usize,
    /// Output tokens of the completed.
    pub output_tokens: usize,
    /// Completed requests whose tokens the server did not count.
    pub uncounted: usize,
    /// Completed requests a second.
    pub request_throughput: f64,
    /// Output tokens a second.
    pub output_throughput: f64,
    /// Prompt and output tokens a second.
    pub total_throughput: f64,
    /// Requests a second that keep every limit, where there are limits.
    pub goodput: Option<f64>,
    /// To the first token.
    pub ttft: Spread,
    /// Per output token after the first.
    pub tpot: Spread,
    /// Between pieces.
    pub itl: Spread,
    /// To the last token.
    pub e2el: Spread,
    /// How much later than meant requests were sent: the load generator's own lateness and the wait for a seat.
    pub late: Spread,
}

impl Report {
    /// What these records of a run of so many seconds say.
    pub fn new(records: &[Record], seconds: f64, goals: &[Goal]) -> Report {
        let done: Vec<&Record> = records.iter().filter(|record| record.is_complete()).collect();
        let sum = |of: fn(&Record) -> usize| done.iter().map(|record| of(record)).sum::<usize>();
        let (prompt_tokens, output_tokens) = (sum(|r| r.prompt_tokens), sum(|r| r.output_tokens));
        let rate = |count: usize| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        let good = done.iter().filter(|record| goals.iter().all(|goal| record.keeps(goal))).count();
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
            ttft: Spread::of(done.iter().filter_map(|record| record.ttft())),
            tpot: Spread::of(done.iter().filter_map(|record| record.tpot())),
            itl: Spread::of(done.iter().flat_map(|record| record.itl())),
            e2el: Spread::of(done.iter().filter_map(|record| record.e2el())),
            late: Spread::of(records.iter().map(|record| record.sent - record.meant)),
        }
    }

    /// The four distributions with their names.
    pub fn spreads(&self) -> [(&'static str, &'static str, &Spread); 4] {
        [
            ("ttft", "Time to first token", &self.ttft),
            ("tpot", "Time per output token", &self.tpot),
            ("itl", "Inter-token latency", &self.itl),
            ("e2el", "End-to-end latency", &self.e2el),
        ]
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn record(meant: f64, pieces: &[f64], output_tokens: usize) -> Record {
        let end = pieces.last().copied().unwrap_or(meant);
        let sent = meant + 0.25;
        let pieces = pieces.to_vec();
        Record { meant, sent, pieces, end, prompt_tokens: 10, output_tokens, counted_by_usage: true, problem: None }
    }

    fn close(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-6, "found {found}, expected {expected}");
    }

    #[test]
    fn times_count_from_when_a_request_was_meant_to_be_sent() {
        // Five tokens in three pieces.
        let record = record(1.0, &[1.5, 1.75, 2.5], 5);
        close(record.ttft().unwrap(), 0.5);
        close(record.e2el().unwrap(), 1.5);
        close(record.tpot().unwrap(), 0.25);
        assert_eq!(record.itl().collect::<Vec<_>>(), [0.25, 0.75]);
        let report = Report::new(&[record], 2.0, &[]);
        close(report.late.max, 250.0);
        close(report.output_throughput, 2.5);
        close(report.total_throughput, 7.5);
        assert_eq!(report.goodput, None);
    }

    #[test]
    fn a_spread_is_in_milliseconds_and_of_no_times_is_empty() {
        let spread = Spread::of((1..=5).map(|n| f64::from(n) / 1000.0));
        close(spread.mean, 3.0);
        close(spread.percentiles[1], 4.6);
        assert_eq!(Spread::of(std::iter::empty()), Spread::default());
    }

    #[test]
    fn goodput_counts_requests_that_keep_every_limit() {
        let records = [
            record(0.0, &[0.1, 0.2, 0.3], 3),
            record(0.0, &[0.4, 0.5, 0.6], 3),
            record(0.0, &[0.1, 0.5, 0.6], 3),
            record(0.0, &[0.1], 1),
        ];
        let good = |goals: &str| {
            let goals: Vec<Goal> = goals.split(' ').map(|goal| goal.parse().unwrap()).collect();
            Report::new(&records, 1.0, &goals).goodput
        };
        assert_eq!(good("ttft:200"), Some(3.0));
        assert_eq!(good("itl:200"), Some(3.0));
        assert_eq!(good("ttft:200 itl:200"), Some(2.0));
        assert_eq!(good("e2el:350"), Some(2.0));
        assert_eq!(good("tpot:150"), Some(3.0));
        for wrong in ["ttft", "ttft:", "ttft:-1", "ttft:0", "speed:3", "itl:nan"] {
            assert!(wrong.parse::<Goal>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_failed_counts_as_failed_and_in_nothing_else() {
        let failed = Record { problem: Some("503".into()), ..record(0.0, &[0.1, 9.0], 2) };
        let empty = record(0.0, &[], 0);
        let report = Report::new(&[record(0.0, &[0.5, 1.0], 2), failed, empty], 1.0, &[]);
        assert_eq!((report.completed, report.failed, report.output_tokens), (1, 2, 2));
        assert_eq!((report.ttft.count, report.itl.count, report.e2el.max), (1, 1, 1000.0));
    }
}
