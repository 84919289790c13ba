//! A decoder written out as a sequence of operations, nothing merged.

mod streams;

use super::op::{AttentionPlan, Factor, HeadRows, Op, Register, StreamStep};
use crate::decoder::{
    Attention, Beside, Branch, Decoder, Experts, Latent, Layer, Linear, Mixer, Mlp, PerLayer, Recurrent, Rope, Rule,
};

/// The operations of all layers, without those that drop rows.
pub(super) struct Written {
    pub ops: Vec<Op>,
    /// The distinct rotary embeddings of the decoder.
    pub ropes: Vec<Rope>,
    pub attention: Vec<AttentionPlan>,
}

/// Indices of the linear layers, norms and mixtures that have been written out.
struct Writer<'a> {
    ops: Vec<Op>,
    ropes: Vec<Rope>,
    attention: Vec<AttentionPlan>,
    recurrent: usize,
    /// Number of mixers that read other rows.
    num_paged: usize,
    linears: usize,
    norms: usize,
    experts: usize,
    scalars: usize,
    /// Number of layers that mix streams.
    mixings: usize,
    /// Number of products of heads so far.
    heads: usize,
    decoder: &'a Decoder,
    /// [`Decoder::linears`].
    declared: Vec<&'a Linear>,
}

impl Writer<'_> {
    /// A product, and what gathers its inputs, and gathers or sums its outputs, of all ranks.
    fn linear(&mut self, from: Register, to: Register) {
        let linear = self.declared[self.linears];
        let from = self.gather(&linear.gathered_inputs, from, Register::Gathered);
        let own = if linear.gathered_outputs.is_empty() { to } else { Register::Shard };
        self.ops.push(Op::Linear { linear: self.linears, from, to: own });
        self.gather(&linear.gathered_outputs, own, to);
        self.ops.extend(linear.summed.then(|| Op::Sum { register: to, width: linear.rows() }));
        self.linears += 1;
    }

    /// Gathers `from` into `to`, if ranks have parts of it, and returns where the whole is.
    fn gather(&mut self, widths: &[usize], from: Register, to: Register) -> Register {
        if widths.is_empty() {
            return from;
        }
        self.ops.push(Op::Gather { from, to, widths: widths.into() });
        to
    }

    fn norm(&mut self, from: Register, to: Register) {
        self.ops.push(Op::Norm { norm: self.norms, groups: 1, from, to });
        self.norms += 1;
    }

    /// A norm of the stream that replaces it.
    fn stream_norm(&mut self) {
        self.norm(Register::Stream, Register::Branch);
        self.ops.push(Op::Swap { a: Register::Stream, b: Register::Branch });
    }

    fn embedding(&mut self) {
        let embedding = &self.decoder.embedding;
        if self.decoder.receives() {
            self.ops.push(Op::Receive { to: Register::Stream });
            self.rope_tables();
            return;
        }
        if let Some(beside) = &embedding.beside {
            self.beside(beside);
            self.after_embedding();
            return;
        }
        let to = if embedding.projection.is_some() { Register::Branch } else { Register::Stream };
        self.ops.push(Op::Embed { table: 0, scale: embedding.scale, to });
        // Linear layer 0 is the table of tokens.
        self.linears = 1;
        let positions = embedding.positions.as_ref().map(|positions| {
            self.linears += 1;
            Op::AddPositions { table: self.linears - 1, offset: positions.offset }
        });
        let types = embedding.types.as_ref().map(|_| {
            self.linears += 1;
            Op::AddTypes { table: self.linears - 1 }
        });
        if embedding.projection.is_some() {
            self.linear(Register::Branch, Register::Stream);
        }
        self.ops.extend(positions.into_iter().chain(types));
        self.after_embedding();
    }

    /// The normed embedding of a predictor in `Held`, and its stream.
    fn beside(&mut self, beside: &Beside) {
        use Register::{Branch, Held, Stream};
        self.ops.push(Op::Embed { table: 0, scale: self.decoder.embedding.scale, to: Stream });
        self.linears = 1;
        self.ops.extend(beside.zero_first.then_some(Op::ZeroFirst));
        self.norm(Stream, Held);
        let norm = beside.state_norm.as_ref().map(|_| self.norms);
        self.ops.push(Op::States { linear: self.linears, norm });
        self.norms += usize::from(norm.is_some());
        self.linears += beside.states.len();
        if beside.token.is_some() {
            self.linear(Held, Branch);
            self.add(Branch, 1.0);
        }
    }

    fn after_embedding(&mut self) {
        let embedding = &self.decoder.embedding;
        if embedding.norm.is_some() {
            self.stream_norm();
        }
        if let Some(inputs) = &embedding.per_layer {
            use Register::{GateUp, PerLayer, Stream};
            self.linear(Stream, GateUp);
            let groups = inputs.projection.rows() / inputs.width.max(1);
            self.ops.extend([
                Op::Scale { register: GateUp, factor: Factor::Number(inputs.x_scale) },
                Op::Norm { norm: self.norms, groups, from: GateUp, to: PerLayer },
                Op::Embed { table: self.linears, scale: inputs.token_scale, to: GateUp },
                Op::Add { to: PerLayer, from: GateUp, scale: 1.0 },
                Op::Scale { register: PerLayer, factor: Factor::Number(std::f32::consts::FRAC_1_SQRT_2) },
            ]);
            self.linears += 1;
            self.norms += 1;
        }
        if self.decoder.streams.is_some() {
            self.linear(Register::Stream, Register::Others);
            self.streams(StreamStep::Rescale);
        }
        self.rope_tables();
    }

    fn rope_tables(&mut self) {
        self.ops.extend((0..self.ropes.len()).map(|table| Op::RopeTable { table }));
    }

    fn layer(&mut self, layer: &Layer) {
        let (last, branches) = match (&layer.mixing, layer.branches.split_last()) {
            (Some(_), Some((last, first))) => (Some(last), first),
            _ => (None, &layer.branches[..]),
        };
        let router = (self.norms, self.linears);
        if layer.mixing.is_some() {
            self.norm(Register::Stream, Register::Branch);
            self.linear(Register::Branch, Register::Scores);
            self.streams(StreamStep::Mix(self.mixings));
        }
        let (together, others) = branches.split_at(layer.parallel);
        self.parallel(together);
        others.iter().for_each(|branch| self.branch(branch));
        if let Some(last) = last {
            self.correct(router, last);
        }
        if layer.scalar.is_some() {
            self.ops.push(Op::Scale { register: Register::Stream, factor: Factor::Scalar(self.scalars) });
            self.scalars += 1;
        }
    }

    fn branch(&mut self, branch: &Branch) {
        let input = if branch.norm.is_some() {
            self.norm(Register::Stream, Register::Branch);
            Register::Branch
        } else {
            Register::Stream
        };
        if branch.norm_after.is_some() {
            self.mixer(&branch.mixer, input, Register::Held);
            self.norm(Register::Held, Register::Branch);
        } else {
            self.mixer(&branch.mixer, input, Register::Branch);
        }
        self.add(Register::Branch, branch.scale);
        self.after_sum(branch);
    }

    /// What a branch does with the stream behind the addition.
    fn after_sum(&mut self, branch: &Branch) {
        if branch.stream_scale != 1.0 {
            let factor = Factor::Number(branch.stream_scale);
            self.ops.push(Op::Scale { register: Register::Stream, factor });
        }
        if branch.stream_norm.is_some() {
            self.stream_norm();
        }
    }

    /// An addition to the stream.
    fn add(&mut self, from: Register, scale: f32) {
        self.ops.push(Op::Add { to: Register::Stream, from, scale });
    }

    /// Two branches that read the same stream: the first leaves its output in `Held`. The last may have a norm of its output.
    fn parallel(&mut self, branches: &[Branch]) {
        let Some((last, first)) = branches.split_last() else { return };
        for branch in first {
            self.norm(Register::Stream, Register::Branch);
            self.mixer(&branch.mixer, Register::Branch, Register::Held);
        }
        // Rows that are not needed are dropped in the layer of the last attention, and with them the normed ones.
        let is_last = self.attention.len() + self.recurrent == self.num_paged;
        if !is_last && first.last().is_some_and(|first| first.norm == last.norm) {
            self.norms += 1;
        } else {
            self.norm(Register::Stream, Register::Branch);
        }
        match last.norm_after {
            Some(_) => {
                self.mixer(&last.mixer, Register::Branch, Register::Mixed);
                self.norm(Register::Mixed, Register::Branch);
            }
            None => self.mixer(&last.mixer, Register::Branch, Register::Branch),
        }
        first.iter().for_each(|branch| self.add(Register::Held, branch.scale));
        self.add(Register::Branch, last.scale);
        self.after_sum(last);
    }

    /// The sum of branches that read the same stream, each with its norms; it grows in `Held`.
    fn sum(&mut self, branches: &[Branch], to: Register) {
        use Register::{Branch, Held, Mixed, Stream};
        for (number, branch) in branches.iter().enumerate() {
            if branch.norm.is_some() {
                self.norm(Stream, Branch);
            }
            self.mixer(&branch.mixer, if branch.norm.is_some() { Branch } else { Stream }, Branch);
            let result = if number == 0 { Held } else { Mixed };
            match branch.norm_after {
                Some(_) => self.norm(Branch, result),
                None => self.ops.push(Op::Swap { a: Branch, b: result }),
            }
            if number > 0 {
                self.ops.push(Op::Add { to: Held, from: Mixed, scale: 1.0 });
            }
        }
        if to != Held {
            self.ops.push(Op::Swap { a: Held, b: to });
        }
    }

    fn mixer(&mut self, mixer: &Mixer, input: Register, to: Register) {
        match mixer {
            Mixer::Attention(layer) => self.attention(layer, input, to),
            Mixer::Recurrent(layer) => self.recurrent(layer, input, to),
            Mixer::Mlp(mlp) => self.mlp(mlp, input, to),
            Mixer::Experts(experts) => self.mixture(experts, input, to),
            Mixer::PerLayer(layer) => self.per_layer(layer, input, to),
            Mixer::Laurel(_) => self.laurel(input, to),
            Mixer::Sum(branches) => self.sum(branches, to),
        }
    }

    fn attention(&mut self, layer: &Attention, input: Register, to: Register) {
        let mut next_norm = || {
            self.norms += 1;
            self.norms - 1
        };
        let query_norm = layer.query_norm.as_ref().map(|_| next_norm());
        let key_norm = layer.key_norm.as_ref().map(|_| next_norm());
        let value_norm = layer.value_norm.as_ref().map(|_| next_norm());
        let table = layer.rope.as_ref().and_then(|rope| self.ropes.iter().position(|known| known == rope));
        let attention = self.attention.len();
        self.attention.push(AttentionPlan { table, query_norm, key_norm, value_norm, latent_norm: None });
        if let Some(latent) = &layer.latent {
            self.latent(attention, layer, latent, input);
            return self.linear(Register::GateUp, to);
        }
        match layer.value_dim {
            None => self.linear(input, Register::Qkv),
            Some(_) => {
                self.linear(input, Register::GateUp);
                self.ops.push(Op::WidenValues { attention });
            }
        }
        if let Some(beside) = &layer.beside {
            self.linear(Register::Held, Register::GateUp);
            self.ops.push(Op::AddRows { to: Register::Qkv, from: Register::GateUp, width: beside.rows() });
        }
        self.ops.extend(match layer.both_sides {
            false => [Op::QkNormRopeCache { attention }, Op::Attend { attention }],
            true => [Op::QkNormRope { attention }, Op::AttendBoth { attention }],
        });
        if layer.gate {
            self.ops.push(Op::GateAttended { attention });
        }
        if layer.value_dim.is_some() {
            self.ops.push(Op::NarrowValues { attention });
            return self.linear(Register::Activated, to);
        }
        self.linear(Register::Attended, to);
    }

    fn recurrent(&mut self, layer: &Recurrent, input: Register, to: Register) {
        self.linear(input, Register::Qkv);
        if let Rule::Selective(_) = layer.rule {
            return self.selective(to);
        }
        let before = layer.norm.as_ref().filter(|_| layer.norms_before_gate()).map(|_| self.norms);
        let recurrent = self.recurrent;
        let op = match layer.rule {
            Rule::ChannelDelta(_) => {
                for to in [Register::GateUp, Register::Activated] {
                    self.linear(input, Register::Mixed);
                    self.linear(Register::Mixed, to);
                }
                Op::ChannelDelta { recurrent, norm: before }
            }
            _ => Op::Recurrent { recurrent, norm: before },
        };
        self.ops.push(op);
        self.recurrent += 1;
        let Some(norm) = &layer.norm else { return self.linear(Register::Attended, to) };
        let after = (self.norms, layer.value_width() / norm.width.max(1));
        self.norms += 1;
        if before.is_some() {
            return self.linear(Register::Attended, to);
        }
        let (norm, groups) = after;
        self.ops.push(Op::Norm { norm, groups, from: Register::Attended, to: Register::Activated });
        self.linear(Register::Activated, to);
    }

    /// A selective state space whose projections are in `Qkv`.
    fn selective(&mut self, to: Register) {
        use Register::{Activated, Attended, GateUp, Mixed};
        self.ops.push(Op::Convolve { recurrent: self.recurrent });
        self.linear(Activated, GateUp);
        self.norm(GateUp, Attended);
        self.linear(Attended, GateUp);
        self.linear(Activated, Mixed);
        self.ops.push(Op::Scan { recurrent: self.recurrent, norms: [self.norms, self.norms + 1] });
        self.recurrent += 1;
        self.norms += 2;
        self.linear(Attended, to);
    }

    /// Latent attention; the values of the heads are in `GateUp`.
    fn latent(&mut self, attention: usize, layer: &Attention, latent: &Latent, input: Register) {
        if latent.query_down.is_some() {
            self.linear(input, Register::Activated);
            self.norm(Register::Activated, Register::GateUp);
            self.linear(Register::GateUp, Register::Attended);
        } else {
            self.linear(input, Register::Attended);
        }
        let has_indexer = latent.indexer().is_some();
        if has_indexer {
            self.linear(Register::GateUp, Register::Index);
            self.linear(input, Register::Scores);
        }
        self.linear(input, Register::GateUp);
        if has_indexer {
            self.ops.push(Op::IndexRows { attention, norm: self.norms });
            self.norms += 1;
        }
        self.attention[attention].latent_norm = Some(self.norms);
        self.norms += 1;
        let heads = layer.heads.num_heads;
        let rows = |register: Register, stride: usize, head_stride: usize| HeadRows { register, stride, head_stride };
        let query_dim = latent.nope_dim + latent.rope_dim;
        let queries = rows(Register::Attended, heads * query_dim, query_dim);
        let absorbed = rows(Register::Qkv, layer.row_width(), layer.heads.head_dim);
        let attended = rows(Register::Attended, heads * latent.rank, latent.rank);
        let values = rows(Register::GateUp, heads * latent.value_dim, latent.value_dim);
        self.ops.extend([
            Op::LatentRows { attention },
            Op::HeadLinear { product: self.heads, from: queries, to: absorbed },
            Op::WriteCache { attention },
            match latent.choice {
                None => Op::Attend { attention },
                Some(_) => Op::AttendChosen { attention },
            },
            Op::HeadLinear { product: self.heads + 1, from: attended, to: values },
        ]);
        self.heads += 2;
    }

    fn mlp(&mut self, mlp: &Mlp, input: Register, to: Register) {
        let Mlp { activation, gated, sparsity, .. } = *mlp;
        self.linear(input, Register::GateUp);
        self.ops.extend(sparsity.map(|deviations| Op::Sparsify { width: mlp.width(), deviations }));
        self.ops.push(Op::Activate { activation, gated, width: mlp.width(), to: Register::Activated });
        self.linear(Register::Activated, to);
    }

    fn per_layer(&mut self, layer: &PerLayer, input: Register, to: Register) {
        let PerLayer { activation, layer: number, .. } = *layer;
        self.linear(input, Register::GateUp);
        self.ops.push(Op::ActivatePerLayer { activation, width: layer.gate.rows(), layer: number });
        self.linear(Register::Activated, to);
    }

    /// A narrow network, added to its input.
    fn laurel(&mut self, input: Register, to: Register) {
        self.linear(input, Register::GateUp);
        self.linear(Register::GateUp, Register::Activated);
        self.norm(Register::Activated, to);
        self.ops.push(Op::Add { to, from: input, scale: 1.0 });
    }

    fn mixture(&mut self, experts: &Experts, input: Register, to: Register) {
        let is_normed = experts.router_norm.is_some();
        if is_normed {
            self.norm(Register::Stream, Register::Mixed);
        }
        self.linear(if is_normed { Register::Mixed } else { input }, Register::Scores);
        let from = if experts.narrow.is_some() { Register::Index } else { input };
        match (&experts.shared, &experts.narrow) {
            (_, Some(_)) => self.linear(input, from),
            (Some(shared), None) => self.mlp(shared, input, Register::Mixed),
            (None, None) => {}
        }
        self.ops.push(Op::Experts { experts: self.experts, from });
        self.experts += 1;
        let summed = experts.experts.first().filter(|_| experts.summed);
        self.ops.extend(summed.map(|mlp| Op::Sum { register: Register::Mixed, width: mlp.down.rows() }));
        if experts.narrow.is_some() {
            let sum = self.gather(&experts.gathered_outputs, Register::Mixed, Register::Index);
            let Some(shared) = &experts.shared else { return self.linear(sum, to) };
            self.linear(sum, Register::Attended);
            self.mlp(shared, input, to);
            return self.ops.push(Op::Add { to, from: Register::Attended, scale: 1.0 });
        }
        if self.gather(&experts.gathered_outputs, Register::Mixed, to) == Register::Mixed {
            self.ops.push(Op::Swap { a: Register::Mixed, b: to });
        }
    }
}

impl Written {
    /// Writes out a decoder.
    pub fn of(decoder: &Decoder) -> Written {
        let mut ropes: Vec<Rope> = Vec::new();
        for rope in decoder.attention().filter_map(|attention| attention.rope.as_ref()) {
            if !ropes.contains(rope) {
                ropes.push(rope.clone());
            }
        }
        let num_paged = decoder.paged().count();
        let (ops, attention) = (Vec::new(), Vec::new());
        let mut writer = Writer {
            ops,
            ropes,
            attention,
            recurrent: 0,
            num_paged,
            linears: 0,
            norms: 0,
            experts: 0,
            scalars: 0,
            mixings: 0,
            heads: 0,
            decoder,
            declared: decoder.linears().collect(),
        };
        writer.embedding();
        for (number, layer) in decoder.layers.iter().enumerate() {
            let states = decoder.taps.iter().enumerate().filter(|(_, tap)| **tap == number);
            writer.ops.extend(states.map(|(state, _)| Op::Tap { state }));
            writer.layer(layer);
        }
        if let Some(streams) = &decoder.streams {
            writer.merge(streams);
        }
        match &decoder.final_norm {
            _ if decoder.sends() => writer.ops.push(Op::Send),
            Some(_) => writer.norm(Register::Stream, Register::Branch),
            None => writer.ops.push(Op::Swap { a: Register::Stream, b: Register::Branch }),
        }
        match (&decoder.head.projection, decoder.head.activation) {
            (Some(projection), Some(activation)) => {
                writer.linear(Register::Branch, Register::GateUp);
                let (width, to) = (projection.rows(), Register::Branch);
                writer.ops.push(Op::Activate { activation, gated: false, width, to });
            }
            (Some(_), None) => {
                writer.linear(Register::Branch, Register::Held);
                writer.ops.push(Op::Swap { a: Register::Held, b: Register::Branch });
            }
            (None, _) => {}
        }
        let Writer { ops, ropes, attention, .. } = writer;
        Written { ops, ropes, attention }
    }
}
