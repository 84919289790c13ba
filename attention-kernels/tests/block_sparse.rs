//! The rule of block-sparse attention against a mask written from its text, and what is refused.

use attention_kernels::{
    AttentionArgs, AttentionBatch, BlockSparse, Dtype, KernelChoice, KvCache, KvShape, Needs, Operation, select,
    variants,
};
use proptest::prelude::*;

/// One cell of the mask, in signed numbers as the rule is stated.
fn mask(rule: &BlockSparse, head: i64, kv_head: i64, query: i64, key: i64) -> bool {
    let size = rule.block_size as i64;
    let (query_block, key_block) = (query.div_euclid(size), key.div_euclid(size));
    let step = i64::from(rule.head_sliding_step);
    let offset = if step >= 0 {
        (rule.first_head as i64 + head) * step + 1
    } else {
        (rule.first_kv_head as i64 + kv_head) * -step + 1
    };
    let remote = (key_block + offset) % rule.vertical_stride as i64 == 0;
    let local = key_block > query_block - rule.local_blocks as i64;
    key <= query && (remote || local)
}

fn rules() -> impl Strategy<Value = BlockSparse> {
    (1..20usize, 1..6usize, 1..12usize, -9..10i32, 0..50usize, 0..50usize).prop_map(
        |(block_size, local_blocks, vertical_stride, head_sliding_step, first_head, first_kv_head)| BlockSparse {
            block_size,
            local_blocks,
            vertical_stride,
            head_sliding_step,
            first_head,
            first_kv_head,
        },
    )
}

proptest! {
    #[test]
    fn a_head_sees_what_the_mask_of_the_text_shows(
        rule in rules(), group in 1..6usize, kv_head in 0..7usize, query in 0..400usize, start in 0..400usize, len in 0..400usize,
    ) {
        let heads = kv_head * group..(kv_head + 1) * group;
        let shown = |head: usize, key: usize| mask(&rule, head as i64, kv_head as i64, query as i64, key as i64);
        for head in heads.clone() {
            let pattern = rule.heads(head..head + 1, kv_head);
            for key in 0..400 {
                prop_assert_eq!(pattern.sees(query, key), shown(head, key), "head {}, key {}", head, key);
            }
        }
        let all = rule.heads(heads.clone(), kv_head);
        let want: Vec<usize> =
            (start..query.min(start + len)).filter(|key| heads.clone().any(|head| shown(head, *key))).collect();
        let runs: Vec<_> = all.runs(query, start..query.min(start + len)).collect();
        prop_assert!(runs.iter().all(|run| !run.is_empty()) && runs.windows(2).all(|pair| pair[0].end < pair[1].start));
        prop_assert_eq!(runs.into_iter().flatten().collect::<Vec<_>>(), want);
    }
}

#[test]
fn the_greatest_numbers_do_not_overflow() {
    let rule = BlockSparse {
        block_size: usize::MAX,
        local_blocks: usize::MAX,
        vertical_stride: u32::MAX as usize,
        head_sliding_step: i32::MIN,
        first_head: u32::MAX as usize,
        first_kv_head: u32::MAX as usize,
    };
    assert!(rule.heads(5..9, 3).sees(1 << 40, 7));
    let mut runs = rule.heads(5..9, 3).runs(1 << 40, 3..1 << 41);
    assert_eq!((runs.next(), runs.next()), (Some(3..1 << 41), None));
}

const RULE: BlockSparse = BlockSparse {
    block_size: 32,
    local_blocks: 1,
    vertical_stride: 2,
    head_sliding_step: 1,
    first_head: 0,
    first_kv_head: 0,
};

#[test]
fn a_rule_that_makes_no_sense_for_the_cache_is_refused_with_the_numbers() {
    let device = device::open("cpu", Some(1)).unwrap();
    let shape = KvShape { num_blocks: 4, num_kv_heads: 1, block_size: 16, head_dim: 8 };
    let cache = KvCache::new(&*device, shape).unwrap();
    let batch = AttentionBatch {
        query_starts: vec![0, 1],
        context_lens: vec![20],
        block_tables: [[2, 1]].into_iter().collect(),
    };
    let call = |sparse: BlockSparse| {
        let (query, mut output) = (device.alloc(64).unwrap(), device.alloc(64).unwrap());
        let args = AttentionArgs {
            query: &query,
            query_stride: 16,
            num_heads: 2,
            output: &mut output,
            lse: None,
            cache: &cache,
            batch: &batch,
            seqs: 0..1,
            scale: 1.0,
            window: None,
            sparse: Some(sparse),
            soft_cap: None,
            alibi_slopes: None,
            sinks: None,
            workspace: None,
        };
        assert!(args.cost().bytes > 0, "the cost of a rule that is not checked");
        let sets = variants(Operation::Decode).into_iter().filter(|variant| variant.capabilities.runs_on("cpu"));
        let best = sets.max_by_key(|variant| variant.capabilities.rank).unwrap();
        best.attention(&*device, args).map_err(|error| error.to_string())
    };
    assert_eq!(call(RULE), Ok(()));
    for (sparse, expected) in [
        (BlockSparse { block_size: 0, ..RULE }, "tokens of a sparse block: found 0, expected 1"),
        (BlockSparse { block_size: 24, ..RULE }, "tokens of a sparse block modulo the block size: found 8, expected 0"),
        (BlockSparse { local_blocks: 0, ..RULE }, "local blocks: found 0, expected 1"),
        (BlockSparse { vertical_stride: 0, ..RULE }, "vertical stride: found 0, expected 1"),
        (BlockSparse { vertical_stride: 1 << 32, ..RULE }, "vertical stride: found 4294967296, expected 4294967295"),
    ] {
        assert_eq!(call(sparse), Err(expected.to_string()));
    }
}

#[test]
fn a_block_size_that_cuts_sparse_blocks_is_refused_at_selection() {
    let refused = |needs: &Needs| select(&KernelChoice::default(), needs).err().unwrap().to_string();
    let needs = Needs { block_sparse: Some(64), ..Needs::default() };
    assert!(select(&KernelChoice::default(), &needs).is_ok());
    let error = refused(&Needs { block_size: 48, ..needs.clone() });
    let line = "the model's sparse blocks have 64 tokens, --block-size is 48; choose a divisor of 64";
    assert!(error.contains("no decode kernel") && error.contains(line), "{error}");
    assert!(!error.contains('\n'));
    let on_gpu = Needs { device: "cuda-sim".into(), dtype: Dtype::Bf16, head_dim: 128, ..needs };
    assert_eq!(select(&KernelChoice::default(), &on_gpu).unwrap().decode.name, "cuda.paged_gqa");
    let hopper = Needs { compute_capability: Some((9, 0)), ..on_gpu };
    let choice = KernelChoice { prefill: "cuda.prefill_sm90".into(), ..Default::default() };
    assert_eq!(select(&choice, &hopper).unwrap().prefill.name, "cuda.prefill_sm90");
}
