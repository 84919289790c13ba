//! The kernel that merges the partial results of split contexts, beside one that merges while it reads the context.

use attention_kernels::{CacheFormat, Dtype, Operation, PARTITION};
use trial::{Look, Problem};

use super::attention::variant;
use super::devices;

/// The kernel that merges has as many threads as it merges partitions at once.
#[test]
fn more_partitions_than_threads_merge_in_order() {
    for device in devices::gpus(4) {
        let format = CacheFormat { dtype: Dtype::F16, ..CacheFormat::default() };
        let lens = vec![(1, 129 * PARTITION + 9), (1, 128 * PARTITION), (1, 17 * PARTITION + 1)];
        for window in [None, Some(65 * PARTITION)] {
            let look = Look { heads: (2, 1), dim: 32, window, repeats: Some(200), ..Look::plain(format, lens.clone()) };
            let problem = Problem::new(12, &look);
            let on_device = problem.with_partials(&device, usize::MAX).unwrap();
            let [want, got] = ["cuda.paged_v1", "cuda.paged_v2"]
                .map(|name| on_device.run(variant(Operation::Decode, name), 0..lens.len(), true).unwrap());
            assert!(got == want, "window {window:?}");
        }
    }
}
