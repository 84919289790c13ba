//! Low-rank additions of several adapters: results, and what a row's result depends on.

use std::sync::{Arc, Mutex};

use attention_kernels::{
    Dtype, KernelError, LowRankArgs, LowRankFactors, LowRankRows, LowRankSize, LowRankSlots, Operation, Variant,
};
use device::{Device, DeviceError, Launch};
use linear::{Arithmetic, DownFactor, LowRank, UpFactor};
use serde_json::json;
use simd::Pool;
use testkit::everything;
use trial::numbers::{Random, from_bytes, to_bytes};
use trial::{LowRankProblem, SlotRanks, bytes};

use super::devices::{self, buffer, variants_on};
use super::failures::Looks;
use crate::support::hooked::{Hooked, Hooks};

/// Outputs of the parts of a layer: of no whole panel, of several thread blocks, of one.
const PARTS: [usize; 3] = [21, 130, 1];

/// All parts, one part, no part, two ranks that are no multiple of a panel, and whole panels.
fn slots(rank: usize) -> Vec<SlotRanks> {
    vec![
        vec![Some(rank); 3],
        vec![None, Some(5), None],
        vec![None; 3],
        vec![Some(1), None, Some(rank.min(19))],
        vec![Some(16.min(rank)), Some(rank), None],
    ]
}

/// Slots of rows: one of each kind and none, many of one slot, none at all.
fn mix(kind: usize, random: &mut Random) -> Vec<Option<u32>> {
    match kind {
        0 => vec![Some(3), None, Some(0), Some(2), Some(1), Some(4), Some(0)],
        1 => (0..37).map(|_| [None, Some(0), Some(0), Some(0), Some(1)][random.below(5)]).collect(),
        2 => vec![None; 5],
        _ => vec![Some(0)],
    }
}

fn problem(seed: u64, dtype: Dtype, kind: usize) -> LowRankProblem {
    let mut random = Random::new(seed);
    // Ranks that are no multiple of a panel and of many panels; inputs for fewer and for more than the threads of a block.
    let (rank, inputs) = [(33, 40), (7, 133), (16, 8), (256, 24)][kind];
    LowRankProblem::new(seed, dtype, [inputs, rank], &PARTS, &slots(rank), mix(kind, &mut random))
}

fn output(problem: &LowRankProblem, device: &Arc<dyn Device>, variant: &Variant) -> Vec<f32> {
    let mut on_device = problem.on(device).unwrap();
    on_device.call(variant).unwrap();
    on_device.output().unwrap()
}

/// The variants of a device with each of their types.
fn each(device: &dyn Device) -> impl Iterator<Item = (&'static Variant, Dtype)> {
    let of = |variant: &'static Variant| variant.capabilities.dtypes.iter().map(move |dtype| (variant, *dtype));
    variants_on(device, &[Operation::LowRank]).into_iter().flat_map(of)
}

#[test]
fn adapters_of_every_rank_and_part_add_what_float64_says_and_nothing_elsewhere() {
    let mut failures = Looks::default();
    for device in devices::all() {
        for (variant, dtype) in each(&*device) {
            for kind in 0..4 {
                failures.look(&*device, variant, &json!({ "dtype": dtype.to_string(), "kind": kind }), || {
                    let problem = problem(kind as u64 + 1, dtype, kind);
                    let worst = problem.worst(&output(&problem, &device, variant), 1);
                    let most = if dtype == Dtype::F32 { 32.0 } else { 0.6 };
                    assert!(worst <= most, "{worst} ulps");
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn a_row_has_the_bits_that_it_has_among_other_rows_and_slots() {
    for device in devices::all() {
        for (variant, dtype) in each(&*device) {
            let made = || problem(5, dtype, 0);
            let (rows, width) = (made().num_rows(), PARTS.iter().sum::<usize>());
            let of_rows = mix(0, &mut Random::new(5));
            let whole = output(&made(), &device, variant);
            let what = format!("{} on {} in {dtype}", variant.name, device.name());
            let mut random = Random::new(9);
            for turn in 0..if everything() { 20 } else { 3 } {
                // Row 2 keeps its slot, at any place; the others change places and slots, and row 0 comes 20 times.
                let mut order: Vec<usize> = (0..rows).chain([0; 20]).collect();
                random.shuffle(&mut order);
                let other = |random: &mut Random| [None, Some(0), Some(1), Some(3)][random.below(4)];
                let order: Vec<_> = order
                    .into_iter()
                    .map(|row| (row, if row == 2 { of_rows[2] } else { other(&mut random) }))
                    .collect();
                let found = output(&made().with_rows(&order), &device, variant);
                let before = made();
                for ((row, slot), found) in order.iter().zip(found.chunks(width)) {
                    let of_row = row * width..(row + 1) * width;
                    if *slot == of_rows[*row] {
                        assert!(found == &whole[of_row.clone()], "{what}: turn {turn}, row {row}");
                    }
                    if slot.is_none() {
                        assert!(found == &before.before()[of_row], "{what}: turn {turn}, row {row} has no adapter");
                    }
                }
            }
        }
    }
}

/// A layer of 24 inputs and outputs 3 to 8, of rank 5.
fn small(inputs: usize, outputs: usize, rank: usize) -> LowRank {
    let data = |len: usize| to_bytes(Dtype::F32, &vec![0.5; len]);
    let (a, b) = (data(rank * inputs), data(outputs * rank));
    let down = DownFactor { dtype: Dtype::F32, data: &a, scale: 1.0 };
    let up = UpFactor { dtype: Dtype::F32, data: &b, first_output: 3, down: 0 };
    LowRank::pack(&Pool::alone(), Arithmetic::Exact, inputs, &[down], &[up]).unwrap()
}

const SIZE: LowRankSize = LowRankSize { inputs: 24, outputs: 8, parts: 1, rank: 16 };

/// Remembers the grids of launches.
struct Grids(Arc<Mutex<Vec<[u32; 3]>>>);

impl Hooks for Grids {
    fn launch(&self, device: &dyn Device, launch: &Launch<'_>) -> Result<(), DeviceError> {
        self.0.lock().unwrap().push(launch.grid);
        device.launch(launch)
    }
}

#[test]
fn launches_depend_on_the_number_of_rows_alone_and_slots_can_be_replaced_and_emptied() {
    let Some(device) = devices::one(2) else { return };
    let grids = Arc::new(Mutex::default());
    let device = Hooked { device, hooks: Grids(Arc::clone(&grids)) };
    let variant = variants_on(&device, &[Operation::LowRank])[0];
    let mut slots = LowRankSlots::new(&device, Dtype::F32, 2, SIZE).unwrap();
    let mut stage = device.pinned(SIZE.slot_bytes(Dtype::F32)).unwrap();
    let mut rows = LowRankRows::new(&device, 3, 2).unwrap();
    let x = buffer(&device, &to_bytes(Dtype::F32, &[1.0; 3 * 24]));
    let mut t = buffer(&device, &[0; 3 * 16 * 4]);
    let mut run = |slots: &LowRankSlots, of_rows: [Option<u32>; 3]| {
        let mut y = buffer(&device, &to_bytes(Dtype::F32, &[1.0; 3 * 8]));
        rows.load(&device, of_rows).unwrap();
        let factors = LowRankFactors::Device { slots, t: &mut t };
        let args = LowRankArgs { x: &x, y: &mut y, num_rows: 3, rows: &rows, factors };
        variant.low_rank(&device, args).unwrap();
        let y = from_bytes(Dtype::F32, &bytes(&device, &y).unwrap());
        y.chunks(8).map(|row| (row[2], row[3], row[7])).collect::<Vec<_>>()
    };
    let unchanged = (1.0, 1.0, 1.0);
    assert_eq!(run(&slots, [Some(1), None, Some(0)]), [unchanged; 3]);
    slots.set(&device, &mut stage, 1, Some(&small(24, 5, 4))).unwrap();
    let added = (1.0, 25.0, 25.0);
    assert_eq!(run(&slots, [Some(1), None, Some(1)]), [added, unchanged, added]);
    slots.set(&device, &mut stage, 1, Some(&small(24, 4, 2))).unwrap();
    slots.set(&device, &mut stage, 0, Some(&small(24, 5, 16))).unwrap();
    assert_eq!(run(&slots, [Some(1), Some(0), None]), [(1.0, 13.0, 1.0), (1.0, 97.0, 97.0), unchanged]);
    slots.set(&device, &mut stage, 0, None).unwrap();
    assert_eq!(run(&slots, [None, Some(0), None]), [unchanged; 3]);
    let grids = grids.lock().unwrap();
    // A panel of ranks and a block of outputs; three rows are at most two tasks of two slots, but the bound is their number.
    assert!(grids.iter().all(|grid| *grid == [1, 2, 1]) && grids.len() == 8, "{grids:?}");
}

#[test]
fn adapters_and_rows_that_do_not_fit_are_refused_before_anything_runs() {
    let said = |result: Result<(), KernelError>| result.unwrap_err().to_string();
    for device in devices::gpus(1) {
        let device = &*device;
        let mut slots = LowRankSlots::new(device, Dtype::F16, 2, SIZE).unwrap();
        let mut stage = device.pinned(SIZE.slot_bytes(Dtype::F16)).unwrap();
        let mut set = |slot, addition: &LowRank| said(slots.set(device, &mut stage, slot, Some(addition)));
        assert_eq!(set(2, &small(24, 5, 4)), "slots of adapters: found 2, expected 3");
        assert_eq!(set(0, &small(23, 5, 4)), "inputs of an adapter: found 23, expected 24");
        assert_eq!(set(0, &small(24, 6, 4)), "outputs of a layer: found 8, expected 9");
        assert_eq!(set(0, &small(24, 5, 17)), "ranks of a layer: found 16, expected 32");
        let mut rows = LowRankRows::new(device, 3, 2).unwrap();
        assert_eq!(said(rows.load(device, [Some(2)])), "slots of adapters: found 2, expected 3");
        rows.load(device, [None, None, Some(1)]).unwrap();
        for variant in variants_on(device, &[Operation::LowRank]) {
            let run = |x: usize, y: usize, t: usize, num_rows: usize| {
                let [x, mut y, mut t] = [2 * x, 2 * y, 4 * t].map(|bytes| device.alloc(bytes).unwrap());
                let factors = LowRankFactors::Device { slots: &slots, t: &mut t };
                said(variant.low_rank(device, LowRankArgs { x: &x, y: &mut y, num_rows, rows: &rows, factors }))
            };
            assert_eq!(run(48, 16, 32, 2), "rows of the step: found 2, expected 3");
            assert_eq!(run(71, 24, 48, 3), "inputs of the rows: found 71, expected 72");
            assert_eq!(run(72, 23, 48, 3), "outputs of the rows: found 23, expected 24");
            assert_eq!(run(72, 24, 47, 3), "elements of t: found 47, expected 48");
            let (x, mut y) = (device.alloc(8).unwrap(), device.alloc(8).unwrap());
            let of = |_| None;
            let factors = LowRankFactors::Host { inputs: 0, outputs: 0, of: &of, first: 0 };
            let args = LowRankArgs { x: &x, y: &mut y, num_rows: 3, rows: &rows, factors };
            assert!(said(variant.low_rank(device, args)).contains("factors on the host"));
        }
    }
}

/// Runs every variant for GPUs once in each type.
pub fn add_all(device: &Arc<dyn Device>) {
    for (variant, dtype) in each(&**device) {
        output(&problem(1, dtype, 0), device, variant);
    }
}
