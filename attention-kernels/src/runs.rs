//! Lists of block copies, cut into runs whose copies may go in any order.

use std::collections::HashSet;

/// Returns the lengths of the runs. A new run begins at a copy that writes a block which an earlier copy of the run names, or
/// that reads a block which an earlier one writes.
pub(crate) fn runs(copies: &[(u32, u32)]) -> Vec<usize> {
    let (mut runs, mut named, mut written) = (Vec::new(), HashSet::new(), HashSet::new());
    for &(from, to) in copies {
        if runs.is_empty() || named.contains(&to) || written.contains(&from) || from == to {
            runs.push(0);
            named.clear();
            written.clear();
        }
        named.extend([from, to]);
        written.insert(to);
        if let Some(run) = runs.last_mut() {
            *run += 1;
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::runs;

    #[test]
    fn copies_that_depend_on_each_other_fall_into_different_runs() {
        assert_eq!(runs(&[]), Vec::<usize>::new());
        assert_eq!(runs(&[(0, 3), (0, 4), (1, 2)]), [3]);
        assert_eq!(runs(&[(0, 3), (3, 1), (5, 6)]), [1, 2], "a source that was written");
        assert_eq!(runs(&[(0, 3), (4, 0)]), [1, 1], "a target that was read");
        assert_eq!(runs(&[(0, 3), (4, 3)]), [1, 1], "a target that was written");
    }
}
