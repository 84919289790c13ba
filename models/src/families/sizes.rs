//! Sizes and numbers of `config.json`, with the bounds that keep products of them far from overflow.

use serde_json::Value;

use crate::checkpoint::error::LoadError;
use crate::checkpoint::fields::Fields;
use crate::decoder;

/// Greatest accepted sizes: larger ones mean a broken file.
pub(super) const MAX_VOCAB: u64 = 1 << 24;
pub(super) const MAX_WIDTH: u64 = 1 << 20;
pub(super) const MAX_LAYERS: u64 = 1 << 12;
pub(super) const MAX_HEADS: u64 = 1 << 12;
pub(super) const MAX_HEAD_DIM: u64 = decoder::MAX_HEAD_DIM;
pub(super) const MAX_POSITIONS: u64 = 1 << 31;
pub(super) const MAX_EXPERTS: u64 = decoder::MAX_EXPERTS as u64;
pub(super) const MAX_GROUPS: u64 = decoder::MAX_EXPERT_GROUPS as u64;
/// Greatest number of tokens that the convolution of a recurrent layer reads.
pub(super) const MAX_KERNEL: u64 = 16;
/// Greatest number of modules of a kind (experts, heads) in all layers: each has an entry in the declaration.
pub(super) const MAX_MODULES: usize = 1 << 18;

/// An integer from 1 to `greatest`; `None` if the key is absent or `null`.
pub(super) fn optional(fields: &Fields<'_>, key: &str, greatest: u64) -> Result<Option<usize>, LoadError> {
    Ok(fields.integer(key, 1..=greatest)?.map(|value| value as usize))
}

/// An integer from 1 to `greatest`.
pub(super) fn required(fields: &Fields<'_>, key: &str, greatest: u64) -> Result<usize, LoadError> {
    optional(fields, key, greatest)?.ok_or_else(|| fields.wrong(key, format!("an integer, 1 to {greatest}")))
}

/// The kind of each layer under its name; `None` if the key is absent or `null`.
pub(super) fn kinds<T: Copy>(
    fields: &Fields<'_>,
    key: &str,
    num_layers: usize,
    names: &[(&str, T)],
) -> Result<Option<Vec<T>>, LoadError> {
    let quoted: Vec<String> = names.iter().map(|(name, _)| format!("{name:?}")).collect();
    fields.read(key, &format!("a list of {num_layers} of {}", quoted.join(" and ")), |value| {
        let kind = |value: &Value| names.iter().find(|(name, _)| value == name).map(|(_, kind)| *kind);
        let kinds = value.as_array()?.iter().map(kind).collect::<Option<Vec<T>>>();
        kinds.filter(|kinds| kinds.len() == num_layers)
    })
}

/// The greatest divisor of `width` up to `most`: how many channels of a recurrence share a task or a thread block.
pub(super) fn channels_of_a_task(width: usize, most: usize) -> usize {
    (1..=most.min(width)).rev().find(|channels| width.is_multiple_of(*channels)).unwrap_or(1)
}

/// Refuses a model whose layers all have states, which are kept in pages of the size of keys and values.
pub(super) fn check_attention(fields: &Fields<'_>, key: &str, has_attention: bool) -> Result<(), LoadError> {
    match has_attention {
        true => Ok(()),
        false => Err(fields.wrong(key, "a layer of attention: models without one are not supported")),
    }
}

/// A number above 0 that a float32 can hold; `None` if the key is absent or `null`.
pub(super) fn positive(fields: &Fields<'_>, key: &str) -> Result<Option<f64>, LoadError> {
    fields.float(key, "a number above 0, in the range of float32", |value| value > 0.0 && (value as f32).is_normal())
}

/// A number of at least 0 that a float32 can hold; `None` if the key is absent or `null`.
pub(super) fn not_negative(fields: &Fields<'_>, key: &str) -> Result<Option<f64>, LoadError> {
    let expected = "a number, at least 0, in the range of float32";
    fields.float(key, expected, |value| value >= 0.0 && (value as f32).is_finite())
}
