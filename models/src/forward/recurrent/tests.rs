//! The recurrence against its definition in float64.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, LazyLock};

use attention_kernels::{KvCache, KvShape};
use device::{Buffer, Device};
use proptest::prelude::*;

use super::*;
use crate::decoder::{ChannelDelta, Linear, Norm, Part, Role, Selective};
use crate::forward::{ForwardBatch, linear};

const EPS: f32 = 1e-6;

/// Which rule a layer has.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Delta,
    /// With a decay of each channel.
    Channels,
    Convolution,
    StateSpace,
    /// The two parts of a selective state space.
    Values,
    Matrix,
}

const KINDS: &[Kind] = &[Kind::Delta, Kind::Channels, Kind::Convolution, Kind::StateSpace, Kind::Values, Kind::Matrix];

/// Steps are clamped to these.
const STEPS: (f32, f32) = (0.3, 1.2);
/// Factors of a state space: of q, k and v, which are in the weights of the convolution, of z and dt.
const FACTORS: [f32; 5] = [1.0, 1.0, 1.0, 0.7, 1.3];

/// A norm of rows of `width` elements.
fn norm_of(width: usize) -> Norm {
    let (kind, weight, shape) = (crate::decoder::NormKind::Rms, vec![String::new()], vec![width]);
    Norm { kind, weight, bias: None, shape, part: None, width, eps: EPS, plus_one: false, factor: 1.0 }
}

fn linear_of(rows: usize) -> Linear {
    Linear::new(1, Role::Column, [Part::new("", rows)])
}

fn selective(key_dim: usize) -> Selective {
    let [low, step, keys] = [1, 1, 1].map(linear_of);
    let (low_norm, key_norms) = (norm_of(1), [norm_of(key_dim), norm_of(key_dim)]);
    Selective { low, low_norm, step, keys, key_norms, a_log: String::new(), skip: String::new() }
}

fn layer(kind: Kind, key_heads: usize, ratio: usize, dims: (usize, usize), kernel: usize, bias: bool) -> Recurrent {
    let ratio = if kind == Kind::Channels { 1 } else { ratio };
    let (value_heads, value_dim) = (key_heads * ratio, dims.1);
    let key_dim = if kind == Kind::Convolution { 0 } else { dims.0 };
    let key_heads = if matches!(kind, Kind::Values | Kind::Matrix) { 1 } else { key_heads };
    let name = String::new;
    let rule = match kind {
        Kind::Delta => Rule::GatedDelta { a_log: name(), dt_bias: name() },
        Kind::Channels => {
            let pair = || [1, 1].map(linear_of);
            Rule::ChannelDelta(Box::new(ChannelDelta { decay: pair(), gate: pair(), a_log: name(), dt_bias: name() }))
        }
        Kind::Convolution => Rule::ShortConvolution,
        Kind::Values | Kind::Matrix => Rule::Selective(Box::new(selective(key_dim))),
        Kind::StateSpace => {
            Rule::StateSpace { a_log: name(), dt_bias: name(), skip: name(), steps: STEPS, factors: FACTORS }
        }
    };
    let (linear, norm) = (linear_of, norm_of(value_dim));
    let mut layer = Recurrent {
        rule,
        shard: None,
        projections: linear(0),
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        kernel,
        conv: vec![String::new()],
        conv_bias: bias.then(String::new),
        norm: matches!(kind, Kind::Delta | Kind::Channels).then_some(norm),
        output: linear(1),
    };
    let rows = |piece: crate::decoder::Piece| piece.dim * if piece.of_keys { key_heads } else { value_heads };
    layer.projections = linear(layer.pieces().into_iter().map(rows).sum());
    layer
}

/// Numbers from -1 to 1 that depend on a seed alone.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

static CPU: LazyLock<Arc<dyn Device>> = LazyLock::new(|| device::open("cpu", Some(2)).unwrap());

fn buffer(values: &[f32]) -> Buffer {
    let mut buffer = CPU.alloc(size_of_val(values)).unwrap();
    buffer.host_mut::<f32>().unwrap().copy_from_slice(values);
    buffer
}

struct Weights {
    conv: Vec<f32>,
    conv_bias: Option<Vec<f32>>,
    decay: Vec<f32>,
    dt_bias: Vec<f32>,
    skip: Vec<f32>,
    norm: Vec<f32>,
    /// Norms of k and of q of a selective state space.
    key_norms: [Vec<f32>; 2],
}

/// The matrix of a selective state space in float64; rows are v, z, values, steps, k and q.
fn naive_scan(of: &Recurrent, weights: &Weights, rows: &[f32]) -> Vec<f64> {
    let (width, keys) = (of.value_width(), of.key_dim);
    let mut states = vec![0.0; keys * width];
    let mut result = Vec::new();
    for row in rows.chunks_exact(4 * width + 2 * keys) {
        let row: Vec<f64> = row.iter().map(|x| f64::from(*x)).collect();
        let (z, values, steps) = (&row[width..2 * width], &row[2 * width..3 * width], &row[3 * width..4 * width]);
        let normed = |number: usize| {
            let x = &row[4 * width + number * keys..][..keys];
            let mean = x.iter().map(|x| x * x).sum::<f64>() / keys as f64 + f64::from(EPS);
            x.iter().zip(&weights.key_norms[number]).map(|(x, w)| x / mean.sqrt() * f64::from(*w)).collect::<Vec<_>>()
        };
        let (k, q) = (normed(0), normed(1));
        for c in 0..width {
            let step = steps[c].exp().ln_1p();
            let mut out = f64::from(weights.skip[c]) * values[c];
            for i in 0..keys {
                let state = &mut states[i * width + c];
                *state = (f64::from(weights.decay[i * width + c]) * step).exp() * *state + step * values[c] * k[i];
                out += *state * q[i];
            }
            result.push(out * silu(z[c]));
        }
    }
    result
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// The layer in float64, as its paper states it, for a whole sequence. Rows of decays of channels and gates are behind the projections.
fn naive(of: &Recurrent, weights: &Weights, projected: &[f32]) -> Vec<f64> {
    let (keys, width) = (of.key_width(), of.conv_width());
    let has_channels = matches!(of.rule, Rule::ChannelDelta(_));
    let of_channels = if has_channels { keys + of.value_width() } else { 0 };
    let (own, stride) = (of.projections.rows(), of.projections.rows() + of_channels);
    let after = if has_channels { width } else { width + of.value_width() };
    let row = |t: usize| &projected[t * stride..][..stride];
    let is_delta = has_channels || matches!(of.rule, Rule::GatedDelta { .. });
    let is_convolution = of.rule == Rule::ShortConvolution;
    let is_values = matches!(of.rule, Rule::Selective(_));
    let mut states = vec![vec![0.0; of.key_dim * of.value_dim]; of.value_heads];
    let mut result = Vec::new();
    for t in 0..projected.len() / stride {
        let input = |t: usize, c: usize| {
            let factor = if is_convolution { f64::from(row(t)[after + c]) } else { 1.0 };
            f64::from(row(t)[c]) * factor
        };
        let convolved = |c: usize| {
            let back = |i: usize| (t + i + 1).checked_sub(of.kernel).map_or(0.0, |at| input(at, c));
            let sum: f64 = (0..of.kernel).map(|i| f64::from(weights.conv[i * width + c]) * back(i)).sum();
            sum + weights.conv_bias.as_ref().map_or(0.0, |bias| f64::from(bias[c]))
        };
        let number = |at: usize| f64::from(row(t)[at]);
        if is_values {
            result.extend((0..width).map(|c| silu(convolved(c))));
            continue;
        }
        if is_convolution {
            result.extend((0..width).map(|c| convolved(c) * number(width + c)));
            continue;
        }
        let convolved: Vec<f64> = (0..width).map(|c| silu(convolved(c))).collect();
        for (h, state) in states.iter_mut().enumerate() {
            let key_head = h / (of.value_heads / of.key_heads);
            let of_keys = |first: usize| {
                let x = &convolved[first + key_head * of.key_dim..][..of.key_dim];
                let length = if is_delta { (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt() } else { 1.0 };
                x.iter().map(|x| x / length).collect::<Vec<_>>()
            };
            let (q, k) = (of_keys(0), of_keys(keys));
            let v = &convolved[2 * keys + h * of.value_dim..][..of.value_dim];
            let [.., of_z, of_dt] = if is_delta { [1.0; 5] } else { FACTORS.map(f64::from) };
            let dt = match (has_channels, is_delta) {
                (true, _) => 0.0,
                (_, true) => number(after + of.value_heads + h),
                (_, false) => number(after + h) * of_dt,
            };
            let mut step = (dt + f64::from(weights.dt_bias[h])).exp().ln_1p();
            let of_channel = |i: usize| {
                let at = h * of.key_dim + i;
                let step = (number(own + at) + f64::from(weights.dt_bias[at])).exp().ln_1p();
                (f64::from(weights.decay[h]) * step).exp()
            };
            if !is_delta {
                step = step.clamp(f64::from(STEPS.0), f64::from(STEPS.1));
            }
            match has_channels {
                true => state.iter_mut().enumerate().for_each(|(at, s)| *s *= of_channel(at / of.value_dim)),
                false => state.iter_mut().for_each(|s| *s *= (f64::from(weights.decay[h]) * step).exp()),
            }
            let product = |state: &[f64], x: &[f64], j: usize| {
                (0..of.key_dim).map(|i| state[i * of.value_dim + j] * x[i]).sum::<f64>()
            };
            let delta: Vec<f64> = match is_delta {
                true => {
                    let beta = 1.0 / (1.0 + (-number(after + h)).exp());
                    (0..of.value_dim).map(|j| beta * (v[j] - product(state, &k, j))).collect()
                }
                false => v.iter().map(|v| step * v).collect(),
            };
            for (i, k) in k.iter().enumerate() {
                for (j, delta) in delta.iter().enumerate() {
                    state[i * of.value_dim + j] += k * delta;
                }
            }
            let scale = if is_delta { (of.key_dim as f64).sqrt() } else { 1.0 };
            let mut o: Vec<f64> = (0..of.value_dim).map(|j| product(state, &q, j) / scale).collect();
            if is_delta {
                let mean = o.iter().map(|o| o * o).sum::<f64>() / of.value_dim as f64;
                o.iter_mut().zip(&weights.norm).for_each(|(o, w)| *o *= f64::from(*w) / (mean + f64::from(EPS)).sqrt());
            } else {
                o.iter_mut().zip(v).for_each(|(o, v)| *o += f64::from(weights.skip[h]) * v);
            }
            let gate = |j: usize| match has_channels {
                true => 1.0 / (1.0 + (-number(own + keys + h * of.value_dim + j)).exp()),
                false => silu(of_z * number(width + h * of.value_dim + j)),
            };
            result.extend(o.iter().enumerate().map(|(j, o)| o * gate(j)));
        }
    }
    result
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 160, ..ProptestConfig::default() })]

    /// Two sequences in chunks that share steps, each with pages of its own, against whole sequences in float64. The
    /// bits are those of a run without chunks, also those of drafts behind a chunk, which the next chunk computes again.
    #[test]
    fn a_recurrence_in_pages_is_that_of_float64_whatever_the_chunks(
        seed in 1u64..1 << 40,
        (kind, bias) in (prop::sample::select(KINDS), any::<bool>()),
        (key_heads, ratio, key_dim, value_dim, kernel) in (1usize..3, 1usize..4, 1usize..20, 1usize..36, 1usize..5),
        lens in [1usize..30, 1usize..30],
        chunks in proptest::collection::vec(0usize..9, 1..6),
        drafts in proptest::collection::vec(0usize..7, 1..5),
    ) {
        let declared = layer(kind, key_heads, ratio, (key_dim, value_dim), kernel, bias);
        let (is_matrix, width) = (kind == Kind::Matrix, declared.value_width());
        let projected = declared.projections.rows();
        // Behind the projections: values, steps, k and q; or steps and gates.
        let has_channels = kind == Kind::Channels;
        let keys = declared.key_width();
        let more = if is_matrix { 2 * width + 2 * key_dim } else if has_channels { keys + width } else { 0 };
        let stride = projected + more;
        let is_selective = matches!(kind, Kind::Values | Kind::Matrix);
        let decays = if is_selective { key_dim * width } else { declared.value_heads };
        let weights = Weights {
            conv: numbers(seed, kernel * declared.conv_width()),
            conv_bias: bias.then(|| numbers(seed + 40, declared.conv_width())),
            skip: numbers(seed + 41, if is_selective { width } else { declared.value_heads }),
            key_norms: [42, 43].map(|at| numbers(seed + at, key_dim)),
            decay: numbers(seed + 1, decays).iter().map(|x| -x.exp()).collect(),
            dt_bias: numbers(seed + 2, if has_channels { keys } else { declared.value_heads }),
            norm: numbers(seed + 3, value_dim),
        };
        let loaded = RecurrentLayer {
            conv: buffer(&weights.conv),
            conv_bias: weights.conv_bias.as_ref().map(|bias| buffer(bias)),
            decay: Some(buffer(&weights.decay)),
            dt_bias: Some(buffer(&weights.dt_bias)),
            skip: Some(buffer(&weights.skip)),
            group: 0,
            place: 0,
            declared: declared.clone(),
        };
        let norm = |weight: &[f32]| {
            let width = weight.len();
            linear::Norm { weight: buffer(weight), bias: None, width, eps: EPS, centre: false }
        };
        let [of_k, of_q] = weights.key_norms.each_ref().map(|weight| norm(weight));
        let norm = norm(&weights.norm);
        let inputs = lens.map(|len| numbers(seed + 4 + len as u64, len * stride));
        let tables: [Vec<i32>; 2] = [(0..8).map(|i| 2 * i).collect(), (0..8).map(|i| 15 - 2 * i).collect()];
        let block_size = 4;
        // As many elements per token as the states need.
        let size = declared.heads_in_keys() * declared.head_state();
        let shape = KvShape { num_blocks: 16, num_kv_heads: 1, block_size, head_dim: size.div_ceil(block_size) };
        let run = |chunks: &[usize], drafts: &[usize]| {
            let mut cache = KvCache::new(&**CPU, shape).unwrap();
            for pages in cache.buffers_mut() {
                pages.host_mut::<f32>().unwrap().fill(f32::NAN);
            }
            let (mut done, mut found) = ([0, 0], [Vec::new(), Vec::new()]);
            // Rows of drafts with their positions.
            let mut drafted = [Vec::new(), Vec::new()];
            let (mut chunks, mut drafts) = (chunks.iter().cycle(), drafts.iter().cycle());
            let mut lists = Lists::default();
            while done != lens {
                let mut counts = [0, 1].map(|s| (*chunks.next().unwrap()).min(lens[s] - done[s]));
                if counts == [0, 0] {
                    counts = [0, 1].map(|s| (lens[s] - done[s]).min(1));
                }
                let mut batch = ForwardBatch::default();
                batch.clear(1);
                let mut order: Vec<usize> = [0, 1].into_iter().filter(|s| counts[*s] > 0).collect();
                order.sort_by_key(|s| counts[*s] != 1);
                let (mut rows, mut total) = (Vec::new(), 0);
                let drafts = [0, 1].map(|s| (*drafts.next().unwrap()).min(lens[s] - done[s] - counts[s]));
                for &s in &order {
                    let count = counts[s] + drafts[s];
                    rows.extend_from_slice(&inputs[s][done[s] * stride..][..count * stride]);
                    total += count;
                    batch.push(done[s], &vec![0; count], [(&vec![0; count][..], &tables[s][..])]);
                    batch.set_drafts(drafts[s]);
                }
                let mut output = buffer(&vec![f32::NAN; total * declared.value_width()]);
                let columns = |first: usize, count: usize| {
                    buffer(&rows.chunks_exact(stride).flat_map(|row| row[first..first + count].to_vec()).collect::<Vec<_>>())
                };
                let of_matrix = |first: usize, count: usize| match is_matrix {
                    true => columns(projected + first, count),
                    false => buffer(&[]),
                };
                let of_channels = |first: usize, count: usize| match has_channels {
                    true => columns(projected + first, count),
                    false => buffer(&[]),
                };
                let (decays, gates) = (of_channels(0, keys), of_channels(keys, width));
                let (values, steps) = (of_matrix(0, width), of_matrix(width, width));
                let keys = of_matrix(2 * width, 2 * key_dim);
                let part = match kind {
                    Kind::Values => RecurrentPart::Convolution,
                    Kind::Channels => RecurrentPart::Channels { steps: &decays, gates: &gates },
                    Kind::Matrix => {
                        RecurrentPart::Matrix { values: &values, steps: &steps, keys: &keys, norms: [&of_k, &of_q] }
                    }
                    _ => RecurrentPart::Whole,
                };
                let projected = columns(0, projected);
                let args = RecurrentRows {
                    batch: &batch,
                    layer: &loaded,
                    norm: Some(&norm),
                    part,
                    projected: &projected,
                    output: &mut output,
                    rows: total,
                    cache: &mut cache,
                };
                let row = NormRow { weight: &weights.norm, bias: &[], width: value_dim, eps: EPS, centre: false };
                super::run(&mut lists, Isa::best(), CPU.pool(), Some(row), args).unwrap();
                let mut rest = output.host::<f32>().unwrap();
                for s in order {
                    let (own, after) = rest.split_at(counts[s] * declared.value_width());
                    found[s].extend_from_slice(own);
                    (rest, done[s]) = (after, done[s] + counts[s]);
                    let (own, after) = rest.split_at(drafts[s] * declared.value_width());
                    drafted[s].push((done[s], own.to_vec()));
                    rest = after;
                }
            }
            (found, drafted)
        };
        let ((whole, _), (chunked, drafted)) = (run(&[usize::MAX], &[0]), run(&chunks, &drafts));
        for s in 0..2 {
            let bits = |rows: &[f32]| rows.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!(bits(&whole[s]), bits(&chunked[s]));
            for (position, rows) in &drafted[s] {
                let want = &whole[s][position * declared.value_width()..][..rows.len()];
                prop_assert_eq!(bits(want), bits(rows));
            }
            let naive = if is_matrix { naive_scan } else { naive };
            for (found, want) in whole[s].iter().zip(naive(&declared, &weights, &inputs[s])) {
                let error = (f64::from(*found) - want).abs();
                prop_assert!(error < 2e-4 * (1.0 + want.abs()), "{} is not {}", found, want);
            }
        }
    }
}
