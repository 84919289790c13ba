//! Weights that are codes, as parameters of the kernels of `csrc/linear.cu`.

use device::Arg;
use linear::{PANEL, TileCodes, TileForm, TileOffset, TileSegment};

use super::parameters::{LinearShape, count};
use crate::error::KernelError;
use crate::format::Dtype;

/// The name of a form in those of kernels; `None`: numbers.
pub(super) fn form_name(form: Option<&TileForm>, dtype: Dtype) -> &'static str {
    let Some(form) = form else { return "numbers" };
    match form.codes {
        // Code and scale are exact in the type, and a product is rounded once, as it is from float32.
        TileCodes::Integers4 if form.scale == dtype && form.offset != TileOffset::Minimum => "narrow4",
        // The scale is a sum of two numbers of the type.
        TileCodes::Integers4
            if (form.scale, dtype) == (Dtype::F16, Dtype::Bf16) && form.offset != TileOffset::Minimum =>
        {
            "split4"
        }
        TileCodes::Integers4 => "codes4",
        TileCodes::Integers8 => "codes8",
        TileCodes::E4m3 => "e4m3",
        TileCodes::Table(_) => "table4",
    }
}

/// The part of a shape that weights determine.
pub(super) fn of_weights(segment: Option<&TileSegment>, [n, k]: [usize; 2]) -> Result<LinearShape, KernelError> {
    let shape = LinearShape { n: count(n)?, k: count(k)?, ..LinearShape::default() };
    let Some(TileSegment { form, .. }) = segment else { return Ok(shape) };
    Ok(LinearShape {
        panel_bytes: form.panel_bytes() as i64,
        scales: count(form.scales())?,
        offsets: count(form.offsets())?,
        groups: count(form.groups)?,
        group_shift: form.group_shift,
        scale_type: match form.scale {
            Dtype::F32 => 0,
            Dtype::F16 => 1,
            Dtype::Bf16 => 2,
        },
        offset_type: match form.offset {
            TileOffset::None => 0,
            TileOffset::Zero => 1,
            TileOffset::Minimum => 2,
        },
        zero: form.zero.into(),
        ..shape
    })
}

/// The table of the codes, which follows the panels; null if they have none.
pub(super) fn table(segment: &TileSegment) -> Arg<'_> {
    match segment.form.codes {
        TileCodes::Table(_) => Arg::pointer(&segment.panels, segment.n.div_ceil(PANEL) * segment.form.panel_bytes()),
        _ => Arg::null(),
    }
}
