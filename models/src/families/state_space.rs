//! Mamba-2 layers: what families share of their sizes and tensor names.

use super::sizes::{self, MAX_HEAD_DIM, MAX_HEADS, MAX_KERNEL};
use super::{Common, Linear, Norm, Part, Pick, Role};
use crate::checkpoint::error::LoadError;
use crate::checkpoint::fields::Fields;
use crate::decoder::{Recurrent, Rule};

/// Keys of the sizes of Mamba-2 layers.
pub(super) struct Keys {
    pub heads: &'static str,
    /// Rows of the state: elements of B and C.
    pub state: &'static str,
    pub groups: &'static str,
    pub kernel: &'static str,
    pub conv_bias: &'static str,
    pub proj_bias: &'static str,
}

/// The keys of Granite 4 and Falcon-H1.
const MAMBA: Keys = Keys {
    heads: "mamba_n_heads",
    state: "mamba_d_state",
    groups: "mamba_n_groups",
    kernel: "mamba_d_conv",
    conv_bias: "mamba_conv_bias",
    proj_bias: "mamba_proj_bias",
};

/// Sizes of Mamba-2 layers.
#[derive(Clone, Copy)]
pub(super) struct StateSpace {
    pub heads: usize,
    /// Columns of the state of a head.
    pub head_dim: usize,
    pub state: usize,
    /// Number of heads of B and C.
    pub groups: usize,
    pub kernel: usize,
    pub conv_bias: bool,
    /// Biases of the first projection and of the last one.
    pub proj_bias: bool,
    pub output_bias: bool,
    /// Least and greatest step.
    pub steps: (f32, f32),
    /// Factors of q, k, v, z and dt.
    pub factors: [f32; 5],
    /// Number of parts of the output that are normed for themselves; 0: it has no norm.
    pub norm_groups: usize,
}

impl StateSpace {
    /// Reads the sizes but that of a head. `groups` is the default of the number of groups.
    pub fn read(fields: &Fields<'_>, keys: &Keys, groups: usize, head_dim: usize) -> Result<StateSpace, LoadError> {
        let heads = sizes::required(fields, keys.heads, MAX_HEADS)?;
        let groups = sizes::optional(fields, keys.groups, MAX_HEADS)?.unwrap_or(groups);
        if !heads.is_multiple_of(groups) {
            return Err(fields.wrong(keys.groups, format!("a divisor of `{}`, {heads}", keys.heads)));
        }
        let proj_bias = fields.boolean(keys.proj_bias)?.unwrap_or(false);
        Ok(StateSpace {
            heads,
            head_dim,
            state: sizes::required(fields, keys.state, MAX_HEAD_DIM)?,
            groups,
            kernel: sizes::optional(fields, keys.kernel, MAX_KERNEL)?.unwrap_or(4),
            conv_bias: fields.boolean(keys.conv_bias)?.unwrap_or(true),
            proj_bias,
            output_bias: proj_bias,
            steps: steps(fields)?,
            factors: [1.0; 5],
            norm_groups: 1,
        })
    }

    /// Reads the sizes under the keys `mamba_…`, of heads that are `inner` wide together.
    pub fn read_mamba(fields: &Fields<'_>, inner: usize) -> Result<StateSpace, LoadError> {
        let heads = sizes::required(fields, MAMBA.heads, MAX_HEADS)?;
        let head_dim = match fields.get("mamba_d_head") {
            Some(value) if value == "auto" => inner / heads,
            _ => sizes::optional(fields, "mamba_d_head", MAX_HEAD_DIM)?.unwrap_or(inner / heads),
        };
        if heads * head_dim != inner || !(1..=MAX_HEAD_DIM as usize).contains(&head_dim) {
            let expected =
                format!("heads of `mamba_d_head`, at most {MAX_HEAD_DIM}, that are the inner width, {inner}");
            return Err(fields.wrong(MAMBA.heads, expected));
        }
        StateSpace::read(fields, &MAMBA, 1, head_dim)
    }

    /// The layer of a module with the usual names. The rows of `in_proj` are z, x, B, C and dt.
    pub fn layer(&self, common: &Common, module: &str) -> Recurrent {
        let StateSpace { heads, head_dim, state, groups, kernel, steps, factors, .. } = *self;
        let at = |name: &str| format!("{module}.{name}");
        let (values, keys, hidden) = (heads * head_dim, groups * state, common.hidden_size);
        let total = 2 * values + 2 * keys + heads;
        let rows = |first: usize, rows: usize| Part::picked(at("in_proj"), rows, Pick::rows(total, first, rows));
        let parts = [
            rows(2 * values + keys, keys),
            rows(2 * values, keys),
            rows(values, values),
            rows(0, values),
            rows(2 * values + 2 * keys, heads),
        ];
        let output = Part::new(at("out_proj"), hidden);
        let norm = || Norm { width: values / self.norm_groups, ..common.norm_of(at("norm"), values) };
        Recurrent {
            rule: Rule::StateSpace { a_log: at("A_log"), dt_bias: at("dt_bias"), skip: at("D"), steps, factors },
            projections: Linear { bias: self.proj_bias, ..Linear::new(hidden, Role::Column, parts) },
            key_heads: groups,
            value_heads: heads,
            shard: None,
            key_dim: state,
            value_dim: head_dim,
            kernel,
            conv: vec![at("conv1d.weight")],
            conv_bias: self.conv_bias.then(|| at("conv1d.bias")),
            norm: (self.norm_groups > 0).then(norm),
            output: Linear { bias: self.output_bias, ..Linear::new(values, Role::Row, [output]) },
        }
    }
}

/// Least and greatest step: `time_step_limit`, where the greatest may be infinite.
fn steps(fields: &Fields<'_>) -> Result<(f32, f32), LoadError> {
    let expected = "two numbers of at least 0, the smaller first, of which the second may be \"Infinity\"";
    let stated = fields.read("time_step_limit", expected, |value| {
        let [least, greatest] = value.as_array()?.as_slice() else { return None };
        let is_infinite = |value: &serde_json::Value| value == "Infinity" || value["__float__"] == "Infinity";
        let number = |value: &serde_json::Value| value.as_f64().filter(|number| *number >= 0.0).map(|it| it as f32);
        let greatest = if is_infinite(greatest) { f32::INFINITY } else { number(greatest)?.min(f32::MAX) };
        let least = number(least).filter(|least| *least <= greatest && least.is_finite())?;
        Some((least, greatest))
    })?;
    Ok(stated.unwrap_or((0.0, f32::INFINITY)))
}
