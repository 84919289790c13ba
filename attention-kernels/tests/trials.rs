//! Measurement of variants: grids of shapes, and times.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use attention_kernels::{Dtype, KernelError, KvDtype, Operation, variants};
use device::Device;
use trial::grid::{Cell, Grid, Shape};
use trial::numbers::{from_byte, to_byte};
use trial::{Peaks, Time};

fn tiny() -> (Arc<dyn Device>, Grid) {
    let device = device::open("cpu", Some(2)).unwrap();
    let grid = Grid {
        heads: 4,
        kv_heads: 2,
        head_sizes: vec![16],
        batches: vec![2],
        contexts: vec![40],
        query_lens: vec![3],
        warmup: 0,
        repeat: 3,
        ..Grid::of(&*device)
    };
    (device, grid)
}

#[test]
fn every_variant_that_runs_here_is_measured_with_its_error() {
    let (device, grid) = tiny();
    let grid = Grid { dtypes: vec![Dtype::F32, Dtype::Bf16], ..grid };
    let mut seen = Vec::new();
    let one = Some(1e10);
    let peaks = Peaks { read: one, copy: one, f32: one, halves: one, ..Peaks::default() };
    grid.run(&device, &mut || Ok(peaks), &mut |row| {
        assert!(row.cell.time.median() > Duration::ZERO && row.cell.bytes > 0, "{row:?}");
        let most = if row.shape.dtype == Dtype::Bf16 { 1.0 } else { 32.0 };
        assert!(row.cell.ulps <= most && row.share.unwrap() > 0.0, "{row:?}");
        assert_eq!(row.cell.ulps == 0.0, matches!(row.operation, Operation::CacheWrite | Operation::BlockCopy));
        seen.push((row.operation, row.variant));
    })
    .unwrap();
    for operation in Operation::ALL {
        for variant in variants(operation).into_iter().filter(|variant| variant.capabilities.runs_on("cpu")) {
            assert!(seen.contains(&(operation, variant.name)), "{operation} {}", variant.name);
        }
    }
}

#[test]
fn bytes_and_operations_are_those_of_the_shape() {
    let (device, grid) = tiny();
    let mut cells = Vec::new();
    grid.run(&device, &mut || Ok(Peaks::default()), &mut |row| {
        assert_eq!(row.share, None);
        cells.push((row.operation, row.cell.bytes, row.cell.operations));
    })
    .unwrap();
    let of = |operation| cells.iter().find(|cell| cell.0 == operation).map(|cell| (cell.1, cell.2)).unwrap();
    // 2 sequences of 40 tokens, 2 KV heads of 16, f32; K and V; query and output rows of 64.
    let (cache, row) = (2 * 2 * 40 * 32 * 4, 64 * 4);
    assert_eq!(of(Operation::Decode), (cache + 2 * 2 * row, 2 * 4 * 40 * 16 * 4));
    // The last 3 of 40 tokens see 38, 39 and 40.
    assert_eq!(of(Operation::Prefill), (cache + 2 * 6 * row, 2 * 4 * 117 * 16 * 4));
    assert_eq!(of(Operation::CacheWrite).0, 6 * 2 * 32 * 8);
    assert_eq!(of(Operation::BlockCopy).0, 2 * 3 * 2 * 2 * 16 * 32 * 4);
    assert_eq!(of(Operation::Linear), ((64 * 64 + 2 * 6 * 64) * 4, 2 * 6 * 64 * 64));
}

#[test]
fn a_grid_that_cannot_be_measured_is_an_error_that_names_the_choices() {
    let (device, grid) = tiny();
    let refused = |grid: &Grid| grid.run(&device, &mut || Ok(Peaks::default()), &mut |_| ()).unwrap_err().to_string();
    let unknown = refused(&Grid { variants: vec!["cpu.fast".into()], ..grid.clone() });
    assert!(unknown.starts_with("--variant \"cpu.fast\": there is no such variant; use one of: cpu."), "{unknown}");
    let unable = refused(&Grid { variants: vec!["cuda.paged_v1".into()], ..grid.clone() });
    assert!(unable.contains("cuda.paged_v1: it runs on cuda and cuda-sim, the device is cpu"), "{unable}");
    let heads = refused(&Grid { kv_heads: 3, ..grid.clone() });
    assert_eq!(heads, "--heads: found 4, expected a multiple of --kv-heads 3; change one of them");
    assert!(refused(&Grid { contexts: vec![0], ..grid }).contains("numbers from 1"));
}

#[test]
fn a_cell_is_reported_at_once_with_its_share_of_the_greatest_peaks_so_far() {
    let (device, mut grid) = tiny();
    grid.operations = vec![Operation::CacheWrite, Operation::BlockCopy];
    grid.variants = vec!["cpu.rows".into()];
    let mut peaks = [4e9, 9e9, 1e9].into_iter();
    let mut shares = Vec::new();
    let mut measure = || Ok(Peaks { copy: peaks.next(), ..Peaks::default() });
    grid.run(&device, &mut measure, &mut |row| {
        shares.push((row.bytes_per_second() / row.share.unwrap() / 1e9).round());
    })
    .unwrap();
    assert_eq!((shares, peaks.next()), (vec![4.0, 9.0], None));
}

#[test]
fn prefill_in_16_bits_is_compared_with_the_peak_of_16_bits() {
    let (_, grid) = tiny();
    let shape = &grid.shapes(Operation::Prefill)[0];
    let halves = Shape { dtype: Dtype::Bf16, ..shape.clone() };
    let cell = Cell { time: Time::default(), kernels: BTreeMap::new(), bytes: 1, operations: 4000, ulps: 0.0 };
    let peaks = Peaks { read: Some(1e12), halves: Some(4e12), ..Peaks::default() };
    // A time of 0 counts as a nanosecond.
    assert_eq!(peaks.share(Operation::Prefill, &halves, &cell), Some(1.0));
    assert_eq!(peaks.share(Operation::Prefill, shape, &cell), None, "no peak of f32");
}

#[test]
fn the_median_is_the_middle_and_the_spread_is_around_it() {
    let time = Time::from([1, 2, 10, 11, 900].map(Duration::from_millis).to_vec());
    assert_eq!(time.median(), Duration::from_millis(10));
    assert!((time.spread() - 0.45).abs() < 1e-9, "{}", time.spread());
    assert_eq!(Time::default().median(), Duration::ZERO);
}

#[test]
fn a_call_runs_as_often_as_it_is_asked_for_and_one_that_fails_ends_it() -> Result<(), KernelError> {
    let device = device::open("cpu", Some(1))?;
    let mut calls = Vec::new();
    let time = trial::time(&*device, 2, 3, |i| {
        calls.push(i);
        Ok(())
    })?;
    assert_eq!((calls, time.len()), (vec![0, 1, 2, 3, 4], 3));
    let failure = || KernelError::NotLoaded { variant: "none", what: "thing" };
    assert!(trial::time(&*device, 0, 3, |i| if i == 1 { Err(failure()) } else { Ok(()) }).is_err());
    Ok(())
}

#[test]
fn eight_bit_numbers_are_those_of_the_fp8_paper() {
    assert_eq!(from_byte(KvDtype::Fp8E4m3, 0x7e), 448.0);
    assert_eq!(from_byte(KvDtype::Fp8E5m2, 0x7b), 57344.0);
    assert_eq!(from_byte(KvDtype::Fp8E4m3, 0x01), 2f32.powi(-9));
    for kv_dtype in [KvDtype::Fp8E4m3, KvDtype::Fp8E5m2, KvDtype::Int8] {
        for byte in 0..=255u8 {
            let value = from_byte(kv_dtype, byte);
            if value.is_finite() && value != -128.0 {
                assert_eq!(to_byte(kv_dtype, value), byte, "{kv_dtype} {byte:#x}");
            }
        }
    }
    assert_eq!(to_byte(KvDtype::Fp8E4m3, 17.0), to_byte(KvDtype::Fp8E4m3, 16.0), "a tie goes to even");
    assert_eq!(to_byte(KvDtype::Fp8E4m3, -1e9), 0xfe);
}
