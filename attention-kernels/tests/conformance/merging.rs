//! Contexts that are split: who computes their parts, and the kernel that merges the results, beside one that merges while it reads.

use attention_kernels::{BlockSparse, CacheFormat, Dtype, KvDtype, KvShape, Operation, PARTITION};
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

/// Where bits may depend on the batch, partitions may be smaller.
#[test]
fn contexts_in_smaller_partitions_are_attended_to_whole() {
    let sparse = BlockSparse {
        block_size: 64,
        local_blocks: 2,
        vertical_stride: 3,
        head_sliding_step: 1,
        first_head: 0,
        first_kv_head: 0,
    };
    for device in devices::gpus(5) {
        let lens = vec![(1, PARTITION + 70), (3, 130), (1, 0), (1, 64), (17, 90), (1, 63)];
        for (name, kv_dtype, dim, window, sparse) in [
            ("cuda.paged_gqa", KvDtype::Same, 128, None, None),
            ("cuda.paged_gqa", KvDtype::Int8PerToken, 256, Some(100), None),
            ("cuda.paged_gqa", KvDtype::Same, 64, None, Some(sparse)),
            ("cuda.paged_v2", KvDtype::Same, 80, Some(70), None),
            ("cuda.generic", KvDtype::Fp8E4m3, 20, None, None),
        ] {
            let format = CacheFormat { dtype: Dtype::F16, kv_dtype, ..CacheFormat::default() };
            let look = Look { heads: (6, 2), dim, window, sparse, sinks: true, ..Look::plain(format, lens.clone()) };
            let (problem, variant) = (Problem::new(6, &look), variant(Operation::Decode, name));
            let (truth, all) = (problem.truth(), 0..lens.len());
            // 6 items at first; 7 of 256 tokens, 15 of 64.
            for at_once in [8, 40] {
                let on_device = problem.on(&device).unwrap().split_for(at_once).unwrap();
                let got = on_device.run(variant, all.clone(), true).unwrap();
                got.check(variant, &problem, &truth).unwrap();
            }
        }
    }
}

#[test]
fn contexts_are_split_further_for_blocks_that_run_at_once_unless_bits_are_promised() {
    let at_once = |device: &dyn device::Device, name: &str, (heads, kv_heads): (usize, usize), dim| {
        let format = CacheFormat { dtype: Dtype::F16, ..CacheFormat::default() };
        let shape = KvShape { num_blocks: 1, num_kv_heads: kv_heads, block_size: 16, head_dim: dim };
        variant(Operation::Decode, name).items_at_once(device, format, shape, heads).unwrap()
    };
    // The simulator runs six blocks at once, each with 16 or 64 rows of a KV head.
    for device in devices::gpus(0).into_iter().filter(|device| device.name() == "cuda-sim") {
        for (name, heads, dim, items) in [
            ("cuda.paged_gqa", (4, 2), 128, 3),
            ("cuda.paged_gqa", (17, 1), 64, 3),
            ("cuda.latent_64", (128, 1), 576, 3),
            ("cuda.latent_16", (128, 1), 576, 0),
            ("cuda.paged_v2", (4, 2), 128, 0),
        ] {
            assert_eq!(at_once(&*device, name, heads, dim), items, "{name}, {heads:?}");
        }
    }
    for device in devices::deterministic() {
        assert_eq!(at_once(&*device, "cuda.paged_gqa", (4, 2), 128), 0, "{}", device.name());
    }
}
