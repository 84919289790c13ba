//! Operations that compute a row from that row alone: on all rows of a step, or on some of them ([`super::blocks`]).

use std::ops::Range;

use attention_kernels::{KernelError, KernelSet, LinearScratch, Rows};
use device::{Buffer, Device};
use linear::RowBlock;

use super::adapters::Adapters;
use super::clock::clock;
use super::loaded::Loaded;
use super::op::{Factor, Op, Register};
use super::ops::{LayerOps, Out};
use super::step::Registers;
use crate::decoder::Decoder;

/// What the operations read besides registers.
pub(super) struct RowOps<'a> {
    pub loaded: &'a Loaded,
    pub kernels: &'a KernelSet,
    pub device: &'a dyn Device,
    pub ops: &'a dyn LayerOps,
    /// Adapters of the rows, if there are any, and whether rows were dropped.
    pub adapters: Option<(&'a Adapters, bool)>,
    /// Elements of a row of the stream.
    pub hidden: usize,
    /// Elements of a row of [`Register::PerLayer`].
    pub per_layer: usize,
}

/// A register as the input of a product.
fn rows_of(buffer: &Buffer, register: Register) -> Rows<'_> {
    if register == Register::Q8 { Rows::Blocks(buffer) } else { Rows::Numbers(buffer) }
}

/// A register as the output of an operation.
fn out_to(buffer: &mut Buffer, register: Register) -> Out<'_> {
    if register == Register::Q8 { Out::Q8(buffer) } else { Out::Numbers(buffer) }
}

/// Elements of a row of a register that an [`Op::Add`] or [`Op::Scale`] takes as a whole.
fn whole(register: Register, (hidden, per_layer): (usize, usize)) -> usize {
    match register {
        Register::PerLayer | Register::GateUp => per_layer,
        _ => hidden,
    }
}

impl<'a> RowOps<'a> {
    pub fn new(
        decoder: &Decoder,
        loaded: &'a Loaded,
        (kernels, device): (&'a KernelSet, &'a dyn Device),
        ops: &'a dyn LayerOps,
    ) -> RowOps<'a> {
        let per_layer = decoder.embedding.per_layer.as_ref().map_or(0, |inputs| inputs.projection.rows());
        RowOps { loaded, kernels, device, ops, adapters: None, hidden: decoder.hidden_size(), per_layer }
    }

    /// The same with the adapters of a step.
    pub fn adapted(self, adapters: Option<&'a Adapters>, dropped: bool) -> RowOps<'a> {
        RowOps { adapters: adapters.filter(|adapters| adapters.active).map(|adapters| (adapters, dropped)), ..self }
    }

    /// Runs an operation on some rows of the step, which are the first ones of its registers; does nothing if it is none of these
    /// operations ([`widths`]). `scratch`: memory of products and of those of adapters on devices that launch kernels.
    pub fn run(
        &self,
        op: &Op,
        registers: &mut Registers,
        of_step: Range<usize>,
        scratch: Option<(&mut LinearScratch, &mut Buffer)>,
    ) -> Result<(), KernelError> {
        let RowOps { loaded, kernels, device, ops, adapters, hidden, per_layer } = *self;
        let (rows, (scratch, t)) = (of_step.len(), scratch.unzip());
        let dtype = kernels.format.dtype;
        let time = |operation, numbers| clock(device, operation, None, numbers, dtype);
        match *op {
            Op::Norm { norm, groups, from, to } => {
                let [x, out] = registers.several([from, to])?;
                let norm = &loaded.norms[norm];
                let _time = time("norm", 2 * rows * groups * norm.width);
                ops.norm(x, norm, rows * groups, out_to(out, to))
            }
            Op::Linear { linear, from, to } => {
                let [x, y] = registers.several([from, to])?;
                loaded.linears[linear].run((kernels, device), rows_of(x, from), rows, y, dtype, scratch)?;
                let Some((adapters, dropped)) = adapters else { return Ok(()) };
                adapters.apply((kernels, device), linear, (x, y), (of_step, dropped), t)
            }
            Op::LinearActivate { linear, from, activation, to, .. } => {
                let [x, y] = registers.several([from, to])?;
                loaded.linears[linear].run_activated((kernels, device), rows_of(x, from), rows, y, dtype, activation)
            }
            Op::GateAttended { attention } => {
                let declared = &loaded.attention[attention].declared;
                let (width, stride) = (declared.heads.query_width(), declared.row_width());
                let [attended, qkv] = registers.several([Register::Attended, Register::Qkv])?;
                let _time = time("gate", 3 * rows * width);
                ops.gate(attended, qkv, stride, width, rows)
            }
            Op::Activate { activation, gated, width, to } => {
                let [gate_up, out] = registers.several([Register::GateUp, to])?;
                let _time = time("activate", (2 + usize::from(gated)) * rows * width);
                ops.activate(activation, gated, gate_up, width, rows, out_to(out, to))
            }
            Op::AddRows { to, from, width } => {
                let [x, y] = registers.several([to, from])?;
                let _time = time("add", 3 * rows * width);
                ops.add(x, y, 1.0, rows, width)
            }
            Op::Add { to, from, scale } => {
                let [x, y] = registers.several([to, from])?;
                let width = whole(to, (hidden, per_layer));
                let _time = time("add", 3 * rows * width);
                ops.add(x, y, scale, rows, width)
            }
            Op::Scale { register, factor } => {
                let factor = match factor {
                    Factor::Number(factor) => factor,
                    Factor::Scalar(scalar) => loaded.scalars[scalar],
                };
                let width = whole(register, (hidden, per_layer));
                let _time = time("scale", 2 * rows * width);
                ops.scale(registers.get_mut(register), factor, rows, width)
            }
            Op::AddNorm { norm, scale, to } => {
                let _time = time("add_norm", 4 * rows * hidden);
                let norm = &loaded.norms[norm];
                if to == Register::Q8 {
                    let [x, y, out] = registers.several([Register::Stream, Register::Branch, to])?;
                    return ops.add_norm(x, y, scale, norm, rows, Some(out));
                }
                let [x, y] = registers.several([Register::Stream, to])?;
                ops.add_norm(x, y, scale, norm, rows, None)
            }
            _ => Ok(()),
        }
    }

    /// The registers of one of these operations on a CPU, with the bytes of a row; nothing for all other operations.
    pub fn widths(&self, op: &Op) -> Vec<(Register, usize)> {
        let loaded = self.loaded;
        let whole = |register| (register, whole(register, (self.hidden, self.per_layer)));
        let elements = match *op {
            Op::Norm { norm, groups, from, to } => {
                [from, to].map(|it| (it, groups * loaded.norms[norm].width)).to_vec()
            }
            Op::Linear { linear, from, to } => {
                let weights = &loaded.linears[linear].weights;
                vec![(from, weights.k()), (to, weights.n())]
            }
            Op::LinearActivate { linear, from, width, to, .. } => {
                vec![(from, loaded.linears[linear].weights.k()), (to, width)]
            }
            Op::GateAttended { attention } => {
                let declared = &loaded.attention[attention].declared;
                vec![(Register::Attended, declared.heads.query_width()), (Register::Qkv, declared.row_width())]
            }
            Op::Activate { gated, width, to, .. } => {
                vec![(Register::GateUp, (1 + usize::from(gated)) * width), (to, width)]
            }
            Op::AddRows { to, from, width } => vec![(to, width), (from, width)],
            Op::Add { to, from, .. } => vec![whole(to), (from, whole(to).1)],
            Op::Scale { register, .. } => vec![whole(register)],
            Op::AddNorm { to, .. } => [Register::Stream, Register::Branch, to].map(|it| (it, self.hidden)).to_vec(),
            _ => Vec::new(),
        };
        let bytes = |(register, elements): (Register, usize)| match register {
            Register::Q8 => (register, elements.div_ceil(RowBlock::LEN) * size_of::<RowBlock>()),
            _ => (register, elements * size_of::<f32>()),
        };
        elements.into_iter().map(bytes).collect()
    }
}
