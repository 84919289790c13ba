//! The bytes and operations that a profile counts for a call.

use attention_kernels::{AttentionArgs, AttentionBatch, BlockSparse, Dtype, KvCache, KvShape, LinearArgs, Rows};
use device::profile::Cost;
use linear::{Purpose, Uploader, WeightRows};

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
    let mut cost = |window, sparse| {
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
            sparse,
            soft_cap: None,
            alibi_slopes: None,
            sinks: None,
            workspace: None,
        };
        args.cost()
    };
    // 3 rows of 2 heads in and out; a token of the cache has 2 * 16 numbers.
    let rows = 3 * 2 * 2 * 16 * 4;
    assert_eq!(cost(None, None), Cost { bytes: rows + (10 + 5) * 128, operations: 4 * 32 * (9 + 10 + 5) });
    assert_eq!(cost(Some(3), None), Cost { bytes: rows + (4 + 3) * 128, operations: 4 * 32 * 9 });
    // In sparse blocks of 8 tokens the row at position 8, in block 1, sees block 0 with one head, as does the one at 9. Bytes are
    // those of the union of the heads.
    let sparse = |step, first_head| BlockSparse {
        block_size: 8,
        local_blocks: 1,
        vertical_stride: 2,
        head_sliding_step: step,
        first_head,
        first_kv_head: 0,
    };
    let some = cost(None, Some(sparse(1, 0)));
    assert_eq!(some, Cost { bytes: rows + (10 + 5) * 128, operations: 4 * 16 * ((9 + 10) + (1 + 2) + 2 * 5) });
    let none = cost(None, Some(sparse(0, 0)));
    assert_eq!(none, Cost { bytes: rows + (2 + 5) * 128, operations: 4 * 16 * (2 * (1 + 2) + 2 * 5) });
    let window = cost(Some(3), Some(sparse(0, 0)));
    assert_eq!(window, Cost { bytes: rows + (2 + 3) * 128, operations: 4 * 16 * (2 * (1 + 2) + 2 * 3) });

    let rows = [WeightRows::Numbers(Dtype::F16, &[0; 4 * 16 * 2])];
    let mut uploader = Uploader::new(&*device).unwrap();
    let weights = uploader.matrix(None, Dtype::F32, [16, 4], &rows, Purpose::Product).unwrap();
    let args = LinearArgs {
        x: Rows::Numbers(&query),
        rows: 3,
        weights: &weights,
        bias: None,
        y: &mut output,
        output: Dtype::F32,
        activation: None,
        scratch: None,
    };
    assert_eq!(args.cost().operations, 2 * 3 * 16 * 4);
    assert_eq!(args.cost().bytes, weights.bytes() as u64 + 3 * (4 + 16) * 4);
}
