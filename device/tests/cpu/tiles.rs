//! Products of bfloat16 tiles: one definition of every bit, on every instruction set, with AMX and without.

use device::gemm::{Arithmetic, PackedMatrix};
use device::simd::tiles::trial::{self, NUM_KINDS, Random};
use device::simd::tiles::{Emulated, Tile};
use device::{Dtype, Isa, Pool};
use proptest::prelude::*;
use testkit::everything;

use super::gemm::run;
use super::rounded::{check_against_exact, packed};
use super::{report_unavailable, tile_isas, values};

/// FNV-1a hash of [`recorded`] as an Emerald Rapids computes it.
const RECORDED: u64 = 0x1769_d206_c47a_587c;

/// Calls `multiply` with rows and operands of many random products, and returns a hash of all results.
fn recorded(mut multiply: impl FnMut(usize, &[Tile; 3]) -> Tile) -> u64 {
    let (random, mut hash) = (&mut Random(5), 0xcbf2_9ce4_8422_2325u64);
    for i in 0..60 * NUM_KINDS {
        let rows = if i % 4 == 0 { 1 + random.bits() as usize % 16 } else { 16 };
        let out = multiply(rows, &trial::operands(random, i % NUM_KINDS));
        out.iter()
            .flat_map(|line| line.0)
            .for_each(|word| hash = (hash ^ u64::from(word)).wrapping_mul(0x100_0000_01b3));
    }
    hash
}

#[test]
fn the_definition_has_the_bits_that_were_recorded_from_hardware() {
    let hash = recorded(|rows, tiles| trial::product(&mut Emulated::new(rows), tiles));
    assert_eq!(hash, RECORDED, "{hash:#x}");
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod hardware {
    use device::simd::tiles::amx::{Amx, Hardware, Probe};

    use super::*;

    fn amx() -> Option<Amx> {
        report_unavailable(&Isa::Amx, Isa::Amx.is_available()).then(|| Amx::get().unwrap())
    }

    #[test]
    fn hardware_has_the_bits_of_the_definition() {
        let Some(amx) = amx() else { return };
        let hash = recorded(|rows, tiles| trial::product(&mut Hardware::configure(amx, rows), tiles));
        assert_eq!(hash, RECORDED, "{hash:#x}");
        let random = &mut Random(9);
        for i in 0..if everything() { 3000 } else { 60 } * NUM_KINDS {
            let (rows, tiles) = (1 + random.bits() as usize % 16, trial::operands(random, i % NUM_KINDS));
            let got = trial::product(&mut Hardware::configure(amx, rows), &tiles);
            let want = trial::product(&mut Emulated::new(rows), &tiles);
            assert_eq!(trial::differences(&got, &want), 0, "product {i} of kind {}", i % NUM_KINDS);
        }
    }

    #[test]
    fn tiles_are_released_and_a_thread_configures_them_once_at_a_time() {
        let Some(amx) = amx() else { return };
        let first = Hardware::configure(amx, 16);
        assert!(std::panic::catch_unwind(|| drop(Hardware::configure(amx, 16))).is_err());
        std::thread::spawn(move || drop(Hardware::configure(amx, 1))).join().unwrap();
        drop(first);
        drop(Hardware::configure(amx, 3));
    }

    #[test]
    fn a_hypervisor_that_hides_a_part_of_the_unit_is_one_sentence() {
        let fine = Probe {
            leaf1_ecx: 1 << 27,
            leaf7_edx: 1 << 22 | 1 << 24,
            states: 3 << 17,
            tile_bytes: 8192,
            palette: [8 << 16 | 64, 16],
            xcr0: 3 << 17,
        };
        assert_eq!(fine.missing(), None);
        for (hidden, says) in [
            (Probe { leaf7_edx: 1 << 22, ..fine }, "this CPU has no AMX tiles in bfloat16"),
            (Probe { leaf7_edx: 1 << 24, ..fine }, "this CPU has no AMX tiles in bfloat16"),
            (Probe { leaf1_ecx: 0, ..fine }, "does not enable AMX tiles"),
            (Probe { xcr0: 1 << 17, ..fine }, "does not enable AMX tiles"),
            (Probe { states: 1 << 17, ..fine }, "hides the state of AMX tiles"),
            (Probe { tile_bytes: 0, ..fine }, "hides the state of AMX tiles"),
            (Probe { palette: [0; 2], ..fine }, "no 8 AMX tiles of 16 rows"),
        ] {
            let said = hidden.missing().unwrap();
            assert!(said.contains(says) && !said.contains('\n'), "{said}");
        }
    }
}

/// Checks products against the definition on every instruction set. A NaN counts as equal to any other.
fn check(pool: &Pool, x: &[f32], w: &PackedMatrix, bias: Option<&[f32]>, what: &str) {
    let want = run(None, pool, x, w, bias);
    for isa in tile_isas() {
        for (i, (got, want)) in run(Some(isa), pool, x, w, bias).iter().zip(&want).enumerate() {
            let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
            assert!(same, "{what}, {isa}, output {i}: {:08x}, want {:08x}", got.to_bits(), want.to_bits());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn products_of_tiles_have_the_same_bits_everywhere_and_rows_do_not_depend_on_the_batch(
        rows in 1usize..70, n in 1usize..90, k in 1usize..150, from in 0usize..3, with_bias: bool, seed: u64,
        threads in 1usize..4,
    ) {
        let pool = Pool::new(Some(threads)).unwrap();
        let (x, dense) = (values(rows * k, seed), values(n * k, seed ^ 0x9E37));
        let w = packed(&pool, Arithmetic::Tiles, k, Dtype::ALL[from], &dense);
        let bias = values(n, seed ^ 7);
        let bias = with_bias.then_some(&bias[..]);
        check(&pool, &x, &w, bias, "any shape");
        let want = run(None, &pool, &x, &w, bias);
        for isa in tile_isas() {
            for row in [0, rows / 2, rows - 1] {
                let alone = run(Some(isa), &pool, &x[row * k..(row + 1) * k], &w, bias);
                prop_assert_eq!(&alone[..], &want[row * n..(row + 1) * n], "{} row {}", isa, row);
            }
        }
        check_against_exact(&want, &x, &dense, k, bias);
    }
}

#[test]
fn passes_and_parts_of_long_rows_have_the_bits_of_the_definition() {
    for (rows, n, k, threads) in
        [(1, 40, 1700, 2), (15, 16, 600, 1), (33, 33, 1200, 2), (530, 40, 64, 2), (130, 70, 4100, 1)]
    {
        let pool = Pool::new(Some(threads)).unwrap();
        let (x, dense) = (values(rows * k, 3), values(n * k, 4));
        let w = packed(&pool, Arithmetic::Tiles, k, Dtype::Bf16, &dense);
        let want = run(None, &pool, &x, &w, None);
        // Emulated tiles take as long as the definition, so the portable variant computes only some.
        for isa in tile_isas().filter(|isa| *isa != Isa::Portable || rows * n * k < 2_000_000) {
            assert_eq!(run(Some(isa), &pool, &x, &w, None), want, "{isa}: {rows} rows, {n} outputs, {k} inputs");
        }
    }
}

#[test]
fn tiny_infinite_and_undefined_numbers_have_the_bits_of_the_definition() {
    let pool = Pool::new(Some(2)).unwrap();
    for (kind, tiny) in [1e-20f32, 1e-19, 3e-23, 1e-38, 1e-40].into_iter().enumerate() {
        let (rows, n, k) = (21, 50, 75);
        let (mut x, mut dense) = (values(rows * k, 5), values(n * k, 6));
        // Some rows and outputs are tiny, some have one number that is not finite.
        x.chunks_mut(k).step_by(3).flatten().for_each(|x| *x *= tiny);
        dense.chunks_mut(k).step_by(5).flatten().for_each(|w| *w *= tiny);
        for (i, special) in [f32::INFINITY, f32::NAN, f32::NEG_INFINITY, -0.0, f32::MAX].into_iter().enumerate() {
            x[(3 * i + 1) * k + 7 * i + kind] = special;
            dense[(20 + i) * k + 70 - i] = special;
        }
        check(&pool, &x, &packed(&pool, Arithmetic::Tiles, k, Dtype::Bf16, &dense), None, &format!("{tiny:e}"));
    }
}
