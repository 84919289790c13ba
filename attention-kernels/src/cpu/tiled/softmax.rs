//! From the scores of a band to weights in bfloat16.

// Loops over registers are most readable with an index that several arrays share.
#![allow(clippy::needless_range_loop)]

use simd::pairs::PairLanes;
use simd::tiles::{GROUP, Tile};
use simd::{LANES, Lanes};

use super::operands::Band;
use crate::cpu::merge::Merged;
use crate::cpu::tile::{Shared, bias};

/// Converts the scores of a band to weights: those of two panels are one A tile in place of the first. Returns the state of each query.
#[inline(always)]
pub(super) fn weigh<D: PairLanes>(shared: &Shared<'_>, band: &Band<'_>, scores: &mut [Tile]) -> [Merged; LANES] {
    let (task, mut found) = (band.seen.task, [Merged::default(); LANES]);
    let scores = &mut scores[band.panels.clone()];
    // Scores with a bias are scaled before it is added; others while the greatest is subtracted.
    let is_plain = shared.soft_cap.is_none() && task.slopes.is_none() && task.scale > 0.0;
    if !is_plain {
        scale_and_bias(shared, band, scores);
    }
    hide(band, scores);
    let (scale, mut row) = (if is_plain { task.scale } else { 1.0 }, 0);
    while row < band.queries.len() {
        row += match band.queries.len() - row {
            4.. => softmax::<D, 4>(scores, row, scale, &mut found),
            _ => softmax::<D, 1>(scores, row, scale, &mut found),
        };
    }
    found
}

/// Scales scores, and applies soft cap and ALiBi.
#[inline(always)]
fn scale_and_bias(shared: &Shared<'_>, band: &Band<'_>, scores: &mut [Tile]) {
    let (task, first) = (band.seen.task, band.seen.first() + band.panels.start * LANES);
    for (panel, tile) in scores.iter_mut().enumerate() {
        for (query, line) in band.queries.clone().zip(tile) {
            let scores = line.as_floats_mut();
            scores.iter_mut().for_each(|score| *score *= task.scale);
            bias(shared, task, query, first + panel * LANES, scores);
        }
    }
}

/// Replaces the scores of tokens that a query does not see by −∞.
#[inline(always)]
fn hide(band: &Band<'_>, scores: &mut [Tile]) {
    let Band { seen, queries, .. } = band;
    // All see the tokens from the first that the last row sees to the last that the first row sees, unless a rule hides some.
    let rows = [queries.end - 1, queries.start].map(|query| seen.by(query / seen.task.group));
    let common = rows[0].start..rows[1].end;
    for (group, tiles) in band.groups().zip(scores.as_chunks_mut::<2>().0) {
        let first = band.first_of(group);
        if seen.sparse.is_none() && common.start <= first && first + GROUP <= common.end {
            continue;
        }
        for (row, query) in queries.clone().enumerate() {
            let bits = seen.bits(query, first);
            for (tile, bits) in tiles.iter_mut().zip([bits, bits >> LANES]) {
                for (lane, score) in tile[row].as_floats_mut().iter_mut().enumerate() {
                    *score = if bits >> lane & 1 == 1 { *score } else { f32::NEG_INFINITY };
                }
            }
        }
    }
}

/// Converts the scores of `R` queries from a row on into weights in bfloat16. Returns R.
#[inline(always)]
fn softmax<D: PairLanes, const R: usize>(scores: &mut [Tile], row: usize, scale: f32, found: &mut [Merged]) -> usize {
    let zero = D::Floats::splat(0.0);
    let mut greatest = [D::Floats::splat(f32::MIN); R];
    for tile in scores.iter() {
        for r in 0..R {
            greatest[r] = greatest[r].max(D::Floats::load(tile[row + r].as_floats()));
        }
    }
    let factor = scale * std::f32::consts::LOG2_E;
    let (mut less, mut totals) = ([zero; R], [[zero; 2]; R]);
    for r in 0..R {
        let greatest = greatest[r].greatest();
        found[row + r].greatest = greatest * scale;
        // A query that sees nothing has no greatest score.
        less[r] = D::Floats::splat(if greatest > f32::MIN { -greatest * factor } else { 0.0 });
    }
    let factor = D::Floats::splat(factor);
    for [low, high] in scores.as_chunks_mut::<2>().0 {
        for r in 0..R {
            let even = D::Floats::load(low[row + r].as_floats()).mul_add(factor, less[r]).exp2();
            let odd = D::Floats::load(high[row + r].as_floats()).mul_add(factor, less[r]).exp2();
            totals[r] = [totals[r][0].add(even), totals[r][1].add(odd)];
            let mut weights = [0.0; GROUP];
            let (to_even, to_odd) = weights.as_chunks_mut::<LANES>().0.split_at_mut(1);
            even.store(&mut to_even[0]);
            odd.store(&mut to_odd[0]);
            D::round(&weights, &mut low[row + r].0);
        }
    }
    for r in 0..R {
        found[row + r].total = totals[r][0].add(totals[r][1]).sum();
    }
    R
}
