//! Reference checkpoints and altered copies of them.
#![allow(dead_code, clippy::unwrap_used)] // each test file uses its part

mod checkpoints;
pub mod faulty;

use attention_kernels::{KvCache, Needs};
use device::Device;
use models::decoder::{Attention, Branch, Heads, Layer, Mixer, Mlp, Rope};
use models::{Decoder, ForwardBatch, Model, ModelConfig, ModelFiles};

pub use checkpoints::{Copy, expected, ids, list, message, text};
pub use testkit::reference::{ALL as CASES, folder};

pub fn files(case: &str) -> ModelFiles {
    ModelFiles::open(&folder(case)).unwrap()
}

/// Number `i` of a tensor of random weights: a multiple of 1/256 from 0 on, below 1.
pub fn made_weight(name: &str, i: usize) -> f32 {
    let seed = name.bytes().fold(7_u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte)));
    let mixed = (seed ^ (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((mixed >> 33) & 0xff) as f32 / 256.0
}

/// Computes a prompt in chunks and returns the logits of its last position. See [`forward`].
pub fn last_logits(
    model: &mut Model,
    caches: &mut [KvCache],
    pool: (usize, usize),
    prompt: &[u32],
    chunk: usize,
) -> Vec<f32> {
    let last = forward(model, caches, pool, prompt, chunk);
    model.logits(&[last]).unwrap().to_vec()
}

/// Computes a prompt in chunks and returns the row of its last position. Its blocks are handed out from the back of a pool of
/// `num_blocks`, so that the tables of the layer groups are not the identity. If there is more than one chunk, only the last row of
/// each is kept to the end.
pub fn forward(
    model: &mut Model,
    caches: &mut [KvCache],
    (block_size, num_blocks): (usize, usize),
    prompt: &[u32],
    chunk: usize,
) -> u32 {
    let groups = model.layout().groups.len();
    let blocks = prompt.len().div_ceil(block_size);
    let table = |group: usize| (0..blocks).map(|i| (num_blocks - 1 - group * blocks - i) as i32).collect();
    let tables: Vec<Vec<i32>> = (0..groups).map(table).collect();
    let slot = |table: &[i32], p: usize| i64::from(table[p / block_size]) * block_size as i64 + (p % block_size) as i64;
    let mut batch = ForwardBatch::default();
    let mut last = 0;
    for (i, tokens) in prompt.chunks(chunk).enumerate() {
        let start = i * chunk;
        let slots = |table: &Vec<i32>| (start..start + tokens.len()).map(|p| slot(table, p)).collect();
        let slots: Vec<Vec<i64>> = tables.iter().map(slots).collect();
        batch.clear(groups);
        batch.needed = (chunk < prompt.len()).then(Vec::new);
        last = batch.push(start, tokens, slots.iter().zip(&tables).map(|(slots, table)| (&slots[..], &table[..])));
        batch.needed.iter_mut().for_each(|needed| needed.push(last));
        model.forward(&batch, caches).unwrap();
    }
    last
}

/// What a decoder needs of kernels.
pub fn needs(device: &dyn Device, decoder: &Decoder) -> Needs {
    Needs { window: true, ..Model::needs(decoder, device) }
}

/// Opens an altered copy of a checkpoint.
pub trait Opened {
    fn files(&self) -> ModelFiles;
}

impl Opened for Copy {
    fn files(&self) -> ModelFiles {
        ModelFiles::open(self.folder()).unwrap()
    }
}

/// What a configuration declares, in numbers that all layers share but for their windows.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    pub architecture: &'static str,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub heads: Heads,
    pub max_position_embeddings: usize,
    pub eps: f32,
    pub rope: Rope,
    pub tied: bool,
    /// Whether there are biases: in queries, keys and values; in the output; in the feed-forward network.
    pub biases: [bool; 3],
    /// Query and key heads are normed.
    pub head_norms: bool,
    pub windows: Vec<Option<usize>>,
    pub eos_token_ids: Vec<u32>,
}

/// The summary of a configuration whose layers are attention and a feed-forward network, all alike.
pub fn summary(config: &ModelConfig) -> Summary {
    let decoder = &config.decoder;
    let parts = |layer: &Layer| match &layer.branches[..] {
        [Branch { mixer: Mixer::Attention(attention), .. }, Branch { mixer: Mixer::Mlp(mlp), .. }] => {
            (attention.clone(), mlp.clone())
        }
        other => panic!("{other:?}"),
    };
    let (attention, mlp) = parts(&decoder.layers[0]);
    let of = |(attention, mlp): &(Attention, Mlp)| {
        assert_eq!(attention.query_norm.is_some(), attention.key_norm.is_some());
        assert_eq!(mlp.gate_up.bias, mlp.down.bias);
        assert!(mlp.gated && mlp.gate_up.rows() == 2 * mlp.down.inputs);
        let biases = [attention.qkv.bias, attention.output.bias, mlp.down.bias];
        (attention.heads, attention.rope.clone().unwrap(), biases, attention.query_norm.is_some(), mlp.down.inputs)
    };
    assert!(decoder.layers.iter().all(|layer| of(&parts(layer)) == of(&(attention.clone(), mlp.clone()))));
    let eps = decoder.final_norm.as_ref().unwrap().eps;
    assert!(decoder.norms().all(|norm| norm.eps == eps));
    let (heads, rope, biases, head_norms, intermediate_size) = of(&(attention, mlp));
    Summary {
        architecture: config.architecture,
        vocab_size: decoder.vocab_size(),
        hidden_size: decoder.hidden_size(),
        intermediate_size,
        heads,
        max_position_embeddings: config.max_position_embeddings,
        eps,
        rope,
        tied: decoder.is_tied(),
        biases,
        head_norms,
        windows: decoder.attention().map(|attention| attention.window).collect(),
        eos_token_ids: config.eos_token_ids.clone(),
    }
}

/// The simulator reports no memory of graphs. That of a GPU is the difference of what the driver has left, which may be 0 and which
/// other programs change.
pub fn assert_graph_bytes(device: &dyn Device, bytes: u64) {
    assert!(bytes == 0 || device.name() == "cuda", "{bytes} bytes");
}

/// Asserts that a device on which a model was loaded has allocated the planned memory, and what its products need.
pub fn assert_allocated(device: &dyn Device, planned: u64, what: &str) {
    assert_eq!(device.allocated(), Some(planned + device.product_bytes()), "{what}");
}
