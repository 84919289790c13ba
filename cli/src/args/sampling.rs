//! Flags of sampling, of commands that generate text.

use clap::Args;

use crate::values;

#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Maximum number of tokens to generate [default: up to the end of the context]
    #[arg(long, value_name = "TOKENS", value_parser = values::whole::<usize>)]
    pub max_tokens: Option<usize>,
    /// Softmax temperature; 0 always selects the most likely token
    #[arg(long)]
    pub temperature: Option<f32>,
    /// Sample from the most likely tokens whose probabilities sum up to this value
    ///
    /// Above 0, at most 1.
    #[arg(long)]
    pub top_p: Option<f32>,
    /// Sample from this many of the most likely tokens; 0: from all
    #[arg(long, value_parser = values::whole::<u32>)]
    pub top_k: Option<u32>,
    /// Drop tokens less likely than this fraction of the most likely token's probability
    #[arg(long)]
    pub min_p: Option<f32>,
    /// Penalty for tokens that have occurred before; 1 disables it
    ///
    /// Above 0.
    #[arg(long)]
    pub repetition_penalty: Option<f32>,
    /// Stop before this text; can be given several times
    ///
    /// The text itself is not printed.
    #[arg(long, value_name = "TEXT", value_parser = values::filled)]
    pub stop: Vec<String>,
    /// Continue after the end-of-sequence token
    #[arg(long)]
    pub ignore_eos: bool,
}
