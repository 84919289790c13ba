//! Appending, forking, truncating, and failures that change nothing.

use kvblock::{BlockId, MemOp, NoSpace};

use super::{cached, concat, free_ids, full, open, pool, prompt, refs, run, table_ids};

#[test]
fn c5_decode_appends_and_indexes_blocks_as_they_fill() {
    let mut pool = pool(10);
    let mut table = run(&mut pool, prompt(&full(1, 4)[..55]));
    assert_eq!(table_ids(&table), [0, 1, 2, 3]);
    assert_eq!(pool.append(&mut table, &[5; 4]), Ok(4));
    pool.commit(&mut table, 59).unwrap();
    assert_eq!((table_ids(&table), cached(&pool, 0..4)), (vec![0, 1, 2, 3], vec![true, true, true, false]));

    assert_eq!(pool.append(&mut table, &[6; 19]), Ok(4));
    assert!(!pool.is_cached(BlockId(3)), "tokens with slots are not computed yet");
    pool.commit(&mut table, 78).unwrap();
    assert_eq!((table_ids(&table), cached(&pool, 3..5)), (vec![0, 1, 2, 3, 4], vec![true, false]));
    pool.audit([&table]).unwrap();
}

#[test]
fn c10_a_failure_changes_nothing() {
    let mut pool = pool(10);
    let shared = full(1, 3);
    let long = concat(&[&shared, &full(2, 3)]);
    let a = run(&mut pool, prompt(&shared));
    let b = run(&mut pool, prompt(&long));
    assert_eq!(table_ids(&b), [0, 1, 2, 3, 4, 5]);
    pool.release(b);
    assert_eq!(refs(&pool, 0..6), [1, 1, 1, 0, 0, 0]);
    let c = run(&mut pool, prompt(&full(3, 2)));
    assert_eq!((table_ids(&c), pool.available()), (vec![6, 7], 5));
    let before = free_ids(&pool);

    let d_tokens = concat(&[&long, &full(4, 3)]);
    let admission = pool.admit(prompt(&d_tokens));
    assert_eq!((admission.cached_tokens(), admission.blocks_needed()), (96, 3));
    assert_eq!(admission.open(3).unwrap_err(), NoSpace { wanted: 6, free: 5 });
    assert_eq!(refs(&pool, 0..6), [1, 1, 1, 0, 0, 0]);
    assert_eq!(free_ids(&pool), before);

    // The prefix fits. Three blocks after it do not, but two do.
    let mut d = pool.admit(prompt(&d_tokens)).open(2).unwrap();
    assert_eq!(pool.append(&mut d, &d_tokens[96..]), Err(NoSpace { wanted: 3, free: 2 }.into()));
    assert_eq!((d.len(), table_ids(&d)), (96, vec![0, 1, 2, 3, 4, 5]));
    pool.release(d);
    let d = open(&mut pool, prompt(&d_tokens[..128]));
    assert_eq!((table_ids(&d)[..6].to_vec(), pool.available()), (vec![0, 1, 2, 3, 4, 5], 0));

    let mut a = a;
    assert_eq!(pool.append(&mut a, &[1]), Err(NoSpace { wanted: 1, free: 0 }.into()));
    assert_eq!((a.len(), table_ids(&a)), (48, vec![0, 1, 2]));
    pool.audit([&a, &c, &d]).unwrap();
}

#[test]
fn c14_rejected_drafts_leave_no_trace_in_the_cache() {
    let mut pool = pool(6);
    let mut table = run(&mut pool, prompt(&full(1, 1)[..14]));
    // Four drafts get slots across the end of the block. A step writes all of them, and two are accepted.
    assert_eq!(pool.append(&mut table, &[7, 7, 8, 9]), Ok(1));
    assert_eq!(table.slots(14..18).collect::<Vec<_>>(), [14, 15, 16, 17]);
    assert!(!pool.is_cached(BlockId(0)), "drafts are not indexed");
    pool.commit(&mut table, 16).unwrap();
    pool.truncate(&mut table, 16).unwrap();
    assert_eq!((table_ids(&table), table.committed(), table.tokens()[14..].to_vec()), (vec![0], 16, vec![7, 7]));
    assert_eq!(cached(&pool, 0..2), [true, false]);
    assert_eq!(pool.drain_memory_ops().collect::<Vec<_>>(), [MemOp::Poison { block: BlockId(1), from_slot: 0 }]);

    // All drafts are rejected within a block. They never enter the index.
    pool.append(&mut table, &[1, 2, 3]).unwrap();
    pool.truncate(&mut table, 16).unwrap();
    pool.append(&mut table, &[5; 16]).unwrap();
    pool.commit(&mut table, 32).unwrap();
    let with = |drafts: &[u32]| concat(&[&table.tokens()[..16], drafts, &[5; 16]]);
    assert_eq!(pool.admit(prompt(&with(&[]))).cached_tokens(), 16, "the last block is computed again");
    let (kept, rejected) = (concat(&[&with(&[]), &[0]]), with(&[1, 2, 3]));
    assert_eq!(pool.admit(prompt(&kept)).cached_tokens(), 32);
    assert_eq!(pool.admit(prompt(&rejected)).cached_tokens(), 16);
    pool.audit([&table]).unwrap();
    pool.release(table);
}

#[test]
fn c15_a_fork_copies_one_block_at_its_first_append() {
    let mut pool = pool(6);
    let mut parent = run(&mut pool, prompt(&full(1, 2)[..20]));
    let mut child = pool.fork(&parent).unwrap();
    assert_eq!((table_ids(&child), refs(&pool, 0..2)), (vec![0, 1], vec![2, 2]));
    assert_eq!(pool.blocks_needed([(&parent, 1)]), 1);
    assert_eq!(pool.blocks_needed([(&parent, 1), (&child, 1)]), 1, "the second of two owners writes in place");

    assert_eq!(pool.append(&mut child, &[5]), Ok(1));
    assert_eq!((table_ids(&child), refs(&pool, 0..3)), (vec![0, 2], vec![2, 1, 1]));
    let copy = MemOp::Copy { src: BlockId(1), dst: BlockId(2) };
    let poison = MemOp::Poison { block: BlockId(2), from_slot: 4 };
    assert_eq!(pool.drain_memory_ops().collect::<Vec<_>>(), [copy, poison]);

    assert_eq!(pool.append(&mut parent, &[6]), Ok(2), "the parent is the sole owner of its last block now");
    assert_eq!((table_ids(&parent), pool.drain_memory_ops().count()), (vec![0, 1], 0));

    pool.release(parent);
    assert_eq!((table_ids(&child), child.tokens()[20], refs(&pool, 0..3)), (vec![0, 2], 5, vec![1, 0, 1]));
    pool.audit([&child]).unwrap();
}

#[test]
fn a_table_with_uncommitted_tokens_cannot_be_forked() {
    let mut pool = pool(6);
    let table = open(&mut pool, prompt(&[1; 20]));
    assert_eq!(
        pool.fork(&table).unwrap_err().to_string(),
        "found 0 committed tokens, expected all 20; commit or truncate the table before forking"
    );
    assert_eq!(refs(&pool, 0..2), [1, 1]);
}

#[test]
fn truncation_within_a_block_removes_it_from_the_index_and_poisons_the_rest() {
    let mut pool = pool(6);
    let tokens = full(1, 3);
    let mut table = run(&mut pool, prompt(&tokens));
    pool.truncate(&mut table, 20).unwrap();
    assert_eq!((table_ids(&table), table.committed()), (vec![0, 1], 20));
    assert_eq!(cached(&pool, 0..3), [true, false, true], "block 2 is freed as a whole and stays cached");
    assert_eq!(pool.drain_memory_ops().collect::<Vec<_>>(), [MemOp::Poison { block: BlockId(1), from_slot: 4 }]);
    assert_eq!(pool.admit(prompt(&tokens)).cached_tokens(), 16);
    pool.audit([&table]).unwrap();
}

#[test]
fn truncation_within_a_shared_block_leaves_the_other_owner_alone() {
    let mut pool = pool(6);
    let tokens = full(1, 2);
    let mut table = run(&mut pool, prompt(&tokens));
    let other = pool.fork(&table).unwrap();
    pool.truncate(&mut table, 20).unwrap();
    assert_eq!((cached(&pool, 0..2), pool.drain_memory_ops().count()), (vec![true, true], 0));
    pool.release(other);
    // The table is now the sole owner of a block that is still cached with its old contents. Writing removes it.
    assert_eq!(pool.append(&mut table, &[9]), Ok(2));
    assert_eq!(cached(&pool, 0..2), [true, false]);
    assert_eq!(pool.drain_memory_ops().collect::<Vec<_>>(), [MemOp::Poison { block: BlockId(1), from_slot: 4 }]);
    pool.audit([&table]).unwrap();
}
