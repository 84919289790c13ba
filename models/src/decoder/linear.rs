//! Linear layers: the tensors that hold their rows, and how they are stored.

use std::fmt;

use linear::{Quantization, RowBlock};
use serde::{Serialize, Serializer};

/// Linear layer `y = x·Wᵀ + bias`. W may consist of several tensors of the checkpoint, stacked by rows: one fused product.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Linear {
    /// The tensors, in order.
    pub parts: Vec<Part>,
    /// Number of inputs: the columns of every part.
    pub inputs: usize,
    /// Whether every part has a bias.
    pub bias: bool,
    /// How the weights are stored on the device.
    pub form: Form,
    /// Its place in a branch.
    pub role: Role,
    /// Whether LoRA adapters may target its parts.
    pub adapters: bool,
    /// How many of the inputs each rank of a group computes, if they are gathered before the product; else empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gathered_inputs: Vec<usize>,
    /// How many outputs each rank of a group computes, if those of all ranks are gathered behind the product; else empty.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub gathered_outputs: Vec<usize>,
    /// Whether each rank of a group has some of the inputs, and the outputs of all are added behind the product.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub summed: bool,
}

/// Rows of a [`Linear`]: a tensor, or rows of a packed one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Part {
    /// Name in the checkpoint, without `.weight` or `.bias`.
    pub name: String,
    /// Number of rows: outputs.
    pub rows: usize,
    /// Where the rows lie in the tensor.
    #[serde(skip_serializing_if = "Pick::is_all")]
    pub pick: Pick,
    /// Whether the tensors are named `NAME` and `NAME_bias` instead of `NAME.weight` and `NAME.bias`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub bare: bool,
    /// Name of another tensor without `.weight`, which some checkpoints have instead, and where the rows lie in it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub own: Option<(String, Pick)>,
}

/// Rows of a tensor `[total, inputs]`, or of one of the matrices of a tensor `[count, total, inputs]`. Row r of the part is row
/// `first + r / run * stride + r % run` of the matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Pick {
    /// Rows of the tensor.
    pub total: usize,
    /// The part's first row.
    pub first: usize,
    /// Number of consecutive rows in a run.
    pub run: usize,
    /// Distance between the first rows of two runs.
    pub stride: usize,
    /// Whether the tensor holds the transpose, `[inputs, total]`.
    pub transposed: bool,
    /// The first input and the number of inputs of the tensor, if the part has only some of them.
    pub inputs: Option<(usize, usize)>,
    /// Which matrix, and how many the tensor has; `None` for a tensor of one matrix without that dimension.
    pub matrix: Option<(usize, usize)>,
}

impl Pick {
    /// All rows of a tensor.
    pub fn all(rows: usize) -> Pick {
        Pick::rows(rows, 0, rows)
    }

    /// Consecutive rows of a tensor of `total` rows.
    pub fn rows(total: usize, first: usize, rows: usize) -> Pick {
        Pick { total, first, run: rows, stride: rows, transposed: false, inputs: None, matrix: None }
    }

    /// Runs of rows of a tensor of `total` rows.
    pub fn runs(total: usize, first: usize, run: usize, stride: usize) -> Pick {
        Pick { total, first, run, stride, transposed: false, inputs: None, matrix: None }
    }

    /// Whether it is the whole tensor.
    fn is_all(&self) -> bool {
        *self == Pick::all(self.total)
    }

    /// The shape of the weight tensor, given the number of inputs.
    pub fn shape(&self, inputs: usize) -> Vec<usize> {
        let count = self.matrix.map(|(_, count)| count);
        let inputs = self.inputs.map_or(inputs, |(_, all)| all);
        let matrix = if self.transposed { [inputs, self.total] } else { [self.total, inputs] };
        count.into_iter().chain(matrix).collect()
    }

    /// The shape of the bias tensor.
    pub fn bias_shape(&self) -> Vec<usize> {
        self.matrix.map(|(_, count)| count).into_iter().chain([self.total]).collect()
    }

    /// The row of the matrix that is row `row` of the part.
    pub fn row(&self, row: usize) -> usize {
        self.first + row / self.run * self.stride + row % self.run
    }
}

impl Part {
    /// A whole tensor.
    pub fn new(name: impl Into<String>, rows: usize) -> Part {
        Part::picked(name, rows, Pick::all(rows))
    }

    /// Some rows of a tensor.
    pub fn picked(name: impl Into<String>, rows: usize, pick: Pick) -> Part {
        Part { name: name.into(), rows, pick, bare: false, own: None }
    }

    /// Name of the weight tensor.
    pub fn weight(&self) -> String {
        if self.bare { self.name.clone() } else { format!("{}.weight", self.name) }
    }

    /// Name of the bias tensor.
    pub fn bias(&self) -> String {
        format!("{}{}", self.name, if self.bare { "_bias" } else { ".bias" })
    }
}

/// How the weights of a [`Linear`] are stored on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Form {
    /// Unquantised: in the checkpoint's type, or on a device that launches kernels in the type of the computation.
    #[default]
    Dense,
    /// Quantised while loading.
    Quantized(Quantization),
    /// As the checkpoint stores them, at least some of them in fewer bits.
    Stored {
        /// Whether products take activations that are quantised in blocks.
        takes_blocks: bool,
        /// Whether devices that launch kernels may round activations to 8 bits ([`ByteMatrix`](linear::ByteMatrix)).
        rounds: bool,
        /// Inputs at whose multiples rows can be cut without a change of weights and rounded activations; 0: nowhere.
        grain: usize,
    },
}

impl Form {
    /// The quantisation while loading.
    pub fn quantization(self) -> Option<Quantization> {
        match self {
            Form::Dense | Form::Stored { .. } => None,
            Form::Quantized(quantization) => Some(quantization),
        }
    }

    /// Inputs at whose multiples rows can be cut without a change of weights and rounded activations; 0: nowhere.
    pub fn grain(self) -> usize {
        match self {
            Form::Dense => 1,
            Form::Quantized(_) => RowBlock::LEN,
            Form::Stored { grain, .. } => grain,
        }
    }

    /// Whether products take activations that are quantised in blocks.
    pub fn takes_blocks(self) -> bool {
        matches!(self, Form::Quantized(_) | Form::Stored { takes_blocks: true, .. })
    }
}

impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Form::Dense => f.write_str("dense"),
            Form::Stored { .. } => f.write_str("stored"),
            Form::Quantized(quantization) => quantization.fmt(f),
        }
    }
}

impl Serialize for Form {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Place of a [`Linear`] in a branch, as the row-parallel form of tensor parallelism has it (Shoeybi et al., "Megatron-LM", 2019):
/// that of [`Reduce::Sum`](super::Reduce::Sum). With [`Reduce::Gather`](super::Reduce::Gather) both kinds are cut by outputs, so that no
/// sum is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// By outputs: each rank computes some of the outputs.
    Column,
    /// By inputs: each rank has some of the inputs, and the partial sums are added.
    Row,
    /// Not at all. Such a layer is small, and it is never quantised.
    Replicated,
}

impl Linear {
    /// A layer without bias that adapters may target.
    pub fn new(inputs: usize, role: Role, parts: impl IntoIterator<Item = Part>) -> Linear {
        let parts = parts.into_iter().collect();
        let (gathered_inputs, gathered_outputs) = (Vec::new(), Vec::new());
        Linear {
            parts,
            inputs,
            bias: false,
            form: Form::Dense,
            role,
            adapters: true,
            gathered_inputs,
            gathered_outputs,
            summed: false,
        }
    }

    /// Number of outputs: the rows of all parts.
    pub fn rows(&self) -> usize {
        self.parts.iter().map(|part| part.rows).sum()
    }

    /// Number of outputs of all ranks.
    pub fn all_rows(&self) -> usize {
        if self.gathered_outputs.is_empty() { self.rows() } else { self.gathered_outputs.iter().sum() }
    }

    /// Number of its weights and biases.
    pub(super) fn num_parameters(&self) -> u64 {
        // A part may repeat a row.
        let own = self.parts.iter().filter(|part| part.pick.stride > 0).map(|part| part.rows);
        (own.sum::<usize>() * (self.inputs + usize::from(self.bias))) as u64
    }

    /// Names and shapes of its tensors in the checkpoint, weights and biases.
    pub(super) fn tensors(&self) -> impl Iterator<Item = (String, Vec<usize>)> {
        self.parts.iter().flat_map(|part| {
            let bias = self.bias.then(|| (part.bias(), part.pick.bias_shape()));
            std::iter::once((part.weight(), part.pick.shape(self.inputs))).chain(bias)
        })
    }
}
