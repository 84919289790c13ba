//! Mixtures of experts: what families share of their routers and of the names of their experts.

use super::Common;
use super::sizes::{self, MAX_EXPERTS, MAX_MODULES};
use crate::checkpoint::error::LoadError;
use crate::checkpoint::fields::Fields;
use crate::decoder::{Experts, Linear, Mlp, Part, Pick, Role, Routing, Scores};

/// A network that computes every row beside the chosen experts.
pub(super) struct Shared {
    pub module: String,
    pub width: usize,
    /// Whether its output has a gate, in the module `MODULE_gate`.
    pub gate: bool,
}

/// Number of experts and number chosen for each row, under these keys. Transformers 5 renames the first of Qwen 3 to
/// `num_local_experts`, which is read for every family that lacks its own key.
pub(super) fn counts(fields: &Fields<'_>, [count, top_k]: [&str; 2]) -> Result<(usize, usize), LoadError> {
    const NEWER: &str = "num_local_experts";
    let count = if fields.get(count).is_none() && fields.get(NEWER).is_some() { NEWER } else { count };
    let experts = sizes::required(fields, count, MAX_EXPERTS)?;
    let layers = fields.integer("num_hidden_layers", 1..=u64::MAX)?.unwrap_or(1) as usize;
    check_modules(fields, count, experts.saturating_mul(layers))?;
    let chosen = sizes::required(fields, top_k, MAX_EXPERTS)?;
    if chosen > experts {
        return Err(fields.wrong(top_k, format!("at most `{count}`, {experts}")));
    }
    Ok((experts, chosen))
}

/// Refuses more experts in all layers than a declaration may have.
pub(super) fn check_modules(fields: &Fields<'_>, key: &str, experts: usize) -> Result<(), LoadError> {
    match experts > MAX_MODULES {
        true => Err(fields.wrong(key, format!("at most {MAX_MODULES} experts in all layers"))),
        false => Ok(()),
    }
}

impl Routing {
    /// The same with the name of the choice bias completed with a module.
    pub(super) fn of_module(&self, module: &str) -> Routing {
        let choice_bias = self.choice_bias.as_ref().map(|(name, shape)| (format!("{module}.{name}"), shape.clone()));
        Routing { choice_bias, ..self.clone() }
    }
}

/// A router that chooses the best experts and uses their scores as weights.
pub(super) fn routing(scores: Scores, top_k: usize) -> Routing {
    Routing {
        top_k,
        scores,
        choice_bias: None,
        groups: None,
        renormalise: false,
        scale: 1.0,
        scales_inputs: false,
        expert_scale: None,
    }
}

/// Experts with separate tensors: `MODULE.experts.N.NAME`, names of gate, up and down.
pub(super) fn separate(common: &Common, module: &str, count: usize, names: [&str; 3], width: usize) -> Vec<Mlp> {
    (0..count).map(|expert| common.gated(format!("{module}.experts.{expert}"), names, width)).collect()
}

/// The same experts in tensors of these names that hold all of them: `[experts, 2 * width, inputs]`, first the rows of the gate,
/// and `[experts, inputs, width]`, or the transposed matrices. Checkpoints may have the separate tensors instead.
pub(super) fn stacked(mut networks: Vec<Mlp>, [gate_up, down]: [String; 2], transposed: bool) -> Vec<Mlp> {
    let count = networks.len();
    for (expert, mlp) in networks.iter_mut().enumerate() {
        for (linear, name) in [(&mut mlp.gate_up, &gate_up), (&mut mlp.down, &down)] {
            let (total, mut first) = (linear.rows(), 0);
            for part in &mut linear.parts {
                let rows = Pick::rows(total, first, part.rows);
                let pick = Pick { transposed, matrix: Some((expert, count)), ..rows };
                let own = Some((std::mem::take(&mut part.name), Pick::all(part.rows)));
                *part = Part { bare: true, own, ..Part::picked(name.clone(), part.rows, pick) };
                first += part.rows;
            }
        }
    }
    networks
}

/// A mixture with a router of this name.
pub(super) fn mixture(
    common: &Common,
    router: String,
    routing: Routing,
    experts: Vec<Mlp>,
    shared: Option<Shared>,
) -> Experts {
    let gate = shared.as_ref().filter(|shared| shared.gate);
    let gate = gate.map(|shared| Part::new(format!("{}_gate", shared.module), 1));
    let parts = std::iter::once(Part::new(router, experts.len())).chain(gate);
    Experts {
        router: Linear { adapters: false, ..Linear::new(common.hidden_size, Role::Replicated, parts) },
        router_norm: None,
        routing,
        experts,
        narrow: None,
        gathered_outputs: Vec::new(),
        summed: false,
        shared_gate: shared.as_ref().is_some_and(|shared| shared.gate),
        shared: shared
            .map(|Shared { module, width, .. }| common.gated(module, ["gate_proj", "up_proj", "down_proj"], width)),
    }
}
