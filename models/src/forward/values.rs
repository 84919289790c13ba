//! Values that are narrower than keys: in the cache they are as wide, and so is the output of attention.

use attention_kernels::KernelError;
use device::Buffer;

use super::ops::{HeadSizes, LayerOps};
use crate::decoder::{Attention, Heads};

/// Copies queries, keys and values to rows in which values are as wide as keys: a value is followed by copies of its first elements, which
/// are as large as it is.
pub(super) fn widen(
    ops: &dyn LayerOps,
    layer: &Attention,
    rows: usize,
    from: &Buffer,
    to: &mut Buffer,
) -> Result<(), KernelError> {
    let Heads { num_kv_heads: heads, head_dim, .. } = layer.heads;
    let (value_dim, stride) = (layer.value_dim.unwrap_or(head_dim), layer.row_width());
    let before = layer.heads.query_width() + layer.heads.key_width();
    let narrow = before + heads * value_dim;
    let others = HeadSizes { rows, heads: 1, width: before, from: [narrow, 0], to: [stride, 0] };
    ops.copy_heads(others, (from, 0), (to, 0))?;
    let values = HeadSizes { rows, heads, width: value_dim, from: [narrow, value_dim], to: [stride, head_dim] };
    ops.copy_heads(values, (from, before), (to, before))?;
    let rest = HeadSizes { width: head_dim - value_dim, ..values };
    ops.copy_heads(rest, (from, before), (to, before + value_dim))
}

/// Copies the output of attention without what widened the values.
pub(super) fn narrow(
    ops: &dyn LayerOps,
    layer: &Attention,
    rows: usize,
    from: &Buffer,
    to: &mut Buffer,
) -> Result<(), KernelError> {
    let Heads { num_heads: heads, head_dim, .. } = layer.heads;
    let width = layer.value_dim.unwrap_or(head_dim);
    let (from_strides, to_strides) = ([heads * head_dim, head_dim], [heads * width, width]);
    ops.copy_heads(HeadSizes { rows, heads, width, from: from_strides, to: to_strides }, (from, 0), (to, 0))
}
