//! The program of the forward pass: a [`Decoder`] as a sequence of operations over registers, rewritten for the device.
//!
//! [`Program::plain`] writes the declared layers out, one operation after the other. [`Program::new`] then merges what a backend
//! does in one operation. No rewrite changes a bit of the result:
//!
//! ```text
//! Add; Norm                   AddNorm          a residual sum and the norm that follows it
//! Linear; Activate            LinearActivate   once weights are loaded, if the product computes the activation
//! Norm | AddNorm | Activate   the same, to Q8  rows that only a product with quantised weights reads are
//! then Linear                 then Linear      quantised to 8 bits by the operation that computes them
//! ```
//!
//! Operations refer to linear layers, norms, attention layers and mixtures of experts by their index in the decoder's iterators
//! ([`Decoder::linears`], [`Decoder::norms`], [`Decoder::attention`], [`Decoder::recurrent`], [`Decoder::experts`]).

use super::op::{AttentionPlan, Op, Register};
use super::writer::Written;
use crate::decoder::{Decoder, Form, Linear, Mixer, Mlp, Rope};

/// The operations of a forward pass. The hidden states that logits are computed from are in `Branch` at the end.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub ops: Vec<Op>,
    /// The distinct rotary embeddings of the decoder: one table each.
    pub ropes: Vec<Rope>,
    /// Elements per row of each register.
    pub widths: [usize; Register::COUNT],
    pub attention: Vec<AttentionPlan>,
}

impl Program {
    /// The program of a decoder for a backend. `takes_q8`: its products with quantised weights take rows in 8 bits.
    pub fn new(decoder: &Decoder, takes_q8: bool) -> Program {
        let mut program = Program::plain(decoder);
        program.fuse_add_and_norm();
        // The products of adapters read the rows as they are. A product quantises them by itself, to the same bits.
        if takes_q8 && decoder.adapters.is_none() {
            program.quantise_inputs(decoder);
        }
        program.widths = program.widths_of(decoder);
        program
    }

    /// The declared sequence, nothing merged.
    pub fn plain(decoder: &Decoder) -> Program {
        let Written { mut ops, ropes, attention } = Written::of(decoder);
        // After the last mixer that reads other rows, a row affects no result but its own.
        let reads_attended = |op: &Op| {
            matches!(
                op,
                Op::Attend { .. }
                    | Op::AttendChosen { .. }
                    | Op::AttendBoth { .. }
                    | Op::GateAttended { .. }
                    | Op::Recurrent { .. }
                    | Op::ChannelDelta { .. }
                    | Op::Scan { .. }
            )
        };
        // A stage sends all rows: the layers behind it write keys and values of each.
        if let Some(last) = ops.iter().rposition(reads_attended).filter(|_| !decoder.sends()) {
            let attended = decoder.paged().last().map_or(0, |mixer| match mixer {
                Mixer::Attention(attention) => attention.attended_width(),
                Mixer::Recurrent(recurrent) => recurrent.value_width(),
                _ => 0,
            });
            let mut moves = vec![
                (Register::Attended, Register::Qkv, attended),
                (Register::Stream, Register::Branch, decoder.hidden_size()),
            ];
            // The output of a branch that is parallel to the last mixer.
            let held = Program::is_read(&ops[last + 1..], Register::Held);
            moves.extend(held.then_some((Register::Held, Register::Branch, decoder.hidden_size())));
            if let Some(streams) = &decoder.streams {
                let others = streams.merge.len() * decoder.hidden_size();
                moves.push((Register::Others, Register::Qkv, others));
                moves.push((Register::Mixture, Register::Branch, decoder.hidden_size()));
            }
            let per_layer = decoder.embedding.per_layer.as_ref();
            moves.extend(per_layer.map(|it| (Register::PerLayer, Register::GateUp, it.projection.rows())));
            ops.insert(last + 1, Op::KeepNeeded { moves });
        }
        let mut program = Program { ops, ropes, attention, widths: [0; Register::COUNT] };
        program.widths = program.widths_of(decoder);
        program
    }

    fn fuse_add_and_norm(&mut self) {
        let mut at = 0;
        while at + 1 < self.ops.len() {
            if let (
                &Op::Add { to: Register::Stream, from: Register::Branch, scale },
                &Op::Norm { norm, groups: 1, from: Register::Stream, to: Register::Branch },
            ) = (&self.ops[at], &self.ops[at + 1])
            {
                self.ops.splice(at..at + 2, [Op::AddNorm { norm, scale, to: Register::Branch }]);
            }
            at += 1;
        }
    }

    /// Has products compute the activation that follows, if they take one and nothing else reads what is activated. The registers keep
    /// their sizes.
    pub fn activate_in_products(&mut self, takes_activation: impl Fn(usize) -> bool) {
        for at in (1..self.ops.len()).rev() {
            if let (
                &Op::Linear { linear, from, to: Register::GateUp },
                &Op::Activate { activation, gated: true, width, to },
            ) = (&self.ops[at - 1], &self.ops[at])
                && to != Register::Q8
                && takes_activation(linear)
                && !Program::is_read(&self.ops[at + 1..], Register::GateUp)
            {
                self.ops.splice(at - 1..=at, [Op::LinearActivate { linear, from, activation, width, to }]);
            }
        }
    }

    /// Has rows computed right before a product with quantised weights, their only reader, written to `Q8`.
    fn quantise_inputs(&mut self, decoder: &Decoder) {
        let quantised: Vec<bool> = decoder.linears().map(|linear| linear.form.takes_blocks()).collect();
        for at in 1..self.ops.len() {
            let &Op::Linear { linear, from, to: result } = &self.ops[at] else { continue };
            let read_again = result != from && Program::is_read(&self.ops[at + 1..], from);
            if let Op::Norm { to, groups: 1, .. } | Op::AddNorm { to, .. } | Op::Activate { to, .. } =
                &mut self.ops[at - 1]
                && *to == from
                && quantised[linear]
                && !read_again
            {
                *to = Register::Q8;
                self.ops[at] = Op::Linear { linear, from: Register::Q8, to: result };
            }
        }
    }

    /// Whether one of the operations reads a register before another overwrites it.
    fn is_read(ops: &[Op], register: Register) -> bool {
        let first = ops.iter().find(|op| op.reads(register) || op.overwrites(register));
        first.is_some_and(|op| op.reads(register))
    }

    fn widths_of(&self, decoder: &Decoder) -> [usize; Register::COUNT] {
        let rows: Vec<usize> = decoder.linears().map(|linear| linear.rows()).collect();
        let norms: Vec<usize> = decoder.norms().map(|norm| norm.width).collect();
        let attention: Vec<_> = decoder.attention().collect();
        let products: Vec<_> = decoder.head_linears().collect();
        let recurrent: Vec<usize> = decoder.recurrent().map(|layer| layer.value_width()).collect();
        let experts: Vec<_> = decoder.experts().collect();
        let inputs: Vec<usize> = decoder.linears().map(|linear| linear.inputs).collect();
        let hidden = decoder.hidden_size();
        let mut widths = [0; Register::COUNT];
        let mut holds = |register: Register, width: usize| {
            widths[register as usize] = widths[register as usize].max(width);
        };
        for op in &self.ops {
            match *op {
                Op::Embed { table, to, .. } => holds(to, inputs[table]),
                Op::Norm { norm, groups, to, .. } => holds(to, groups * norms[norm]),
                Op::AddNorm { norm, to, .. } => holds(to, norms[norm]),
                Op::Linear { linear, to, .. } => holds(to, rows[linear]),
                Op::Attend { attention: layer }
                | Op::AttendChosen { attention: layer }
                | Op::AttendBoth { attention: layer } => holds(Register::Attended, attention[layer].attended_width()),
                Op::WidenValues { attention: layer } => holds(Register::Qkv, attention[layer].row_width()),
                Op::NarrowValues { attention: layer } => holds(Register::Activated, attention[layer].output.inputs),
                Op::LatentRows { attention: layer } => holds(Register::Qkv, attention[layer].row_width()),
                Op::HeadLinear { product, to, .. } => {
                    holds(to.register, to.stride);
                    let heads = products[product];
                    holds(Register::Activated, heads.iter().map(|linear| linear.inputs).max().unwrap_or(0));
                    holds(Register::Mixed, heads.iter().map(Linear::rows).max().unwrap_or(0));
                }
                Op::Receive { to } => holds(to, hidden),
                Op::Gather { to, ref widths, .. } => holds(to, widths.iter().sum()),
                Op::Recurrent { recurrent: number, .. }
                | Op::ChannelDelta { recurrent: number, .. }
                | Op::Scan { recurrent: number, .. } => holds(Register::Attended, recurrent[number]),
                Op::Convolve { recurrent: number } => holds(Register::Activated, recurrent[number]),
                Op::States { .. } => {
                    [Register::Stream, Register::Branch, Register::Mixed].map(|it| holds(it, hidden))[0]
                }
                Op::Activate { width, to, .. } | Op::LinearActivate { width, to, .. } => holds(to, width),
                Op::ActivatePerLayer { width, .. } => holds(Register::Activated, width),
                Op::Experts { experts: number, .. } => {
                    // Scratch of one expert: its rows, its projections, their activation, its output.
                    let widest =
                        |width: fn(&Mlp) -> usize| experts[number].experts.iter().map(width).max().unwrap_or(0);
                    let width = hidden.max(experts[number].inputs());
                    holds(Register::Mixed, width);
                    holds(Register::Qkv, width);
                    holds(Register::Attended, width);
                    holds(Register::GateUp, widest(|mlp| mlp.gate_up.rows()));
                    holds(Register::Activated, widest(Mlp::width));
                    let gathered = |mlp: &Mlp| mlp.down.gathered_inputs.iter().sum();
                    holds(Register::Gathered, widest(gathered));
                }
                Op::Streams { .. } => holds(Register::Mixture, hidden),
                // The rows of several registers pass through the buffers of `Qkv` and `Attended`.
                Op::KeepNeeded { ref moves } => {
                    let passes =
                        |(from, _, width): &(Register, _, usize)| (*from == Register::Others).then_some(*width);
                    moves.iter().filter_map(passes).for_each(|width| holds(Register::Attended, width));
                }
                Op::RopeTable { .. }
                | Op::Sparsify { .. }
                | Op::IndexRows { .. }
                | Op::AddPositions { .. }
                | Op::AddTypes { .. }
                | Op::ZeroFirst
                | Op::Send
                | Op::Tap { .. }
                | Op::AddRows { .. }
                | Op::QkNormRopeCache { .. }
                | Op::QkNormRope { .. }
                | Op::WriteCache { .. }
                | Op::GateAttended { .. }
                | Op::Swap { .. }
                | Op::Scale { .. }
                | Op::Sum { .. }
                | Op::Add { .. } => {}
            }
        }
        // These swap their buffers.
        let streams = [Register::Stream, Register::Branch, Register::Held, Register::Mixed, Register::Mixture];
        let gathered = [Register::PerLayer, Register::GateUp];
        for swapped in [&streams[..], if widths[Register::PerLayer as usize] > 0 { &gathered } else { &[] }] {
            let widest = swapped.iter().map(|register| widths[*register as usize]).max().unwrap_or(0);
            for register in swapped {
                let width = &mut widths[*register as usize];
                *width = if *width == 0 { 0 } else { widest };
            }
        }
        widths
    }

    /// Inputs of the widest product that quantises its own rows, 0 if none does. A quantised head is one: its rows are a
    /// selection from those of the step.
    pub fn widest_self_quantised(&self, decoder: &Decoder) -> usize {
        let linears: Vec<_> = decoder.linears().collect();
        let of_ops = self.ops.iter().filter_map(|op| match op {
            Op::Linear { linear, from, .. } if *from != Register::Q8 => Some(linears[*linear]),
            _ => None,
        });
        let of_experts = decoder.experts().flat_map(|experts| &experts.experts);
        let of_experts = of_experts.flat_map(|mlp| [&mlp.gate_up, &mlp.down]);
        let head = decoder.head.linear.as_ref().unwrap_or(&decoder.embedding.tokens);
        let of_experts = of_experts.chain(decoder.head_linears().flatten());
        let quantised = of_ops.chain(of_experts).chain([head]).filter(|linear| linear.form != Form::Dense);
        quantised.map(|linear| linear.inputs).max().unwrap_or(0)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use linear::Quantization;

    use super::*;
    use crate::ModelConfig;
    use crate::decoder::Activation;

    const STREAM: Register = Register::Stream;
    const BRANCH: Register = Register::Branch;
    const ADD: Op = Op::Add { to: STREAM, from: BRANCH, scale: 1.0 };

    #[test]
    fn a_layer_is_written_out_and_merged_where_possible() {
        let mut decoder = ModelConfig::load(&crate::demo()).unwrap().decoder;
        decoder.layers.truncate(1);
        let linear = |linear, from, to| Op::Linear { linear, from, to };
        let plain = Program::plain(&decoder);
        let needed = Op::KeepNeeded { moves: vec![(Register::Attended, Register::Qkv, 192), (STREAM, BRANCH, 192)] };
        let activate = |to| Op::Activate { activation: Activation::Silu, gated: true, width: 384, to };
        let beginning = [Op::Embed { table: 0, scale: 1.0, to: STREAM }, Op::RopeTable { table: 0 }];
        let attention = [Op::QkNormRopeCache { attention: 0 }, Op::Attend { attention: 0 }, needed];
        let output = linear(2, Register::Attended, BRANCH);
        let want = [
            &beginning[..],
            &[Op::Norm { norm: 0, groups: 1, from: STREAM, to: BRANCH }, linear(1, BRANCH, Register::Qkv)],
            &attention,
            &[output.clone(), ADD, Op::Norm { norm: 1, groups: 1, from: STREAM, to: BRANCH }],
            &[linear(3, BRANCH, Register::GateUp), activate(Register::Activated)],
            &[linear(4, Register::Activated, BRANCH), ADD, Op::Norm { norm: 2, groups: 1, from: STREAM, to: BRANCH }],
        ];
        assert_eq!(plain.ops, want.concat());

        let q8 = Register::Q8;
        let quantised = decoder.in_form(Form::Quantized(Quantization::Q8));
        let merged = Program::new(&quantised, true);
        let want = [
            &beginning[..],
            &[Op::Norm { norm: 0, groups: 1, from: STREAM, to: q8 }, linear(1, q8, Register::Qkv)],
            &attention,
            &[output, Op::AddNorm { norm: 1, scale: 1.0, to: q8 }, linear(3, q8, Register::GateUp), activate(q8)],
            &[linear(4, q8, BRANCH), Op::AddNorm { norm: 2, scale: 1.0, to: BRANCH }],
        ];
        assert_eq!(merged.ops, want.concat());
        assert_eq!((merged.widths[q8 as usize], merged.widths[Register::Activated as usize]), (384, 0));
        assert_eq!(merged.widest_self_quantised(&quantised), 192);
        assert_eq!(plain.widest_self_quantised(&quantised), 384);
    }
}
