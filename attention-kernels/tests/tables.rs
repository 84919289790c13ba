//! Block tables of a step.

use attention_kernels::BlockTables;

#[test]
fn tables_contain_what_was_pushed_and_nothing_in_between() {
    let mut tables: BlockTables = [vec![4, 7, 2], vec![], vec![1]].into_iter().collect();
    assert_eq!((tables.len(), tables.num_entries(), tables.longest()), (3, 4, 3));
    assert_eq!(tables.iter().collect::<Vec<_>>(), [&[4, 7, 2][..], &[], &[1]]);
    assert_eq!(tables.table(3), [0i32; 0], "there is no such sequence");
    tables.push(&[5, 6]);
    assert_eq!((tables.table(3), tables.longest()), (&[5, 6][..], 3));
    tables.clear();
    assert!(tables.is_empty() && tables.iter().next().is_none());
}
