//! Paths and masks of trees of drafts.

use attention_kernels::for_tests::{TreePath, check_tree};
use proptest::prelude::*;

proptest! {
    #[test]
    fn a_path_is_the_tokens_before_the_rows_and_then_its_own(before in 0usize..1000, mask in 1u64..) {
        let path = TreePath::new(before, mask);
        let tokens: Vec<usize> = (0..=path.position()).map(|position| path.token(position)).collect();
        let rows = (0..64).filter(|row| mask >> row & 1 == 1).map(|row| before + row);
        prop_assert_eq!(tokens, (0..before).chain(rows).collect::<Vec<_>>());
    }
}

#[test]
fn only_trees_whose_rows_follow_their_parents_pass() {
    for masks in [&[0, 0, 0][..], &[0b1, 0b11, 0b101, 0b1011, 0b10101], &[0b1, 0b10, 0b110], &[]] {
        check_tree(masks).unwrap();
    }
    // No own bit, a later row, a path that is not the parent's, a chain beside a tree, too many rows.
    for masks in [&[0b1, 0b01][..], &[0b11, 0b10], &[0b1, 0b10, 0b111], &[0b1, 0, 0b100], &[1; 65]] {
        check_tree(masks).unwrap_err();
    }
}
