//! The settings of generated problems: for each variant every value that it supports, combined pairwise, or by threes with
//! `QUIRE_TEST_ALL=1`.

use attention_kernels::{BlockSparse, CacheFormat, Capabilities, KvDtype, Latents, Layout, PARTITION, Sizes, Variant};
use trial::Look;

use super::covering;

/// Query heads and KV heads: MHA, GQA with groups of 3, MQA with 7, and a group that does not fit a tile of 16.
const HEADS: [(usize, usize); 4] = [(2, 2), (6, 2), (7, 1), (18, 1)];

/// Returns the sizes to test: all of a list, else limits and odd sizes.
fn samples(sizes: Sizes, tries: &[usize]) -> Vec<usize> {
    match sizes {
        Sizes::List(sizes) => sizes.to_vec(),
        Sizes::UpTo { .. } => tries.iter().copied().filter(|&size| sizes.contain(size)).collect(),
    }
}

/// Rows and context of the sequences of a batch: padding, one token, borders of blocks and partitions; chunks from index 3
/// on.
fn lens(kind: usize, block_size: usize) -> Vec<(usize, usize)> {
    match kind {
        0 => vec![(1, 1), (1, 0), (1, 2 * block_size), (1, block_size + 1)],
        1 => vec![(1, PARTITION + 1), (0, 9), (1, 40)],
        2 => vec![(1, 3), (1, 2 * PARTITION), (1, PARTITION - 1)],
        3 => vec![(3, block_size + 2), (1, 0), (0, 9), (67, 70), (1, 1), (2, 0), (20, 20)],
        _ => vec![(5, PARTITION + 3), (1, 17)],
    }
}

/// Returns a format that exists, with a block size and a head size for it. Scales in the page require one layout, and CUDA kernels
/// require whole vectors of them; pairs require whole vectors of tokens and of elements.
pub fn that_exists(format: CacheFormat, block_size: usize, dim: usize) -> (CacheFormat, usize, usize) {
    let rows = CacheFormat { layout: Layout::Hnd, ..format };
    match (format.kv_dtype, format.layout) {
        (KvDtype::Int8PerToken, _) => (rows, block_size.next_multiple_of(4), dim),
        (KvDtype::Bf16, Layout::Pairs) => (format, block_size.next_multiple_of(16), dim.next_multiple_of(16)),
        (_, Layout::Pairs) => (rows, block_size, dim),
        _ => (format, block_size, dim),
    }
}

/// A latent has no layout of pairs.
pub fn without_pairs(layout: Layout) -> Layout {
    if layout == Layout::Pairs { Layout::Hnd } else { layout }
}

/// Returns all looks of a variant.
pub fn of(variant: &Variant, strength: usize) -> Vec<Look> {
    let can = &variant.capabilities;
    let dims = samples(can.head_sizes, &[8, 20, 48, 64, 96, 120, 160, 256, 320, 512]);
    let has_others = !matches!(can.latent, Latents::Only(_));
    let mut looks = if has_others { with(variant, strength, can.kv_dtypes, &dims) } else { Vec::new() };
    if can.latent != Latents::None && variant.operation.is_attention() {
        let fits = |dims: &&(usize, usize)| can.latent.misfit(dims.0, Some(dims.1)).is_none();
        let dims: Vec<usize> = LATENT.iter().filter(fits).map(|dims| dims.0).collect();
        let latent = with(variant, strength, can.kv_dtypes, &dims).into_iter();
        looks.extend(latent.map(|look| {
            let dims = LATENT.iter().find(|dims| dims.0 == look.dim);
            let format = CacheFormat { layout: without_pairs(look.format.layout), ..look.format };
            Look { format, latent: dims.map(|dims| dims.1), ..look }
        }));
    }
    looks
}

/// Returns the look with a cache that the variant supports: with latents if it supports nothing else.
pub fn fitting(can: &Capabilities, look: Look) -> Look {
    match can.latent {
        Latents::Only(sizes) => Look { dim: sizes[0][0], latent: Some(sizes[0][1]), ..look },
        _ => look,
    }
}

/// Elements of a key and of a value in latent caches: of DeepSeek's models, half of that, and odd ones.
const LATENT: [(usize, usize); 4] = [(576, 512), (96, 64), (36, 20), (16, 16)];

/// Numbers of values of a sparse rule: blocks of the cache in a sparse block (0: none is sparse), local blocks, strides, steps, and
/// ranks before this one.
const SPARSE: [usize; 5] = [4, 3, 5, 5, 3];

/// Returns the rule of a row with these columns. Strides of 3, 4 and 5 are no divisors of the numbers of heads.
fn sparse(row: &[usize], block_size: usize, (heads, kv_heads): (usize, usize)) -> Option<BlockSparse> {
    let &[blocks, local, stride, step, ranks] = row else { return None };
    (blocks > 0).then(|| BlockSparse {
        block_size: blocks * block_size,
        local_blocks: 1 + local,
        vertical_stride: 1 + stride,
        head_sliding_step: step as i32 - 2,
        first_head: ranks * heads,
        first_kv_head: ranks * kv_heads,
    })
}

fn with(variant: &Variant, strength: usize, kv_dtypes: &[KvDtype], dims: &[usize]) -> Vec<Look> {
    let can = &variant.capabilities;
    let block_sizes = samples(can.block_sizes, &[8, 16, 5, 32, 128]);
    let windows: &[Option<usize>] = if can.window { &[None, Some(1), Some(19), Some(520)] } else { &[None] };
    let kinds = if can.max_query_len == 1 { 3 } else { 5 };
    let flags = [can.soft_cap, can.alibi, can.sinks].map(|claimed| 1 + usize::from(claimed));
    let mut sizes = vec![
        can.dtypes.len(),
        kv_dtypes.len(),
        can.layouts.len(),
        dims.len(),
        block_sizes.len(),
        HEADS.len(),
        windows.len(),
        kinds,
        flags[0],
        flags[1],
        3,
        flags[2],
    ];
    if can.block_sparse {
        sizes.extend(SPARSE);
    }
    let rows = covering::rows(&sizes, strength, 42);
    let look = |row: Vec<usize>| {
        let format =
            CacheFormat { dtype: can.dtypes[row[0]], kv_dtype: kv_dtypes[row[1]], layout: can.layouts[row[2]] };
        let scales = [None, Some(false), Some(true)][row[10]].filter(|_| format.kv_dtype.takes_scales());
        let (format, block_size, dim) = that_exists(format, block_sizes[row[4]], dims[row[3]]);
        Look {
            format,
            heads: HEADS[row[5]],
            dim,
            latent: None,
            block_size,
            scales,
            window: windows[row[6]],
            sparse: row.get(12..).and_then(|rule| sparse(rule, block_size, HEADS[row[5]])),
            soft_cap: row[8] == 1,
            alibi: row[9] == 1,
            sinks: row[11] == 1,
            repeats: None,
            lens: lens(row[7], block_size),
        }
    };
    rows.into_iter().map(look).collect()
}
