//! How fast a model is about on the CPU of this machine, and at most: lower bounds of times from the peak rates of this machine, or of a GPU
//! that is named.

use std::fmt;

use engine::{EngineConfig, Estimate, Plan, Quantization, Roofline};
use serde_json::{Value, json};

use crate::error::CliError;

/// Prompt and context of the figures.
const PROMPT: u64 = 1024;

/// A GPU of `--card`: memory, and the rates of its data sheet.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Card {
    pub name: &'static str,
    gib: f64,
    /// Bytes read per second.
    read: f64,
    /// Operations in half precision per second, without sparsity.
    peak: f64,
}

const fn card(name: &'static str, gib: f64, gigabytes: f64, tera_operations: f64) -> Card {
    Card { name, gib, read: gigabytes * 1e9, peak: tera_operations * 1e12 }
}

/// The GPUs of `--card`.
pub const CARDS: [Card; 13] = [
    card("a10", 24.0, 600.0, 125.0),
    card("a100-40g", 40.0, 1555.0, 312.0),
    card("a100", 80.0, 2039.0, 312.0),
    card("l4", 24.0, 300.0, 121.0),
    card("l40s", 48.0, 864.0, 362.0),
    card("rtx3090", 24.0, 936.0, 71.0),
    card("rtx4090", 24.0, 1008.0, 165.0),
    card("rtx5090", 32.0, 1792.0, 209.0),
    card("rtxpro6000", 96.0, 1792.0, 504.0),
    card("h100-pcie", 80.0, 2039.0, 756.0),
    card("h100", 80.0, 3350.0, 989.0),
    card("h200", 141.0, 4800.0, 989.0),
    card("b200", 180.0, 8000.0, 2250.0),
];

/// Parses `--card`.
pub fn parse(text: &str) -> Result<Card, String> {
    let name = text.to_lowercase();
    CARDS.into_iter().find(|card| card.name == name).ok_or_else(|| {
        let names: Vec<&str> = CARDS.iter().map(|card| card.name).collect();
        format!("expected one of {}", names.join(", "))
    })
}

/// The bounds of a model on a machine.
pub struct Speed {
    roofline: Roofline,
    /// Rates of the model's own products, on a CPU.
    estimate: Option<Estimate>,
    /// What the rates are those of.
    machine: String,
    /// Flags that help, and what they bring.
    advice: Vec<String>,
}

impl Speed {
    /// Measures the rates of this machine, which takes about a second, unless a card is named.
    pub fn of(config: &EngineConfig, plan: &Plan, on: Option<&(Card, Roofline)>) -> Result<Speed, CliError> {
        let (roofline, estimate, machine) = match on {
            Some((card, roofline)) => (*roofline, None, format!("the data sheet of {}", card.name)),
            None => {
                let (roofline, estimate) = Roofline::estimate(config)?;
                (roofline, estimate, "peak rates measured here".to_string())
            }
        };
        let mut advice = Vec::new();
        let is_gpu = on.is_some() || config.device == "cuda";
        if plan.quantization.is_none() && !plan.stored && !is_gpu {
            let smaller = EngineConfig { quantization: Some(Quantization::Q8), ..config.clone() };
            if let Ok(quantised) = engine::plan(&smaller) {
                let share = quantised.weight_bytes as f64 / plan.weight_bytes.max(1) as f64;
                let faster = 1.0 / (roofline.token_seconds(PROMPT) * share);
                advice.push(format!("--quantization q8: {share:.2} of the weights, up to {faster:.0} tokens/s"));
            }
        }
        if plan.limited_by_pool || plan.pool_tokens() < plan.max_model_len * 4 {
            let form = if is_gpu { "fp8" } else { "int8" };
            advice.push(format!("--kv-cache-dtype {form}: the cache holds about twice as many tokens"));
        }
        if config.max_model_len.is_none() && plan.limited_by_pool {
            advice.push("--max-model-len N: a shorter context lets more sequences run at once".to_string());
        }
        if !config.enable_prefix_caching {
            advice.push("--enable-prefix-caching: equal beginnings of prompts are computed once".to_string());
        }
        Ok(Speed { roofline, estimate, machine, advice })
    }

    /// Estimates of the tokens per second of one sequence, and of the seconds to its first token.
    fn estimates(&self) -> Option<[f64; 2]> {
        let estimate = self.estimate.as_ref()?;
        // Both are measured: a busy moment can put one on the wrong side of the other.
        let token = estimate.token_seconds(&self.roofline, PROMPT).max(self.roofline.token_seconds(PROMPT));
        let first = estimate.prompt_seconds(&self.roofline, PROMPT).max(self.roofline.prompt_seconds(PROMPT));
        Some([1.0 / token, first])
    }

    fn per_second(&self) -> f64 {
        1.0 / self.roofline.token_seconds(PROMPT)
    }

    pub fn to_json(&self) -> Value {
        json!({
            "machine": self.machine,
            "read_bytes_per_second": self.roofline.read,
            "operations_per_second": self.roofline.peak,
            "tokens_per_second": self.estimates().map(|[tokens, _]| tokens),
            "seconds_to_first_token": self.estimates().map(|[_, first]| first),
            "tokens_per_second_at_most": self.per_second(),
            "seconds_to_first_token_at_least": self.roofline.prompt_seconds(PROMPT),
            "prompt_tokens": PROMPT,
            "advice": self.advice,
        })
    }
}

impl fmt::Display for Speed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f)?;
        if let Some([tokens, first]) = self.estimates() {
            writeln!(
                f,
                "speed about        {tokens:.1} tokens/s of one sequence (products like the model's timed here)"
            )?;
            writeln!(f, "first token about  {first:.3} s after a prompt of {PROMPT} tokens")?;
        }
        writeln!(f, "speed at most      {:.1} tokens/s of one sequence ({})", self.per_second(), self.machine)?;
        let first = self.roofline.prompt_seconds(PROMPT);
        writeln!(f, "first token        {first:.3} s or more after a prompt of {PROMPT} tokens")?;
        for (index, line) in self.advice.iter().enumerate() {
            writeln!(f, "{:<18} {line}", if index == 0 { "flags that help" } else { "" })?;
        }
        Ok(())
    }
}

impl Card {
    /// The plan of a model on this GPU, and its bounds.
    pub fn plan(self, config: &EngineConfig) -> Result<(Plan, Roofline), CliError> {
        let memory = (self.gib * f64::from(1 << 30)) as u64;
        Ok(Roofline::of_card(config, memory, self.read, self.peak)?)
    }
}
