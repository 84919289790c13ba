//! The tensors of a GGUF file under their names in Hugging Face layout, and how their values are undone from what conversion changed.

use std::borrow::Cow;
use std::ops::Range;

use device::Dtype;
use linear::{StoredFormat, StoredRow, StoredRows};

use super::architectures::{Architecture, CHOICE_BIAS, CONVOLUTION, EXPERTS, MODULES, ONE_ROW, ROPE_FACTORS};
use super::file::Gguf;
use super::part::Tensor;
use super::types::{ElementType, Storage};
use crate::decoder::MAX_EXPERTS;

/// What conversion changed in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Change {
    /// Nothing.
    None,
    /// 1 was added.
    PlusOne,
    /// Rows of heads of this size: rows i and i + size / 2 became neighbours.
    Pairs(usize),
}

/// How the values of a tensor are stored.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Encoding {
    kind: &'static ElementType,
    change: Change,
}

impl Encoding {
    /// Type of the values that [`Encoding::decode`] gives.
    pub fn dtype(&self) -> Dtype {
        match (self.kind.storage, self.change) {
            (Storage::Number(dtype), Change::None | Change::Pairs(_)) => dtype,
            _ => Dtype::F32,
        }
    }

    /// The form and the rows of a matrix with rows of `k` weights; `None` for numbers.
    pub fn rows<'a>(&self, data: &'a [u8], k: usize) -> Option<(StoredFormat, Box<dyn StoredRows + Send + 'a>)> {
        match (self.kind.storage, self.change) {
            (Storage::Codes(format, _), Change::None) => {
                Some((format, Box::new(Rows { kind: self.kind, data, k, pairs: 0 })))
            }
            (Storage::Codes(format, _), Change::Pairs(size)) => {
                Some((format, Box::new(Rows { kind: self.kind, data, k, pairs: size })))
            }
            _ => None,
        }
    }

    /// Whether the values are the bytes in the file.
    pub fn is_plain(&self) -> bool {
        matches!(self.kind.storage, Storage::Number(_)) && self.change == Change::None
    }

    /// Little-endian values of [`Encoding::dtype`] of a tensor of this many rows.
    pub fn decode<'a>(&self, data: &'a [u8], rows: usize) -> Cow<'a, [u8]> {
        let data = match self.change {
            Change::Pairs(size) => without_pairs(data, rows, size),
            _ => Cow::Borrowed(data),
        };
        if matches!(self.kind.storage, Storage::Number(_)) && self.change != Change::PlusOne {
            return data;
        }
        let offset = if self.change == Change::PlusOne { 1.0 } else { 0.0 };
        Cow::Owned(self.kind.values(&data).iter().flat_map(|value| (value - offset).to_le_bytes()).collect())
    }
}

/// Rows of blocks.
struct Rows<'a> {
    kind: &'static ElementType,
    data: &'a [u8],
    /// Weights of a row.
    k: usize,
    /// Rows of a head whose neighbours belong together; 0 if rows are in the order of Hugging Face.
    pairs: usize,
}

impl StoredRows for Rows<'_> {
    fn read(&self, row: usize, out: &mut StoredRow) {
        let row = if self.pairs > 1 { paired(row, self.pairs) } else { row };
        let bytes = self.k / self.kind.block * self.kind.bytes;
        self.kind.unpack(self.data.get(row * bytes..(row + 1) * bytes).unwrap_or_default(), out);
    }
}

/// The row of a GGUF tensor that is row `row` in the order of Hugging Face, in heads of `size` rows.
fn paired(row: usize, size: usize) -> usize {
    row / size * size + row % (size / 2) * 2 + row % size / (size / 2)
}

/// Rows in the order of Hugging Face: row `2i + s` of a head of `size` rows becomes row `i + s * size / 2`.
fn without_pairs(data: &[u8], rows: usize, size: usize) -> Cow<'_, [u8]> {
    let fits = rows > 0 && size > 0 && size.is_multiple_of(2) && rows.is_multiple_of(size);
    if !fits || !data.len().is_multiple_of(rows) {
        // The shape contradicts the configuration, which the caller reports.
        return Cow::Borrowed(data);
    }
    let row_bytes = data.len() / rows;
    Cow::Owned((0..rows).flat_map(|row| &data[paired(row, size) * row_bytes..][..row_bytes]).copied().collect())
}

/// A tensor under its name in Hugging Face layout.
pub(crate) struct Named {
    pub name: String,
    /// Number of its file.
    pub part: usize,
    pub encoding: Encoding,
    pub shape: Vec<usize>,
    /// Its bytes in the file.
    pub data: Range<usize>,
}

/// Least bytes of an expert's matrix: with fewer, the names of experts would need more memory than the file has bytes.
const LEAST_EXPERT: usize = 128;

/// What the keys say of the tensors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    pub head_dim: usize,
    pub layers: u64,
    pub experts: u64,
}

/// All tensors but those that are part of the configuration. Tensors without a known name keep theirs.
pub(super) fn named(gguf: &Gguf, architecture: &Architecture, counts: Counts) -> Vec<Named> {
    let tensors = gguf.tensors().iter().filter(|(name, _)| !ROPE_FACTORS.contains(&name.as_str()));
    tensors.flat_map(|(name, tensor)| name_one(name, tensor, architecture, counts)).collect()
}

fn name_one(name: &str, tensor: &Tensor, architecture: &Architecture, counts: Counts) -> Vec<Named> {
    let with = |name: String, change: Change| Named {
        name,
        part: tensor.part,
        encoding: Encoding { kind: tensor.kind, change },
        shape: tensor.shape.clone(),
        data: tensor.data.clone(),
    };
    let (module, suffix) = name.rsplit_once('.').unwrap_or((name, ""));
    let norm = if architecture.norms_plus_one { Change::PlusOne } else { Change::None };
    match module {
        "token_embd" => return vec![with(format!("model.embed_tokens.{suffix}"), Change::None)],
        "output_norm" => return vec![with(format!("model.norm.{suffix}"), norm)],
        // That of the output, under another name.
        "token_embd_norm" => return vec![with(format!("model.embedding_norm.{suffix}"), norm)],
        "output" => return vec![with(format!("lm_head.{suffix}"), Change::None)],
        _ => {}
    }
    let unknown = || vec![with(name.to_string(), Change::None)];
    let Some((layer, module)) = module.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) else {
        return unknown();
    };
    let is_layer = layer.parse().is_ok_and(|number: u64| number < counts.layers);
    let layer = format!("model.layers.{layer}");
    if module == "attn_sinks" {
        return vec![with(format!("{layer}.self_attn.sinks"), Change::None)];
    }
    let (experts, names) = architecture.experts;
    // Files of early 2024 have a tensor for each expert.
    if let Some((part, expert)) = module.rsplit_once('.').filter(|(_, expert)| expert.parse::<usize>().is_ok()) {
        let index = EXPERTS.iter().position(|experts| experts.strip_suffix("_exps") == Some(part));
        let Some(index) = index else { return unknown() };
        return vec![with(format!("{layer}.{experts}.{expert}.{}.{suffix}", names[index]), Change::None)];
    }
    if let Some(index) = EXPERTS.iter().position(|experts| *experts == module) {
        let count = tensor.shape[0];
        let bytes = tensor.data.len() / count;
        let expert = |expert: usize| {
            let start = tensor.data.start + expert * bytes;
            let name = format!("{layer}.{experts}.{expert}.{}.{suffix}", names[index]);
            Named { shape: tensor.shape[1..].to_vec(), data: start..start + bytes, ..with(name, Change::None) }
        };
        // A matrix of one dimension has no experts in it; what contradicts the keys is a broken file.
        let is_stated = is_layer && count as u64 == counts.experts && count <= MAX_EXPERTS && bytes >= LEAST_EXPERT;
        return if tensor.shape.len() > 1 && is_stated { (0..count).map(expert).collect() } else { unknown() };
    }
    let known = architecture.modules.iter().chain(MODULES).find(|(stored, _)| *stored == module);
    let Some((stored, known)) = known else { return unknown() };
    let change = match *stored {
        "attn_q" | "attn_k" if architecture.pairs => Change::Pairs(counts.head_dim),
        _ if stored.ends_with("norm") => norm,
        _ => Change::None,
    };
    let mut named = with(format!("{layer}.{known}.{suffix}"), change);
    match *stored {
        ONE_ROW if named.shape.len() == 1 => named.shape.insert(0, 1),
        CONVOLUTION if named.shape.len() == 2 => named.shape.insert(1, 1),
        CHOICE_BIAS => named.name = format!("{layer}.{known}"),
        _ => {}
    }
    vec![named]
}
