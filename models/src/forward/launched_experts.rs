//! Mixtures of experts as launches of the kernels in `csrc/experts.cu`.

use attention_kernels::{Dtype, ExpertLinearArgs, KernelError, KernelSet, expert_linear, ordered_bytes};
use device::{Arg, Buffer, Device, DeviceError};

use super::kernels::{self, at_least, count, holds, instance, launch, optional};
use super::linear::Linear;
use super::ops::ExpertRows;
use super::ranks;
use crate::decoder::{Decoder, Experts, Groups, Mlp, Scores};

device::kernel_structs! {
    /// The struct of the same name in `experts.cu`.
    struct RouteShape: 40 bytes {
        experts: u32,
        stride: u32,
        top_k: u32,
        scores: u32,
        groups: u32,
        top_groups: u32,
        by_two: u32,
        renormalise: u32,
        scale: f32,
        threshold: f32,
    }
    /// The struct of the same name in `experts.cu`.
    struct SumShape: 16 bytes {
        width: u32,
        top_k: u32,
        shared: u32,
        stride: u32,
    }
}

/// Device memory of the mixtures of a model, which use it one after the other.
pub(super) struct ExpertMemory {
    max_rows: usize,
    /// Whether products have memory to order their rows: that of results which are not computed yet.
    orders: bool,
    /// Float32 `[rows, experts]`, twice: scores, and scores for the choice.
    scores: [Buffer; 2],
    /// u32 `[rows, top_k]`.
    chosen: Buffer,
    /// Float32 `[rows, top_k]`.
    weights: Buffer,
    /// u32 `[rows * top_k]`: choices by expert, and u32 `[experts + 1]`: where each expert's begin.
    order: Buffer,
    starts: Buffer,
    /// Rows of all choices: projections, activation, output.
    projections: Buffer,
    activated: Buffer,
    outputs: Buffer,
    /// The activations of all ranks.
    gathered: Buffer,
}

/// Bytes of each buffer for steps of `max_rows` rows: scores, choices, starts, projections, activations, outputs, activations of
/// all ranks.
fn sizes(decoder: &Decoder, max_rows: usize, kernels: &KernelSet) -> [usize; 7] {
    let (dtype, orders) = (kernels.format.dtype, kernels.linear.capabilities.orders_experts);
    let most = |size: fn(&Experts) -> usize| decoder.experts().map(size).max().unwrap_or(0);
    let widest = |size: fn(&Mlp) -> usize| {
        let of = |experts: &Experts| experts.routing.top_k * experts.experts.iter().map(size).max().unwrap_or(0);
        max_rows * decoder.experts().map(of).max().unwrap_or(0) * dtype.bytes()
    };
    // Rows are ordered where results of the next product, or of the one before, will be or were.
    let ordered = |inputs: fn(&Mlp) -> usize| {
        let of = |experts: &Experts| {
            let widest = experts.experts.iter().map(inputs).max().unwrap_or(0);
            ordered_bytes(max_rows * experts.routing.top_k, widest, dtype)
        };
        if orders { decoder.experts().map(of).max().unwrap_or(0) } else { 0 }
    };
    let choices = max_rows * most(|experts| experts.routing.top_k) * size_of::<u32>();
    let experts = most(|experts| experts.experts.len());
    [
        max_rows * experts * size_of::<f32>(),
        choices,
        (experts + 1) * size_of::<u32>(),
        widest(|mlp| mlp.gate_up.rows()).max(ordered(|mlp| mlp.down.inputs)),
        widest(Mlp::width),
        widest(|mlp| mlp.down.rows()).max(ordered(|mlp| mlp.gate_up.inputs)),
        widest(|mlp| mlp.down.gathered_inputs.iter().sum()),
    ]
}

impl ExpertMemory {
    /// Memory for steps of up to `max_rows` rows; `None` for a decoder without experts.
    pub fn new(
        device: &dyn Device,
        decoder: &Decoder,
        max_rows: usize,
        kernels: &KernelSet,
    ) -> Result<Option<ExpertMemory>, DeviceError> {
        if decoder.experts().next().is_none() {
            return Ok(None);
        }
        let [scores, choices, starts, projections, activated, outputs, gathered] = sizes(decoder, max_rows, kernels);
        Ok(Some(ExpertMemory {
            max_rows,
            orders: kernels.linear.capabilities.orders_experts,
            scores: [device.alloc(scores)?, device.alloc(scores)?],
            chosen: device.alloc(choices)?,
            weights: device.alloc(choices)?,
            order: device.alloc(choices)?,
            starts: device.alloc(starts)?,
            projections: device.alloc(projections)?,
            activated: device.alloc(activated)?,
            outputs: device.alloc(outputs)?,
            gathered: device.alloc(gathered)?,
        }))
    }

    /// Bytes of [`ExpertMemory::new`].
    pub fn bytes(decoder: &Decoder, max_rows: usize, kernels: &KernelSet) -> usize {
        if decoder.experts().next().is_none() {
            return 0;
        }
        let [scores, choices, others @ ..] = sizes(decoder, max_rows, kernels);
        2 * scores + 3 * choices + others.iter().sum::<usize>()
    }

    /// Computes a mixture.
    pub fn run(&mut self, dtype: Dtype, args: ExpertRows<'_>) -> Result<(), KernelError> {
        let ExpertRows { declared, loaded, device, rows, x, scores, mixed, ranks, .. } = args;
        let (routing, experts) = (&declared.routing, declared.experts.len());
        let (stride, width, top_k) = (declared.router.rows(), declared.inputs(), routing.top_k);
        at_least("rows of the mixtures of experts", self.max_rows, rows)?;
        holds("logits of a router", scores, rows * stride, dtype.bytes())?;
        holds("inputs of experts", x, rows * width, dtype.bytes())?;
        let summed = declared.experts.first().map_or(width, |expert| expert.down.rows());
        holds("outputs of experts", mixed, rows * summed, dtype.bytes())?;
        let groups = routing.groups.unwrap_or(Groups { count: 1, top: 1, by_two: false });
        let shape = RouteShape {
            experts: count(experts)?,
            stride: count(stride)?,
            top_k: count(top_k)?,
            scores: match routing.scores {
                Scores::Softmax => 0,
                Scores::Sigmoid => 1,
                Scores::Logits => 2,
                Scores::SparseMixer { .. } => 3,
            },
            groups: count(groups.count)?,
            top_groups: count(groups.top)?,
            by_two: groups.by_two.into(),
            renormalise: routing.renormalise.into(),
            scale: routing.scale,
            threshold: match routing.scores {
                Scores::SparseMixer { threshold } => threshold,
                _ => 0.0,
            },
        };
        let [all, ranked] = &self.scores;
        let pointers = [all, ranked, &self.chosen, &self.weights].map(|buffer| Arg::pointer(buffer, 0));
        let [all, ranked, chosen, weights] = pointers;
        let args = [
            Arg::pointer(scores, 0),
            optional(loaded.choice_bias.as_ref()),
            optional(loaded.expert_scale.as_ref()),
            all,
            ranked,
            chosen,
            weights,
            Arg::bytes(&shape),
        ];
        launch(device, instance!("route_experts", dtype), [count(rows)?, 1, 1], 32, &args)?;
        let choices = rows * top_k;
        let [chosen, order, starts] = [&self.chosen, &self.order, &self.starts].map(|buffer| Arg::pointer(buffer, 0));
        let args = [chosen, order, starts, Arg::from(count(choices)?), Arg::from(count(experts)?)];
        launch(device, "group_by_expert", [count(experts)?, 1, 1], 256, &args)?;

        let ([[projection, down]], Some(network)) = (&loaded.networks[..], declared.experts.first()) else {
            let (what, found) = ("stacked networks of experts", loaded.networks.len());
            return Err(KernelError::Shape { what, found, expected: 1 });
        };
        let (inner, projected) = (network.width(), network.gate_up.rows());
        let (orders, order, starts) = (self.orders, &self.order, &self.starts);
        let multiply = |x: &Buffer, top_k: usize, linear: &Linear, y: &mut Buffer, space: &mut Buffer| {
            let (assignments, weights, bias) = (choices, &linear.weights, linear.bias.as_ref());
            let ordered = orders.then_some(space);
            let args = ExpertLinearArgs { x, assignments, top_k, weights, bias, y, order, starts, experts, ordered };
            expert_linear(device, args)
        };
        multiply(x, top_k, projection, &mut self.projections, &mut self.outputs)?;
        if routing.scales_inputs {
            let [x, weights] = [&self.projections, &self.weights].map(|buffer| Arg::pointer(buffer, 0));
            let args = [x, weights, Arg::from(count(projected)?)];
            let grid = [count(choices)?, count(projected.div_ceil(2048))?, 1];
            launch(device, instance!("scale_inputs", dtype), grid, 256, &args)?;
        }
        let up = network.gated.then_some((&self.projections, projected, inner));
        let (activation, gate) = (network.activation, (&self.projections, projected));
        kernels::activate(device, dtype, activation, gate, up, &mut self.activated, (choices, inner))?;
        let widths = &network.down.gathered_inputs;
        let activated = if widths.is_empty() {
            &self.activated
        } else {
            let size = dtype.bytes();
            ranks::needed(ranks)?.gather(device, &self.activated, (choices, widths, size), &mut self.gathered)?;
            &self.gathered
        };
        multiply(activated, 1, down, &mut self.outputs, &mut self.projections)?;
        let shared = match (declared.adds_shared(), declared.shared_gate) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => 2,
        };
        let shape = SumShape { width: count(summed)?, top_k: count(top_k)?, shared, stride: count(stride)? };
        let weights = optional((!routing.scales_inputs).then_some(&self.weights));
        let [outputs, scores, mixed] = [&self.outputs, scores, mixed].map(|buffer: &Buffer| Arg::pointer(buffer, 0));
        let grid = [count(rows)?, count(summed.div_ceil(2048))?, 1];
        launch(
            device,
            instance!("sum_experts", dtype),
            grid,
            256,
            &[outputs, weights, scores, mixed, Arg::bytes(&shape)],
        )
    }
}
