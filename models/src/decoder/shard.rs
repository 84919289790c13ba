//! The part of a decoder that one rank of a tensor-parallel group computes.
//!
//! With [`Reduce::Gather`] every matrix is cut by output rows, so no sum is ever split and any number of ranks gives the bits of one.
//! Where a product reads whole rows, the ranks' parts are gathered before it:
//!
//! ```text
//! attention   qkv of own heads ─▶ attention ─▶ gather ─▶ own rows of output ─▶ gather
//! network     own rows of gate and up ─▶ activation ─▶ gather ─▶ own rows of down ─▶ gather
//! experts     the same for each expert; outputs are gathered after their weighted sum
//! head        own rows of the vocabulary ─▶ gather
//! ```
//!
//! With [`Reduce::Sum`] the second matrices are cut by inputs, those that the rank has computed (Shoeybi et al., "Megatron-LM", 2019):
//!
//! ```text
//! attention   qkv of own heads ─▶ attention ─▶ own inputs of output ─▶ sum
//! network     own rows of gate and up ─▶ activation ─▶ own inputs of down ─▶ sum
//! experts     the same for each expert; outputs are summed after their weighted sum
//! ```
//!
//! The first rank adds their biases. A matrix whose storage form cannot be cut there ([`Form::grain`](super::Form::grain)) is cut by rows.
//!
//! Attention and recurrent layers are cut by groups of heads that share keys and values. If there are fewer groups than ranks, several
//! ranks hold the keys and values of one, each with some of its query heads. Parts need not be equal: 9 heads of 3 groups are cut over
//! 2 ranks as 6 and 3. Each rank has the whole of: embeddings, norms, routers, projections to latents, inputs of layers, mixing of streams,
//! sparse networks, and attention and recurrent layers with a norm that spans heads of several ranks.

use std::ops::Range;
use std::str::FromStr;

use super::attention::HeadShard;
use super::linear::{Linear, Part, Pick};
use super::recurrent::Piece;
use super::{Attention, Branch, Decoder, Experts, Head, Heads, Latent, Mixer, Mlp, Norm, Recurrent, Rule};

/// Rows of a part are a multiple of this number where there are enough: kernels work on as many at a time.
const GRAIN: usize = 32;

/// A decoder that cannot be cut over so many ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("found {ranks}, expected at most {most}: {what}")]
pub struct ShardError {
    /// What is cut.
    pub what: &'static str,
    /// Greatest number of ranks.
    pub most: usize,
    /// The number of ranks.
    pub ranks: usize,
}

/// What the ranks of a tensor-parallel group exchange.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Reduce {
    /// Rows: the same bits for any number of ranks.
    #[default]
    Gather,
    /// Partial sums, which are added: about half of the exchanges, and results that differ in their last bits from those of another
    /// number of ranks.
    Sum,
}

impl FromStr for Reduce {
    type Err = &'static str;

    fn from_str(name: &str) -> Result<Reduce, &'static str> {
        match name {
            "gather" => Ok(Reduce::Gather),
            "sum" => Ok(Reduce::Sum),
            _ => Err("expected gather or sum"),
        }
    }
}

/// The heads of each rank: query heads and key/value heads.
type HeadRanges = Vec<(Range<usize>, Range<usize>)>;

/// One rank of a group.
#[derive(Clone, Copy)]
struct Rank {
    rank: usize,
    ranks: usize,
    reduce: Reduce,
}

/// Cuts `total` in order into a part for each rank, as equal as multiples of the grain are, or of 1 if there are too few of them.
fn cut(total: usize, ranks: usize, grain: usize, what: &'static str) -> Result<Vec<Range<usize>>, ShardError> {
    if total < ranks {
        return Err(ShardError { what, most: total, ranks });
    }
    let grain = if total >= grain * ranks { grain } else { 1 };
    let units = total.div_ceil(grain);
    let at = |rank: usize| (units * rank / ranks * grain).min(total);
    Ok((0..ranks).map(|rank| at(rank)..at(rank + 1)).collect())
}

fn even(total: usize, ranks: usize) -> Vec<Range<usize>> {
    (0..ranks).map(|rank| total * rank / ranks..total * (rank + 1) / ranks).collect()
}

fn cut_heads(heads: usize, kv_heads: usize, ranks: usize) -> Result<HeadRanges, ShardError> {
    let ratio = heads / kv_heads.max(1);
    if ranks <= kv_heads {
        let groups = even(kv_heads, ranks).into_iter();
        return Ok(groups.map(|kv| (kv.start * ratio..kv.end * ratio, kv)).collect());
    }
    // The ranks of each group.
    let groups = even(ranks, kv_heads);
    if groups.iter().any(|group| group.len() > ratio) {
        return Err(ShardError { what: "each rank needs a query head", most: heads, ranks });
    }
    let of_group = |(kv, group): (usize, &Range<usize>)| {
        let heads = even(ratio, group.len()).into_iter();
        heads.map(move |head| (kv * ratio + head.start..kv * ratio + head.end, kv..kv + 1))
    };
    Ok(groups.iter().enumerate().flat_map(of_group).collect())
}

fn widths(ranges: &[Range<usize>]) -> Vec<usize> {
    ranges.iter().map(Range::len).collect()
}

impl Part {
    /// The parts that are some rows of this one: one, unless the rows begin or end within a run.
    fn slice(&self, rows: Range<usize>) -> Vec<Part> {
        let mut parts = Vec::new();
        let Pick { run, stride, .. } = self.pick;
        let mut at = rows.start;
        while at < rows.end {
            let (index, within) = (at / run.max(1), at % run.max(1));
            let whole = (rows.end - at) / run.max(1) * run;
            let (count, run, stride) = match whole {
                // Whole runs.
                1.. if within == 0 => (whole, run, stride),
                // What is left of one.
                _ => {
                    let count = (run - within).min(rows.end - at);
                    (count, count, count)
                }
            };
            let first = self.pick.first + index * self.pick.stride + within;
            let own = self.own.as_ref().map(|(name, own)| {
                let first = own.first + at;
                (name.clone(), Pick { first, run: count, stride: count, ..*own })
            });
            let pick = Pick { first, run, stride, ..self.pick };
            parts.push(Part { rows: count, pick, own, ..self.clone() });
            at += count;
        }
        parts
    }
}

impl Linear {
    /// The layer with some of its outputs alone.
    pub(super) fn outputs(&self, ranges: impl IntoIterator<Item = Range<usize>>) -> Linear {
        let mut parts = Vec::new();
        for range in ranges {
            let mut first = 0;
            for part in &self.parts {
                let (start, end) = (range.start.max(first), range.end.min(first + part.rows));
                if start < end {
                    parts.extend(part.slice(start - first..end - first));
                }
                first += part.rows;
            }
        }
        Linear { parts, ..self.clone() }
    }

    /// This rank's outputs; those of all ranks are gathered.
    fn gathered(&self, Rank { rank, ranks, .. }: Rank, what: &'static str) -> Result<Linear, ShardError> {
        let ranges = cut(self.rows(), ranks, GRAIN, what)?;
        Ok(Linear { gathered_outputs: widths(&ranges), ..self.outputs(std::iter::once(ranges[rank].clone())) })
    }

    /// Returns whether the layer is cut by inputs, `widths` of them for each rank.
    fn is_summed(&self, reduce: Reduce, widths: &[usize]) -> bool {
        let grain = self.form.grain();
        let ends = widths.iter().scan(0, |end, width| {
            *end += width;
            Some(*end)
        });
        let fits = |end: usize| end == self.inputs || grain > 0 && end.is_multiple_of(grain);
        reduce == Reduce::Sum && ends.into_iter().all(fits)
    }

    /// The layer whose inputs are cut over the ranks like this.
    fn joined(&self, on: Rank, widths: Vec<usize>, what: &'static str) -> Result<Linear, ShardError> {
        if self.is_summed(on.reduce, &widths) {
            return Ok(Linear { summed: true, ..self.inputs(on, &widths) });
        }
        Ok(Linear { gathered_inputs: widths, ..self.gathered(on, what)? })
    }

    /// This rank's inputs, and on the first rank the bias.
    fn inputs(&self, Rank { rank, .. }: Rank, widths: &[usize]) -> Linear {
        let begin: usize = widths[..rank].iter().sum();
        let cut = |pick: Pick| {
            let (first, all) = pick.inputs.unwrap_or((0, self.inputs));
            Pick { inputs: Some((first + begin, all)), ..pick }
        };
        let part = |part: &Part| {
            let own = part.own.as_ref().map(|(name, own)| (name.clone(), cut(*own)));
            Part { pick: cut(part.pick), own, ..part.clone() }
        };
        let parts = self.parts.iter().map(part).collect();
        Linear { parts, inputs: widths[rank], bias: self.bias && rank == 0, ..self.clone() }
    }
}

impl Norm {
    /// The norm of some heads: one weight for each element of the row is cut, weights that serve every head are not.
    fn of_heads(&self, heads: &Range<usize>, head_dim: usize) -> Norm {
        let count = self.shape.iter().product::<usize>() * self.weight.len();
        let part = (count > self.width).then_some((heads.start * head_dim, heads.len() * head_dim));
        Norm { part, ..self.clone() }
    }
}

impl Attention {
    /// Whether a norm of its queries or keys spans several heads.
    fn has_wide_norm(&self) -> bool {
        let norms = self.query_norm.iter().chain(&self.key_norm).chain(&self.value_norm);
        norms.into_iter().any(|norm| norm.width > self.heads.head_dim)
    }

    fn shard(&self, rank: Rank) -> Result<Attention, ShardError> {
        const OUTPUT: &str = "rows of the output of attention";
        let Heads { num_heads, num_kv_heads, head_dim } = self.heads;
        if self.has_wide_norm() || self.beside.is_some() {
            return Ok(Attention { output: self.output.gathered(rank, OUTPUT)?, ..self.clone() });
        }
        let ranges = match self.latent {
            // Every rank has the latents.
            Some(_) if num_heads >= rank.ranks => {
                even(num_heads, rank.ranks).into_iter().map(|heads| (heads, 0..1)).collect()
            }
            _ => cut_heads(num_heads, num_kv_heads, rank.ranks)?,
        };
        let (heads, kv) = ranges[rank.rank].clone();
        let of_latent = self.latent.as_ref().map(|latent| latent.value_dim);
        let value_dim = of_latent.or(self.value_dim).unwrap_or(head_dim);
        let inputs = ranges.iter().map(|(heads, _)| heads.len() * value_dim).collect();
        let elements =
            |first: usize, heads: &Range<usize>| first + heads.start * head_dim..first + heads.end * head_dim;
        let (queries, keys) = (num_heads * head_dim, self.own_kv_heads() * head_dim);
        let qkv = match (&self.latent, self.shares) {
            (Some(_), _) => self.qkv.clone(),
            (None, shares) => {
                let mut parts = vec![elements(0, &heads)];
                if shares.is_none() {
                    let first = queries + keys;
                    let values = first + kv.start * value_dim..first + kv.end * value_dim;
                    parts.extend([elements(queries, &kv), values]);
                }
                parts.extend(self.gate.then(|| elements(queries + 2 * keys, &heads)));
                self.qkv.outputs(parts)
            }
        };
        let norm = |norm: &Option<Norm>, heads| norm.as_ref().map(|norm: &Norm| norm.of_heads(heads, head_dim));
        Ok(Attention {
            qkv,
            heads: Heads { num_heads: heads.len(), num_kv_heads: kv.len(), head_dim },
            shard: Some(HeadShard { first: heads.start, first_kv: kv.start, num_heads, num_kv_heads }),
            query_norm: norm(&self.query_norm, &heads),
            key_norm: norm(&self.key_norm, &kv),
            value_norm: norm(&self.value_norm, &kv),
            alibi_slopes: self.alibi_slopes.as_ref().map(|slopes| slopes[heads.clone()].to_vec()),
            sparse: self.sparse.map(|mut sparse| {
                sparse.first_head += heads.start;
                sparse.first_kv_head += kv.start;
                sparse
            }),
            latent: self.latent.as_ref().map(|latent| latent.shard(&heads)),
            output: self.output.joined(rank, inputs, OUTPUT)?,
            ..self.clone()
        })
    }
}

impl Latent {
    fn shard(&self, heads: &Range<usize>) -> Latent {
        let query_dim = self.nope_dim + self.rope_dim;
        Latent {
            query: self.query.outputs(std::iter::once(heads.start * query_dim..heads.end * query_dim)),
            absorb: self.absorb[heads.clone()].to_vec(),
            expand: self.expand[heads.clone()].to_vec(),
            ..self.clone()
        }
    }
}

impl Recurrent {
    fn shard(&self, rank: Rank) -> Result<Recurrent, ShardError> {
        const OUTPUT: &str = "rows of the output of a recurrent layer";
        let Recurrent { key_heads, value_heads, value_dim, .. } = *self;
        // A norm of heads that several ranks would have, or products of the values of all heads.
        let is_whole = matches!(self.rule, Rule::Selective(_));
        let normed = self.norm.as_ref().map_or(1, |norm| norm.width / value_dim.max(1));
        if is_whole || normed > value_heads / key_heads || normed > 1 && rank.ranks > key_heads {
            return Ok(Recurrent { output: self.output.gathered(rank, OUTPUT)?, ..self.clone() });
        }
        let ranges = cut_heads(value_heads, key_heads, rank.ranks)?;
        let (values, keys) = ranges[rank.rank].clone();
        let mut first = 0;
        let part = |Piece { of_keys, dim }: Piece| {
            let (own, count) = if of_keys { (&keys, key_heads) } else { (&values, value_heads) };
            let range = first + own.start * dim..first + own.end * dim;
            first += count * dim;
            range
        };
        let parts: Vec<_> = self.pieces().into_iter().map(part).collect();
        let inputs = ranges.iter().map(|(values, _)| values.len() * value_dim).collect();
        Ok(Recurrent {
            projections: self.projections.outputs(parts),
            key_heads: keys.len(),
            value_heads: values.len(),
            shard: Some(HeadShard {
                first: values.start,
                first_kv: keys.start,
                num_heads: value_heads,
                num_kv_heads: key_heads,
            }),
            rule: self.rule.of_heads(&values, self.key_dim, value_dim),
            norm: self.norm.as_ref().map(|norm| norm.of_heads(&values, value_dim)),
            output: self.output.joined(rank, inputs, OUTPUT)?,
            ..self.clone()
        })
    }
}

impl Mlp {
    /// The elements between activation and down projection of each rank.
    fn cut(&self, Rank { ranks, reduce, .. }: Rank) -> Result<Vec<Range<usize>>, ShardError> {
        let grain = if reduce == Reduce::Sum { self.down.form.grain().max(GRAIN) } else { GRAIN };
        cut(self.down.inputs, ranks, grain, "the width of a network")
    }

    fn shard(&self, rank: Rank) -> Result<Mlp, ShardError> {
        let (width, ranges) = (self.down.inputs, self.cut(rank)?);
        let own = ranges[rank.rank].clone();
        let up = self.gated.then(|| width + own.start..width + own.end);
        Ok(Mlp {
            learned: self.learned.clone(),
            gate_up: self.gate_up.outputs(std::iter::once(own).chain(up)),
            down: self.down.joined(rank, widths(&ranges), "rows of the output of a network")?,
            ..self.clone()
        })
    }
}

impl Experts {
    /// The outputs of all networks are added before they are gathered or summed over the ranks, so all are cut alike.
    fn shard(&self, mut rank: Rank) -> Result<Experts, ShardError> {
        for mlp in self.experts.iter().chain(&self.shared) {
            if !mlp.down.is_summed(rank.reduce, &widths(&mlp.cut(rank)?)) {
                rank.reduce = Reduce::Gather;
            }
        }
        let (mut gathered_outputs, mut summed) = (Vec::new(), false);
        let mut network = |mlp: &Mlp| {
            let mut mlp = mlp.shard(rank)?;
            gathered_outputs = std::mem::take(&mut mlp.down.gathered_outputs);
            summed = std::mem::take(&mut mlp.down.summed);
            Ok(mlp)
        };
        let experts = self.experts.iter().map(&mut network).collect::<Result<_, _>>()?;
        let shared = match (&self.shared, &self.narrow) {
            (None, _) => None,
            // Added behind the projection of the sum of the experts.
            (Some(shared), Some(_)) => Some(shared.shard(rank)?),
            (Some(shared), None) => Some(network(shared)?),
        };
        Ok(Experts { experts, shared, gathered_outputs, summed, ..self.clone() })
    }
}

impl Mixer {
    fn shard(&self, rank: Rank) -> Result<Mixer, ShardError> {
        Ok(match self {
            Mixer::Attention(layer) => Mixer::Attention(layer.shard(rank)?),
            Mixer::Recurrent(layer) => Mixer::Recurrent(layer.shard(rank)?),
            // The gates of all ranks have one mean.
            Mixer::Mlp(mlp) if mlp.sparsity.is_some() => Mixer::Mlp(mlp.clone()),
            Mixer::Mlp(mlp) => Mixer::Mlp(mlp.shard(rank)?),
            Mixer::Experts(experts) => Mixer::Experts(experts.shard(rank)?),
            Mixer::PerLayer(layer) => Mixer::PerLayer(layer.clone()),
            Mixer::Laurel(layer) => Mixer::Laurel(layer.clone()),
            Mixer::Sum(branches) => Mixer::Sum(of_branches(branches, rank)?),
        })
    }
}

fn of_branches(branches: &[Branch], rank: Rank) -> Result<Vec<Branch>, ShardError> {
    branches.iter().map(|branch| Ok(Branch { mixer: branch.mixer.shard(rank)?, ..branch.clone() })).collect()
}

impl Decoder {
    /// The part of the decoder that rank `rank` of `ranks` computes (see the [module](crate::decoder)). A decoder of its own, but for
    /// rows that the ranks [gather](Linear::gathered_outputs) or [add](Linear::summed).
    ///
    /// # Errors
    /// A layer has fewer heads or rows than there are ranks.
    pub fn shard(&self, rank: usize, ranks: usize, reduce: Reduce) -> Result<Decoder, ShardError> {
        if ranks <= 1 {
            return Ok(self.clone());
        }
        let on = Rank { rank: rank.min(ranks - 1), ranks, reduce };
        let mut sharded = self.clone();
        for layer in &mut sharded.layers {
            layer.branches = of_branches(&layer.branches, on)?;
        }
        // A head with rows for some tokens alone, or rows without a token, is that of a small model.
        let Head { linear, tokens, masked, .. } = &self.head;
        if tokens.is_none() && masked.is_empty() {
            let head = linear.as_ref().unwrap_or(&self.embedding.tokens);
            sharded.head.linear = Some(head.gathered(on, "rows of the vocabulary")?);
        }
        Ok(sharded)
    }

    /// Number of exchanges in a step that sum the outputs of products, and of products whose inputs are gathered before them.
    pub fn joins(&self) -> (usize, usize) {
        let gathers = |linear: &&Linear| !linear.gathered_inputs.is_empty();
        let summed = self.linears().filter(|linear| linear.summed).count();
        let gathered = self.linears().filter(gathers).count();
        let mixtures = || self.experts().filter_map(|experts| Some((experts, &experts.experts.first()?.down)));
        let summed_mixtures = mixtures().filter(|(experts, _)| experts.summed).count();
        (summed + summed_mixtures, gathered + mixtures().filter(|(_, down)| gathers(down)).count())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::decoder::Role;

    /// Rows of the tensors of a layer, as (name, row of the tensor).
    fn rows_of(linear: &Linear) -> Vec<(String, usize)> {
        let of = |part: &Part| (0..part.rows).map(|row| (part.name.clone(), part.pick.row(row))).collect::<Vec<_>>();
        linear.parts.iter().flat_map(of).collect()
    }

    proptest! {
        #[test]
        fn slices_of_a_layer_are_its_rows(
            runs in prop::collection::vec((1usize..5, 1usize..5, 0usize..4, 0usize..3), 1..4),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        ) {
            let part = |(at, &(run, count, gap, first)): (usize, &(usize, usize, usize, usize))| {
                let rows = run * count;
                let pick = Pick::runs(first + count * (run + gap), first, run, run + gap);
                let own = Some((format!("own{at}"), Pick::all(rows)));
                Part { own, ..Part::picked(format!("part{at}"), rows, pick) }
            };
            let linear = Linear::new(4, Role::Column, runs.iter().enumerate().map(part));
            let all = rows_of(&linear);
            let mut bounds: Vec<usize> = cuts.iter().map(|cut| cut.index(all.len() + 1)).chain([0, all.len()]).collect();
            bounds.sort_unstable();
            let mut found = Vec::new();
            for bounds in bounds.windows(2) {
                let slice = linear.outputs(std::iter::once(bounds[0]..bounds[1]));
                prop_assert_eq!(slice.rows(), bounds[1] - bounds[0]);
                // The rows of a part in a tensor of its own follow each other.
                for part in &slice.parts {
                    let (_, own) = part.own.as_ref().unwrap();
                    prop_assert!(own.run >= part.rows && own.first + part.rows <= own.total);
                }
                found.extend(rows_of(&slice));
            }
            prop_assert_eq!(found, all);
        }

        #[test]
        fn every_head_belongs_to_one_rank_and_finds_its_keys_there(kv in 1usize..6, ratio in 1usize..6, ranks in 1usize..9) {
            let cut = cut_heads(kv * ratio, kv, ranks);
            prop_assert_eq!(cut.is_err(), ranks.div_ceil(kv) > ratio);
            prop_assume!(cut.is_ok());
            let ranges = cut.unwrap();
            let heads: Vec<usize> = ranges.iter().flat_map(|(heads, _)| heads.clone()).collect();
            prop_assert_eq!(heads, (0..kv * ratio).collect::<Vec<_>>());
            for (heads, keys) in ranges {
                prop_assert!(!heads.is_empty());
                // Heads of a rank are numbered from 0, and so are its keys: the ratio must lead to the same ones.
                let own = heads.len() / keys.len();
                prop_assert_eq!(own * keys.len(), heads.len());
                for (local, head) in heads.enumerate() {
                    prop_assert_eq!(keys.start + local / own, head / ratio);
                }
            }
        }
    }
}
