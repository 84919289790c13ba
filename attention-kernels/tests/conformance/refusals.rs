//! Calls that the wrappers refuse before a kernel runs. A kernel checks nothing, so each would access invalid memory.

use attention_kernels::{
    AttentionArgs, AttentionBatch, BlockTables, CacheFormat, CacheWriteArgs, Dtype, Kernel, KernelError, KvCache,
    KvDtype, KvShape, Layout, Operation, Workspace, WorkspaceLimits, variants,
};
use device::{Buffer, Device};
use trial::{Look, Problem};

use super::devices::{self, variants_on};
use super::looks;

const SHAPE: KvShape = KvShape { num_blocks: 8, num_kv_heads: 2, block_size: 16, head_dim: 64 };

const LIMITS: WorkspaceLimits = WorkspaceLimits {
    max_seqs: 2,
    max_rows: 4,
    max_blocks: 40,
    num_blocks: 8,
    block_size: 16,
    num_heads: 4,
    head_dim: 64,
    max_partials: 0,
    items_at_once: 0,
    max_copies: 0,
};

fn batch() -> AttentionBatch {
    AttentionBatch { query_starts: vec![0, 1, 2], context_lens: vec![17, 1], block_tables: tables([3, 5]) }
}

/// Returns two tables of 40 blocks, the first sequence's as given.
fn tables(first: [i32; 2]) -> BlockTables {
    [[&first[..], &[-1; 38]].concat(), [&[7][..], &[-1; 39]].concat()].into_iter().collect()
}

/// Returns the error of a call of `name` that is valid except for what `change` does to it.
fn call(
    device: &dyn Device,
    name: &str,
    workspace: Option<&Workspace>,
    cache: &KvCache,
    change: impl FnOnce(&mut AttentionArgs<'_>),
) -> Result<(), KernelError> {
    let operation = if name.contains("prefill") { Operation::Prefill } else { Operation::Decode };
    let variant = variants(operation).into_iter().find(|variant| variant.name == name).unwrap();
    let Kernel::Attention(kernel) = variant.kernel else { panic!("{name}") };
    let [query, mut output]: [Buffer; 2] = std::array::from_fn(|_| device.alloc(2 * 4 * 64 * 2).unwrap());
    let batch = batch();
    let mut args = AttentionArgs {
        query: &query,
        query_stride: 256,
        num_heads: 4,
        output: &mut output,
        lse: None,
        cache,
        batch: &batch,
        seqs: 0..2,
        scale: 1.0,
        window: None,
        sparse: None,
        soft_cap: None,
        alibi_slopes: None,
        sinks: None,
        workspace,
    };
    change(&mut args);
    kernel(device, args)
}

#[test]
fn a_call_that_does_not_fit_its_cache_or_workspace_is_an_error_with_the_numbers() {
    for device in devices::gpus(0) {
        let device = &*device;
        let format = CacheFormat { dtype: Dtype::F16, ..CacheFormat::default() };
        let cache = KvCache::with_format(device, SHAPE, format).unwrap();
        let mut workspace = Workspace::new(device, LIMITS).unwrap();
        let said = |name: &str, workspace: &Workspace, cache: &KvCache, change: &dyn Fn(&mut AttentionArgs<'_>)| {
            call(device, name, Some(workspace), cache, change).unwrap_err().to_string()
        };
        let unloaded = said("cuda.paged_v1", &workspace, &cache, &|_| ());
        assert!(unloaded.starts_with("cuda.paged_v1: found no batch with these lengths"), "{unloaded}");
        workspace.load(device, &batch(), &[], None).unwrap();
        for name in ["cuda.paged_v2", "cuda.paged_v1", "cuda.paged_prefill"] {
            call(device, name, Some(&workspace), &cache, |_| ()).unwrap();
            let none = call(device, name, None, &cache, |_| ()).unwrap_err().to_string();
            assert!(none.contains("found no workspace"), "{none}");
        }
        let broad = KvCache::with_format(device, KvShape { head_dim: 128, ..SHAPE }, format).unwrap();
        let wide = |args: &mut AttentionArgs<'_>| args.seqs = 0..1;
        for name in ["cuda.paged_v2", "cuda.paged_gqa", "cuda.generic"] {
            let large = said(name, &workspace, &broad, &wide);
            assert_eq!(large, "elements of a row that the workspace holds: found 256, expected 512");
        }
        let three: &'static Buffer = Box::leak(Box::new(device.alloc(3 * 4).unwrap()));
        let slopes = said("cuda.paged_v2", &workspace, &cache, &|args| args.alibi_slopes = Some(three));
        assert_eq!(slopes, "bytes of ALiBi slopes: found 12, expected 16");
        let sinks = said("cuda.paged_prefill", &workspace, &cache, &|args| args.sinks = Some(three));
        assert_eq!(sinks, "bytes of sinks: found 12, expected 16");
        assert_eq!(
            said("cuda.paged_v2", &workspace, &cache, &|args| args.window = Some(0)),
            "window: found 0, expected 1"
        );
        let stride = said("cuda.paged_v2", &workspace, &cache, &|args| args.query_stride = 252);
        assert!(stride.starts_with("query stride") || stride.starts_with("query elements"), "{stride}");
        let heads = said("cuda.paged_v2", &workspace, &cache, &|args| args.num_heads = 3);
        assert_eq!(heads, "num_heads modulo num_kv_heads: found 1, expected 0");
        let odd = KvCache::with_format(device, KvShape { head_dim: 48, ..SHAPE }, format).unwrap();
        let heads = said("cuda.paged_v2", &workspace, &odd, &|_| ());
        assert!(heads.contains("cuda.paged_v2 was called with heads of 48 and f16, cache same, HND"), "{heads}");
        let heads = said("cuda.prefill_sm90", &workspace, &odd, &|_| ());
        assert!(heads.contains("called with heads of 48, blocks of 16 and f16, cache same, HND"), "{heads}");
        let fewer = KvCache::with_format(device, KvShape { num_blocks: 7, ..SHAPE }, format).unwrap();
        assert_eq!(said("cuda.paged_v2", &workspace, &fewer, &|_| ()), "blocks of the cache: found 7, expected 8");
        let single = KvCache::with_format(device, SHAPE, CacheFormat::default()).unwrap();
        assert!(said("cuda.paged_v2", &workspace, &single, &wide).contains("heads of 64 and f32"));
        let broad = KvCache::with_format(device, KvShape { head_dim: 584, ..SHAPE }, format).unwrap();
        let generic = said("cuda.generic", &workspace, &broad, &|args| args.seqs = 0..0);
        assert_eq!(generic, "greatest head size: found 576, expected 584");
    }
}

#[test]
fn a_batch_with_released_blocks_behind_a_window_is_refused_for_wider_windows() {
    for device in devices::gpus(0) {
        let format = CacheFormat { dtype: Dtype::F16, ..CacheFormat::default() };
        let cache = KvCache::with_format(&*device, SHAPE, format).unwrap();
        let mut workspace = Workspace::new(&*device, LIMITS).unwrap();
        let mut holed = batch();
        holed.block_tables = tables([-1, 5]);
        workspace.load(&*device, &holed, &[], Some(1)).unwrap();
        call(&*device, "cuda.paged_v2", Some(&workspace), &cache, |args| args.window = Some(1)).unwrap();
        for window in [Some(2), None] {
            let error =
                call(&*device, "cuda.paged_v2", Some(&workspace), &cache, |args| args.window = window).unwrap_err();
            assert!(error.to_string().contains("found no batch with these lengths and this window"), "{error}");
        }
    }
}

#[test]
fn a_step_that_would_read_outside_of_the_pool_is_not_loaded() {
    let device = device::open("cpu", Some(1)).unwrap();
    let mut workspace = Workspace::new(&*device, LIMITS).unwrap();
    let mut refused = |change: &dyn Fn(&mut AttentionBatch), window| {
        let mut batch = batch();
        change(&mut batch);
        workspace.load(&*device, &batch, &[], window).unwrap_err().to_string()
    };
    assert_eq!(refused(&|batch| batch.block_tables = tables([3, 8]), None), "block id: found 8, expected 8");
    assert!(refused(&|batch| batch.block_tables = tables([-1, 5]), None).starts_with("block id"));
    assert!(refused(&|batch| batch.context_lens[0] = 33, Some(1)).starts_with("block id"), "an entry of padding");
    assert!(
        refused(&|batch| batch.context_lens[0] = 641, None).starts_with("blocks in a table: found 40, expected 41")
    );
    assert_eq!(refused(&|batch| batch.query_starts = vec![0, 3, 2], None), "query_starts: found 2, expected 3");
    assert_eq!(
        refused(&|batch| batch.query_starts = vec![1, 1, 2], None),
        "first of query_starts: found 1, expected 0"
    );
    let rows = refused(&|batch| batch.query_starts = vec![0, 4, 5], None);
    assert_eq!(rows, "rows that the workspace holds: found 4, expected 5");
}

#[test]
fn a_load_compares_only_blocks_in_use_however_long_the_longest_table_is() {
    let device = device::open("cpu", Some(1)).unwrap();
    let limits = WorkspaceLimits { max_seqs: 257, max_rows: 257, max_blocks: 8192, ..LIMITS };
    let mut workspace = Workspace::new(&*device, limits).unwrap();
    let (long, short) = (vec![3; 8192], vec![5; 2]);
    let held = 8192 + 256 * 2;
    // The long sequence moves to another row when one before it ends, so the previous contents of rows are compared too.
    for (at, most) in [(100, usize::MAX), (100, held), (100, held), (99, 2 * held), (99, held)] {
        let seqs = 0..257;
        let tables: Vec<&[i32]> = seqs.clone().map(|seq| if seq == at { &long[..] } else { &short }).collect();
        let batch = AttentionBatch {
            query_starts: (0..=257).collect(),
            context_lens: tables.iter().map(|table| table.len() as u32 * 16).collect(),
            block_tables: tables.into_iter().collect(),
        };
        workspace.load(&*device, &batch, &[], None).unwrap();
        let compared = workspace.compared_entries();
        assert!(compared <= most, "{compared} entries compared, {held} are held");
    }
}

#[test]
fn an_empty_step_launches_nothing_that_a_driver_would_refuse() {
    for device in devices::gpus(0) {
        let device = &*device;
        let format = CacheFormat { dtype: Dtype::F16, ..CacheFormat::default() };
        let mut cache = KvCache::with_format(device, SHAPE, format).unwrap();
        let mut workspace =
            Workspace::new(device, WorkspaceLimits { max_blocks: 0, max_partials: 2, ..LIMITS }).unwrap();
        // Only padding, with empty tables.
        let block_tables = [[]; 2].into_iter().collect();
        let lens = AttentionBatch { query_starts: vec![0, 1, 2], context_lens: vec![0, 0], block_tables };
        let padding: &'static AttentionBatch = Box::leak(Box::new(lens));
        workspace.load(device, padding, &[], None).unwrap();
        for name in ["cuda.paged_v1", "cuda.paged_v2", "cuda.paged_gqa", "cuda.paged_prefill"] {
            call(device, name, Some(&workspace), &cache, |args| args.batch = padding)
                .unwrap_or_else(|error| panic!("{name}: {error}"));
        }
        let source = device.alloc(0).unwrap();
        for writer in devices::variants_on(device, &[Operation::CacheWrite]) {
            let (slot_mapping, cache, workspace) = (&[][..], &mut cache, Some(&workspace));
            let args = CacheWriteArgs {
                source: &source,
                key_offset: 0,
                value_offset: 0,
                stride: 128,
                slot_mapping,
                cache,
                workspace,
            };
            writer.cache_write(device, args).unwrap();
        }
    }
}

#[test]
fn a_cache_in_a_layout_that_a_variant_does_not_take_is_refused() {
    for device in devices::all() {
        for variant in variants_on(&*device, &[Operation::Decode, Operation::Prefill]) {
            let can = &variant.capabilities;
            for layout in Layout::ALL.into_iter().filter(|layout| !can.layouts.contains(layout)) {
                let kv_dtype = if layout == Layout::Pairs { KvDtype::Bf16 } else { can.kv_dtypes[0] };
                let format = CacheFormat { dtype: can.dtypes[0], kv_dtype, layout };
                let look = looks::fitting(can, Look::plain(format, vec![(1, 20)]));
                let problem = Problem::new(1, &look);
                let error = problem.on(&device).unwrap().run(variant, 0..1, false).unwrap_err().to_string();
                assert!(error.starts_with(&format!("{} was called with {format}", variant.name)), "{error}");
            }
        }
    }
}
