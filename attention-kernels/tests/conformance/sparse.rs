//! What block-sparse attention reads, and which bits it shares with other calls, beside the comparisons with float64.

use std::sync::Arc;

use attention_kernels::{BlockSparse, KvDtype, Operation, PARTITION, Variant};
use device::Device;
use trial::{Look, OnDevice, Problem, Results};

use super::asked::{Asked, by_problem};
use super::attention::at_the_borders;
use super::devices::{self, variants_on};

const ATTENTION: [Operation; 2] = [Operation::Decode, Operation::Prefill];

/// Three of four heads skip any block that is not local.
const RULE: BlockSparse = BlockSparse {
    block_size: 32,
    local_blocks: 2,
    vertical_stride: 7,
    head_sliding_step: 1,
    first_head: 0,
    first_kv_head: 0,
};

/// Calls `each` with every problem on every device, and with the block-sparse variants that are to solve it.
fn each_problem(
    seed: u64,
    look: impl Fn(&Variant) -> Look,
    each: impl Fn(&Arc<dyn Device>, &Problem, &[&'static Variant]),
) {
    let mut called = 0;
    for device in devices::all() {
        let can = |it: &&Variant| it.capabilities.block_sparse && it.capabilities.latent.misfit(64, None).is_none();
        let variants = variants_on(&*device, &ATTENTION).into_iter().filter(can);
        for Asked { seed, look, variants, .. } in by_problem(variants.map(|variant| (seed, look(variant), variant))) {
            each(&device, &Problem::new(seed, &look), &variants);
            called += variants.len();
        }
    }
    assert!(called >= 4, "{called} variants");
}

fn look(variant: &Variant, rows: usize, sparse: BlockSparse) -> Look {
    let rows = if variant.capabilities.max_query_len == 1 || variant.operation == Operation::Decode { 1 } else { rows };
    let lens = vec![(rows, 3 * PARTITION + 40), (rows, 90), (1, 0), (rows, rows)];
    let look = at_the_borders(variant.capabilities.dtypes[0], KvDtype::Same, None, rows);
    Look { lens, sparse: Some(sparse), ..look }
}

fn run(on_device: &OnDevice<'_>, problem: &Problem, variant: &Variant) -> Results {
    on_device.run(variant, 0..problem.batch.num_seqs(), variant.capabilities.lse).unwrap()
}

#[test]
fn blocks_that_no_head_sees_are_never_read() {
    // Heads with one pattern, so that whole blocks of the cache are skipped.
    let rule = BlockSparse { head_sliding_step: 0, ..RULE };
    each_problem(
        3,
        |variant| look(variant, 5, rule),
        |device, problem, variants| {
            let (mut on_device, table) = (problem.on(device).unwrap(), problem.batch.table(0));
            let truth = problem.truth();
            let (position, context) = (3 * PARTITION + 40 - problem.rows_of(0).len(), 3 * PARTITION + 40);
            let pattern = rule.heads(0..1, 0);
            let (seen, hidden): (Vec<usize>, Vec<usize>) =
                (0..context / 16).partition(|block| pattern.sees_block(position / 32, block * 16 / 32));
            assert!(hidden.len() > context / 16 * 3 / 4, "{} blocks are hidden", hidden.len());
            let before: Vec<Results> = variants.iter().map(|variant| run(&on_device, problem, variant)).collect();
            hidden.iter().for_each(|block| on_device.cache.poison(&**device, table[*block] as usize, 0).unwrap());
            for (variant, before) in variants.iter().zip(&before) {
                let what = format!("{} {} on {}", variant.name, variant.operation, device.name());
                before.check(variant, problem, &truth).unwrap_or_else(|wrong| panic!("{what}: {wrong}"));
                assert_eq!(run(&on_device, problem, variant), *before, "{what}");
            }
            // The poison works: a block that is seen turns the row to NaN.
            on_device.cache.poison(&**device, table[seen[0]] as usize, 0).unwrap();
            for variant in variants {
                assert!(run(&on_device, problem, variant).check(variant, problem, &truth).is_err());
            }
        },
    );
}

#[test]
fn a_rule_that_hides_nothing_has_the_bits_of_a_dense_call() {
    let rules = [BlockSparse { vertical_stride: 1, ..RULE }, BlockSparse { local_blocks: 1000, ..RULE }];
    let of_two_partitions = |variant: &Variant| {
        let mut look = look(variant, 40, rules[0]);
        look.lens[0].1 = PARTITION + 40;
        look
    };
    each_problem(7, of_two_partitions, |device, problem, variants| {
        let problems = [None, Some(rules[0]), Some(rules[1])].map(|sparse| Problem { sparse, ..problem.clone() });
        let on_device = problems.each_ref().map(|problem| problem.on(device).unwrap());
        for variant in variants {
            let [dense, sparse @ ..] = on_device.each_ref().map(|on_device| run(on_device, problem, variant));
            assert!(
                sparse.iter().all(|it| *it == dense),
                "{} {} on {}",
                variant.name,
                variant.operation,
                device.name()
            );
        }
    });
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let devices = [1, 2, 5].map(|threads| device::open("cpu", Some(threads)).unwrap());
    for variant in variants_on(&*devices[0], &ATTENTION).into_iter().filter(|it| it.capabilities.block_sparse) {
        for head_sliding_step in [-1, 0, 2] {
            let problem = Problem::new(9, &look(variant, 70, BlockSparse { head_sliding_step, ..RULE }));
            let [one, two, five] =
                devices.each_ref().map(|device| run(&problem.on(device).unwrap(), &problem, variant));
            assert!(one == two && one == five, "{} {}, step {head_sliding_step}", variant.name, variant.operation);
        }
    }
}

#[test]
fn the_ranks_of_a_group_compute_the_heads_of_the_whole() {
    for head_sliding_step in [-1, 1, 2] {
        let look = |variant: &Variant| look(variant, 3, BlockSparse { head_sliding_step, ..RULE });
        each_problem(11, look, |device, whole, variants| {
            // Without the poison, which differs from rank to rank.
            let truth = whole.truth();
            let (dim, rows) = (whole.shape.head_dim, whole.batch.num_rows());
            for rank in 0..2 {
                let mut part = whole.clone();
                (part.num_heads, part.shape.num_kv_heads, part.query_gap) = (2, 1, 0);
                part.sparse =
                    Some(BlockSparse { head_sliding_step, first_head: 2 * rank, first_kv_head: rank, ..RULE });
                part.query = whole.query.chunks(2 * dim).skip(rank).step_by(2).flatten().copied().collect();
                let of_head = |numbers: &[f32]| -> Vec<f32> {
                    numbers.chunks(16 * dim).skip(rank).step_by(2).flatten().copied().collect()
                };
                (part.keys, part.values) = (of_head(&whole.keys), of_head(&whole.values));
                let (on_device, of_rank) = (part.on(device).unwrap(), part.truth());
                for variant in variants {
                    let checked = run(&on_device, &part, variant).check(variant, &part, &of_rank);
                    let what = format!("{} {}, rank {rank}", variant.name, variant.operation);
                    checked.unwrap_or_else(|wrong| panic!("{what}: {wrong}"));
                }
                for (row, head) in (0..rows).flat_map(|row| [(row, 0), (row, 1)]) {
                    let (here, there) = ((row * 2 + head) * dim, (row * 4 + 2 * rank + head) * dim);
                    assert_eq!(of_rank.output[here..][..dim], truth.output[there..][..dim], "row {row}, head {head}");
                }
            }
        });
    }
}
