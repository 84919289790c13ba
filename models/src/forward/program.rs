//! The program of the forward pass: a [`Decoder`] as a sequence of operations over registers, rewritten for the device.
//!
//! [`Program::plain`] writes the declared layers out, one operation after the other. [`Program::new`] then merges what a backend
//! does in one operation. No rewrite changes a bit of the result:
//!
//! ```text
//! Add; RmsNorm                             FusedAddRmsNorm     a residual sum and the norm that follows it
//! RmsNorm | FusedAddRmsNorm | ActAndMul    the same, to Q8     rows that only a product with quantised weights reads are
//! then Linear                              then Linear         quantised to 8 bits by the operation that computes them
//! ```
//!
//! Operations refer to linear layers, norms and attention layers by their index in the decoder's iterators
//! ([`Decoder::linears`], [`Decoder::norms`], [`Decoder::attention`]).

use crate::decoder::{Activation, Decoder, Form, Mixer, Rope};

/// A buffer of a step with one row per token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Register {
    /// Residual stream.
    Stream,
    /// Input of a branch after its norm, and later the branch's output.
    Branch,
    /// Fused queries, keys and values.
    Qkv,
    /// Output of attention.
    Attended,
    /// Gate and up projections of a feed-forward network.
    GateUp,
    /// Output of its activation.
    Activated,
    /// Rows in 8 bits, with a scale for each block of numbers ([`RowBlock`](device::gemm::RowBlock)).
    Q8,
}

impl Register {
    pub const COUNT: usize = 7;
}

/// One operation on all rows of a step.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Op {
    /// `Stream` = embeddings of the tokens.
    Embed,
    /// Fills a rotary table with the cosines and sines of the positions.
    RopeTable { table: usize },
    /// `to = norm(from)`.
    RmsNorm { norm: usize, from: Register, to: Register },
    /// `to = linear(from)`.
    Linear { linear: usize, from: Register, to: Register },
    /// Head norms and rotation of `Qkv` in place, and the cache write.
    QkNormRopeCache { attention: usize },
    /// `Attended` = attention of the queries in `Qkv`.
    Attend { attention: usize },
    /// Drops the rows whose results are not needed ([`ForwardBatch::needed`](super::ForwardBatch::needed)). Each move gathers the
    /// rest of one register (of that width) into another, then the two registers swap names.
    KeepNeeded { moves: [(Register, Register, usize); 2] },
    /// `to = activation(gate) * up` of the rows of `GateUp`; `width` is that of the result.
    ActAndMul { activation: Activation, width: usize, to: Register },
    /// `Stream += Branch`.
    Add,
    /// `Stream += Branch`, then `to = norm(Stream)`.
    FusedAddRmsNorm { norm: usize, to: Register },
}

/// The operations of a forward pass up to the final norm, whose result is in `Branch`.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub ops: Vec<Op>,
    /// The distinct rotary embeddings of the decoder: one table each.
    pub ropes: Vec<Rope>,
    /// Elements per row of each register.
    pub widths: [usize; Register::COUNT],
    pub attention: Vec<AttentionPlan>,
}

/// What [`Op::QkNormRopeCache`] uses in an attention layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionPlan {
    /// Index of its rotary table.
    pub table: usize,
    pub query_norm: Option<usize>,
    pub key_norm: Option<usize>,
}

impl Program {
    /// The program of a decoder for a backend. `takes_q8`: its products with quantised weights take rows in 8 bits.
    pub fn new(decoder: &Decoder, takes_q8: bool) -> Program {
        let mut program = Program::plain(decoder);
        program.fuse_add_and_norm();
        if takes_q8 {
            program.quantise_inputs(decoder);
        }
        program.widths = program.widths_of(decoder);
        program
    }

    /// The declared sequence, nothing merged.
    pub fn plain(decoder: &Decoder) -> Program {
        let mut ropes: Vec<Rope> = Vec::new();
        for attention in decoder.attention() {
            if !ropes.contains(&attention.rope) {
                ropes.push(attention.rope.clone());
            }
        }
        let mut attention: Vec<AttentionPlan> = Vec::new();
        let mut ops = vec![Op::Embed];
        ops.extend((0..ropes.len()).map(|table| Op::RopeTable { table }));
        // Linear layer 0 is the embedding.
        let (mut linears, mut norms) = (1.., 0..);
        let mut linear = |from, to| Op::Linear { linear: linears.next().unwrap_or_default(), from, to };
        let mut next_norm = || norms.next().unwrap_or_default();
        for branch in decoder.branches() {
            ops.push(Op::RmsNorm { norm: next_norm(), from: Register::Stream, to: Register::Branch });
            match &branch.mixer {
                Mixer::Attention(layer) => {
                    let number = attention.len();
                    attention.push(AttentionPlan {
                        table: ropes.iter().position(|rope| *rope == layer.rope).unwrap_or_default(),
                        query_norm: layer.query_norm.as_ref().map(|_| next_norm()),
                        key_norm: layer.key_norm.as_ref().map(|_| next_norm()),
                    });
                    ops.extend([
                        linear(Register::Branch, Register::Qkv),
                        Op::QkNormRopeCache { attention: number },
                        Op::Attend { attention: number },
                        linear(Register::Attended, Register::Branch),
                    ]);
                }
                Mixer::Mlp(mlp) => {
                    let (activation, width) = (mlp.activation, mlp.down.inputs);
                    ops.extend([
                        linear(Register::Branch, Register::GateUp),
                        Op::ActAndMul { activation, width, to: Register::Activated },
                        linear(Register::Activated, Register::Branch),
                    ]);
                }
            }
            ops.push(Op::Add);
        }
        ops.push(Op::RmsNorm { norm: next_norm(), from: Register::Stream, to: Register::Branch });
        // After the last attention, a row affects no result but its own.
        if let Some(last) = ops.iter().rposition(|op| matches!(op, Op::Attend { .. })) {
            let attended = decoder.attention().last().map_or(0, |attention| attention.heads.query_width());
            let moves = [
                (Register::Attended, Register::Qkv, attended),
                (Register::Stream, Register::Branch, decoder.hidden_size()),
            ];
            ops.insert(last + 1, Op::KeepNeeded { moves });
        }
        let mut program = Program { ops, ropes, attention, widths: [0; Register::COUNT] };
        program.widths = program.widths_of(decoder);
        program
    }

    fn fuse_add_and_norm(&mut self) {
        let mut at = 0;
        while at + 1 < self.ops.len() {
            if let (Op::Add, &Op::RmsNorm { norm, from: Register::Stream, to }) = (&self.ops[at], &self.ops[at + 1]) {
                self.ops.splice(at..at + 2, [Op::FusedAddRmsNorm { norm, to }]);
            }
            at += 1;
        }
    }

    /// Has rows computed right before a product with quantised weights, their only reader, written to `Q8`.
    fn quantise_inputs(&mut self, decoder: &Decoder) {
        let quantised: Vec<bool> = decoder.linears().map(|linear| linear.form != Form::Dense).collect();
        for at in 1..self.ops.len() {
            if let [.., producer, Op::Linear { linear, from, .. }] = &mut self.ops[..=at]
                && let Op::RmsNorm { to, .. } | Op::FusedAddRmsNorm { to, .. } | Op::ActAndMul { to, .. } = producer
                && to == from
                && quantised[*linear]
            {
                (*to, *from) = (Register::Q8, Register::Q8);
            }
        }
    }

    fn widths_of(&self, decoder: &Decoder) -> [usize; Register::COUNT] {
        let rows: Vec<usize> = decoder.linears().map(|linear| linear.rows()).collect();
        let norms: Vec<usize> = decoder.norms().map(|norm| norm.width).collect();
        let attended: Vec<usize> = decoder.attention().map(|attention| attention.heads.query_width()).collect();
        let mut widths = [0; Register::COUNT];
        for op in &self.ops {
            let (to, width) = match *op {
                Op::Embed => (Register::Stream, decoder.hidden_size()),
                Op::RmsNorm { norm, to, .. } | Op::FusedAddRmsNorm { norm, to } => (to, norms[norm]),
                Op::Linear { linear, to, .. } => (to, rows[linear]),
                Op::Attend { attention } => (Register::Attended, attended[attention]),
                Op::ActAndMul { width, to, .. } => (to, width),
                Op::RopeTable { .. } | Op::QkNormRopeCache { .. } | Op::KeepNeeded { .. } | Op::Add => continue,
            };
            widths[to as usize] = widths[to as usize].max(width);
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
        let head = decoder.head.as_ref().unwrap_or(&decoder.embedding);
        let quantised = of_ops.chain([head]).filter(|linear| linear.form != Form::Dense);
        quantised.map(|linear| linear.inputs).max().unwrap_or(0)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use device::gemm::Quantization;

    use super::*;
    use crate::ModelConfig;

    const STREAM: Register = Register::Stream;
    const BRANCH: Register = Register::Branch;

    #[test]
    fn a_layer_is_written_out_and_merged_where_possible() {
        let mut decoder = ModelConfig::load(&crate::demo()).unwrap().decoder;
        decoder.layers.truncate(1);
        let linear = |linear, from, to| Op::Linear { linear, from, to };
        let plain = Program::plain(&decoder);
        let needed = Op::KeepNeeded { moves: [(Register::Attended, Register::Qkv, 192), (STREAM, BRANCH, 192)] };
        let activate = |to| Op::ActAndMul { activation: Activation::Silu, width: 384, to };
        let beginning = [Op::Embed, Op::RopeTable { table: 0 }];
        let attention = [Op::QkNormRopeCache { attention: 0 }, Op::Attend { attention: 0 }, needed];
        let output = linear(2, Register::Attended, BRANCH);
        let want = [
            &beginning[..],
            &[Op::RmsNorm { norm: 0, from: STREAM, to: BRANCH }, linear(1, BRANCH, Register::Qkv)],
            &attention,
            &[output.clone(), Op::Add, Op::RmsNorm { norm: 1, from: STREAM, to: BRANCH }],
            &[linear(3, BRANCH, Register::GateUp), activate(Register::Activated)],
            &[linear(4, Register::Activated, BRANCH), Op::Add, Op::RmsNorm { norm: 2, from: STREAM, to: BRANCH }],
        ];
        assert_eq!(plain.ops, want.concat());

        let q8 = Register::Q8;
        let quantised = decoder.in_form(Form::Quantized(Quantization::Q8));
        let merged = Program::new(&quantised, true);
        let want = [
            &beginning[..],
            &[Op::RmsNorm { norm: 0, from: STREAM, to: q8 }, linear(1, q8, Register::Qkv)],
            &attention,
            &[output, Op::FusedAddRmsNorm { norm: 1, to: q8 }, linear(3, q8, Register::GateUp), activate(q8)],
            &[linear(4, q8, BRANCH), Op::FusedAddRmsNorm { norm: 2, to: BRANCH }],
        ];
        assert_eq!(merged.ops, want.concat());
        assert_eq!((merged.widths[q8 as usize], merged.widths[Register::Activated as usize]), (384, 0));
        assert_eq!(merged.widest_self_quantised(&quantised), 192);
        assert_eq!(plain.widest_self_quantised(&quantised), 384);
    }
}
