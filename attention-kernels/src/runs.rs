//! Splits lists of block copies into runs whose copies may run in any order.

use std::collections::HashSet;

/// Returns the lengths of the runs. A new run starts at a copy that writes a block which an earlier copy of the run reads
/// or writes, or that reads a block which an earlier copy writes.
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
