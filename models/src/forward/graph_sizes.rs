//! Sizes of decode steps that run as CUDA graphs, and the state of each.

use device::Graph;

use super::ForwardBatch;

/// Sizes of decode steps with one row for each sequence that graphs are captured for: 1, 2, 4, 8, the multiples of 16, and
/// `max_num_seqs` itself. vLLM has the same sizes, and the other multiples of 8 up to 256.
///
/// ```
/// assert_eq!(models::graph_sizes(1), [1]);
/// assert_eq!(models::graph_sizes(40), [1, 2, 4, 8, 16, 32, 40]);
/// ```
pub fn graph_sizes(max_num_seqs: usize) -> Vec<usize> {
    let regular = [1, 2, 4, 8].into_iter().chain((1..).map(|i| 16 * i));
    regular.take_while(|size| *size < max_num_seqs).chain([max_num_seqs]).collect()
}

/// Numbers of rows of decode steps with several rows of a sequence that graphs are captured for: the powers of two from 2 to 64,
/// the multiples of 64, and `max_rows` itself. They are fewer than [`graph_sizes`], because up to 64 rows a step takes little
/// longer than for half as many: it mostly reads the weights.
///
/// ```
/// assert_eq!(models::draft_graph_sizes(5), [2, 4, 5]);
/// assert_eq!(models::draft_graph_sizes(256), [2, 4, 8, 16, 32, 64, 128, 192, 256]);
/// ```
pub fn draft_graph_sizes(max_rows: usize) -> Vec<usize> {
    let regular = [2, 4, 8, 16, 32].into_iter().chain((1..).map(|i| 64 * i));
    regular.take_while(|size| *size < max_rows).chain([max_rows]).collect()
}

/// Number of graphs by state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphCount {
    /// Graphs that decode steps may use: those of all families ([`Model::use_graphs`](super::Model::use_graphs)).
    pub sizes: usize,
    /// Those that have been captured.
    pub captured: usize,
    /// Those whose capture has failed.
    pub failed: usize,
}

/// All graphs of a model.
pub(super) struct Graphs {
    /// A step uses the first family that serves it.
    pub families: Vec<Family>,
    pub padded: ForwardBatch,
}

/// Graphs of several sizes for steps of one kind.
pub(super) struct Family {
    /// Most rows of a sequence.
    pub most_rows: usize,
    /// The steps have LoRA adapters, so they launch more.
    pub adapted: bool,
    /// Numbers of rows, ascending.
    pub sizes: Vec<(usize, State)>,
}

pub(super) enum State {
    New,
    Captured(Graph),
    Failed,
}

impl Family {
    pub fn new(most_rows: usize, adapted: bool, sizes: Vec<usize>) -> Family {
        Family { most_rows, adapted, sizes: sizes.into_iter().map(|size| (size, State::New)).collect() }
    }
}
