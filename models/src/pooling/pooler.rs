//! What is computed of the pooled vector of a text.

use std::collections::BTreeMap;
use std::fmt;

use simd::Pool;

use super::modules::{Module, Modules};
use super::{Pooling, ScoreFunction};
use crate::checkpoint::error::LoadError;
use crate::checkpoint::files::ModelFiles;
use crate::decoder::{Dense, DenseActivation, Norm, NormKind};
use crate::{ModelConfig, Weights};

/// What a pooled vector becomes.
#[derive(Clone, Debug, PartialEq)]
pub enum Task {
    /// An embedding.
    Embed {
        /// Whether it has length 1.
        normalised: bool,
    },
    /// Logits of labels.
    Classify {
        /// Names of the labels: one per logit.
        labels: Vec<String>,
        /// From logits to scores.
        scores: ScoreFunction,
    },
}

/// To which lengths the embeddings of a model may be cut.
#[derive(Clone, Debug, Default, PartialEq, serde::Serialize)]
pub enum Dimensions {
    /// To none.
    #[default]
    Own,
    /// To any.
    Any,
    /// To these.
    Listed(Vec<usize>),
}

/// The pooling of a checkpoint, and what follows it.
pub struct Pooler {
    /// How hidden states become one vector; `None` if the checkpoint's way is not supported.
    pub pooling: Option<Pooling>,
    /// What the vector becomes.
    pub task: Task,
    /// Number of elements of the result.
    pub width: usize,
    /// To which lengths an embedding may be cut.
    pub dimensions: Dimensions,
    /// Texts that Sentence Transformers puts before others, by name.
    pub prompts: BTreeMap<String, String>,
    steps: Vec<Step>,
}

enum Step {
    Dense { weight: Vec<f32>, bias: Vec<f32>, inputs: usize, activation: DenseActivation },
    Norm { weight: Vec<f32>, bias: Vec<f32>, eps: f64, centre: bool },
    Normalize,
}

impl fmt::Debug for Pooler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Pooler { pooling, task, width, dimensions, steps, .. } = self;
        let mut shown = f.debug_struct("Pooler");
        shown.field("pooling", pooling).field("task", task).field("width", width);
        shown.field("dimensions", dimensions).field("steps", &steps.len()).finish_non_exhaustive()
    }
}

impl Pooler {
    /// What the checkpoint states: its classifier, or its modules, or without both an embedding of length 1: of the last token, of an
    /// encoder the first. `odds`: the tokens whose log-odds, that of the first against the second, are the score of a text.
    ///
    /// # Errors
    /// A file is broken, or a size contradicts the model's.
    pub fn load(
        files: &ModelFiles,
        config: &ModelConfig,
        weights: &Weights,
        odds: Option<[u32; 2]>,
    ) -> Result<Pooler, LoadError> {
        let Modules { listed, pooling, after, prompts } = Modules::load(files)?;
        let decoder = &config.decoder;
        let default = if decoder.is_encoder() { Pooling::Cls } else { Pooling::Last };
        let mut made = Pooler {
            pooling: pooling.unwrap_or(Some(default)),
            task: Task::Embed { normalised: false },
            width: decoder.output_width(),
            dimensions: config.dimensions.clone(),
            prompts,
            steps: Vec::new(),
        };
        if let Some(tokens) = odds {
            made.add_odds((files, config), weights, tokens)?;
            made.task = Task::Classify { labels: vec!["LABEL_0".to_string()], scores: ScoreFunction::Sigmoid };
            return Ok(made);
        }
        if let Some(classifier) = &decoder.head.classifier {
            for layer in &classifier.layers {
                made.add_dense(layer, weights)?;
            }
            made.pooling = Some(classifier.pooling);
            made.task = Task::Classify { labels: classifier.labels.clone(), scores: classifier.scores };
            return Ok(made);
        }
        for module in after {
            match module {
                Module::Dense(dense, weights) => made.add_dense(&dense, &weights)?,
                Module::Normalize => made.normalise(),
                Module::LogitScore(tokens) => {
                    made.add_odds((files, config), weights, tokens)?;
                    made.task = Task::Classify { labels: vec!["LABEL_0".to_string()], scores: ScoreFunction::Identity };
                }
            }
        }
        if !listed {
            made.normalise();
        }
        Ok(made)
    }

    fn normalise(&mut self) {
        self.steps.push(Step::Normalize);
        self.task = Task::Embed { normalised: true };
    }

    fn add_dense(&mut self, layer: &Dense, weights: &Weights) -> Result<(), LoadError> {
        let weight = weights.expect(&format!("{}.weight", layer.name), &[layer.outputs, layer.inputs])?;
        if layer.inputs != self.width {
            return Err(LoadError::WrongShape {
                file: weight.file.clone(),
                tensor: format!("{:?}", weight.name),
                found: weight.shape.clone(),
                expected: vec![layer.outputs, self.width],
            });
        }
        let of = |name: String, len: usize| Ok::<_, LoadError>(weights.expect(&name, &[len])?.to_f32());
        let bias = layer.bias.then(|| of(format!("{}.bias", layer.name), layer.outputs)).transpose()?;
        self.steps.push(Step::Dense {
            weight: weight.to_f32(),
            bias: bias.unwrap_or_default(),
            inputs: layer.inputs,
            activation: layer.activation,
        });
        if let Some(Norm { kind, weight, bias, width, eps, .. }) = &layer.norm {
            let [weight, bias] = [weight.first(), bias.as_ref()]
                .map(|name| name.map_or(Ok(Vec::new()), |name| of(name.clone(), *width)));
            let centre = *kind == NormKind::Layer;
            self.steps.push(Step::Norm { weight: weight?, bias: bias?, eps: f64::from(*eps), centre });
        }
        self.width = layer.outputs;
        self.task = Task::Embed { normalised: false };
        Ok(())
    }

    /// A layer of one output: the difference of two rows of the output projection.
    fn add_odds(
        &mut self,
        (files, config): (&ModelFiles, &ModelConfig),
        weights: &Weights,
        tokens: [u32; 2],
    ) -> Result<(), LoadError> {
        let decoder = &config.decoder;
        let head = decoder.head.linear.as_ref().unwrap_or(&decoder.embedding.tokens);
        let refused = |found: String, expected: &str| LoadError::Setting {
            file: files.locate("config.json"),
            key: "classifier_from_token".to_string(),
            found,
            expected: expected.to_string(),
        };
        let part = match &head.parts[..] {
            [part] if !head.bias && decoder.head.soft_cap.is_none() && decoder.head.projection.is_none() => part,
            _ => return Err(refused(format!("{tokens:?}"), "a model whose logits are a plain product")),
        };
        let table = weights.expect(&part.weight(), &[part.rows, head.inputs])?;
        if let Some(token) = tokens.iter().find(|token| **token as usize >= part.rows) {
            let expected = format!("token ids below {}, the rows of the output projection", part.rows);
            return Err(refused(token.to_string(), &expected));
        }
        let numbers = table.elements();
        let row = |token: u32| {
            let bytes = head.inputs * table.dtype.bytes();
            let mut row = vec![0.0_f32; head.inputs];
            table.dtype.read_row(&numbers[token as usize * bytes..][..bytes], &mut row);
            row
        };
        let (yes, no) = (row(tokens[0]), row(tokens[1]));
        let weight = yes.iter().zip(no).map(|(yes, no)| (yes - no) * decoder.head.scale).collect();
        self.steps.push(Step::Dense {
            weight,
            bias: Vec::new(),
            inputs: head.inputs,
            activation: DenseActivation::Identity,
        });
        self.width = 1;
        Ok(())
    }

    /// What becomes of a pooled vector.
    pub fn apply(&self, mut vector: Vec<f64>, threads: &Pool) -> Vec<f32> {
        for step in &self.steps {
            match step {
                Step::Dense { weight, bias, inputs, activation } => {
                    let mut out = vec![0.0; weight.len() / inputs];
                    threads.chunks_mut(&mut out, 1, *inputs, |row, out| {
                        let sum = dot(&vector, &weight[row * inputs..][..*inputs]);
                        out[0] = activation.of(sum + bias.get(row).map_or(0.0, |bias| f64::from(*bias)));
                    });
                    vector = out;
                }
                Step::Norm { weight, bias, eps, centre } => norm(&mut vector, weight, bias, *eps, *centre),
                Step::Normalize => normalise(&mut vector),
            }
        }
        vector.into_iter().map(|x| x as f32).collect()
    }

    /// Says to which lengths embeddings may be cut, in place of the checkpoint.
    pub fn set_dimensions(&mut self, any: Option<bool>, listed: Option<Vec<usize>>) {
        match (listed, any) {
            (Some(listed), _) => self.dimensions = Dimensions::Listed(listed),
            (None, Some(true)) => self.dimensions = Dimensions::Any,
            (None, Some(false)) => self.dimensions = Dimensions::Own,
            (None, None) => {}
        }
    }

    /// Whether embeddings may be cut to this many elements.
    pub fn takes(&self, dimensions: usize) -> bool {
        dimensions == self.width
            || match &self.dimensions {
                Dimensions::Own => false,
                Dimensions::Any => (1..=self.width).contains(&dimensions),
                Dimensions::Listed(known) => known.contains(&dimensions) && dimensions <= self.width,
            }
    }

    /// A vector at length 1.
    pub fn at_length_1(&self, vector: &[f32]) -> Vec<f32> {
        let mut wide: Vec<f64> = vector.iter().map(|x| f64::from(*x)).collect();
        normalise(&mut wide);
        wide.into_iter().map(|x| x as f32).collect()
    }

    /// The first elements of an embedding, at length 1 if embeddings are.
    pub fn cut(&self, mut vector: Vec<f32>, dimensions: usize) -> Vec<f32> {
        if dimensions >= vector.len() {
            return vector;
        }
        vector.truncate(dimensions);
        if self.task == (Task::Embed { normalised: true }) {
            return self.at_length_1(&vector);
        }
        vector
    }
}

/// Eight sums side by side, so that the order of additions is the same in every build.
fn dot(a: &[f64], b: &[f32]) -> f64 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let mut sums = [0.0; 8];
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * f64::from(*b);
        }
    }
    let rest = a_rest.iter().zip(b_rest).map(|(a, b)| a * f64::from(*b));
    sums.into_iter().chain(rest).sum()
}

fn norm(vector: &mut [f64], weight: &[f32], bias: &[f32], eps: f64, centre: bool) {
    let count = vector.len() as f64;
    let mean = if centre { vector.iter().sum::<f64>() / count } else { 0.0 };
    let square = vector.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / count;
    let factor = 1.0 / (square + eps).sqrt();
    for (i, x) in vector.iter_mut().enumerate() {
        let scaled = (*x - mean) * factor * weight.get(i).map_or(1.0, |weight| f64::from(*weight));
        *x = scaled + bias.get(i).map_or(0.0, |bias| f64::from(*bias));
    }
}

/// Brings a vector to length 1. A vector of zeros stays zero.
fn normalise(vector: &mut [f64]) {
    let length = vector.iter().map(|x| x * x).sum::<f64>().sqrt();
    let scale = if length > 0.0 { 1.0 / length } else { 0.0 };
    vector.iter_mut().for_each(|x| *x *= scale);
}

impl DenseActivation {
    fn of(self, x: f64) -> f64 {
        match self {
            DenseActivation::Identity => x,
            DenseActivation::Tanh => x.tanh(),
            DenseActivation::Relu => x.max(0.0),
            DenseActivation::Gelu => 0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2)),
            DenseActivation::Silu => x / (1.0 + (-x).exp()),
            DenseActivation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
        }
    }
}

/// The error function: `2/√π e^(−x²) Σ 2ⁿ x^(2n+1) / (2n+1)!!` (Abramowitz and Stegun, 7.1.6), all of whose terms have the sign of x.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum) = (x, x);
    for n in 1..200 {
        term *= 2.0 * x * x / f64::from(2 * n + 1);
        sum += term;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
}
