//! The memory budget of all requests in flight.
#![allow(clippy::unwrap_used)]

use super::*;

const BUDGET: usize = 128 << 20;

/// Takes parts of this size until none is left.
fn fill(budget: &Budget, bytes: usize, is_incomplete: bool) -> Vec<Reserved> {
    let take = || {
        let mut part = Reserved::default();
        budget.resize(&mut part, bytes, is_incomplete).ok().map(|()| part)
    };
    std::iter::from_fn(take).collect()
}

#[test]
fn parts_leave_space_for_smaller_ones_and_return_what_they_held() {
    let budget = Budget::new(BUDGET, 16 << 20);
    for _ in 0..2 {
        let held: Vec<Vec<Reserved>> =
            [(16 << 20, true), (16 << 20, false), (1 << 20, true), (1 << 20, false), (64 << 10, true)]
                .map(|(bytes, is_incomplete)| fill(&budget, bytes, is_incomplete))
                .into();
        // Incomplete bodies stop at half, all large parts at six eighths; then there is space for the smaller ones.
        assert_eq!(held.iter().map(Vec::len).collect::<Vec<_>>(), [4, 2, 0, 16, 256]);
    }
    assert!(budget.was_freed());
    let (whole, mut part) = (largest(BUDGET), Reserved::default());
    budget.resize(&mut part, whole, false).unwrap();
    assert!(budget.resize(&mut Reserved::default(), 2 << 20, false).is_err());
}

#[test]
fn a_part_that_cannot_grow_keeps_its_size() {
    let budget = Budget::new(BUDGET, 16 << 20);
    let mut part = Reserved::default();
    budget.resize(&mut part, 8 << 20, true).unwrap();
    let others = fill(&budget, 16 << 20, false);
    assert!(budget.resize(&mut part, 100 << 20, false).is_err());
    assert_eq!(part.bytes, [8 << 20; COUNT]);
    drop(others);
    budget.resize(&mut part, 1 << 20, false).unwrap();
    assert_eq!(part.bytes, [1 << 20, 1 << 20, 0, 0]);
    budget.resize(&mut part, 0, false).unwrap();
    assert!(part.is_empty() && fill(&budget, 16 << 20, false).len() == 6);
}

#[test]
fn a_small_budget_has_space_for_a_small_part() {
    assert_eq!([32 << 10, 64 << 10, 256 << 10, BUDGET].map(largest), [32 << 10, 64 << 10, 224 << 10, 96 << 20]);
    let budget = Budget::new(15 << 20, 16 << 20);
    assert!(budget.resize(&mut Reserved::default(), 9_000_000, true).is_ok());
}
