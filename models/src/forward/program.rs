//! What the forward pass runs: a [`Decoder`] written out as operations over registers, then rewritten for the device.
//!
//! [`Program::new`] writes the declared sequence, one operation after the other. The rewrites in this file merge what a backend
//! does in one operation; each leaves every bit as it was:
//!
//! ```text
//! Add; Norm                        AddNorm      a sum and the norm behind it
//! Norm | AddNorm | Activate        … to Blocks  what only products with quantised weights read is brought to 8 bits
//! then Linear                                   where it is computed
//! ```
//!
//! Linear layers, norms and attention layers are referred to by their numbers in the walks of the decoder
//! ([`Decoder::linears`], [`Decoder::norms`], [`Decoder::attention`]).

use attention_kernels::KernelSet;

use crate::decoder::Activation;
use crate::decoder::{Decoder, Form, Mixer, Rope};

/// A buffer of a step with one row for each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Register {
    /// The residual stream.
    Stream,
    /// What a branch reads at its beginning and what it returns.
    Branch,
    /// Fused queries, keys and values.
    Qkv,
    /// What attention returns.
    Attended,
    /// Gate and up of a feed-forward network.
    GateUp,
    /// What its activation returns.
    Activated,
    /// Rows in 8 bits, with a scale for each block of numbers.
    Blocks,
}

impl Register {
    /// Number of registers.
    pub const COUNT: usize = 7;
}

/// One operation on all rows of a step.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Op {
    /// `Stream` becomes the embeddings of the tokens.
    Embed,
    /// A rotary table becomes the cosines and sines of the positions.
    RopeTable { table: usize },
    /// `to = norm(from)`.
    Norm { norm: usize, from: Register, to: Register },
    /// `to = linear(from)`.
    Linear { linear: usize, from: Register, to: Register },
    /// Head norms and rotation of `Qkv` in place, and the cache write.
    Heads { attention: usize },
    /// `Attended` becomes attention of the queries in `Qkv`.
    Attend { attention: usize },
    /// From here on only the rows go on that are needed ([`ForwardBatch::needed`](super::ForwardBatch::needed)), of the registers
    /// that are read again: each moves to the one beside it, and the two change names. The third is the width of a row.
    Needed { moves: [(Register, Register, usize); 2] },
    /// `to = activation(gate) * up` of `GateUp`, in rows of `width`.
    Activate { activation: Activation, width: usize, to: Register },
    /// `Stream += Branch`.
    Add,
    /// `Stream += Branch`, then `to = norm(Stream)`.
    AddNorm { norm: usize, to: Register },
}

/// The operations of a forward pass, up to the final norm, whose result is in `Branch`.
#[derive(Clone, Debug)]
pub(super) struct Program {
    pub ops: Vec<Op>,
    /// The distinct rotary embeddings of the decoder.
    pub ropes: Vec<Rope>,
    /// Elements of a row of each register.
    pub widths: [usize; Register::COUNT],
    /// What the attention layers refer to.
    pub attention: Vec<AttentionPlan>,
}

/// Numbers of what an attention layer uses beside its linear layers.
#[derive(Clone, Copy, Debug)]
pub(super) struct AttentionPlan {
    /// Its rotary table.
    pub table: usize,
    pub query_norm: Option<usize>,
    pub key_norm: Option<usize>,
}

/// What a backend can do in one operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fusion {
    /// A sum and the norm behind it.
    pub add_norm: bool,
    /// Products with quantised weights read rows that are in 8 bits already.
    pub blocks: bool,
}

impl Fusion {
    /// What the chosen kernels and the layer operations beside them can do: every backend has a sum with its norm.
    pub fn of(kernels: &KernelSet) -> Fusion {
        Fusion { add_norm: true, blocks: kernels.linear.capabilities.takes_blocks }
    }
}

impl Program {
    /// Writes a decoder out and rewrites it for a backend.
    pub fn new(decoder: &Decoder, fusion: Fusion) -> Program {
        let mut program = Program::plain(decoder);
        if fusion.add_norm {
            program.merge_add_and_norm();
        }
        if fusion.blocks {
            program.write_blocks(decoder);
        }
        program.widths = program.widths_of(decoder);
        program
    }

    /// The declared sequence.
    fn plain(decoder: &Decoder) -> Program {
        let mut ropes: Vec<Rope> = Vec::new();
        for attention in decoder.attention() {
            if !ropes.contains(&attention.rope) {
                ropes.push(attention.rope.clone());
            }
        }
        let mut attention: Vec<AttentionPlan> = Vec::new();
        let mut ops = vec![Op::Embed];
        ops.extend((0..ropes.len()).map(|table| Op::RopeTable { table }));
        // The embedding is linear layer 0.
        let (mut linear, mut norm) = (0, 0);
        let mut next_linear = || {
            linear += 1;
            linear
        };
        let mut next_norm = || {
            norm += 1;
            norm - 1
        };
        for branch in decoder.branches() {
            ops.push(Op::Norm { norm: next_norm(), from: Register::Stream, to: Register::Branch });
            match &branch.mixer {
                Mixer::Attention(layer) => {
                    let number = attention.len();
                    attention.push(AttentionPlan {
                        table: ropes.iter().position(|rope| *rope == layer.rope).unwrap_or_default(),
                        query_norm: layer.query_norm.as_ref().map(|_| next_norm()),
                        key_norm: layer.key_norm.as_ref().map(|_| next_norm()),
                    });
                    ops.extend([
                        Op::Linear { linear: next_linear(), from: Register::Branch, to: Register::Qkv },
                        Op::Heads { attention: number },
                        Op::Attend { attention: number },
                        Op::Linear { linear: next_linear(), from: Register::Attended, to: Register::Branch },
                    ]);
                }
                Mixer::Mlp(mlp) => {
                    let (activation, width) = (mlp.activation, mlp.down.inputs);
                    ops.extend([
                        Op::Linear { linear: next_linear(), from: Register::Branch, to: Register::GateUp },
                        Op::Activate { activation, width, to: Register::Activated },
                        Op::Linear { linear: next_linear(), from: Register::Activated, to: Register::Branch },
                    ]);
                }
            }
            ops.push(Op::Add);
        }
        ops.push(Op::Norm { norm: next_norm(), from: Register::Stream, to: Register::Branch });
        // Behind the last layer that mixes rows, a row serves its own result alone.
        if let Some(last) = ops.iter().rposition(|op| matches!(op, Op::Attend { .. })) {
            let attended = decoder.attention().last().map_or(0, |attention| attention.heads.query_width());
            let moves = [
                (Register::Attended, Register::Qkv, attended),
                (Register::Stream, Register::Branch, decoder.hidden_size()),
            ];
            ops.insert(last + 1, Op::Needed { moves });
        }
        Program { ops, ropes, attention, widths: [0; Register::COUNT] }
    }

    fn merge_add_and_norm(&mut self) {
        let mut at = 0;
        while at + 1 < self.ops.len() {
            if let (Op::Add, &Op::Norm { norm, from: Register::Stream, to }) = (&self.ops[at], &self.ops[at + 1]) {
                self.ops.splice(at..at + 2, [Op::AddNorm { norm, to }]);
            }
            at += 1;
        }
    }

    /// Rows that are made right before a product with quantised weights, and are read by nothing else, are made in 8 bits.
    fn write_blocks(&mut self, decoder: &Decoder) {
        let quantized: Vec<bool> = decoder.linears().map(|linear| linear.form != Form::Dense).collect();
        for at in 1..self.ops.len() {
            let (before, rest) = self.ops.split_at_mut(at);
            let (Some(maker), Some(Op::Linear { linear, from, .. })) = (before.last_mut(), rest.first_mut()) else {
                continue;
            };
            if let Op::Norm { to, .. } | Op::AddNorm { to, .. } | Op::Activate { to, .. } = maker
                && to == from
                && quantized[*linear]
            {
                (*to, *from) = (Register::Blocks, Register::Blocks);
            }
        }
    }

    /// Elements of a row of each register.
    fn widths_of(&self, decoder: &Decoder) -> [usize; Register::COUNT] {
        let rows: Vec<usize> = decoder.linears().map(|linear| linear.rows()).collect();
        let norms: Vec<usize> = decoder.norms().map(|norm| norm.width).collect();
        let attended: Vec<usize> = decoder.attention().map(|attention| attention.heads.query_width()).collect();
        let mut widths = [0; Register::COUNT];
        for op in &self.ops {
            let (to, width) = match *op {
                Op::Embed => (Register::Stream, decoder.hidden_size()),
                Op::Norm { norm, to, .. } | Op::AddNorm { norm, to } => (to, norms[norm]),
                Op::Linear { linear, to, .. } => (to, rows[linear]),
                Op::Attend { attention } => (Register::Attended, attended[attention]),
                Op::Activate { width, to, .. } => (to, width),
                Op::RopeTable { .. } | Op::Heads { .. } | Op::Needed { .. } | Op::Add => continue,
            };
            widths[to as usize] = widths[to as usize].max(width);
        }
        widths
    }

    /// Inputs of the widest product that brings its rows to 8 bits itself; 0 if there is none. The head is one where it is
    /// quantised: its rows are chosen from those of the step.
    pub fn widest_quantised_here(&self, decoder: &Decoder) -> usize {
        let linears: Vec<_> = decoder.linears().collect();
        let of_ops = self.ops.iter().filter_map(|op| match op {
            Op::Linear { linear, from, .. } if *from != Register::Blocks => Some(linears[*linear]),
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
    fn a_layer_is_written_out_and_merged_where_it_can_be() {
        let mut decoder = ModelConfig::load(&crate::demo()).unwrap().decoder;
        decoder.layers.truncate(1);
        let linear = |linear, from, to| Op::Linear { linear, from, to };
        let plain = Program::new(&decoder, Fusion { add_norm: false, blocks: false });
        let needed = Op::Needed { moves: [(Register::Attended, Register::Qkv, 192), (STREAM, BRANCH, 192)] };
        let activate = |to| Op::Activate { activation: Activation::Silu, width: 384, to };
        let beginning = [Op::Embed, Op::RopeTable { table: 0 }];
        let attention = [Op::Heads { attention: 0 }, Op::Attend { attention: 0 }, needed];
        let output = linear(2, Register::Attended, BRANCH);
        let want = [
            &beginning[..],
            &[Op::Norm { norm: 0, from: STREAM, to: BRANCH }, linear(1, BRANCH, Register::Qkv)],
            &attention,
            &[output.clone(), Op::Add, Op::Norm { norm: 1, from: STREAM, to: BRANCH }],
            &[linear(3, BRANCH, Register::GateUp), activate(Register::Activated)],
            &[linear(4, Register::Activated, BRANCH), Op::Add, Op::Norm { norm: 2, from: STREAM, to: BRANCH }],
        ];
        assert_eq!(plain.ops, want.concat());

        let blocks = Register::Blocks;
        let quantised = decoder.in_form(Form::Quantized(Quantization::Q8));
        let merged = Program::new(&quantised, Fusion { add_norm: true, blocks: true });
        let want = [
            &beginning[..],
            &[Op::Norm { norm: 0, from: STREAM, to: blocks }, linear(1, blocks, Register::Qkv)],
            &attention,
            &[output, Op::AddNorm { norm: 1, to: blocks }, linear(3, blocks, Register::GateUp), activate(blocks)],
            &[linear(4, blocks, BRANCH), Op::AddNorm { norm: 2, to: BRANCH }],
        ];
        assert_eq!(merged.ops, want.concat());
        assert_eq!((merged.widths[blocks as usize], merged.widths[Register::Activated as usize]), (384, 0));
        assert_eq!(merged.widest_quantised_here(&quantised), 192);
        assert_eq!(plain.widest_quantised_here(&quantised), 384);
    }
}
