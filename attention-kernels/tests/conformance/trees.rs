//! Trees of query rows: the bits of a row are those of its path, beside the comparisons with float64.

use attention_kernels::trial::{Look, Problem};
use attention_kernels::{
    AttentionBatch, BlockSparse, CacheFormat, KernelChoice, KvDtype, Needs, Operation, PARTITION, select,
};

use super::attention::at_the_borders;
use super::devices::{self, variants_on};

const ATTENTION: [Operation; 2] = [Operation::Decode, Operation::Prefill];

/// Trees that start before and behind the borders of tiles and partitions, and a chain beside them.
const LENS: [(usize, usize); 6] = [(9, PARTITION + 4), (1, 70), (7, 67), (16, 16), (3, 130), (40, PARTITION + 20)];

/// Returns the problem in which the sequence of a row ends with the row's path, in the same blocks.
fn chain_of(problem: &Problem, seq: usize, row: usize) -> Problem {
    let mut chain = Problem { batch: AttentionBatch::default(), ..problem.clone() };
    let (rows, mask) = (problem.rows_of(seq), problem.batch.tree_mask[row]);
    let path: Vec<usize> = (0..rows.len()).filter(|i| mask >> i & 1 == 1).collect();
    let (before, size) = (problem.batch.context_lens[seq] as usize - rows.len(), problem.shape.block_size);
    let table = problem.batch.table(seq);
    let slot = |token: usize| table[token / size] as usize * size + token % size;
    let (dim, width, heads) = (problem.shape.head_dim, problem.width(), problem.shape.num_kv_heads);
    for (i, of_seq) in path.iter().enumerate() {
        let (from, to) = (slot(before + of_seq), slot(before + i));
        for head in 0..heads {
            let (from, to) = (problem.shape.offset(from, head), problem.shape.offset(to, head));
            chain.keys.copy_within(from..from + dim, to);
            chain.values.copy_within(from..from + dim, to);
        }
        for scales in chain.token_scales.iter_mut().filter(|scales| !scales.is_empty()) {
            scales.copy_within(from * heads..(from + 1) * heads, to * heads);
        }
    }
    let start = rows.start;
    chain.query = path.iter().flat_map(|i| &problem.query[(start + i) * width..][..width]).copied().collect();
    chain.batch.query_starts = vec![0, path.len() as u32];
    chain.batch.context_lens = vec![(before + path.len()) as u32];
    chain.batch.block_tables.push(table);
    chain
}

#[test]
fn a_row_of_a_tree_has_the_bits_of_its_path_at_the_end_of_the_sequence() {
    let sparse = BlockSparse {
        block_size: 32,
        local_blocks: 1,
        vertical_stride: 3,
        head_sliding_step: 1,
        first_head: 0,
        first_kv_head: 0,
    };
    let mut compared = 0;
    for device in devices::all() {
        for variant in variants_on(&*device, &ATTENTION).into_iter().filter(|it| it.capabilities.trees) {
            let can = &variant.capabilities;
            assert!(can.row_invariant.is_some(), "{}", variant.name);
            let settings = [(None, None, false), (Some(20), None, true), (Some(PARTITION), Some(sparse), false)];
            for (i, (window, sparse, alibi)) in settings.into_iter().enumerate() {
                let kv_dtype = can.kv_dtypes[i % can.kv_dtypes.len()];
                let look = at_the_borders(can.dtypes[0], kv_dtype, window, 1);
                let format = CacheFormat { layout: can.layouts[i % can.layouts.len()], ..look.format };
                let (format, ..) = super::looks::that_exists(format, look.block_size, look.dim);
                let lens = LENS.iter().copied().filter(|lens| lens.0 <= can.max_query_len).collect();
                let look = Look { trees: true, format, lens, sparse, alibi, ..look };
                let problem = Problem::new(i as u64 + 5, &look);
                let all = 0..problem.batch.num_seqs();
                let got = problem.on(&device).unwrap().run(variant, all.clone(), can.lse).unwrap();
                for seq in all {
                    let rows = problem.rows_of(seq).filter(|row| problem.batch.tree_mask[*row] != 0);
                    // Every third row, and the last.
                    for row in rows.filter(|row| row % 3 == 0 || row + 1 == problem.rows_of(seq).end) {
                        let chain = chain_of(&problem, seq, row);
                        let alone = chain.on(&device).unwrap().run(variant, 0..1, can.lse).unwrap();
                        let last = chain.batch.num_rows() - 1;
                        assert!(
                            got.rows(&problem, row..row + 1) == alone.rows(&chain, last..last + 1),
                            "{} {} on {}, {look:?}, row {row}",
                            variant.name,
                            variant.operation,
                            device.name()
                        );
                        compared += 1;
                    }
                }
            }
        }
    }
    assert!(compared > 100, "{compared} rows");
}

#[test]
fn what_is_not_a_tree_and_a_kernel_without_trees_are_refused() {
    let device = device::open("cpu", Some(1)).unwrap();
    let variant = variants_on(&*device, &[Operation::Prefill])[0];
    let look = Look {
        trees: true,
        lens: vec![(3, 20)],
        ..at_the_borders(variant.capabilities.dtypes[0], KvDtype::Same, None, 1)
    };
    let with = |tree_mask: Vec<u64>| {
        let mut problem = Problem::new(1, &look);
        problem.batch.tree_mask = tree_mask;
        let done = problem.on(&device).and_then(|on_device| on_device.run(variant, 0..1, false));
        done.map(drop).map_err(|error| error.to_string())
    };
    assert_eq!(with(vec![1, 0b11, 0b101]), Ok(()));
    let of_a_row = "tree mask of a row, given its parent's: found";
    assert!(with(vec![1, 0b11, 0b110]).unwrap_err().starts_with(&format!("{of_a_row} 6, expected 7")));
    assert!(with(vec![1, 0, 0b101]).unwrap_err().starts_with(&format!("{of_a_row} 0, expected 2")));
    assert!(with(vec![1, 0b11]).unwrap_err().starts_with("tree masks: found 2, expected 3"));
    let needs =
        Needs { trees: true, device: "cuda-sim".into(), dtype: attention_kernels::Dtype::Bf16, ..Needs::default() };
    assert!(select(&KernelChoice::default(), &needs).is_ok());
    let choice = KernelChoice { prefill: "cuda.prefill_sm90".into(), ..KernelChoice::default() };
    let error = select(&choice, &needs).err().unwrap().to_string();
    assert!(error.contains("it has no trees of query rows; use one of: cuda.paged_prefill, cuda.generic"), "{error}");
}
