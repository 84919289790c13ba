//! The tensors of a GGUF file under their names in Hugging Face layout.

use std::ops::Range;

use serde_json::{Map, Value as Json};

use super::architectures::{Architecture, CHOICE_BIAS_ROW, EXPERTS, MODULES, ONE_ROW, OUTER, Predictor, ROPE_FACTORS};
use super::encoding::{Encoding, KeyHeads, Order, ValueHeads, Values};
use super::file::Gguf;
use super::metadata::MAX_LAYERS;
use super::part::Tensor;
use super::types::TYPES;
use crate::checkpoint::error::LoadError;
use crate::decoder::MAX_EXPERTS;

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

/// Least bytes of a matrix that is one of several in a tensor: with fewer, the names would need more memory than the file has bytes.
const LEAST_MATRIX: usize = 128;
/// Greatest number of matrices in a tensor that belongs to no layer.
const MAX_OUTER: usize = 8;

/// Greatest size of a head, and number of heads, whose order is undone.
const MAX_SIZE: u64 = 1 << 12;
/// The type whose tensors have scales besides.
const SCALED: &str = "NVFP4";

/// Projections to queries, keys and values, and the one to all of them.
const QUERY: &str = "attn_q";
const KEY: &str = "attn_k";
const VALUE: &str = "attn_v";
const JOINT: &str = "attn_qkv";

/// Bytes of a number of the metadata.
const FLOAT: usize = 4;

/// Tensors with a matrix for each head.
const HEADS: [&str; 2] = ["attn_k_b", "attn_v_b"];

/// What the keys say of the tensors.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub head_dim: usize,
    pub heads: usize,
    pub key_heads: usize,
    /// Size of a value.
    pub value_dim: usize,
    /// Number of layers, with those that predict further tokens, and number of the others.
    pub layers: u64,
    pub last: u64,
    pub experts: u64,
    /// Key heads, value heads of each, and the sizes of both, in recurrent layers whose value heads are ordered by their number within a
    /// key head.
    pub tiled: Option<[usize; 4]>,
}

/// All tensors but those that are part of the configuration. Tensors without a known name keep theirs.
pub(super) fn named(gguf: &Gguf, architecture: &Architecture, counts: Counts) -> Vec<Named> {
    let names = Names { gguf, architecture, counts };
    let tensors = gguf.tensors().iter().filter(|(name, _)| !ROPE_FACTORS.contains(&name.as_str()));
    tensors.flat_map(|(name, tensor)| names.of(name, tensor)).chain(names.of_arrays()).collect()
}

/// The value heads of recurrent layers, if a key head has several and their sizes are those of some model.
pub(super) fn tiled(map: &Map<String, Json>) -> Option<[usize; 4]> {
    let size = |key: &str| {
        map.get(&format!("linear_{key}")).and_then(Json::as_u64).filter(|size| (1..=MAX_SIZE).contains(size))
    };
    let (keys, values) = (size("num_key_heads")?, size("num_value_heads")?);
    let sizes = [keys, values / keys, size("key_head_dim")?, size("value_head_dim")?];
    (values > keys && values.is_multiple_of(keys)).then(|| sizes.map(|size| size as usize))
}

/// Checks that scales of whole tensors are numbers for each matrix or one for all.
///
/// # Errors
/// They are not.
pub(super) fn check_scales(gguf: &Gguf) -> Result<(), LoadError> {
    for (name, tensor) in gguf.tensors().iter().filter(|(_, tensor)| tensor.kind.name == SCALED) {
        let stem = name.strip_suffix(".weight").unwrap_or(name);
        let Some(scale) = gguf.tensors().get(&format!("{stem}.scale")) else { continue };
        let found: usize = scale.shape.iter().product();
        let count = if tensor.shape.len() > 2 { tensor.shape[0] } else { 1 };
        if found != 1 && found != count || found > MAX_EXPERTS {
            return Err(LoadError::Gguf {
                file: gguf.file(scale.part).to_string(),
                found: format!("tensor {stem}.scale of {found} values"),
                expected: format!("1 or {count}, at most {MAX_EXPERTS}, for the matrices of {name}"),
            });
        }
    }
    Ok(())
}

struct Names<'a> {
    gguf: &'a Gguf,
    architecture: &'a Architecture,
    counts: Counts,
}

/// The module and what follows it: `.weight`, `.bias` or nothing.
fn split(name: &str) -> (&str, &str) {
    let end = [".weight", ".bias"].iter().find(|end| name.ends_with(**end)).map_or(0, |end| end.len());
    name.split_at(name.len() - end)
}

impl Names<'_> {
    fn of(&self, name: &str, tensor: &Tensor) -> Vec<Named> {
        let plain = |name: String| Named {
            name,
            part: tensor.part,
            encoding: Encoding::plain(tensor.kind),
            shape: tensor.shape.clone(),
            data: tensor.data.clone(),
        };
        if self.is_scale(name) {
            return Vec::new();
        }
        let found = match name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
            Some((layer, rest)) => self.of_layer(layer, rest, tensor, &plain),
            None => self.outer(name, tensor, &plain),
        };
        let mut found = found.unwrap_or_else(|| vec![plain(name.to_string())]);
        self.scale(name, tensor, &mut found);
        found
    }

    /// A tensor that belongs to no layer.
    fn outer(&self, name: &str, tensor: &Tensor, plain: &dyn Fn(String) -> Named) -> Option<Vec<Named>> {
        let (module, suffix) = split(name);
        let (stored, known) = self.architecture.outer.iter().chain(OUTER).find(|(stored, _)| *stored == module)?;
        // Matrices of several streams.
        if tensor.shape.len() == 3 && tensor.shape[0] <= MAX_OUTER {
            return Some(matrices(tensor, plain, |number| format!("{known}.{number}{suffix}")).collect());
        }
        let mut named = plain(format!("{known}{suffix}"));
        named.encoding.values = self.norm(stored, suffix);
        if *stored == "token_types" && named.shape.len() == 1 {
            named.shape.insert(0, 1);
        }
        Some(vec![named])
    }

    /// A tensor of a layer, given its name there.
    fn of_layer(
        &self,
        layer: &str,
        rest: &str,
        tensor: &Tensor,
        plain: &dyn Fn(String) -> Named,
    ) -> Option<Vec<Named>> {
        let Names { architecture, counts, .. } = self;
        let number = layer.parse::<u64>().ok();
        let (module, suffix) = split(rest);
        let behind = number.and_then(|number| number.checked_sub(counts.last));
        let predictor = architecture.predictor.filter(|_| behind.is_some());
        if predictor.is_some() && behind != Some(0) {
            return None;
        }
        let own = predictor.and_then(|it| it.modules.iter().find(|(stored, _)| *stored == module));
        let prefix = match (predictor, own) {
            (Some(Predictor { root, .. }), Some(_)) => root.to_string(),
            (Some(Predictor { root, layer, .. }), None) => format!("{root}.layers.{layer}"),
            (None, _) => format!("{}.{layer}", architecture.layers),
        };
        // A matrix for each of so many: no name for what contradicts the keys, which is a broken file.
        let each = |count: u64, most: usize, name: &dyn Fn(usize) -> String| {
            let found = tensor.shape[0];
            let is_layer = number.is_some_and(|number| number < counts.layers);
            let is_stated = is_layer && found as u64 == count && found <= most && tensor.shape.len() > 1;
            let named = (is_stated && tensor.data.len() / found >= LEAST_MATRIX).then(|| matrices(tensor, plain, name));
            named.map(Iterator::collect)
        };
        let variant = architecture.variant.filter(|(tensor, _)| self.gguf.tensors().contains_key(*tensor));
        let known = variant.map_or(&[][..], |(_, modules)| modules).iter().chain(architecture.modules);
        let known = known.chain(architecture.shared_modules).chain(MODULES);
        let find = |name: &str| known.clone().find(|(stored, _)| *stored == name);
        let known = own.or_else(|| find(rest)).or_else(|| find(module));
        if module == JOINT && known.is_none() {
            let parts = [QUERY, KEY, VALUE].map(|part| Some((part, format!("{prefix}.{}{suffix}", find(part)?.1))));
            return self.apart(tensor, parts, plain);
        }
        let (experts, names) = architecture.experts;
        if known.is_none_or(|(stored, _)| *stored != rest) {
            // Files of early 2024 have a tensor for each expert.
            if let Some((part, expert)) = module.rsplit_once('.').filter(|(_, expert)| expert.parse::<usize>().is_ok())
            {
                let index = EXPERTS.iter().position(|experts| experts.strip_suffix("_exps") == Some(part))?;
                return Some(vec![plain(format!("{prefix}.{experts}.{expert}.{}{suffix}", names[index]))]);
            }
            if let Some(index) = EXPERTS.iter().position(|experts| *experts == module) {
                let name = |expert: usize| format!("{prefix}.{experts}.{expert}.{}{suffix}", names[index]);
                return each(counts.experts, MAX_EXPERTS, &name);
            }
        }
        let (stored, known) = known?;
        if known.ends_with(".norms") {
            let count = if *stored == "attn_q_norm" { counts.heads } else { counts.key_heads };
            return each(count as u64, count, &|head| format!("{prefix}.{known}.{head}{suffix}"));
        }
        if HEADS.contains(stored) {
            return each(counts.heads as u64, counts.heads, &|head| format!("{prefix}.{known}.{head}{suffix}"));
        }
        let suffix = if *stored == rest { "" } else { suffix };
        let mut named = plain(format!("{prefix}.{known}{suffix}"));
        named.encoding.values = self.norm(stored, suffix);
        named.encoding.order = self.order(stored);
        if *stored == "ssm_a" {
            named.encoding.values = Values::LogNegative;
        }
        named.shape = shape(stored, named.shape);
        if *known == CHOICE_BIAS_ROW && named.shape.len() == 1 {
            named.shape.insert(0, 1);
        }
        Some(vec![named])
    }

    /// The queries, keys and values of a tensor with the rows of all, given their names in the file and in Hugging Face layout.
    fn apart(
        &self,
        tensor: &Tensor,
        parts: [Option<(&str, String)>; 3],
        plain: &dyn Fn(String) -> Named,
    ) -> Option<Vec<Named>> {
        let Counts { head_dim, heads, value_dim, .. } = self.counts;
        let rows = tensor.shape[0];
        let (queries, sizes) = (heads.checked_mul(head_dim)?, head_dim.checked_add(value_dim)?);
        let others = rows.checked_sub(queries).filter(|others| sizes > 0 && *others > 0 && others % sizes == 0)?;
        let counts = [queries, others / sizes * head_dim, others / sizes * value_dim];
        let bytes = tensor.data.len() / rows;
        let mut start = tensor.data.start;
        let mut found = Vec::new();
        for (part, rows) in parts.into_iter().zip(counts) {
            let (stored, name) = part?;
            let mut named = plain(name);
            named.shape[0] = rows;
            named.data = start..start + rows * bytes;
            named.encoding.order = self.order(stored);
            start = named.data.end;
            found.push(named);
        }
        Some(found)
    }

    /// Tensors of one number each, from arrays of the metadata.
    fn of_arrays(&self) -> impl Iterator<Item = Named> {
        let Names { gguf, architecture, counts } = self;
        architecture.arrays.iter().flat_map(move |(key, module)| {
            let layers = counts.last.min(MAX_LAYERS + 1) as usize;
            let bytes = gguf.floats(key).unwrap_or_default();
            let is_stated = layers as u64 <= MAX_LAYERS && bytes.len() == layers * FLOAT;
            let start = bytes.start;
            (0..if is_stated { layers } else { 0 }).map(move |layer| Named {
                name: format!("{}.{layer}.{module}", architecture.layers),
                part: 0,
                encoding: Encoding::plain(&TYPES[0]),
                shape: vec![1],
                data: start + layer * FLOAT..start + (layer + 1) * FLOAT,
            })
        })
    }

    /// The change of a norm's weights.
    fn norm(&self, stored: &str, suffix: &str) -> Values {
        let is_norm = stored.ends_with("norm") && stored != "ssm_norm" && suffix == ".weight";
        let is_norm = is_norm && self.architecture.norms_plus_one;
        if is_norm { Values::PlusOne } else { Values::Same }
    }

    /// The change of the order of rows or columns.
    fn order(&self, stored: &str) -> Order {
        let Counts { head_dim, heads, key_heads, .. } = self.counts;
        if matches!(stored, QUERY | KEY) && self.architecture.pairs {
            return Order::Pairs(head_dim);
        }
        if stored == JOINT && self.architecture.groups {
            let queries = heads.checked_div(key_heads).unwrap_or(0);
            if [key_heads, queries, head_dim].iter().any(|size| *size as u64 > MAX_SIZE) {
                return Order::Same;
            }
            return Order::Groups(KeyHeads { count: key_heads, queries, dim: head_dim });
        }
        let Some([keys, per_key, key_dim, dim]) = self.counts.tiled else { return Order::Same };
        let heads = |first: usize, dim: usize| ValueHeads { first, keys, per_key, dim };
        match stored {
            JOINT | "ssm_conv1d" => Order::Tiled(heads(2 * keys * key_dim, dim)),
            "attn_gate" => Order::Tiled(heads(0, dim)),
            "ssm_alpha" | "ssm_beta" | "ssm_a" | "ssm_dt.bias" => Order::Tiled(heads(0, 1)),
            "ssm_out" => Order::TiledColumns(heads(0, dim)),
            _ => Order::Same,
        }
    }

    /// Whether a tensor is a scale of another one, or of the inputs of its product.
    fn is_scale(&self, name: &str) -> bool {
        let of = |end: &str| name.strip_suffix(end).map(|module| format!("{module}.weight"));
        let weight = of(".scale").or_else(|| of(".input_scale")).and_then(|weight| self.gguf.tensors().get(&weight));
        weight.is_some_and(|weight| weight.kind.name == SCALED)
    }

    /// Multiplies the scales of a tensor, of all its matrices or of each, by what the file has for it.
    fn scale(&self, name: &str, tensor: &Tensor, found: &mut [Named]) {
        if tensor.kind.name != SCALED {
            return;
        }
        let scale = name.strip_suffix(".weight").and_then(|module| self.gguf.tensors().get(&format!("{module}.scale")));
        let Some(scale) = scale else { return };
        let factors = scale.kind.values(self.gguf.data(scale));
        let all = factors.first().copied().filter(|_| factors.len() == 1);
        for (number, named) in found.iter_mut().enumerate() {
            named.encoding.factor = all.or(factors.get(number).copied()).unwrap_or(1.0);
        }
    }
}

/// The matrices of a tensor of several.
fn matrices(
    tensor: &Tensor,
    plain: &dyn Fn(String) -> Named,
    name: impl Fn(usize) -> String,
) -> impl Iterator<Item = Named> {
    let count = tensor.shape[0];
    let bytes = tensor.data.len() / count;
    (0..count).map(move |number| {
        let start = tensor.data.start + number * bytes;
        Named { shape: tensor.shape[1..].to_vec(), data: start..start + bytes, ..plain(name(number)) }
    })
}

/// The shape in Hugging Face layout.
fn shape(stored: &str, mut shape: Vec<usize>) -> Vec<usize> {
    match stored {
        ONE_ROW if shape.len() == 1 => shape.insert(0, 1),
        // Of q, k and v each.
        "ssm_conv1d_q" | "ssm_conv1d_k" | "ssm_conv1d_v" => {
            shape.retain(|dim| *dim > 1);
            shape.insert(shape.len().min(1), 1);
            shape.resize(3, 1);
        }
        // Weights of a convolution of channels.
        "shortconv.conv" | "ssm_conv1d" if shape.len() == 2 => shape.insert(1, 1),
        // A number for each head.
        "ssm_a" | "ssm_d" if shape.len() == 2 && shape[1] == 1 => shape.truncate(1),
        // Of groups of heads.
        "ssm_norm" if shape.len() > 1 => shape = vec![shape.iter().product()],
        _ => {}
    }
    shape
}
