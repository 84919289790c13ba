//! From the hidden states of a text to its embedding, or to the scores of its labels.
//!
//! ```text
//! hidden states ─▶ pooling ─▶ dense layers, norms ─▶ length 1       an embedding
//!                          └▶ dense layers of a classifier ─▶ logits ─▶ scores
//! ```
//!
//! A folder of Sentence Transformers states the first line in `modules.json` ([`modules`]), an architecture with a classifier the second
//! ([`Classifier`](crate::decoder::Classifier)). Both work on one vector of each text, in float64 on the host, so their bits depend on
//! nothing else.

mod modules;
mod pooler;

pub(crate) use modules::{is_listed, max_tokens};
pub use pooler::{Dimensions, Pooler, Task};

/// How the hidden states after the final norm become one vector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Pooling {
    /// The hidden state of the last token, which in a decoder attends to all others.
    #[default]
    Last,
    /// The mean over all tokens.
    Mean,
    /// The hidden state of the first token.
    Cls,
    /// The greatest of each element over all tokens.
    Max,
    /// The sum over all tokens, divided by the root of their number.
    MeanSqrtLen,
    /// The mean over all tokens with their positions as weights, from 1 on.
    WeightedMean,
}

impl Pooling {
    /// Whether the vector is made of the last token's state alone, so that other tokens may come from the prefix cache.
    pub fn is_of_last(self) -> bool {
        self == Pooling::Last
    }
}

impl std::str::FromStr for Pooling {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Pooling, &'static str> {
        match name.to_ascii_lowercase().as_str() {
            "last" => Ok(Pooling::Last),
            "mean" => Ok(Pooling::Mean),
            "cls" => Ok(Pooling::Cls),
            _ => Err("expected last, mean or cls"),
        }
    }
}

/// From the logits of labels to their scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ScoreFunction {
    /// The logits.
    Identity,
    /// The logistic function of each.
    Sigmoid,
    /// The softmax over all.
    Softmax,
}

impl ScoreFunction {
    /// The scores of these logits.
    ///
    /// ```
    /// use models::ScoreFunction;
    /// assert_eq!(ScoreFunction::Sigmoid.of(&[0.0]), [0.5]);
    /// assert_eq!(ScoreFunction::Softmax.of(&[3.0, 3.0]), [0.5, 0.5]);
    /// ```
    pub fn of(self, logits: &[f32]) -> Vec<f32> {
        let wide = |x: &f32| f64::from(*x);
        match self {
            ScoreFunction::Identity => logits.to_vec(),
            ScoreFunction::Sigmoid => logits.iter().map(|x| (1.0 / (1.0 + (-wide(x)).exp())) as f32).collect(),
            ScoreFunction::Softmax => {
                let greatest = logits.iter().map(wide).fold(f64::NEG_INFINITY, f64::max);
                let exps: Vec<f64> = logits.iter().map(|x| (wide(x) - greatest).exp()).collect();
                let total: f64 = exps.iter().sum();
                exps.iter().map(|x| (x / total) as f32).collect()
            }
        }
    }
}
