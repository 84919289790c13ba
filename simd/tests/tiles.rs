//! Products of tiles: one definition of every bit, with AMX and without.

use simd::Pairs;
use simd::tiles::trial::{self, NUM_KINDS, Random};
use simd::tiles::{Emulated, Tile};

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
    let hash = recorded(|rows, tiles| trial::product(&mut Emulated::<64>::new(rows), tiles));
    assert_eq!(hash, RECORDED, "{hash:#x}");
}

#[test]
fn bytes_are_multiplied_exactly_and_by_parts() {
    let (rows, lines, sums) = trial::byte_operands(&mut Random(7));
    let product = |row: usize, output: usize, i: usize| {
        i32::from(rows.0[row][i]) * i32::from(lines.0[i / 4][4 * output + i % 4] as i8)
    };
    let sum = |row: usize, output: usize| (0..32).map(|i| product(row, output, i)).sum::<i32>();
    let want = std::array::from_fn(|row| {
        Pairs(std::array::from_fn(|output| sums[row].0[output].wrapping_add(sum(row, output) as u32)))
    });
    assert_eq!(trial::byte_product(&mut Emulated::<32>::new(16), &(rows, lines, sums)), want);
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod hardware {
    use simd::Isa;
    use simd::tiles::amx::{Amx, Hardware, Probe};
    use testkit::everything;

    use super::*;
    use crate::support::report_unavailable;

    fn amx() -> Option<Amx> {
        report_unavailable(&Isa::Amx, Isa::Amx.is_available()).then(|| Amx::get().unwrap())
    }

    #[test]
    fn hardware_has_the_bits_of_the_definition() {
        let Some(amx) = amx() else { return };
        let hash = recorded(|rows, tiles| trial::product(&mut Hardware::<64>::configure(amx, rows), tiles));
        assert_eq!(hash, RECORDED, "{hash:#x}");
        let random = &mut Random(9);
        for i in 0..if everything() { 3000 } else { 60 } * NUM_KINDS {
            let (rows, tiles) = (1 + random.bits() as usize % 16, trial::operands(random, i % NUM_KINDS));
            let got = trial::product(&mut Hardware::<64>::configure(amx, rows), &tiles);
            let want = trial::product(&mut Emulated::<64>::new(rows), &tiles);
            assert_eq!(trial::differences(&got, &want), 0, "product {i} of kind {}", i % NUM_KINDS);
        }
    }

    #[test]
    fn hardware_multiplies_bytes_as_the_definition() {
        let Some(amx) = amx() else { return };
        let random = &mut Random(3);
        for i in 0..if everything() { 10_000 } else { 500 } {
            let (rows, bytes) = (1 + random.bits() as usize % 16, trial::byte_operands(random));
            let got = trial::byte_product(&mut Hardware::<32>::configure(amx, rows), &bytes);
            assert_eq!(got, trial::byte_product(&mut Emulated::<32>::new(rows), &bytes), "{i}, {rows} rows");
        }
    }

    #[test]
    fn tiles_are_released_and_a_thread_configures_them_once_at_a_time() {
        let Some(amx) = amx() else { return };
        let first = Hardware::<64>::configure(amx, 16);
        assert!(std::panic::catch_unwind(|| drop(Hardware::<64>::configure(amx, 16))).is_err());
        std::thread::spawn(move || drop(Hardware::<64>::configure(amx, 1))).join().unwrap();
        drop(first);
        drop(Hardware::<64>::configure(amx, 3));
    }

    #[test]
    fn a_hypervisor_that_hides_a_part_of_the_unit_is_one_sentence() {
        let fine = Probe {
            leaf1_ecx: 1 << 27,
            leaf7_edx: 1 << 22 | 1 << 24 | 1 << 25,
            states: 3 << 17,
            tile_bytes: 8192,
            palette: [8 << 16 | 64, 16],
            xcr0: 3 << 17,
        };
        assert_eq!(fine.missing(), None);
        for (hidden, says) in [
            (Probe { leaf7_edx: 1 << 22 | 1 << 25, ..fine }, "this CPU has no AMX tiles in bfloat16 and int8"),
            (Probe { leaf7_edx: 1 << 24 | 1 << 25, ..fine }, "this CPU has no AMX tiles in bfloat16 and int8"),
            (Probe { leaf7_edx: 1 << 22 | 1 << 24, ..fine }, "this CPU has no AMX tiles in bfloat16 and int8"),
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
