//! What decoders with several residual streams compute beside branches.

use super::super::op::{HeadRows, Op, Register, StreamStep};
use super::Writer;
use crate::decoder::{Branch, Streams};

impl Writer<'_> {
    pub(super) fn streams(&mut self, step: StreamStep) {
        self.ops.push(Op::Streams { step, others: Register::Others });
    }

    /// The mean of all streams.
    pub(super) fn merge(&mut self, streams: &Streams) {
        let (width, others) = (self.decoder.hidden_size(), Register::GateUp);
        let rows = |register: Register| HeadRows { register, stride: streams.merge.len() * width, head_stride: width };
        self.ops.extend([
            Op::HeadLinear { product: self.heads, from: rows(Register::Others), to: rows(others) },
            Op::Streams { step: StreamStep::Rescale, others },
            Op::Streams { step: StreamStep::Mean, others },
        ]);
        self.heads += 1;
    }

    /// What follows the branches of a layer that mixes streams, with the same norm and router as before them.
    pub(super) fn correct(&mut self, (norm, linear): (usize, usize), last: &Branch) {
        use Register::{Branch, Held, Scores, Stream};
        self.ops.extend([
            Op::Norm { norm, groups: 1, from: Stream, to: Branch },
            Op::Linear { linear, from: Branch, to: Scores },
        ]);
        self.streams(StreamStep::Correct(self.mixings));
        self.mixings += 1;
        self.mixer(&last.mixer, Branch, Held);
        match last.norm_after {
            Some(_) => self.norm(Held, Branch),
            None => self.ops.push(Op::Swap { a: Held, b: Branch }),
        }
        self.streams(StreamStep::Add);
    }
}
