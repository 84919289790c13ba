//! Launches of the kernels under the sanitizers, each in another process, with the arguments that the wrappers pass.

use std::sync::Arc;

use attention_kernels::{CacheWriteArgs, Dtype, Kernel, KvCache, Operation, PARTITION, Sizes, Variant, variants};
use device::Device;
use testkit::everything;
use testkit::kernels::host::Instrument;
use trial::{Look, Problem};

use super::caches::{copy_all, loaded, write_workspace};
use super::devices::{self, KERNELS, buffer};
use super::looks;
use super::transfers::convert_all;

/// Reduces a look to a small batch: two partitions of which a window leaves some tokens each, with one row or a chunk of
/// rows, or some tiles of one partition. It passes every barrier that a large batch passes.
fn small(look: Look, i: usize) -> Look {
    let (window, lens) = match i % 3 {
        0 => (Some(33), vec![(1, PARTITION + 9), (1, 0)]),
        1 => (Some(33), vec![(3, PARTITION + 4)]),
        _ => (None, vec![(18, 150), (1, 40)]),
    };
    Look { heads: [(2, 1), (3, 3), (18, 1)][i / 3 % 3], lens, window, ..look }
}

/// Whether an ordinary run has the kernel of a look ([`support`]): not for bf16, and for [`SOME_HEAD_SIZES`].
///
/// [`support`]: crate::support::Kernels::under
/// [`SOME_HEAD_SIZES`]: testkit::kernels::host::SOME_HEAD_SIZES
fn is_compiled(variant: &Variant, look: &Look) -> bool {
    let generic = matches!(variant.capabilities.head_sizes, Sizes::UpTo { .. });
    let is_compiled = generic || look.latent.is_some() || [64, 80, 128, 256].contains(&look.dim);
    everything() || look.format.dtype != Dtype::Bf16 && is_compiled
}

/// Runs every `step`-th look of each attention variant for GPUs.
fn attend(device: &Arc<dyn Device>, operation: Operation, step: usize) {
    for variant in devices::variants_on(&**device, &[operation]) {
        let looks = looks::of(variant, 2).into_iter().filter(|look| is_compiled(variant, look));
        for (i, look) in looks.step_by(step).enumerate() {
            let problem = Problem::new(i as u64, &small(look, i));
            problem.on(device).unwrap().run(variant, 0..problem.batch.num_seqs(), true).unwrap();
        }
    }
}

/// Runs cache writes, copies, conversions, low-rank additions, and attention to chosen tokens.
fn move_bytes(device: Arc<dyn Device>, step: usize) {
    for variant in variants(Operation::CacheWrite).into_iter().filter(|v| v.capabilities.runs_on("cuda-sim")) {
        let Kernel::CacheWrite(kernel) = variant.kernel else { panic!("{}", variant.name) };
        for look in looks::of(variant, 2).into_iter().step_by(step) {
            let problem = Problem::new(1, &Look { lens: vec![(1, 9)], ..look });
            let (shape, width) = (problem.shape, problem.shape.num_kv_heads * problem.shape.head_dim);
            let mut cache: KvCache = problem.on(&device).unwrap().cache;
            let slots = [2, -1, (shape.num_blocks * shape.block_size) as i64 - 1];
            let workspace = loaded(write_workspace(&*device, &shape, 3), &*device, &slots);
            let args = CacheWriteArgs {
                source: &buffer(&*device, &vec![0x33; 6 * width * problem.format.dtype.bytes()]),
                key_offset: 0,
                value_offset: 3 * width,
                stride: width,
                slot_mapping: &slots,
                cache: &mut cache,
                workspace: Some(&workspace),
            };
            kernel(&*device, args).unwrap();
        }
    }
    copy_all(&*device);
    convert_all(&*device);
    super::low_rank::add_all(&device);
    super::linear::multiply_all(&device);
    super::rewritten::rewrite_all(&device, Dtype::F16);
    super::wide::multiply_all(&device, Dtype::F16);
    super::yardstick::read_and_fold(&*device, 12 << 10, 2);
    super::mirror::send_all(&*device);
    super::chosen::attend_all(&*device);
}

/// What the names of kernels begin with.
const DECODE: [&str; 5] = ["paged_decode", "paged_gqa", "paged_generic", "latent_decode", "paged_reduce"];
const PREFILL: [&str; 5] = ["paged_prefill", "prefill_128", "prefill_sm90", "paged_generic", "latent_prefill"];
const CACHE: [&str; 18] = [
    "reshape_and_cache",
    "copy_blocks",
    "convert_fp8",
    "shrink_low_rank",
    "expand_low_rank",
    "linear_",
    "experts_sm90",
    "order_rows",
    "add_slices",
    "unpack_",
    "round_rows",
    "scale_rows",
    "read_memory",
    "scatter_words",
    "score_tokens",
    "choose_tokens",
    "paged_chosen",
    "latent_chosen",
];

/// Replays under a sanitizer what `work` launches of every `step`-th look; with `QUIRE_TEST_ALL=1` all looks, under three
/// seeds.
fn assert_clean(sanitizer: Instrument, kernels: &[&str], step: usize, work: impl FnOnce(Arc<dyn Device>, usize)) {
    let (step, seeds) = if everything() { (1, &[0, 1, 77][..]) } else { (step, &[1][..]) };
    KERNELS.are_clean(sanitizer, seeds, kernels, |device| work(device, step));
}

#[test]
fn the_memory_sanitizers_find_nothing_in_the_decode_kernels() {
    assert_clean(Instrument::Memory, &DECODE, 4, |device, step| attend(&device, Operation::Decode, step));
}

#[test]
fn the_memory_sanitizers_find_nothing_in_the_prefill_kernels() {
    assert_clean(Instrument::Memory, &PREFILL, 4, |device, step| attend(&device, Operation::Prefill, step));
}

#[test]
fn the_memory_sanitizers_find_nothing_in_the_cache_kernels() {
    assert_clean(Instrument::Memory, &CACHE, 5, move_bytes);
}

#[test]
#[ignore = "only in a step of its own: cargo xtask ci runs it"]
fn the_thread_sanitizer_finds_nothing_in_the_kernels() {
    let all = [&DECODE[..], &PREFILL, &CACHE].concat();
    assert_clean(Instrument::Thread, &all, 8, |device, step| {
        attend(&device, Operation::Decode, step);
        attend(&device, Operation::Prefill, step);
        move_bytes(device, step);
    });
}
