//! Lanes: float vectors and sums of byte products.

use simd::int8::{DotIsa, DotLanes, Floats, GROUP, IntLanes, OFFSET};
use simd::{Isa, LANES, LEAST_EXP2, Lanes, Portable, compiled, dispatch, dispatch_dot};

use super::support::{dot_isas, isas};

#[inline(always)]
fn exp_and_sum<L: Lanes>(x: &[f32; LANES], out: &mut [f32; LANES], sum: &mut f32) {
    L::load(x).exp().store(out);
    *sum = L::load(x).sum();
}

#[inline(always)]
fn transpose<L: Lanes>(square: &mut [[f32; LANES]; LANES]) {
    let mut rows = [L::splat(0.0); LANES];
    for (row, from) in rows.iter_mut().zip(&*square) {
        *row = L::load(from);
    }
    for (row, to) in L::transpose(rows).into_iter().zip(square) {
        row.store(to);
    }
}

#[test]
fn a_square_is_transposed() {
    for isa in isas() {
        let mut square = std::array::from_fn(|i| std::array::from_fn(|j| (LANES * i + j) as f32));
        let square_ref = &mut square;
        dispatch!(isa, transpose(square_ref: &mut [[f32; LANES]; LANES]));
        for (i, row) in square.iter().enumerate() {
            assert!(row.iter().enumerate().all(|(j, &x)| x == (LANES * j + i) as f32), "{isa}: {row:?}");
        }
    }
}

#[test]
fn test_builds_are_compiled_for_every_instruction_set() {
    let floats = compiled::AVX2 && compiled::AVX512;
    let pairs = compiled::AVX2_PAIRS && compiled::AVX512_BF16;
    assert!(floats && pairs && compiled::AVX2_DOT && compiled::AVX_VNNI && compiled::AVX512_VNNI);
    assert_eq!(Isa::left_out(), None);
}

#[test]
fn every_available_isa_agrees_with_the_standard_library() {
    for isa in isas() {
        for start in -6..7 {
            let x: [f32; LANES] = std::array::from_fn(|i| start as f32 * 14.0 - i as f32 * 0.37);
            let (mut out, mut sum) = ([0.0; LANES], 0.0);
            let (xr, or, sr) = (&x, &mut out, &mut sum);
            dispatch!(isa, exp_and_sum(xr: &[f32; LANES], or: &mut [f32; LANES], sr: &mut f32));
            for (&x, &y) in x.iter().zip(&out) {
                let want = f64::from(x).exp();
                assert!((f64::from(y) - want).abs() <= want * 3e-7 + 1.3e-38, "{isa}: exp({x}) = {y}, want {want}");
            }
            assert!((sum - x.iter().sum::<f32>()).abs() < 1e-3, "{isa}");
        }
    }
}

#[inline(always)]
fn exp2<L: Lanes>(x: &[f32; LANES], out: &mut [f32; LANES]) {
    L::load(x).exp2().store(out);
}

/// Numbers around each that decides something, and a sample of all between −45 and 1.
#[test]
fn powers_of_two_have_the_same_bits_with_every_fused_multiply_add() {
    let deciding =
        [0.0, -0.0, -0.5, -1.0, -1.5, LEAST_EXP2, f32::NEG_INFINITY, f32::MIN, f32::NAN, 1.0, -1e-30, -3e-8, -6e-8];
    let near = |x: f32| (-2..3i32).map(move |step| f32::from_bits(x.to_bits().wrapping_add_signed(step)));
    let numbers = deciding.into_iter().flat_map(near).filter(|x| x.is_nan() || *x <= 1.0);
    let numbers: Vec<f32> = numbers.chain((0..46 << 10).map(|i| 1.0 - i as f32 / 1023.7)).collect();
    let fused: Vec<Isa> = isas().filter(|isa| *isa != Isa::Portable).collect();
    for x in numbers.chunks(LANES).filter_map(|x| x.try_into().ok()) {
        let mut want = [0.0; LANES];
        exp2::<Portable<true>>(x, &mut want);
        for (&x, &y) in x.iter().zip(&want) {
            let exact = f64::from(x).exp2();
            match x {
                x if x.is_nan() => assert!(y.is_nan()),
                LEAST_EXP2.. => assert!((f64::from(y) - exact).abs() <= exact * 3e-7, "2^{x} = {y}, want {exact}"),
                _ => assert_eq!(y.to_bits(), 0, "2^{x}"),
            }
        }
        for isa in fused.iter().copied() {
            let mut out = [0.0; LANES];
            let found = &mut out;
            dispatch!(isa, exp2(x: &[f32; LANES], found: &mut [f32; LANES]));
            for ((got, want), x) in out.iter().zip(want).zip(x) {
                assert!(
                    got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                    "{isa}: 2^{x} = {got}, not {want}"
                );
            }
        }
    }
    let mut one = [0.0; LANES];
    exp2::<Portable<true>>(&[0.0; LANES], &mut one);
    assert_eq!(one, [1.0; LANES]);
}

#[inline(always)]
fn two_groups<D: DotLanes>(w: &[[u8; GROUP]; 2], a: [[i8; 4]; 2], halves: &[u16; LANES], out: &mut [[f32; LANES]; 8]) {
    let correction = -i32::from(OFFSET) * a.iter().flatten().map(|&a| i32::from(a)).sum::<i32>();
    let start = D::Sums::splat(D::start(correction));
    let sums = D::dot(D::dot(start, D::load(&w[0]), a[0]), D::load(&w[1]), a[1]);
    sums.to_floats().store(&mut out[0]);
    Floats::<D>::load_finite_f16(halves).store(&mut out[1]);
    for bits in 1..=6 {
        let codes = w.each_ref().map(|w| D::Sums::load_codes(w, 2, bits));
        let mut sums = D::begin::<1, 1>([-7], bits);
        (0..4).for_each(|_| D::add(&mut sums, [codes], [&a], bits));
        let [[sums]] = D::by_rows(sums, [-7], bits);
        sums.to_floats().store(&mut out[1 + bits as usize]);
    }
}

/// Extremes (weights ±127 with activations ±127, which overflow 16 bits where pairs are summed carelessly) and bytes
/// of all values.
#[test]
fn every_available_isa_sums_byte_products_exactly() {
    let extreme = |i: usize| [1u8, 255, 128, 129][i % 4];
    for case in 0..64usize {
        let w: [[u8; GROUP]; 2] = std::array::from_fn(|g| {
            std::array::from_fn(|i| match case {
                0 => 255,
                1..16 => extreme(i * (case + 1) + g + i / 7),
                _ => ((i * 37 + g * 101 + case * 53 + i * i) % 255 + 1) as u8,
            })
        });
        let a: [[i8; 4]; 2] = std::array::from_fn(|g| {
            std::array::from_fn(|i| match case {
                0 => 127,
                1..16 => [127i8, -127, 127, -127][(i * (case / 4) + g + case) % 4],
                _ => ((i * 91 + g * 67 + case * 29) % 255) as i8,
            })
            .map(|a: i8| a.max(-127))
        });
        let halves: [u16; LANES] = std::array::from_fn(|i| match i {
            0 => 0,
            1 => 1,      // the least subnormal number
            2 => 0x3ff,  // the greatest one
            3 => 0x7bff, // 65504
            4 => 0x8000, // −0
            5 => 0x83ff, // negative and subnormal
            _ => ((case * 487 + i * 1913) as u16 % 0x7c00) | (((i % 2) as u16) << 15),
        });
        let want: [f32; LANES] = std::array::from_fn(|lane| {
            let products = (0..2).flat_map(|g| (0..4).map(move |j| (g, j)));
            products.map(|(g, j)| (i32::from(w[g][lane * 4 + j]) - 128) * i32::from(a[g][j])).sum::<i32>() as f32
        });
        // Codes of 32 inputs: eight of them, four times.
        let small = |bits: u32, lane: usize| {
            let products = (0..2).flat_map(|g| (0..4).map(move |j| (g, j)));
            let code = |g: usize, j: usize| i32::from(w[g][lane * 4 + j] >> 2) & ((1 << bits) - 1);
            (4 * products.map(|(g, j)| code(g, j) * i32::from(a[g][j])).sum::<i32>() - 7) as f32
        };
        for isa in dot_isas() {
            let mut out = [[f32::NAN; LANES]; 8];
            let (wr, hr, or) = (&w, &halves, &mut out);
            dispatch_dot!(
                isa,
                two_groups(wr: &[[u8; GROUP]; 2], a: [[i8; 4]; 2], hr: &[u16; LANES], or: &mut [[f32; LANES]; 8])
            );
            assert_eq!(out[0], want, "{isa}, case {case}");
            let bits = |floats: [f32; LANES]| floats.map(f32::to_bits);
            assert_eq!(bits(out[1]), halves.map(|h| half::f16::from_bits(h).to_f32().to_bits()), "{isa}, case {case}");
            for bits in 1..=6 {
                let want = std::array::from_fn(|lane| small(bits, lane));
                assert_eq!(out[1 + bits as usize], want, "{isa}, case {case}, {bits} bits");
            }
        }
    }
}

#[test]
fn the_dot_instructions_of_an_isa_are_no_wider_than_it() {
    for isa in isas() {
        let dot = DotIsa::best_for(isa);
        assert!(dot.is_available(), "{isa}: {dot}");
        assert!(isa == Isa::Avx512 || dot.vectors() != DotIsa::Avx512Vnni, "{isa}: {dot}");
        assert!(isa != Isa::Portable || dot == DotIsa::Portable, "{isa}: {dot}");
    }
}
