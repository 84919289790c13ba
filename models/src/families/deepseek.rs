//! The router of DeepSeek V3, which other families use too.

use super::experts::{self, Shared};
use super::sizes::{self, MAX_EXPERTS, MAX_GROUPS, positive};
use super::{Common, Fields, LoadError, Routing, Scores};
use crate::decoder::{Experts, Groups};

/// Number of experts and routing: sigmoid scores, a bias for the choice alone, groups ranked by their two best experts.
pub(super) fn routing_v3(fields: &Fields<'_>) -> Result<(usize, Routing), LoadError> {
    let (count, top_k) = experts::counts(fields, ["n_routed_experts", "num_experts_per_tok"])?;
    let groups = groups(fields, count, top_k, true)?;
    let routing = Routing {
        choice_bias: Some("gate.e_score_correction_bias".to_string()),
        groups,
        renormalise: fields.boolean("norm_topk_prob")?.unwrap_or(true),
        scale: positive(fields, "routed_scaling_factor")?.unwrap_or(1.0) as f32,
        ..experts::routing(Scores::Sigmoid, top_k)
    };
    Ok((count, routing))
}

/// The groups of experts; `None` for one group.
pub(super) fn groups(
    fields: &Fields<'_>,
    count: usize,
    top_k: usize,
    by_two: bool,
) -> Result<Option<Groups>, LoadError> {
    let groups = sizes::optional(fields, "n_group", MAX_GROUPS)?.unwrap_or(1);
    let top = sizes::optional(fields, "topk_group", MAX_EXPERTS)?.unwrap_or(1);
    if !count.is_multiple_of(groups) {
        return Err(fields.wrong("n_group", format!("a divisor of the number of experts, {count}")));
    }
    if top > groups || top_k > top * (count / groups) || by_two && groups > 1 && count / groups < 2 {
        return Err(fields.wrong("topk_group", format!("a number of groups with enough experts, at most {groups}")));
    }
    Ok((groups > 1).then_some(Groups { count: groups, top, by_two }))
}

/// The experts of a layer, with shared ones as one network. The name of the choice bias is completed with the module.
pub(super) fn mixture(
    common: &Common,
    layer: usize,
    routing: &Routing,
    count: usize,
    width: usize,
    shared: usize,
) -> Experts {
    let module = common.at(layer, "mlp");
    let shared = (shared > 0).then(|| Shared {
        module: format!("{module}.shared_experts"),
        width: shared * width,
        gate: false,
    });
    let choice_bias = routing.choice_bias.as_ref().map(|name| format!("{module}.{name}"));
    let networks = experts::separate(common, &module, count, ["gate_proj", "up_proj", "down_proj"], width);
    let routing = Routing { choice_bias, ..routing.clone() };
    experts::mixture(common, format!("{module}.gate"), routing, networks, shared)
}
