//! The fused head norm, rotation and cache write.

use std::sync::Arc;

use attention_kernels::layer;
use attention_kernels::{CacheFormat, Dtype, KvCache, KvDtype, KvScales, KvShape, Layout};
use device::Device;
use models::kernels::{self, QkNormRopeCacheArgs};

use crate::covering;

use super::numbers::{Random, from_byte, from_bytes, round, to_byte};
use super::{KERNELS, buffer, bytes, check, everything, floats, numbers_of, tolerance};

const EPS: f32 = 1e-6;
const BLOCK_SIZE: usize = 8;
const BLOCKS: usize = 4;

/// One problem.
#[derive(Clone, Debug)]
pub struct Look {
    pub format: CacheFormat,
    pub dim: usize,
    pub heads: (usize, usize),
    pub norms: (bool, bool),
    /// `None`, or one scale per head.
    pub scales: Option<bool>,
    /// Keys and values go to the cache, or stay.
    pub fused: bool,
}

pub fn looks(strength: usize) -> Vec<Look> {
    let dims = [32, 64, 80, 96, 112, 128, 192, 256, 20, 34, 6];
    let heads = [(2, 2), (6, 2), (5, 1), (32, 8)];
    let norms = [(false, false), (true, true), (true, false)];
    let sizes =
        [Dtype::ALL.len(), KvDtype::ON_GPU.len(), Layout::COMMON.len(), dims.len(), heads.len(), norms.len(), 3, 2];
    let look = |row: Vec<usize>| {
        let format = CacheFormat {
            dtype: Dtype::ALL[row[0]],
            kv_dtype: KvDtype::ON_GPU[row[1]],
            layout: Layout::COMMON[row[2]],
        };
        let scales = [None, Some(false), Some(true)][row[6]].filter(|_| format.kv_dtype.takes_scales());
        // Scales in the page have one layout.
        let scaled = format.kv_dtype == KvDtype::Int8PerToken;
        let format = if scaled { CacheFormat { layout: Layout::Hnd, ..format } } else { format };
        let (dim, heads, norms, fused) = (dims[row[3]], heads[row[4]], norms[row[5]], row[7] == 0);
        Look { format, dim, heads, norms, scales, fused }
    };
    covering::rows(&sizes, strength, 11).into_iter().map(look).collect()
}

/// Slots of five rows: two blocks, one row to nowhere.
const SLOTS: [i64; 5] = [9, -1, 31, 0, 14];

/// Runs a look; fails where anything is not as float64 has it.
pub fn conforms(device: &dyn Device, seed: u64, look: &Look) {
    let &Look { format, dim, heads: (num_heads, num_kv_heads), norms, scales, fused } = look;
    let what = format!("{look:?}");
    let mut random = Random::new(seed);
    let (rows, total) = (SLOTS.len(), num_heads + 2 * num_kv_heads);
    let (qkv, exact) = numbers_of(&mut random, format.dtype, rows * total * dim);
    let weights = |random: &mut Random, wanted: bool| -> Option<Vec<f32>> {
        wanted.then(|| (0..dim).map(|_| random.unit() + 1.5).collect())
    };
    let (query_norm, key_norm) = (weights(&mut random, norms.0), weights(&mut random, norms.1));
    let angles: Vec<f32> = (0..rows * dim / 2).map(|_| random.unit() * 3.0).collect();
    let rope: Vec<f32> = angles
        .chunks(dim / 2)
        .flat_map(|row| row.iter().map(|a| a.cos()).chain(row.iter().map(|a| a.sin())).collect::<Vec<_>>())
        .collect();
    let shape = KvShape { num_blocks: BLOCKS, num_kv_heads, block_size: BLOCK_SIZE, head_dim: dim };
    let scale = |random: &mut Random, per_head: bool| -> Vec<f32> {
        (0..if per_head { num_kv_heads } else { 1 }).map(|_| (random.unit() + 2.0) / 20.0).collect()
    };
    let scales = scales.map(|per_head| [scale(&mut random, per_head), scale(&mut random, per_head)]);
    let untouched = vec![0x55; BLOCKS * format.block_bytes(&shape)];
    let cache = KvCache {
        shape,
        format,
        keys: buffer(device, &untouched),
        values: buffer(device, &untouched).into(),
        scales: scales.as_ref().map(|[k, v]| {
            Arc::new(KvScales { keys: floats(device, k), values: floats(device, v), per_head: k.len() > 1 })
        }),
    };
    let offset: Option<Vec<f32>> = (format.kv_dtype.is_byte() && seed.is_multiple_of(2))
        .then(|| (0..num_kv_heads * dim).map(|_| random.unit() * 2.0).collect());
    let offset_on = offset.as_ref().map(|offset| floats(device, offset));
    let slot_bytes: Vec<u8> = SLOTS.iter().flat_map(|slot| slot.to_le_bytes()).collect();
    let on_device = [&query_norm, &key_norm].map(|weight| weight.as_ref().map(|weight| floats(device, weight)));
    let (mut fused_rows, table, slots) = (buffer(device, &qkv), floats(device, &rope), buffer(device, &slot_bytes));
    let args = QkNormRopeCacheArgs {
        qkv: &mut fused_rows,
        rows,
        num_heads,
        num_kv_heads,
        query_norm: on_device[0].as_ref(),
        key_norm: on_device[1].as_ref(),
        eps: EPS,
        stride: (num_heads + 2 * num_kv_heads) * look.dim,
        rope: Some(&table),
        key_offset: offset_on.as_ref(),
        cache: &cache,
        slots: fused.then_some(&slots),
    };
    kernels::qk_norm_rope_cache(device, args).unwrap();

    // What a head becomes, each element with the size of its terms.
    let truth = |row: usize, head: usize| -> Vec<(f64, f64)> {
        let x = &exact[(row * total + head) * dim..][..dim];
        if head >= num_heads + num_kv_heads {
            return x.iter().map(|x| (*x, x.abs())).collect();
        }
        let weight = if head < num_heads { &query_norm } else { &key_norm };
        let mean = x.iter().map(|x| x * x).sum::<f64>() / dim as f64;
        let factor = 1.0 / (mean + f64::from(EPS)).sqrt();
        let normed = |i: usize| weight.as_ref().map_or(x[i], |weight| x[i] * factor * f64::from(weight[i]));
        let half = dim / 2;
        let turned = |i: usize| {
            let pair = i % half;
            let (low, high) = (normed(pair), normed(half + pair));
            let (cos, sin) = (f64::from(rope[row * dim + pair]), f64::from(rope[row * dim + half + pair]));
            let value = if i < half { low * cos - high * sin } else { high * cos + low * sin };
            (value, low.abs() + high.abs())
        };
        let mut turned: Vec<(f64, f64)> = (0..dim).map(turned).collect();
        if let Some(key) = head.checked_sub(num_heads)
            && let Some(offset) = &offset
        {
            for (x, less) in turned.iter_mut().zip(&offset[key * dim..]) {
                *x = (x.0 - f64::from(*less), x.1 + f64::from(less.abs()));
            }
        }
        if !format.mixes_keys(dim) {
            return turned;
        }
        let factor = f64::from(layer::mixing_factors(dim)[usize::from(head >= num_heads)]);
        let sign = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { factor } else { -factor };
        let mixed = |i: usize| turned.iter().enumerate().map(|(j, x)| sign(i, j) * x.0).sum();
        let magnitude: f64 = turned.iter().map(|x| x.1 * factor).sum();
        (0..dim).map(|i| (mixed(i), magnitude)).collect()
    };
    let (element, got) = (format.dtype.bytes(), bytes(device, &fused_rows));
    for row in 0..rows {
        for head in 0..total {
            let place = (row * total + head) * dim * element;
            let got = &got[place..place + dim * element];
            if head < num_heads || !fused {
                check(&format!("{what}, row {row}, head {head}"), format.dtype, got, truth(row, head));
            } else {
                assert!(*got == qkv[place..place + dim * element], "{what}: keys and values of the rows stay");
            }
        }
    }
    let strides = format.strides(&shape);
    for (which, pages) in cache.buffers().enumerate() {
        let (mut want, got) = (untouched.clone(), bytes(device, pages));
        for (row, slot) in SLOTS.iter().enumerate() {
            let Ok(slot) = usize::try_from(*slot) else { continue };
            for head in (0..num_kv_heads).filter(|_| fused) {
                let at = slot / BLOCK_SIZE * strides.block + head * strides.head + slot % BLOCK_SIZE * strides.token;
                let range = at * format.element_bytes()..(at + dim) * format.element_bytes();
                let truth = truth(row, num_heads + which * num_kv_heads + head);
                let what = format!("{what}, {} of row {row}, head {head}", ["keys", "values"][which]);
                if format.kv_dtype == KvDtype::Int8PerToken {
                    let unit = slot / BLOCK_SIZE * strides.block + head * strides.head;
                    let place = unit + BLOCK_SIZE * dim + slot % BLOCK_SIZE * size_of::<f32>();
                    let scale = from_bytes(Dtype::F32, &got[place..place + 4])[0];
                    want[place..place + 4].copy_from_slice(&got[place..place + 4]);
                    is_scaled(&what, format, scale, &got[range.clone()], &truth);
                } else if format.kv_dtype.takes_scales() {
                    let scale = scales.as_ref().map_or(1.0, |s| s[which][head.min(s[which].len() - 1)]);
                    for (byte, truth) in got[range.clone()].iter().zip(truth) {
                        is_quantised(&what, format, scale, *byte, truth);
                    }
                } else {
                    check(&what, format.dtype, &got[range.clone()], truth);
                }
                // What was compared is no longer in question.
                want[range.clone()].copy_from_slice(&got[range]);
            }
        }
        assert!(got == want, "{what}: another slot was written");
    }
}

/// A row is what [`int8_row`](super::numbers::int8_row) makes of some numbers within the tolerance of the truth: the scale is
/// the greatest one's, and each byte is its number's under that scale.
fn is_scaled(what: &str, format: CacheFormat, scale: f32, bytes: &[u8], truth: &[(f64, f64)]) {
    let greatest = truth.iter().map(|(truth, _)| truth.abs()).fold(0.0, f64::max);
    let slack = truth.iter().map(|(_, magnitude)| tolerance(format.dtype, *magnitude)).fold(0.0, f64::max);
    let error = (f64::from(scale) * 127.0 - greatest).abs();
    assert!(error <= slack + greatest * 1e-6, "{what}: scale {scale}, the greatest magnitude is {greatest}");
    bytes.iter().zip(truth).for_each(|(byte, truth)| is_quantised(what, format, scale, *byte, *truth));
}

/// A byte is that of some number within the tolerance of the truth.
fn is_quantised(what: &str, format: CacheFormat, scale: f32, byte: u8, (truth, magnitude): (f64, f64)) {
    let kv_dtype = format.kv_dtype;
    let slack = tolerance(format.dtype, magnitude);
    let value = |x: f64| from_byte(kv_dtype, to_byte(kv_dtype, round(format.dtype, x as f32) / scale));
    let (low, high, got) = (value(truth - slack), value(truth + slack), from_byte(kv_dtype, byte));
    assert!(low <= got && got <= high, "{what}: stored {got}, expected {low} to {high} for {truth}");
}

#[test]
fn normed_and_rotated_heads_in_rows_and_cache_match_float64() {
    for device in [0, 9].into_iter().flat_map(|seed| KERNELS.devices(seed)) {
        let looks = looks(if everything() { 3 } else { 2 });
        println!("{} problems", looks.len());
        looks.iter().enumerate().for_each(|(i, look)| conforms(&*device, i as u64, look));
    }
}

#[test]
fn a_row_has_the_same_bits_alone_and_among_others() {
    let every_look = || looks(2).into_iter().step_by(5);
    for (device, look) in KERNELS.devices(4).iter().flat_map(|device| every_look().map(move |look| (device, look))) {
        let (num_heads, num_kv_heads) = look.heads;
        let width = (num_heads + 2 * num_kv_heads) * look.dim;
        let mut random = Random::new(3);
        let (qkv, _) = numbers_of(&mut random, look.format.dtype, 3 * width);
        let norm: Vec<f32> = (0..look.dim).map(|_| random.unit() + 1.5).collect();
        let rope: Vec<f32> = (0..3 * look.dim).map(|_| random.unit()).collect();
        let run = |qkv: &[u8], rope: &[f32], rows: usize| {
            let shape = KvShape { num_blocks: 1, num_kv_heads, block_size: BLOCK_SIZE, head_dim: look.dim };
            let cache = KvCache::with_format(&**device, shape, look.format).unwrap();
            let (mut rows_on, norm) = (buffer(&**device, qkv), floats(&**device, &norm));
            let args = QkNormRopeCacheArgs {
                qkv: &mut rows_on,
                rows,
                num_heads,
                num_kv_heads,
                query_norm: Some(&norm),
                key_norm: Some(&norm),
                eps: EPS,
                stride: width,
                rope: Some(&floats(&**device, rope)),
                key_offset: None,
                cache: &cache,
                slots: None,
            };
            kernels::qk_norm_rope_cache(&**device, args).unwrap();
            bytes(&**device, &rows_on)
        };
        let (all, row) = (run(&qkv, &rope, 3), width * look.format.dtype.bytes());
        let alone = run(&qkv[row..2 * row], &rope[look.dim..2 * look.dim], 1);
        assert!(alone == all[row..2 * row], "{look:?}");
        assert!(from_bytes(look.format.dtype, &all).iter().all(|x| x.is_finite()));
    }
}
