//! Which decode steps are graphs, and what has become of them.

use device::Graph;

use super::ForwardBatch;

/// The sizes of decode steps that graphs are made for: 1, 2, 4, 8 and the multiples of 16, all of which vLLM has too (and the
/// other multiples of 8 up to 256), up to the greatest step, which is the last one whatever it is.
///
/// ```
/// assert_eq!(models::graph_sizes(1), [1]);
/// assert_eq!(models::graph_sizes(40), [1, 2, 4, 8, 16, 32, 40]);
/// ```
pub fn graph_sizes(max_num_seqs: usize) -> Vec<usize> {
    let regular = [1, 2, 4, 8].into_iter().chain((1..).map(|i| 16 * i));
    regular.take_while(|size| *size < max_num_seqs).chain([max_num_seqs]).collect()
}

/// How many graphs there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphCount {
    /// Sizes of decode steps.
    pub sizes: usize,
    /// Those that have been captured.
    pub captured: usize,
    /// Those whose capture has failed.
    pub failed: usize,
}

/// The graphs of a model.
pub(super) struct Graphs {
    /// Ascending.
    pub sizes: Vec<(usize, State)>,
    pub padded: ForwardBatch,
}

pub(super) enum State {
    /// Not used yet.
    New,
    Captured(Graph),
    Failed,
}
