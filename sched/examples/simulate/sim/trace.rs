//! Traces: arrival times and lengths of requests.

use super::random::Random;

/// One request of a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrival {
    /// Seconds since the start.
    pub at: f64,
    /// Number of prompt tokens, at least 1.
    pub prompt: usize,
    /// Number of output tokens, at least 1.
    pub output: usize,
}

/// Distribution of the lengths in a generated trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Lengths {
    /// Prompts of 48 tokens, outputs of 50 to 2,000 tokens, uniformly distributed.
    Uniform,
    /// Log-normal with the means of the PagedAttention paper for ShareGPT: 161 input and 338 output tokens.
    ShareGpt,
    /// Log-normal with its means for Alpaca: 19 input and 58 output tokens.
    Alpaca,
}

impl Lengths {
    pub const ALL: [Lengths; 3] = [Lengths::Uniform, Lengths::ShareGpt, Lengths::Alpaca];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Lengths::Uniform => "uniform-50-2000",
            Lengths::ShareGpt => "sharegpt",
            Lengths::Alpaca => "alpaca",
        }
    }

    fn draw(self, random: &mut Random) -> (usize, usize) {
        match self {
            Lengths::Uniform => (48, 50 + random.below(1951)),
            Lengths::ShareGpt => (length(random, 161.3), length(random, 338.0)),
            Lengths::Alpaca => (length(random, 19.3), length(random, 58.5)),
        }
    }
}

/// A length that fits a context of 2,048 together with another. The clamping lowers the mean slightly.
fn length(random: &mut Random, mean: f64) -> usize {
    random.log_normal(mean, 1024)
}

/// Generates `count` requests of a Poisson process with `rate` requests per second; all at once if it is infinite.
pub fn generate(lengths: Lengths, count: usize, rate: f64, seed: u64) -> Vec<Arrival> {
    let mut random = Random(seed);
    let mut at = 0.0;
    let mut next = || {
        at += random.exponential() / rate;
        let (prompt, output) = lengths.draw(&mut random);
        Arrival { at, prompt, output }
    };
    (0..count).map(|_| next()).collect()
}

/// Parses `arrival,prompt tokens,output tokens` lines. A first line without numbers is a header. Returns the requests
/// in order of arrival.
pub fn parse_csv(text: &str, max_model_len: usize) -> Result<Vec<Arrival>, String> {
    let mut trace = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        let fields: Vec<&str> = line.split(',').map(str::trim).collect();
        let is_header = number == 1 && fields.iter().all(|f| f.parse::<f64>().is_err());
        if line.trim().is_empty() || is_header {
            continue;
        }
        let found = || format!("line {number}: found {line:?}, expected arrival seconds, prompt tokens, output tokens");
        let [at, prompt, output] = fields[..] else {
            return Err(found());
        };
        let (Ok(at), Ok(prompt), Ok(output)) = (at.parse(), prompt.parse(), output.parse()) else {
            return Err(found());
        };
        let arrival = Arrival { at, prompt, output };
        if !at.is_finite() || at < 0.0 || prompt == 0 || output == 0 {
            return Err(format!("{}: times must be at least 0, token counts at least 1", found()));
        }
        if prompt.saturating_add(output) > max_model_len {
            return Err(format!(
                "line {number}: found {prompt} + {output} tokens, expected at most {max_model_len}, the context length"
            ));
        }
        trace.push(arrival);
    }
    if trace.is_empty() {
        return Err("the trace is empty: expected at least one request".into());
    }
    trace.sort_by(|a, b| a.at.total_cmp(&b.at));
    Ok(trace)
}
