//! Sequences that are sampled on device and host.

use std::sync::Arc;

use device::{Buffer, Device, Dtype};
use half::{bf16, f16};
use sampling::device::{DeviceSampler, Limits, Logits, Row};
use sampling::{Context, Sampled, Sampler, SamplingParams, TokenSet};

use crate::rows;

/// One sequence of a request.
#[derive(Clone, Debug)]
pub struct Sequence {
    pub params: SamplingParams,
    pub prompt: Vec<u32>,
    pub output: Vec<u32>,
    pub stop_ids: Vec<u32>,
    pub seed: u64,
    pub sequence: u32,
    pub allowed: Option<TokenSet>,
}

impl Sequence {
    pub fn new(params: SamplingParams, seed: u64) -> Sequence {
        let (prompt, output, stop_ids) = (vec![1, 2, 2], vec![], vec![]);
        Sequence { params, prompt, output, stop_ids, seed, sequence: 0, allowed: None }
    }

    pub fn of(row: rows::Row, seed: u64) -> Sequence {
        let rows::Row { params, prompt, output, stop_ids, .. } = row;
        Sequence { params, prompt, output, stop_ids, seed, sequence: 3, allowed: None }
    }

    pub fn context(&self) -> Context<'_> {
        Context {
            prompt: &self.prompt,
            output: &self.output,
            stop_ids: &self.stop_ids,
            allowed: self.allowed.as_ref(),
            seed: self.seed,
            sequence: self.sequence,
        }
    }

    /// The token that the host draws.
    pub fn sampled(&self, logits: &[f32]) -> Sampled {
        Sampler::new().sample(logits, &self.params, &self.context())
    }
}

/// Limits for small problems.
pub fn limits(max_num_seqs: usize, vocab: usize) -> Limits {
    Limits { max_logprobs: 40, list_words: 300, ..Limits::new(max_num_seqs, vocab, 300) }
}

pub fn sampler(device: &Arc<dyn Device>, limits: Limits) -> DeviceSampler {
    DeviceSampler::new(Arc::clone(device), limits).unwrap()
}

pub const TYPES: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

/// Rounds logits to a type.
pub fn rounded(dtype: Dtype, logits: &[f32]) -> Vec<f32> {
    let round = |&x: &f32| match dtype {
        Dtype::F32 => x,
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
    };
    logits.iter().map(round).collect()
}

/// Rows of logits on the device, each followed by 3 NaN.
pub struct OnDevice {
    buffer: Buffer,
    dtype: Dtype,
    stride: usize,
}

impl OnDevice {
    pub fn new<'a>(device: &dyn Device, dtype: Dtype, rows: impl IntoIterator<Item = &'a [f32]>) -> OnDevice {
        let (mut bytes, mut stride) = (Vec::new(), 0);
        for row in rows {
            stride = row.len() + 3;
            for &x in row.iter().chain(&[f32::NAN; 3]) {
                match dtype {
                    Dtype::F32 => bytes.extend(x.to_ne_bytes()),
                    Dtype::F16 => bytes.extend(f16::from_f32(x).to_ne_bytes()),
                    Dtype::Bf16 => bytes.extend(bf16::from_f32(x).to_ne_bytes()),
                }
            }
        }
        let mut buffer = device.alloc(bytes.len()).unwrap();
        device.upload(&mut buffer, 0, &bytes).unwrap();
        OnDevice { buffer, dtype, stride }
    }

    pub fn logits(&self) -> Logits<'_> {
        Logits { buffer: &self.buffer, dtype: self.dtype, stride: self.stride }
    }
}

/// A row for each of these slots, with consecutive rows of logits.
pub fn rows_of(slots: impl IntoIterator<Item = u32>) -> Vec<Row> {
    slots.into_iter().zip(0..).map(|(slot, logits_row)| Row::new(slot, logits_row)).collect()
}

/// Runs a step and waits for it.
pub fn step(sampler: &mut DeviceSampler, logits: &OnDevice, rows: &[Row]) -> Vec<Sampled> {
    let pending = sampler.sample(&logits.logits(), rows).unwrap();
    sampler.collect(&pending).unwrap().collect()
}

/// Deterministic logits: some tokens far above the rest, many equal.
pub fn generated(vocab: usize, seed: u32) -> Vec<f32> {
    let at = |token: u32| {
        let [a, b, ..] = sampling::philox4x32_10([token, seed, 0, 0], [7, 7]);
        let noise = (a >> 20) as f32 / 256.0 - 8.0;
        if b % 97 == 0 { noise + 6.0 } else { noise }
    };
    (0..vocab as u32).map(at).collect()
}
