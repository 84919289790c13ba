//! Attention to the tokens that an indexer chooses, on a CPU.

use attention_kernels::layer;
use attention_kernels::{ChosenArgs, KernelError, attend_chosen};
use device::Buffer;
use simd::{Isa, Pool};

use super::cpu::PASS_COST;
use super::ops::{ChosenRows, IndexRows};
use crate::decoder::{Attention, Indexer, Latent};

/// What an indexer of a layer reads, given the rows of its queries and of their factors; `None`: it has no indexer of its own.
pub(super) fn index_of<'a>(
    latent: &Latent,
    layer: &Attention,
    [queries, weights]: [&'a Buffer; 2],
) -> Option<attention_kernels::IndexRows<'a>> {
    latent.indexer().map(|&Indexer { heads, dim, .. }| attention_kernels::IndexRows {
        queries,
        weights,
        heads,
        dim,
        first: layer.heads.head_dim - dim,
    })
}

/// [`LayerOps::index_rows`](super::ops::LayerOps::index_rows).
pub(super) fn index_rows(isa: Isa, threads: &Pool, args: IndexRows<'_>) -> Result<(), KernelError> {
    let IndexRows { layer, latent, indexer, rows, queries, latents, norm, rope } = args;
    let (norm, table, dims) = (norm.row()?, rope.host::<f32>()?, latent.rope_dim);
    let &Indexer { heads, dim, interleaved, .. } = indexer;
    let stride = layer.heads.head_dim;
    let queries = &mut queries.host_mut::<f32>()?[..rows * heads * dim];
    let latents = &mut latents.host_mut::<f32>()?[..rows * stride];
    let work = (heads + 1) * dim * PASS_COST;
    threads.zip_chunks_mut((queries, heads * dim), (latents, stride), work, |t, queries, latent| {
        let table = &table[t * dims..][..dims];
        let key = &mut latent[stride - dim..];
        layer::norm_heads(isa, key, norm);
        for head in queries.chunks_exact_mut(dim).chain([key]) {
            layer::rotate_heads(isa, &mut head[..dims], dims, table, interleaved);
        }
    });
    Ok(())
}

/// [`LayerOps::attend_chosen`](super::ops::LayerOps::attend_chosen).
pub(super) fn attend(threads: &Pool, chosen: &mut Vec<u32>, args: ChosenRows<'_>) -> Result<(), KernelError> {
    let ChosenRows { batch, layer, latent, choice, query, index, output, cache } = args;
    let (declared, group) = (&layer.declared, &batch.groups[layer.view].attention);
    let longest = group.context_lens.iter().copied().max().unwrap_or(0) as usize;
    let most = choice.top_k().min(longest).max(1);
    chosen.resize(chosen.len().max(most * group.num_rows()), 0);
    let index = index_of(latent, declared, index);
    attend_chosen(
        threads,
        ChosenArgs {
            query,
            query_stride: declared.row_width(),
            num_heads: declared.heads.num_heads,
            dim: latent.rank + latent.rope_dim,
            scale: declared.scale,
            cache,
            batch: group,
            output,
            most,
            chosen,
            index,
        },
    )
}
