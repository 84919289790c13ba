//! Sizes of decode steps that run as CUDA graphs, and the state of each.

use device::Graph;

use super::ForwardBatch;

/// Sizes of decode steps that graphs are captured for: 1, 2, 4, 8, the multiples of 16, and `max_num_seqs` itself. vLLM has
/// the same sizes, and the other multiples of 8 up to 256.
///
/// ```
/// assert_eq!(models::graph_sizes(1), [1]);
/// assert_eq!(models::graph_sizes(40), [1, 2, 4, 8, 16, 32, 40]);
/// ```
pub fn graph_sizes(max_num_seqs: usize) -> Vec<usize> {
    let regular = [1, 2, 4, 8].into_iter().chain((1..).map(|i| 16 * i));
    regular.take_while(|size| *size < max_num_seqs).chain([max_num_seqs]).collect()
}

/// Number of graphs by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphCount {
    /// Graphs that decode steps may use: one of each size, and another of each size for steps with LoRA adapters.
    pub sizes: usize,
    /// Those that have been captured.
    pub captured: usize,
    /// Those whose capture has failed.
    pub failed: usize,
}

pub(super) struct Graphs {
    /// Sizes, ascending: of steps without adapters, and of steps with some, which launch more. The latter are empty if the decoder
    /// takes no adapters.
    pub sizes: [Vec<(usize, State)>; 2],
    pub padded: ForwardBatch,
}

pub(super) enum State {
    New,
    Captured(Graph),
    Failed,
}
