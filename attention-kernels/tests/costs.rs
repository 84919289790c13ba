//! The bytes and operations that a profile counts for a call.

use attention_kernels::{AttentionArgs, AttentionBatch, Dtype, KvCache, KvShape, LinearArgs, Rows};
use device::profile::Cost;

#[test]
fn attention_reads_what_its_rows_see_and_a_product_all_weights() {
    let device = device::open("cpu", Some(1)).unwrap();
    let shape = KvShape { num_blocks: 8, num_kv_heads: 1, block_size: 8, head_dim: 16 };
    let cache = KvCache::new(&*device, shape).unwrap();
    let query = device.alloc(1024).unwrap();
    let mut output = device.alloc(1024).unwrap();
    // Two rows at positions 8 and 9, one at position 4, and padding.
    let (query_starts, context_lens) = (vec![0, 2, 3, 4], vec![10, 5, 0]);
    let batch = AttentionBatch { query_starts, context_lens, block_tables: [[0; 2]; 3].into_iter().collect() };
    let mut cost = |window| {
        let args = AttentionArgs {
            query: &query,
            query_stride: 32,
            num_heads: 2,
            output: &mut output,
            lse: None,
            cache: &cache,
            batch: &batch,
            seqs: 0..3,
            scale: 1.0,
            window,
            soft_cap: None,
            alibi_slopes: None,
            sinks: None,
            workspace: None,
        };
        args.cost()
    };
    // 3 rows of 2 heads in and out; a token of the cache has 2 * 16 numbers.
    let rows = 3 * 2 * 2 * 16 * 4;
    assert_eq!(cost(None), Cost { bytes: rows + (10 + 5) * 128, operations: 4 * 32 * (9 + 10 + 5) });
    assert_eq!(cost(Some(3)), Cost { bytes: rows + (4 + 3) * 128, operations: 4 * 32 * 9 });

    let weights = device
        .packed_matrix(None, 4, &[device::gemm::WeightRows::Numbers(device::Dtype::F16, &[0; 4 * 16 * 2])])
        .unwrap();
    let args = LinearArgs {
        x: Rows::Numbers(&query),
        rows: 3,
        weights: &weights,
        bias: None,
        y: &mut output,
        output: Dtype::F32,
    };
    assert_eq!(args.cost().operations, 2 * 3 * 16 * 4);
    assert_eq!(args.cost().bytes, weights.bytes() as u64 + 3 * (4 + 16) * 4);
}
