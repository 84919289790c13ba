//! Every attention variant, on every device, with all its capabilities, against float64.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use attention_kernels::{
    BlockSparse, CacheFormat, Dtype, KvDtype, Latents, Layout, Operation, PARTITION, Variant, variants,
};
use device::Device;
use simd::Isa;
use trial::numbers::Random;
use trial::{Look, OnDevice, Problem, Results, UNTOUCHED};

use super::asked::{Asked, by_problem};
use super::devices::{self, variants_on};
use super::failures::{Fault, Looks, of_look, same_bits};
use super::looks;

const ATTENTION: [Operation; 2] = [Operation::Decode, Operation::Prefill];

/// Whether a variant is for latents alone, which are as wide as nine usual heads.
fn is_latent(variant: &Variant) -> bool {
    matches!(variant.capabilities.latent, Latents::Only(_))
}

/// Returns the looks of a variant with their numbers. A variant that launches the kernel of another, or has its bits, takes every third
/// in an ordinary run, because that one is tested with all, and so does one for latents.
fn looks_of(variant: &Variant) -> impl Iterator<Item = (u64, Look)> {
    let another_s = (variant.name, variant.operation) == (GENERIC, Operation::Decode);
    // The emulation has the source and, as its family promises, the bits of the native variant.
    let is_native = [Isa::Avx512Bf16, Isa::Amx].contains(&variant.capabilities.isa);
    let emulated = variant.capabilities.arithmetic.rounds() && !is_native;
    let (strength, step) = match testkit::everything() {
        true => (3, 1),
        false => (2, if another_s || emulated || is_latent(variant) { 3 } else { 1 }),
    };
    (0..).zip(looks::of(variant, strength)).step_by(step)
}

/// What the looks of one variant have shown.
#[derive(Default)]
struct Shown {
    problems: usize,
    seconds: f32,
    /// The greatest error in ulps for each type.
    greatest: [f64; 3],
}

/// Runs the looks of all of some variants on one device.
fn conform(
    device: &Arc<dyn Device>,
    other_order: Option<&Arc<dyn Device>>,
    variants: &[&'static Variant],
    failures: &mut Looks,
) {
    let mut shown: Vec<Shown> = variants.iter().map(|_| Shown::default()).collect();
    let asked = variants.iter().flat_map(|&variant| looks_of(variant).map(move |(seed, look)| (seed, look, variant)));
    for Asked { seed, look, settings, variants: asked } in by_problem(asked) {
        let problem = Problem::new(seed, &look);
        let (truth, on_device) = (problem.truth(), problem.on(device).unwrap());
        let elsewhere = other_order.map(|device| problem.on(device).unwrap());
        let alone = elsewhere.as_ref().unwrap_or(&on_device);
        for variant in asked {
            let begin = Instant::now();
            let ulps = failures.look(&**device, variant, &settings, || {
                let (lse, all) = (variant.capabilities.lse, 0..problem.batch.num_seqs());
                let got = on_device.run(variant, all.clone(), lse)?;
                let ulps = got.check(variant, &problem, &truth)?;
                if variant.capabilities.row_invariant.is_some() {
                    let one = Random::new(seed).below(all.end);
                    is_the_same_alone(variant, &problem, alone, one..one + 1, &got, lse)?;
                }
                Ok(ulps)
            });
            let shown = &mut shown[variants.iter().position(|one| std::ptr::eq(*one, variant)).unwrap()];
            let error = &mut shown.greatest[look.format.dtype as usize];
            *error = error.max(ulps.unwrap_or(f64::INFINITY));
            shown.problems += 1;
            shown.seconds += begin.elapsed().as_secs_f32();
        }
    }
    for (variant, Shown { problems, seconds, greatest }) in variants.iter().zip(shown) {
        let errors: Vec<String> =
            Dtype::ALL.iter().zip(greatest).filter(|e| e.1 > 0.0).map(|(t, e)| format!("{t} {e:.2}")).collect();
        println!(
            "{:<8} {:<8} {:<20} {problems:>5} problems  {seconds:>6.1} s  ulps at most: {}",
            device.name(),
            variant.operation.key(),
            variant.name,
            errors.join(", ")
        );
    }
}

/// Checks that a part of a batch has the same bits when it runs alone, and that other rows are not written.
pub fn is_the_same_alone(
    variant: &Variant,
    problem: &Problem,
    on_device: &OnDevice<'_>,
    seqs: Range<usize>,
    whole: &Results,
    lse: bool,
) -> Result<(), Fault> {
    let alone = on_device.run(variant, seqs.clone(), lse)?;
    let rows = problem.rows_of(seqs.start).start..problem.rows_of(seqs.end - 1).end;
    let what = format!("sequences {seqs:?} alone differ from the same in the batch");
    same_rows(&what, problem, alone.rows(problem, rows.clone()), whole.rows(problem, rows.clone()))?;
    for others in [0..rows.start, rows.end..problem.batch.num_rows()] {
        let (output, lse) = alone.rows(problem, others);
        let untouched = |len| vec![UNTOUCHED; len];
        let want = (&untouched(output.len())[..], &untouched(lse.len())[..]);
        same_rows("rows of other sequences were written", problem, (output, lse), want)?;
    }
    Ok(())
}

/// Compares the bits of the output and of the lse of some rows.
fn same_rows(what: &str, problem: &Problem, got: (&[u8], &[u8]), want: (&[u8], &[u8])) -> Result<(), Fault> {
    same_bits(what, problem.format.dtype, got.0, want.0)?;
    same_bits(&format!("{what} in the lse"), Dtype::F32, got.1, want.1)
}

/// Serves every head size, in decode and in prefill.
const GENERIC: &str = "cuda.generic";

pub fn every_claim_holds(pick: impl Fn(&Variant) -> bool) {
    let mut failures = Looks::default();
    for device in devices::all() {
        let other_order = if device.name() == "cuda-sim" { devices::sim(77) } else { None };
        let variants = variants_on(&*device, &ATTENTION).into_iter().filter(|variant| pick(variant));
        conform(&device, other_order.as_ref(), &variants.collect::<Vec<_>>(), &mut failures);
    }
}

#[test]
fn every_claim_of_the_cpu_variants_and_of_the_generic_kernel_holds() {
    every_claim_holds(|variant| variant.name == GENERIC || variant.capabilities.dtypes == [Dtype::F32]);
}

/// Rows of one task whose windows start on both sides of a partition's end: far more rows than in any look.
#[test]
fn a_window_that_starts_behind_a_partition_sees_nothing_of_it_and_bits_do_not_depend_on_chunks() {
    let device = device::open("cpu", Some(2)).unwrap();
    let mut failures = Looks::default();
    for (window, kv_dtype) in
        [1, 19, 90].into_iter().flat_map(|window| [(window, KvDtype::Same), (window, KvDtype::Bf16)])
    {
        let format = CacheFormat { dtype: Dtype::F32, kv_dtype, layout: Layout::Hnd };
        let look = Look {
            heads: (2, 2),
            dim: 16,
            window: Some(window),
            ..Look::plain(format, vec![(300, PARTITION + 200), (300, 317)])
        };
        let problem = Problem::new(window as u64, &look);
        let (on_device, truth) = (problem.on(&device).unwrap(), problem.truth());
        let takes_it = |variant: &&Variant| variant.capabilities.kv_dtypes.contains(&kv_dtype);
        let variants = variants_on(&*device, &[Operation::Prefill]).into_iter().filter(takes_it);
        let (settings, mut wanted) = (of_look(window as u64, &look), Vec::new());
        for variant in variants {
            let found = failures.look(&*device, variant, &settings, || {
                let got = on_device.run(variant, 0..2, false)?;
                got.check(variant, &problem, &truth)?;
                Ok(got)
            });
            wanted.extend(found.filter(|_| variant.capabilities.row_invariant.is_some()).map(|found| (variant, found)));
        }
        for chunk in chunks(&problem, 7) {
            let on_device = chunk.problem.on(&device).unwrap();
            for (variant, want) in &wanted {
                failures
                    .look(&*device, variant, &settings, || chunk.agrees(&on_device, variant, &problem, want, false));
            }
        }
    }
}

/// Models with recurrent layers have blocks of some thousand tokens.
#[test]
fn blocks_may_be_longer_than_partitions() {
    let mut failures = Looks::default();
    for device in devices::all() {
        let variants = variants_on(&*device, &ATTENTION).into_iter().filter(|variant| variant.name != HOPPER);
        let asked = variants.flat_map(|variant| {
            let can = &variant.capabilities;
            assert!((1..=256).all(|n| can.block_sizes.contain(16 * n)), "{}", variant.name);
            (0..).zip([528, 2048, 4096]).map(move |(i, block_size)| {
                let format = CacheFormat { dtype: can.dtypes[i % can.dtypes.len()], ..CacheFormat::default() };
                let rows = if variant.operation == Operation::Decode { 1 } else { 3 };
                let lens = vec![(rows, block_size + 5), (rows, 40)];
                let window = [None, Some(600)][i % 2];
                let look = Look { block_size, heads: (3, 1), window, ..Look::plain(format, lens) };
                (i as u64, looks::fitting(can, look), variant)
            })
        });
        for Asked { seed, look, settings, variants } in by_problem(asked) {
            let problem = Problem::new(seed, &look);
            let (on_device, truth) = (problem.on(&device).unwrap(), problem.truth());
            for variant in variants {
                failures.look(&*device, variant, &settings, || {
                    Ok(on_device.run(variant, 0..2, true)?.check(variant, &problem, &truth)?)
                });
            }
        }
    }
}

#[test]
fn every_claim_of_the_decode_kernels_holds() {
    every_claim_holds(|variant| {
        variant.operation == Operation::Decode
            && variant.capabilities.dtypes.contains(&Dtype::F16)
            && ![Some("cuda.tiles"), Some(GENERIC)].contains(&variant.capabilities.row_invariant)
            && !is_latent(variant)
    });
}

#[test]
fn every_claim_of_the_tensor_core_kernels_holds() {
    every_claim_holds(|variant| variant.capabilities.rounds_weights && !is_latent(variant) && variant.name != HOPPER);
}

#[test]
fn every_claim_of_the_latent_kernels_holds() {
    every_claim_holds(is_latent);
}

#[test]
fn every_claim_of_the_hopper_kernel_holds() {
    every_claim_holds(|variant| variant.name == HOPPER);
}

/// Two kernels have blocks of 128 rows, in halves. Tiles of the Hopper kernel have 128 tokens, and each of its two warpgroups a half.
#[test]
fn halves_of_a_block_may_see_different_tiles() {
    let cases = [
        // The first half sees tile 0 only, the second tile 1 only: the rows of one token each see themselves.
        ((2, 2), Some(1), (128, 192)),
        // The first starts a tile earlier, ends a tile earlier, or both.
        ((2, 2), Some(20), (128, 200)),
        ((16, 1), None, (8, 132)),
        ((16, 1), Some(4), (8, 134)),
        ((16, 1), Some(300), (8, 900)),
        // The second has no rows, or fewer than 64, and tiles wrap around the stages.
        ((16, 1), None, (4, 1200)),
        ((16, 1), Some(700), (5, 1413)),
        ((3, 3), None, (65, 65)),
        ((7, 1), Some(130), (30, 1025)),
    ];
    let mut failures = Looks::default();
    for seed in [0, 3, 77] {
        for device in devices::gpus(seed) {
            let mut found = variants_on(&*device, &[Operation::Prefill]);
            found.retain(|variant| [HOPPER, "cuda.prefill_128"].contains(&variant.name));
            for (variant, (i, (heads, window, lens))) in
                found.iter().flat_map(|variant| cases.into_iter().enumerate().map(move |case| (*variant, case)))
            {
                for sparse in [None, Some(SPARSE)] {
                    let dim = [64, 128][(i + usize::from(sparse.is_some()) + seed as usize) % 2];
                    let format = CacheFormat { dtype: Dtype::F16, ..CacheFormat::default() };
                    let block_size = [16, 32, 8][i % 3];
                    let look =
                        Look { heads, dim, window, sparse, block_size, ..Look::plain(format, vec![lens, (2, 140)]) };
                    failures.look(&*device, variant, &of_look(i as u64, &look), || {
                        let problem = Problem::new(i as u64, &look);
                        let got = problem.on(&device)?.run(variant, 0..2, true)?;
                        Ok(got.check(variant, &problem, &problem.truth())?)
                    });
                }
            }
        }
    }
}

/// A rule by which most partitions are skipped by some head.
const SPARSE: BlockSparse = BlockSparse {
    block_size: 32,
    local_blocks: 2,
    vertical_stride: 19,
    head_sliding_step: 3,
    first_head: 4,
    first_kv_head: 2,
};

const HOPPER: &str = "cuda.prefill_sm90";

pub fn variant(operation: Operation, name: &str) -> &'static Variant {
    variants(operation).into_iter().find(|variant| variant.name == name).unwrap()
}

const BORDERS: [usize; 6] =
    [PARTITION - 1, PARTITION, PARTITION + 1, 2 * PARTITION - 1, 2 * PARTITION, 2 * PARTITION + 1];

pub fn at_the_borders(dtype: Dtype, kv_dtype: KvDtype, window: Option<usize>, rows: usize) -> Look {
    let format = CacheFormat { dtype, kv_dtype, layout: Layout::Hnd };
    Look { window, ..Look::plain(format, BORDERS.iter().map(|&context| (rows, context)).collect()) }
}

#[test]
fn v1_and_v2_agree_in_every_bit_at_partition_borders() {
    for device in devices::gpus(3) {
        for (dtype, kv_dtype, window) in [
            (Dtype::F16, KvDtype::Same, None),
            (Dtype::Bf16, KvDtype::Fp8E4m3, None),
            (Dtype::F16, KvDtype::Int8, Some(600)),
        ] {
            let look = at_the_borders(dtype, kv_dtype, window, 1);
            let problem = Problem::new(8, &Look { sinks: kv_dtype != KvDtype::Same, ..look });
            let (on_device, truth, all) = (problem.on(&device).unwrap(), problem.truth(), 0..BORDERS.len());
            let v1 = variant(Operation::Decode, "cuda.paged_v1");
            let want = on_device.run(v1, all.clone(), true).unwrap();
            want.check(v1, &problem, &truth).unwrap();
            let got = on_device.run(variant(Operation::Decode, "cuda.paged_v2"), all.clone(), true).unwrap();
            assert_eq!(got, want, "{dtype}, cache {kv_dtype}, window {window:?}");
        }
    }
}

/// Contexts that find no space for partial results are computed by one thread block for each row and head.
#[test]
fn space_for_partial_results_changes_no_bit() {
    for device in devices::gpus(2) {
        let lens =
            vec![(1, 1300), (3, PARTITION + 2), (1, 90), (17, PARTITION + 8), (4, 2 * PARTITION + 1), (1, 0), (2, 700)];
        for (name, kv_dtype, dim) in [
            ("cuda.paged_v2", KvDtype::Same, 32),
            ("cuda.paged_gqa", KvDtype::Same, 80),
            ("cuda.paged_gqa", KvDtype::Int8PerToken, 192),
            ("cuda.generic", KvDtype::Same, 20),
        ] {
            let look = at_the_borders(Dtype::F16, kv_dtype, [None, Some(600)][dim / 32 % 2], 1);
            let look = Look { dim, heads: (18, 2), sinks: true, lens: lens.clone(), ..look };
            let (problem, variant) = (Problem::new(dim as u64, &look), variant(Operation::Decode, name));
            let all = 0..lens.len();
            let want = problem.with_partials(&device, 0).unwrap().run(variant, all.clone(), true).unwrap();
            want.check(variant, &problem, &problem.truth()).unwrap();
            for max_partials in [4, 13, 24, usize::MAX] {
                let got =
                    problem.with_partials(&device, max_partials).unwrap().run(variant, all.clone(), true).unwrap();
                assert_eq!(got, want, "{name} with space for {max_partials}");
            }
        }
    }
}

#[test]
fn variants_of_one_family_agree_in_every_bit_however_rows_are_cut_into_chunks() {
    families_agree(|_| true);
}

pub fn families_agree(pick: impl Fn(&Variant) -> bool) {
    let mut failures = Looks::default();
    for device in devices::all() {
        let mut compared = HashSet::new();
        for prefill in variants_on(&*device, &[Operation::Prefill]).into_iter().filter(|variant| pick(variant)) {
            let can = &prefill.capabilities;
            if can.row_invariant.is_none() {
                continue; // it claims nothing of the kind
            }
            let family: Vec<_> = variants_on(&*device, &ATTENTION)
                .into_iter()
                .filter(|variant| variant.capabilities.row_invariant == can.row_invariant && pick(variant))
                .collect();
            let cases = [
                Some((None, None, None)),
                (can.latent == Latents::Any).then_some((Some(40), None, None)),
                (can.block_sparse && !is_latent(prefill)).then_some((None, Some(SPARSE), None)),
                (can.window && !is_latent(prefill)).then_some((None, None, Some(19))),
            ];
            for (latent, sparse, window) in cases.into_iter().flatten() {
                let look = at_the_borders(can.dtypes[0], can.kv_dtypes[0], window, 5);
                let look = looks::fitting(can, Look { heads: (2, 1), sinks: can.sinks, latent, sparse, ..look });
                let lens = look.lens[..if is_latent(prefill) { 3 } else { BORDERS.len() }].to_vec();
                let (look, seqs) = (Look { lens: lens.clone(), ..look }, 0..lens.len());
                let mut settings = of_look(4, &look);
                // All of the family are compared with the first of it.
                if !compared.insert((can.row_invariant, settings.to_string())) {
                    continue;
                }
                let whole = Problem::new(4, &look);
                let want = failures.look(&*device, prefill, &settings, || {
                    let want = whole.on(&device)?.run(prefill, seqs.clone(), can.lse)?;
                    want.check(prefill, &whole, &whole.truth())?;
                    Ok(want)
                });
                let Some(want) = want else { continue };
                let rows: &[usize] = if is_latent(prefill) { &[2] } else { &[1, 2] };
                for chunk in rows.iter().flat_map(|rows| chunks(&whole, *rows)) {
                    let on_device = chunk.problem.on(&device).unwrap();
                    for variant in &family {
                        failures.look(&*device, variant, &settings, || {
                            chunk.agrees(&on_device, variant, &whole, &want, can.lse)
                        });
                    }
                }
                let suits =
                    |layout: &Layout| layout.suits(can.kv_dtypes[0], 16, whole.shape.head_dim, whole.latent.is_some());
                for layout in can.layouts.iter().copied().filter(suits) {
                    let mut ordered = whole.clone();
                    ordered.format.layout = layout;
                    settings["layout"] = layout.to_string().into();
                    let (on_device, all) = (ordered.on(&device).unwrap(), 0..whole.batch.num_rows());
                    let takes_it = |variant: &&&Variant| {
                        variant.operation == Operation::Prefill && variant.capabilities.layouts.contains(&layout)
                    };
                    for variant in family.iter().filter(takes_it) {
                        failures.look(&*device, variant, &settings, || {
                            let got = on_device.run(variant, seqs.clone(), can.lse)?;
                            let got = got.rows(&ordered, all.clone());
                            same_rows(
                                "another layout or variant has other bits",
                                &whole,
                                got,
                                want.rows(&whole, all.clone()),
                            )
                        });
                    }
                }
            }
        }
    }
}

/// Some rows of each sequence, over the same cache.
struct Chunk {
    problem: Problem,
    /// The rows, counted from the first of their sequence.
    rows: Range<usize>,
}

/// Cuts the rows of each sequence, of which all have as many, into chunks.
fn chunks(whole: &Problem, rows: usize) -> impl Iterator<Item = Chunk> {
    let of_all = whole.rows_of(0).len();
    (0..of_all).step_by(rows).map(move |first| {
        let rows = first..of_all.min(first + rows);
        let seqs = whole.batch.num_seqs();
        let mut problem = Problem { query: Vec::new(), ..whole.clone() };
        problem.batch.query_starts = (0..=seqs).map(|seq| (seq * rows.len()) as u32).collect();
        for seq in 0..seqs {
            problem.batch.context_lens[seq] = whole.batch.context_lens[seq] - (of_all - rows.end) as u32;
            let from = (whole.rows_of(seq).start + first) * whole.width();
            problem.query.extend_from_slice(&whole.query[from..from + rows.len() * whole.width()]);
        }
        Chunk { problem, rows }
    })
}

impl Chunk {
    /// Checks that a variant gives these rows the bits that they have in the whole.
    fn agrees(
        &self,
        on_device: &OnDevice<'_>,
        variant: &Variant,
        whole: &Problem,
        want: &Results,
        lse: bool,
    ) -> Result<(), Fault> {
        let Chunk { problem, rows } = self;
        let got = on_device.run(variant, 0..problem.batch.num_seqs(), lse)?;
        for seq in 0..problem.batch.num_seqs() {
            let start = whole.rows_of(seq).start;
            let what = format!("rows {rows:?} of sequence {seq} as a chunk differ");
            let want = want.rows(whole, start + rows.start..start + rows.end);
            same_rows(&what, whole, got.rows(problem, problem.rows_of(seq)), want)?;
        }
        Ok(())
    }
}

#[test]
fn a_mixed_batch_goes_to_two_kernels_that_write_only_their_own_rows() {
    for device in devices::gpus(0) {
        let look = Look {
            lens: vec![(1, 70), (1, 0), (1, 5), (40, 60), (9, 9)],
            ..at_the_borders(Dtype::F16, KvDtype::Same, None, 1)
        };
        let problem = Problem::new(6, &look);
        let (on_device, truth) = (problem.on(&device).unwrap(), problem.truth());
        let [decode, prefill] =
            [variant(Operation::Decode, "cuda.paged_gqa"), variant(Operation::Prefill, "cuda.paged_prefill")];
        let mut first = on_device.run(decode, 0..3, true).unwrap();
        let second = on_device.run(prefill, 3..5, true).unwrap();
        let (untouched, _) = second.rows(&problem, 0..3);
        assert!(untouched.iter().all(|byte| *byte == UNTOUCHED));
        let (decoded, heads) = (3 * problem.width() * 2, 3 * problem.num_heads * 4);
        first.output[decoded..].copy_from_slice(&second.output[decoded..]);
        if let (Some(to), Some(from)) = (&mut first.lse, &second.lse) {
            to[heads..].copy_from_slice(&from[heads..]);
        }
        first.check(prefill, &problem, &truth).unwrap();
    }
}
