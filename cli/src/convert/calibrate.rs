//! The inputs of layers: H = XᵀX for texts that a model reads.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use engine::{Dtype, EngineError};
use linear::{Gemm, PackedMatrix, Rows, gemm};
use models::{ForwardBatch, Model};
use simd::{Isa, Pool, lock};

/// Tokens of a text that are read together.
pub(super) const LENGTH: usize = 512;

/// Texts that are read at most: 65536 tokens.
pub(super) const MAX_TEXTS: usize = 128;

/// Tokens in a block of the cache.
const BLOCK: usize = 16;

/// H of each layer, by its index among the decoder's linear layers.
pub(super) type Hessians = BTreeMap<usize, Vec<f32>>;

/// Sums XᵀX of some layers over texts of at most [`LENGTH`] tokens each.
pub(super) fn calibrate(
    model: &mut Model,
    pool: &Pool,
    texts: &[&[u32]],
    layers: &[(usize, usize)],
) -> Result<Hessians, EngineError> {
    let sums: Hessians = layers.iter().map(|(layer, k)| (*layer, vec![0.0; k * k])).collect();
    let sums = Arc::new(Mutex::new(sums));
    let (seen, threads) = (Arc::clone(&sums), pool.clone());
    model.observe(Some(Box::new(move |layer, rows| {
        if let Some(sum) = lock(&seen).get_mut(&layer) {
            add(&threads, rows, sum);
        }
    })));
    let mut caches = model.new_cache(LENGTH.div_ceil(BLOCK) * model.layout().groups.len(), BLOCK)?;
    let mut batch = ForwardBatch::default();
    for text in texts {
        let groups = model.layout().groups.len();
        let blocks = text.len().div_ceil(BLOCK);
        let tables: Vec<Vec<i32>> =
            (0..groups).map(|group| (0..blocks).map(|i| (group * blocks + i) as i32).collect()).collect();
        let slot = |table: &[i32], at: usize| i64::from(table[at / BLOCK]) * BLOCK as i64 + (at % BLOCK) as i64;
        let slots: Vec<Vec<i64>> =
            tables.iter().map(|table| (0..text.len()).map(|at| slot(table, at)).collect()).collect();
        batch.clear(groups);
        batch.push(0, text, slots.iter().zip(&tables).map(|(slots, table)| (&slots[..], &table[..])));
        model.forward(&batch, &mut caches)?;
    }
    model.observe(None);
    Ok(std::mem::take(&mut *lock(&sums)))
}

/// Adds XᵀX of some rows.
fn add(pool: &Pool, rows: &[f32], sum: &mut [f32]) {
    let k = sum.len().isqrt();
    let count = rows.len() / k.max(1);
    let mut columns = vec![0.0f32; rows.len()];
    for (i, row) in rows.chunks_exact(k).enumerate() {
        row.iter().enumerate().for_each(|(j, x)| columns[j * count + i] = *x);
    }
    let bytes: Vec<u8> = columns.iter().flat_map(|x| x.to_le_bytes()).collect();
    let Ok(weights) = PackedMatrix::pack(pool, count, &[(Dtype::F32, &bytes)]) else { return };
    let mut products = vec![0.0; k * k];
    let args = Gemm { x: Rows::Numbers(&columns), weights: &weights, bias: None, y: &mut products };
    gemm(Isa::best(), pool, args);
    sum.iter_mut().zip(products).for_each(|(sum, x)| *sum += x);
}
