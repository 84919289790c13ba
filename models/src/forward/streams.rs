//! Operations on several residual streams, and sparse gates, on a CPU: each row for itself.

use attention_kernels::KernelError;
use attention_kernels::layer;
use device::Buffer;
use simd::{Isa, Pool};

use super::cpu::PASS_COST;
use super::loaded::MixingLayer;
use super::op::StreamStep;
use super::ops::StreamRows;
use crate::decoder::MAX_STREAMS;

/// Least mean of the squares of a stream that is scaled.
const LEAST_SQUARE: f32 = 1e-5;

/// The mean of the squares, with a sum in float64 in the order of the elements.
fn mean_square(x: &[f32]) -> f32 {
    let sum: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
    (sum / x.len() as f64) as f32
}

/// The factors of a row: `weights` has a row of as many numbers as there are streams for each.
fn factors(weights: &[f32], scores: &[f32], factors: &mut [f32]) {
    let mut tanh = [0.0; MAX_STREAMS];
    tanh.iter_mut().zip(scores).for_each(|(tanh, score)| *tanh = score.tanh());
    for (factor, weights) in factors.iter_mut().zip(weights.chunks_exact(scores.len())) {
        *factor = weights.iter().zip(&tanh).map(|(weight, tanh)| weight * tanh).sum();
    }
}

pub(super) fn run(isa: Isa, threads: &Pool, args: StreamRows<'_>) -> Result<(), KernelError> {
    let StreamRows { step, layer, rows, width, count, stream, others, mixture, branch, scores } = args;
    let streams = count + 1;
    let (all, cost) = (count * width, streams * width * PASS_COST);
    let others = &mut others.host_mut::<f32>()?[..rows * all];
    let scores = scores.host::<f32>()?;
    let scores_of = |row: usize| &scores[row * streams..][..streams];
    match (step, layer) {
        (StreamStep::Rescale, _) => {
            let stream = stream.host::<f32>()?;
            threads.chunks_mut(others, all, cost, |row, others| {
                let target = mean_square(&stream[row * width..][..width]).sqrt();
                for other in others.chunks_exact_mut(width) {
                    let own = mean_square(other).max(LEAST_SQUARE).sqrt();
                    layer::scale(isa, other, target / own);
                }
            });
        }
        (StreamStep::Mix(_), Some(MixingLayer { predictions, .. })) => {
            let predictions = predictions.host::<f32>()?;
            let stream = &mut stream.host_mut::<f32>()?[..rows * width];
            threads.zip_chunks_mut((&mut *stream, width), (others, all), cost, |row, first, others| {
                let mut mix = [0.0; MAX_STREAMS * MAX_STREAMS];
                let mix = &mut mix[..streams * streams];
                factors(predictions, scores_of(row), mix);
                for (at, first) in first.iter_mut().enumerate() {
                    let mut x = [0.0; MAX_STREAMS];
                    x[0] = *first;
                    (1..streams).for_each(|i| x[i] = others[(i - 1) * width + at]);
                    for (j, mix) in mix.chunks_exact(streams).enumerate() {
                        let mixed = mix.iter().zip(&x).fold(x[j], |sum, (factor, x)| sum + factor * x);
                        *(if j == 0 { &mut *first } else { &mut others[(j - 1) * width + at] }) = mixed;
                    }
                }
            });
            mixture.host_mut::<f32>()?[..rows * width].copy_from_slice(stream);
        }
        (StreamStep::Correct(_), Some(MixingLayer { corrections, output_scale, .. })) => {
            let corrections = corrections.host::<f32>()?;
            let (mixture, scale) = (mixture.host::<f32>()?, output_scale.host::<f32>()?);
            let stream = &mut stream.host_mut::<f32>()?[..rows * width];
            threads.zip_chunks_mut((&mut *stream, width), (others, all), cost, |row, first, others| {
                let mut gains = [0.0; MAX_STREAMS];
                factors(corrections, scores_of(row), &mut gains[..streams]);
                let mixture = &mixture[row * width..][..width];
                for (at, (first, mixture)) in first.iter_mut().zip(mixture).enumerate() {
                    let change = *first - mixture;
                    *first = mixture + (1.0 + gains[0]) * change;
                    for (other, gain) in others.iter_mut().skip(at).step_by(width).zip(&gains[1..]) {
                        *other += (1.0 + gain) * change;
                    }
                }
            });
            threads.chunks_mut(&mut branch.host_mut::<f32>()?[..rows * width], width, width * PASS_COST, |row, out| {
                let first = &stream[row * width..][..width];
                out.iter_mut().zip(first).zip(scale).for_each(|((out, x), scale)| *out = x * scale);
            });
        }
        (StreamStep::Add, _) => {
            let branch = branch.host::<f32>()?;
            threads.chunks_mut(others, all, cost, |row, others| {
                let added = &branch[row * width..][..width];
                others.chunks_exact_mut(width).for_each(|other| layer::add(isa, other, added, 1.0));
            });
        }
        (StreamStep::Mean, _) => {
            let others = &*others;
            threads.chunks_mut(&mut stream.host_mut::<f32>()?[..rows * width], width, cost, |row, first| {
                others[row * all..][..all].chunks_exact(width).for_each(|other| layer::add(isa, first, other, 1.0));
                layer::scale(isa, first, 1.0 / streams as f32);
            });
        }
        (StreamStep::Mix(_) | StreamStep::Correct(_), None) => {
            return Err(KernelError::NotLoaded { variant: "models", what: "weights of a layer that mixes streams" });
        }
    }
    Ok(())
}

/// [`LayerOps::sparsify`](super::ops::LayerOps::sparsify).
pub(super) fn sparsify(
    threads: &Pool,
    x: &mut Buffer,
    width: usize,
    deviations: f32,
    rows: usize,
) -> Result<(), KernelError> {
    let x = &mut x.host_mut::<f32>()?[..rows * 2 * width];
    threads.chunks_mut(x, 2 * width, 2 * width * PASS_COST, |_, row| {
        let gates = &mut row[..width];
        let mean = gates.iter().map(|x| f64::from(*x)).sum::<f64>() / width as f64;
        let squares: f64 = gates.iter().map(|x| (f64::from(*x) - mean) * (f64::from(*x) - mean)).sum();
        let least = (mean + f64::from(deviations) * (squares / width as f64).sqrt()) as f32;
        gates.iter_mut().for_each(|x| *x = (*x - least).max(0.0));
    });
    Ok(())
}
