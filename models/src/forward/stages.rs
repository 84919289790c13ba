//! Cuts a decoder into the stages of a pipeline.

use std::ops::Range;

use super::groups::PageLayout;
use crate::decoder::{Attention, Choice, Decoder, Layer, LayerGroup, Linear, Mixer, Stage};

/// A decoder that cannot be cut into these stages.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("found {found}, expected {expected}")]
pub struct StageError {
    /// The wish.
    pub found: String,
    /// What is possible.
    pub expected: String,
}

/// The layers of each of `stages` stages, such that the one with the greatest cost has the least. The cost of a layer are the weights
/// that a token is multiplied with; the last stage has the head too.
///
/// # Errors
/// There are fewer layers than stages.
pub fn partition(decoder: &Decoder, stages: usize) -> Result<Vec<usize>, StageError> {
    let count = decoder.layers.len();
    if stages == 0 || stages > count {
        let expected = format!("1 to {count}, the number of layers");
        return Err(StageError { found: stages.to_string(), expected });
    }
    let mut costs: Vec<usize> = decoder.layers.iter().map(cost).collect();
    let head = decoder.head.linear.as_ref().unwrap_or(&decoder.embedding.tokens);
    costs[count - 1] += size(head);
    // least[i]: the least greatest cost of the first i layers in so many stages, and where the last of them begins.
    let sums: Vec<usize> = std::iter::once(0)
        .chain(costs.iter().scan(0, |sum, cost| {
            *sum += cost;
            Some(*sum)
        }))
        .collect();
    let mut least: Vec<usize> = sums.clone();
    let mut begins = Vec::new();
    for stage in 1..stages {
        let best = |end: usize| {
            let of = |begin: usize| (least[begin].max(sums[end] - sums[begin]), begin);
            (stage..end).map(of).min().unwrap_or((usize::MAX, 0))
        };
        let all: Vec<(usize, usize)> = (0..=count).map(best).collect();
        least = all.iter().map(|(cost, _)| *cost).collect();
        begins.push(all.into_iter().map(|(_, begin)| begin).collect::<Vec<_>>());
    }
    let (mut end, mut partition) = (count, Vec::new());
    for begins in begins.iter().rev() {
        partition.push(end - begins[end]);
        end = begins[end];
    }
    partition.push(end);
    partition.reverse();
    Ok(partition)
}

fn size(linear: &Linear) -> usize {
    linear.rows() * linear.inputs
}

fn cost(layer: &Layer) -> usize {
    let of = |mixer: &Mixer| {
        let others: usize = mixer.linears().into_iter().map(size).sum();
        let of_experts = match mixer {
            Mixer::Experts(experts) => {
                let all: usize = experts.experts.iter().map(|mlp| size(&mlp.gate_up) + size(&mlp.down)).sum();
                all * experts.routing.top_k / experts.experts.len().max(1)
            }
            _ => 0,
        };
        others + of_experts
    };
    layer.branches.iter().map(|branch| of(&branch.mixer)).sum()
}

impl Decoder {
    /// The stage that computes these layers of this decoder, which may be [a part](Decoder::shard) of one.
    ///
    /// # Errors
    /// A layer of it reads what another stage computes.
    pub fn stage(&self, layers: Range<usize>) -> Result<Decoder, StageError> {
        let whole = layers == (0..self.layers.len());
        if whole {
            return Ok(self.clone());
        }
        let refused = |found: &str| {
            let expected = "one stage (--pipeline-parallel-size 1): the layers of this model read more than the stream"
                .to_string();
            StageError { found: found.to_string(), expected }
        };
        if self.embedding.per_layer.is_some() || self.embedding.beside.is_some() || !self.taps.is_empty() {
            return Err(refused("inputs of every layer"));
        }
        if self.streams.is_some() {
            return Err(refused("several residual streams"));
        }
        let is_paged = |mixer: &&Mixer| matches!(mixer, Mixer::Attention(_) | Mixer::Recurrent(_));
        let paged_in = |layers: &[Layer]| {
            let mixers = layers.iter().flat_map(|layer| &layer.branches).map(|branch| &branch.mixer);
            mixers.filter(is_paged).count()
        };
        let first = paged_in(&self.layers[..layers.start]);
        let own = first..first + paged_in(&self.layers[layers.clone()]);
        let layout = PageLayout::new(self);
        let of_stage = |group: &LayerGroup| {
            let layers = group.layers.iter().filter(|layer| own.contains(layer)).map(|layer| layer - first).collect();
            LayerGroup { layers, ..group.clone() }
        };
        let (receives, sends) = (layers.start > 0, layers.end < self.layers.len());
        let mut stage = Decoder {
            layers: self.layers[layers].to_vec(),
            stage: Some(Stage {
                receives,
                sends,
                groups: layout.groups.iter().map(of_stage).collect(),
                place_heads: layout.place_heads,
            }),
            ..self.clone()
        };
        let latents = stage.attention().find_map(|layer| layer.latent.as_ref());
        if latents.is_some_and(|latent| matches!(latent.choice, Some(Choice::Before { .. }))) {
            return Err(refused("tokens that another stage chooses"));
        }
        for branch in stage.layers.iter_mut().flat_map(|layer| &mut layer.branches) {
            if let Mixer::Attention(Attention { shares: Some(donor), .. }) = &mut branch.mixer {
                *donor = donor.checked_sub(first).ok_or_else(|| refused("keys and values of another stage"))?;
            }
        }
        if sends {
            stage.final_norm = None;
            (stage.head.projection, stage.head.linear) = (None, None);
            stage.head.masked.clear();
        } else if self.is_tied() {
            stage.head.linear = Some(self.embedding.tokens.clone());
        }
        Ok(stage)
    }
}
