//! What the kernels for GPUs read, write and compute, counted on the simulator.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use attention_kernels::{BlockSparse, CacheFormat, Dtype, KvDtype, Operation, Rewritten, variants};
use device::sim::{Counts, Tally};
use device::{Device, Options};
use linear::{Codes, Offset, Purpose, Rounding, Scale, StoredFormat};
use testkit::kernels::host::{self, SOME_HEAD_SIZES};
use trial::{Look, Problem};

/// A device that counts, with kernels for bf16, and for 8-bit caches those of grouped decode.
fn counting() -> Option<(Arc<dyn Device>, Arc<Tally>)> {
    static FOLDER: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || {
        host::counts_for_tests("attention_kernels", "conformance", |unit| {
            let is_one_of = |kind: &str| unit.macros.iter().all(|name| name.ends_with(kind));
            let wanted = is_one_of("_BF16") && !unit.name.contains("generic")
                || is_one_of("_BF16_KV8") && unit.name.contains("paged_gqa");
            unit.macros.push(SOME_HEAD_SIZES.to_owned());
            wanted
        })
    };
    let kernels = FOLDER.get_or_init(build).clone()?;
    let tally = Arc::<Tally>::default();
    let options = Options { kernels: Some(kernels), counts: Some(Arc::clone(&tally)), ..Options::default() };
    Some((device::open_with("cuda-sim", &options).unwrap(), tally))
}

fn look(heads: (usize, usize), dim: usize, lens: Vec<(usize, usize)>) -> Look {
    let format = CacheFormat { dtype: Dtype::Bf16, ..CacheFormat::default() };
    Look { heads, dim, block_size: 16, ..Look::plain(format, lens) }
}

/// Counts a call of a variant, by the beginning of the kernel's name up to its type.
fn count(operation: Operation, name: &str, look: &Look) -> Option<BTreeMap<String, Counts>> {
    let (device, tally) = counting()?;
    let problem = Problem::new(1, look);
    let on_device = problem.on(&device).unwrap();
    let variant = variants(operation).into_iter().find(|variant| variant.name == name).unwrap();
    let mut output = on_device.output().unwrap();
    tally.take();
    on_device.call(variant, 0..problem.batch.num_seqs(), &mut output, None).unwrap();
    let kernel = |name: &str| name.split("_bf16").next().unwrap().to_owned();
    Some(tally.take().into_iter().map(|(name, (_, counts))| (kernel(&name), counts)).collect())
}

/// Bytes of the keys and values that the sequences of a look have.
fn cache_bytes(look: &Look) -> u64 {
    let tokens: usize = look.lens.iter().map(|(_, context)| context).sum();
    (2 * tokens * look.heads.1 * look.dim * 2) as u64
}

#[test]
fn grouped_decode_reads_each_key_and_value_once_whatever_the_group() {
    let groups = [((2, 2), 1), ((6, 2), 1), ((16, 1), 1), ((8, 2), 1), ((8, 2), 4), ((2, 2), 16), ((6, 2), 5)];
    for (i, (heads, rows)) in groups.into_iter().enumerate() {
        // Several rows of 64 elements would be more than a hundredth of the keys and values of a partition.
        let dim = if rows > 1 { 128 } else { [64, 128, 256][i % 3] };
        let look = look(heads, dim, vec![(rows, 1024), (rows, 1500)]);
        let Some(counts) = count(Operation::Decode, "cuda.paged_gqa", &look) else { return };
        let (gqa, cache) = (counts["paged_gqa"], cache_bytes(&look));
        assert!(gqa.distinct_read_bytes >= cache, "{heads:?} of {dim}: {gqa:?}");
        let times = gqa.read_bytes as f64 / gqa.distinct_read_bytes as f64;
        assert!(times <= 1.05, "{heads:?} of {dim}: {times} times the distinct bytes");
        assert_eq!(gqa.bank_conflicts, 0, "{heads:?} of {dim}");
        assert_eq!(gqa.busy_blocks, gqa.blocks, "a block without work");
    }
}

/// Where each token has scales of its own, both are read with it, and its block once more for their place.
#[test]
fn caches_in_8_bits_are_read_in_half_of_the_bytes() {
    for dim in [64, 128, 256] {
        let of = |kv_dtype| {
            let look = look((8, 2), dim, vec![(1, 1024), (1, 1500)]);
            let look = Look { format: CacheFormat { kv_dtype, ..look.format }, ..look };
            count(Operation::Decode, "cuda.paged_gqa", &look).map(|counts| counts["paged_gqa"])
        };
        let Some(halves) = of(KvDtype::Same) else { return };
        for (kv_dtype, scales) in [
            (KvDtype::Fp8E4m3, 0),
            (KvDtype::Fp8E5m2, 0),
            (KvDtype::Int8, 0),
            (KvDtype::Int8PerToken, 3 * 2 * 2524 * 4),
        ] {
            let Some(bytes) = of(kv_dtype) else { return };
            // Each of 4 warps, of 2 for wide heads, reads the query of the 10 units for itself; tables are those of 16 bits.
            let (cache, warps) = (2 * 2524 * 2 * dim as u64, if dim > 128 { 2 } else { 4 });
            let queries = 10 * (warps - 1) * 4 * dim as u64 * 2;
            assert_eq!(bytes.read_bytes, halves.read_bytes - cache + queries + scales, "{kv_dtype}, {dim}");
            let of_scales = if scales > 0 { 2 * 2 * 2524 * 4 } else { 0 };
            let distinct = halves.distinct_read_bytes - cache + of_scales;
            assert_eq!(bytes.distinct_read_bytes, distinct, "{kv_dtype}, {dim}");
            // Eight lanes store 128 bytes: two rows of 64 with 16 between them, of which the last are in the banks of the first.
            let stores = 2 * 80 * if dim == 64 { 32 } else { 0 };
            assert_eq!(bytes.bank_conflicts, stores, "{kv_dtype}, {dim}");
            assert_eq!(bytes.products, halves.products, "{kv_dtype}, {dim}");
        }
    }
}

#[test]
fn grouped_decode_multiplies_whole_tiles_and_waits_three_times_for_each() {
    let look = look((8, 2), 128, vec![(1, 700), (1, 40)]);
    let Some(counts) = count(Operation::Decode, "cuda.paged_gqa", &look) else { return };
    let gqa = counts["paged_gqa"];
    // Of 64 tokens: 8 in the first partition of the first sequence, 3 in its second, 1 in the other sequence; 2 KV heads.
    let tiles = 2 * (8 + 3 + 1);
    // For 16 rows: 8 steps over the head for 8 columns of tokens, 4 steps over the tokens for 16 columns of the head, and the
    // sum of the weights in each of 4 warps.
    assert_eq!(gqa.products, tiles * (8 * 8 + 4 * 16 + 4 * 4));
    // One for the query, and one for the places of the first tile.
    assert_eq!(gqa.barriers, 4 * tiles + 2 * 2 * 3);
    // The sums of two partitions, and the output of the sequence that is not split.
    let partials = 2 * 8 * (128 + 2) * 4;
    assert_eq!(gqa.written_bytes, partials + 8 * 128 * 2);
    let reduce = counts["paged_reduce"];
    assert_eq!((reduce.blocks, reduce.busy_blocks), (16, 8));
    assert_eq!(reduce.written_bytes, 8 * 128 * 2);
}

/// As many blocks share a context as the device runs at once.
#[test]
fn a_short_context_alone_is_read_by_as_many_blocks_as_run_at_once() {
    let Some((device, tally)) = counting() else { return };
    let problem = Problem::new(1, &look((8, 2), 128, vec![(1, 512)]));
    let variant = variants(Operation::Decode).into_iter().find(|variant| variant.name == "cuda.paged_gqa").unwrap();
    let of_device = variant.items_at_once(&*device, problem.format, problem.shape, 8).unwrap();
    for (at_once, parts) in [(0, 1), (2, 2), (9, 8), (of_device, 8)] {
        let on_device = problem.on(&device).unwrap().split_for(at_once).unwrap();
        let mut output = on_device.output().unwrap();
        tally.take();
        on_device.call(variant, 0..1, &mut output, None).unwrap();
        let counts = tally.take();
        let (_, gqa) = &counts["paged_gqa_bf16_h128"];
        assert_eq!((gqa.blocks, gqa.busy_blocks), (2 * parts, 2 * parts), "{at_once} items");
        // Tiles are the same; a block waits for its query and for its first places.
        assert_eq!((gqa.products, gqa.barriers), (2 * 8 * (8 * 8 + 4 * 16 + 4 * 4), 2 * (4 * 8 + 2 * parts)));
    }
}

#[test]
fn a_latent_is_read_once_for_64_heads_as_key_and_as_value() {
    for (name, kernel, rows, heads) in
        [("cuda.latent_64", "latent_decode_64", 64, 128), ("cuda.latent_16", "latent_decode_16", 16, 32)]
    {
        let look = Look { latent: Some(512), ..look((heads, 1), 576, vec![(1, 1024), (1, 700)]) };
        let Some(counts) = count(Operation::Decode, name, &look) else { return };
        let (latent, groups) = (counts[kernel], (heads / rows) as u64);
        // Each partition reads its query, too.
        let (cache, query) = (cache_bytes(&look) / 2, (heads * 576 * 2) as u64);
        let times = (latent.read_bytes - 4 * query) as f64 / (groups * cache) as f64;
        assert!((1.0..1.02).contains(&times), "{name}: {times} times the latents for {rows} heads");
        let others = latent.distinct_read_bytes - cache - 2 * query;
        assert!(others < cache / 100, "{name}: {others} bytes of neither latents nor queries");
        assert_eq!((latent.bank_conflicts, latent.busy_blocks), (0, latent.blocks), "{name}");
        // Tiles of 32 tokens. 16 rows take 36 steps over the key for 4 columns of tokens, 2 steps over the tokens for 64 columns of the
        // value, and the sum of the weights in each warp of the rows.
        let (tiles, warps) = (groups * (16 + 16 + 16 + 6), if rows == 64 { 2 } else { 4 });
        assert_eq!(latent.products, tiles * (rows as u64 / 16) * (36 * 4 + 2 * (64 + warps)), "{name}");
        // One for the places of the first tile, and one where a unit may find shared memory divided otherwise.
        assert_eq!(latent.barriers, 3 * tiles + groups * 4 * if rows == 64 { 2 } else { 1 }, "{name}");
        assert_eq!(latent.written_bytes, (4 * heads * (512 + 2) * 4) as u64, "{name}");
    }
}

#[test]
fn short_contexts_need_one_launch_and_no_partial_results() {
    let look = look((8, 2), 128, vec![(1, 512), (1, 1), (1, 0), (1, 300)]);
    for name in ["cuda.paged_gqa", "cuda.paged_v2"] {
        let Some(counts) = count(Operation::Decode, name, &look) else { return };
        assert_eq!(counts.len(), 1, "{counts:?}");
        let of = counts.values().next().unwrap();
        assert_eq!(of.written_bytes, 4 * 8 * 128 * 2, "the output and nothing else: {of:?}");
    }
}

#[test]
fn decode_by_rows_reads_the_cache_once_for_each_query_head() {
    let look = look((8, 2), 128, vec![(1, 700), (1, 1024), (1, 90)]);
    for name in ["cuda.paged_v1", "cuda.paged_v2"] {
        let Some(counts) = count(Operation::Decode, name, &look) else { return };
        let (decode, cache) = (counts["paged_decode"], cache_bytes(&look));
        let heads_of_group = decode.read_bytes as f64 / cache as f64;
        assert!((4.0..4.2).contains(&heads_of_group), "{name}: {heads_of_group} times the cache");
        assert_eq!(decode.busy_blocks, decode.blocks, "{name}");
    }
}

/// As Phi-3-small: a head sees one block in eight, and the heads of a KV head different ones.
#[test]
fn blocks_that_no_head_sees_are_not_read() {
    let sparse = BlockSparse {
        block_size: 64,
        local_blocks: 4,
        vertical_stride: 8,
        head_sliding_step: 1,
        first_head: 0,
        first_kv_head: 0,
    };
    let (context, group) = (2048, 4);
    let look = Look { sparse: Some(sparse), ..look((8, 2), 128, vec![(1, context)]) };
    let seen = |heads: Range<usize>, kv_head| -> usize {
        sparse.heads(heads, kv_head).runs(context - 1, 0..context).map(|run| run.len()).sum()
    };
    let of_groups: usize = (0..2).map(|kv_head| seen(kv_head * group..(kv_head + 1) * group, kv_head)).sum();
    let of_heads: usize = (0..8).map(|head| seen(head..head + 1, head / group)).sum();
    assert!(of_groups < 2 * context * 2 / 3 && of_heads < 8 * context / 4, "{of_groups} and {of_heads}");
    let bytes_of_token = 2 * 128 * 2;
    for (name, kernel, tokens, distinct) in [
        ("cuda.paged_gqa", "paged_gqa", of_groups, of_groups),
        ("cuda.paged_v1", "paged_decode", of_heads, of_groups),
        ("cuda.paged_v2", "paged_decode", of_heads, of_groups),
    ] {
        let Some(counts) = count(Operation::Decode, name, &look) else { return };
        let of = counts[kernel];
        let [read, distinct_read] = [(of.read_bytes, tokens), (of.distinct_read_bytes, distinct)]
            .map(|(bytes, tokens)| bytes as f64 / (tokens * bytes_of_token) as f64);
        // Each partition of v2 reads the query and the table too.
        assert!((1.0..1.1).contains(&read), "{name}: {read} times the tokens that heads see");
        assert!((1.0..1.02).contains(&distinct_read), "{name}: {distinct_read}");
    }
}

#[test]
fn prefill_reads_the_cache_once_for_64_rows() {
    // 128 rows of 4 heads are 8 tiles, of which each sees 8 tokens more than the one before, and the last 64 sees 256.
    let look = look((8, 2), 128, vec![(128, 256)]);
    let Some(counts) = count(Operation::Prefill, "cuda.paged_prefill", &look) else { return };
    let prefill = counts["paged_prefill"];
    let seen: usize = (0..8).map(|tile| 128 + 16 * (tile + 1)).sum();
    let cache = (2 * seen * 2 * 128 * 2) as f64;
    let queries = (128 * 8 * 128 * 2) as f64;
    let ratio = prefill.read_bytes as f64 / (cache + queries);
    assert!((1.0..1.05).contains(&ratio), "{ratio} times the keys and values that 64 rows see");
    assert_eq!(prefill.bank_conflicts, 0);
    assert_eq!((prefill.blocks, prefill.busy_blocks), (18, 16), "one more block for each sequence and KV head");
    // A tile has 64 tokens. Of the blocks of a KV head, four need 3 tiles and four need 4.
    let tiles = 2 * (4 * 3 + 4 * 4);
    // A warp has 16 rows: 8 steps over the head for 8 columns of tokens, 4 steps over the tokens for 16 columns and the weights' sum.
    assert_eq!(prefill.products, tiles * 4 * (8 * 8 + 4 * 17));
    // A weight of each row and token, and two factors of each lane.
    assert_eq!(prefill.exponentials, tiles * (64 * 64 + 2 * 128));
    // Two for the keys and two for the values of a tile, and one for the first places of a block.
    assert_eq!(prefill.barriers, 4 * tiles + 16);
}

#[test]
fn prefill_with_32_rows_a_warp_reads_the_cache_once_for_128_rows() {
    // As above, in 4 blocks for each KV head, of which each sees 32 tokens more than the one before.
    let look = look((8, 2), 128, vec![(128, 256)]);
    let Some(counts) = count(Operation::Prefill, "cuda.prefill_128", &look) else { return };
    let prefill = counts["prefill_128"];
    let seen: usize = (0..4).map(|tile| 128 + 32 * (tile + 1)).sum();
    let (cache, queries) = (2 * seen * 2 * 128 * 2, 128 * 8 * 128 * 2);
    let ratio = prefill.read_bytes as f64 / (cache + queries) as f64;
    assert!((1.0..1.05).contains(&ratio), "{ratio} times the keys and values that 128 rows see");
    assert_eq!(prefill.bank_conflicts, 0);
    assert_eq!((prefill.blocks, prefill.busy_blocks), (10, 8), "one more block for each sequence and KV head");
    // Two blocks of a KV head need 3 tiles and two need 4.
    let tiles = 2 * (2 * 3 + 2 * 4);
    assert_eq!(prefill.products, tiles * 2 * 4 * (8 * 8 + 4 * 17));
    assert_eq!(prefill.exponentials, tiles * (128 * 64 + 4 * 128));
    // Each block waits once for its query rows and once for its first addresses, and for each tile twice for keys and twice for values.
    assert_eq!(prefill.barriers, 4 * tiles + 2 * 8);
}

#[test]
fn hopper_prefill_reads_the_cache_once_for_128_rows_and_both_warpgroups_take_a_turn_for_each_tile() {
    // 128 rows of 4 heads are 4 blocks for each KV head, of which each sees 32 tokens more than the one before. The tokens are
    // whole cache blocks, so boxes load all of them.
    let look = look((8, 2), 128, vec![(128, 320)]);
    let Some(counts) = count(Operation::Prefill, "cuda.prefill_sm90", &look) else { return };
    let prefill = counts["prefill_sm90"];
    let seen = [224, 256, 288, 320];
    let cache = 2 * seen.iter().sum::<u64>() * 2 * 128 * 2;
    let queries = 128 * 8 * 128 * 2;
    let ratio = prefill.read_bytes as f64 / (cache + queries) as f64;
    assert!((1.0..1.05).contains(&ratio), "{ratio} times the keys and values that 128 rows see");
    assert_eq!((prefill.blocks, prefill.busy_blocks), (10, 8));
    // A tile has 128 tokens: the first two blocks need two, the others three.
    let tiles: [u64; 4] = [2, 2, 3, 3];
    let of_warpgroups = 2 * 2 * tiles.iter().sum::<u64>();
    assert_eq!(prefill.warpgroup_products, of_warpgroups * (8 + 8));
    assert_eq!(prefill.exponentials, of_warpgroups * (64 * 128 + 2 * 128));
    // The start, the two queries, and a turn of each warpgroup for each tile except the first of all. Each of their 8 warps waits
    // for two products of a tile and meets before it frees keys and values. The last tile of three blocks has tokens without a box.
    let barriers: u64 = tiles.iter().map(|tiles| 1 + 2 + 2 * tiles - 1 + 8 * (2 + 2) * tiles).sum();
    assert_eq!(prefill.barriers, 2 * (barriers + 3));
}

#[test]
fn codes_are_read_once_for_up_to_sixteen_rows_and_only_by_experts_that_have_rows() {
    let Some((device, tally)) = counting() else { return };
    let (n, k, dtype) = (128, 1024, Dtype::Bf16);
    let integers = |bits, zero| Codes::Integers { bits, zero };
    let forms = [
        StoredFormat { codes: integers(4, 0), group: 128, scale: Scale::F16, offset: Offset::ZeroPoint },
        StoredFormat { codes: integers(8, 128), group: 32, scale: Scale::F16, offset: Offset::None },
        StoredFormat { codes: Codes::E4m3, group: 128, scale: Scale::F32, offset: Offset::None },
    ];
    for format in forms {
        let weights = super::linear::random_codes(&*device, dtype, format, [n, k], Purpose::Product);
        for rows in [1, 8, 9, 16] {
            tally.take();
            super::linear::multiply(&*device, &weights, &vec![0.5; rows * k], None, dtype, None);
            let (launches, counts) = tally.take().pop_first().unwrap().1;
            // Each block reads the rows of x and writes its outputs.
            let others = ((n / 16 * k + n) * rows * 2) as u64;
            let ratio = (counts.sectors * 32 - others) as f64 / weights.bytes() as f64;
            assert!((1.0..=1.05).contains(&ratio), "{format:?}, {rows} rows: {ratio} times the stored bytes");
            assert_eq!(counts.products, (n / 16 * k / 16 * rows.div_ceil(8)) as u64);
            assert_eq!((counts.barriers, launches), (counts.blocks, 1));
            // Where a warp adds the sums of two rows of 16 outputs, four of each lie in the same banks.
            let of_two_rows = counts.blocks * (rows as u64 / 2) * 8;
            assert_eq!(counts.bank_conflicts, of_two_rows, "{rows} rows");
        }
    }
    // 2 of 9 experts, of 128 outputs each, compute a row.
    let weights = super::linear::random_codes(&*device, dtype, forms[0], [9 * n, k], Purpose::Stack(n));
    tally.take();
    super::linear::of_experts(&*device, &weights, (&vec![0.5; k], &vec![0.5; 9 * n]), (&[7, 2], 9, 2), false);
    let counts = tally.take().pop_first().unwrap().1.1;
    assert_eq!((counts.blocks, counts.busy_blocks), (2 * 8, 2 * 8));
    let ratio = counts.distinct_read_bytes as f64 / (weights.bytes() * 2 / 9 + k * 2) as f64;
    assert!((1.0..=1.05).contains(&ratio), "{ratio} times the codes of two experts");
}

/// Sectors of 32 bytes that a kernel for Hopper takes for products of `blocks` blocks of 128 outputs and `rows` rows with k inputs, without
/// those of the weights: their boxes of x and the outputs of `stored` rows.
fn sectors_beside_weights(blocks: usize, [rows, stored]: [usize; 2], k: usize) -> u64 {
    (blocks * (rows * k + stored * 128) * 2 / 32) as u64
}

#[test]
fn hopper_reads_and_unpacks_codes_once_for_a_block_of_rows_and_rows_once_for_128_outputs() {
    let Some((device, tally)) = counting() else { return };
    let (n, k, dtype) = (256, 512, Dtype::Bf16);
    let integers = |bits, zero| Codes::Integers { bits, zero };
    let none = |codes, group, scale| StoredFormat { codes, group, scale, offset: Offset::None };
    for (format, form) in [
        (none(integers(4, 8), 32, Scale::F16), "split4"),
        (StoredFormat { offset: Offset::ZeroPoint, ..none(integers(4, 0), 128, Scale::Bf16) }, "narrow4"),
        (none(integers(8, 128), 32, Scale::F16), "codes8"),
    ] {
        let weights = super::linear::random_codes(&*device, dtype, format, [n, k], Purpose::Product);
        for (rows, size) in [(33, 64), (64, 64), (100, 128), (200, 256)] {
            let mut space = super::rewritten::scratch(&*device, Rewritten::Order, [n, k], rows);
            tally.take();
            super::linear::multiply(&*device, &weights, &vec![0.5; rows * k], None, dtype, Some(&mut space));
            let mut counted = tally.take();
            let (_, order) = counted.remove("order_rows").unwrap();
            let x = (rows * k * 2) as u64;
            assert_eq!((order.distinct_read_bytes, order.written_bytes), (x, x));
            // A warp of the last block may read one more.
            assert!(order.sectors * 32 <= 2 * x + 8 * 32, "{rows} rows: {} sectors", order.sectors);
            let (launches, counts) = counted.remove(&format!("linear_sm90_{form}_bf16_{size}")).unwrap();
            assert!(counted.is_empty() && launches == 1, "{counted:?}");
            let others = sectors_beside_weights(n / 128, [size, rows], k);
            let ratio = (counts.sectors - others) as f64 * 32.0 / weights.bytes() as f64;
            // Scales and zero points of a group of 128 are loaded for both of its tiles.
            assert!((1.0..=1.1).contains(&ratio), "{form}, {rows} rows: {ratio} times the stored bytes");
            assert_eq!((counts.blocks, counts.busy_blocks, counts.bank_conflicts), (2, 2, 0), "{form}, {rows} rows");
            // Each product of 64 outputs and 16 inputs has codes that were unpacked for it.
            assert_eq!(counts.warpgroup_products, (n / 64 * k / 16) as u64, "{form}, {rows} rows");
        }
    }
}

#[test]
fn grouped_experts_read_and_unpack_the_codes_of_those_that_have_rows_once_for_each_block_of_their_rows() {
    let Some((device, tally)) = counting() else { return };
    let (n, k, dtype, experts) = (256, 512, Dtype::Bf16, 9);
    let codes = Codes::Integers { bits: 4, zero: 8 };
    let format = StoredFormat { codes, group: 32, scale: Scale::F16, offset: Offset::None };
    let weights = super::linear::random_codes(&*device, dtype, format, [experts * n, k], Purpose::Stack(n));
    // Three experts of very different numbers of rows; all of them alike; many rows of all but one.
    let few: Vec<u32> = (0..121).map(|a| if a < 100 { 2 } else { 5 + 2 * u32::from(a > 100) }).collect();
    let alike: Vec<u32> = (0..360).map(|a| a % 9).collect();
    let many: Vec<u32> = (0..640).map(|a| a * 5 % 8).collect();
    for (chosen, size) in [(few, 16), (alike, 64), (many, 128)] {
        tally.take();
        let x = vec![0.5; chosen.len() * k];
        super::linear::of_experts(&*device, &weights, (&x, &vec![0.5; experts * n]), (&chosen, experts, 1), true);
        let mut counted = tally.take();
        let (_, counts) = counted.remove(&format!("experts_sm90_split4_bf16_{size}")).unwrap();
        let (_, order) = counted.remove("order_rows").unwrap();
        assert!(counted.is_empty(), "{counted:?}");
        assert_eq!(order.written_bytes, (chosen.len() * k * 2) as u64, "each row once");
        let of = |expert| chosen.iter().filter(|c| **c == expert).count();
        let parts: usize = (0..experts as u32).map(|expert| of(expert).div_ceil(size)).sum();
        let blocks = parts * n / 128;
        assert_eq!((counts.busy_blocks, counts.bank_conflicts), (blocks as u64, 0));
        assert_eq!(counts.warpgroup_products, (2 * blocks * k / 16) as u64);
        assert_eq!(counts.written_bytes, (chosen.len() * n * 2) as u64, "each result once");
        let stored = (chosen.len() * n * 2 / 32) as u64;
        // Each of 8 warps reads the places of four rows of y at once.
        let places = (8 * chosen.len() * n / 128 / 4) as u64;
        let others = sectors_beside_weights(blocks, [size, 0], k) + stored + places;
        // Blocks look for their part and add biases.
        let codes = (parts * weights.bytes() / experts) as f64 / 32.0;
        let ratio = (counts.sectors - others) as f64 / codes;
        assert!((1.0..=1.1).contains(&ratio), "{size} rows: {ratio} times the codes of parts");
    }
}

#[test]
fn unpacking_reads_codes_once_and_rounding_reads_rows_twice() {
    let Some((device, tally)) = counting() else { return };
    let (n, k, dtype) = (128, 1024, Dtype::Bf16);
    let (codes, group) = (Codes::Integers { bits: 4, zero: 8 }, 128);
    let format = StoredFormat { codes, group, scale: Scale::Bf16, offset: Offset::None };
    let weights = super::linear::random_codes(&*device, dtype, format, [n, k], Purpose::Product);
    let rows = 65;
    let mut space = super::rewritten::scratch(&*device, Rewritten::Weights, [n, k], rows);
    tally.take();
    super::linear::multiply(&*device, &weights, &vec![0.5; rows * k], None, dtype, Some(&mut space));
    let mut counted = tally.take();
    let (launches, counts) = counted.remove("unpack_narrow4_bf16").unwrap();
    assert!(counted.is_empty() && launches == 1, "{counted:?}");
    // The scales of a group are loaded for each 32 inputs.
    let ratio = (counts.sectors * 32 - counts.written_bytes) as f64 / weights.bytes() as f64;
    assert!((1.0..=1.12).contains(&ratio), "{ratio} times the stored bytes");
    assert_eq!(counts.distinct_read_bytes, weights.bytes() as u64);
    assert_eq!((counts.written_bytes, counts.distinct_written_bytes), (2 * (n * k) as u64, 2 * (n * k) as u64));
    assert_eq!((counts.busy_blocks, counts.bank_conflicts, counts.barriers), (counts.blocks, 0, 0));

    let rows = 3;
    let rounding = Rounding::Row;
    let format = StoredFormat { codes: Codes::Integers { bits: 8, zero: 128 }, group: k, scale: Scale::F32, ..format };
    let part = crate::weights::Random::new(format, n, k, 1);
    let weights = super::rewritten::matrix(&*device, dtype, &[(&part, rounding)], k);
    let mut space = super::rewritten::scratch(&*device, Rewritten::Rows, [n, k], rows);
    tally.take();
    super::linear::multiply(&*device, &weights, &vec![0.5; rows * k], None, dtype, Some(&mut space));
    let mut counted = tally.take();
    let (_, counts) = counted.remove("round_rows_bf16").unwrap();
    let x = (rows * k * 2) as u64;
    assert_eq!((counts.read_bytes, counts.distinct_read_bytes), (2 * x, x));
    assert_eq!((counts.written_bytes, counts.barriers), ((rows * (k + 4)) as u64, rows as u64));
    let (_, counts) = counted.remove("scale_rows_bf16").unwrap();
    // For four outputs a lane reads their sums, their scales and the scale of the row.
    assert_eq!(counts.read_bytes, (rows * n / 4 * (16 + 16 + 4)) as u64);
    assert_eq!((counts.written_bytes, counts.barriers), ((rows * n * 2) as u64, 0));
    // A warp has the numbers of one row, and each request is whole sectors.
    let sectors = rows * n / 128 * (16 + 16 + 1 + 8);
    assert_eq!((counts.requests, counts.sectors), ((rows * n / 128 * 4) as u64, sectors as u64));
    assert!(counted.is_empty(), "{counted:?}");
}
