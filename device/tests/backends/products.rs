//! Matrix products on every backend that launches.

use std::sync::Arc;

use device::gemm::{Columns, Factor, FactorType, Product, ProductShape};
use device::{Device, DeviceError, Dtype, Options};

use super::{contents, filled, launching};

#[test]
fn products_are_plain_sums_in_every_type_with_and_without_a_bias() {
    let store = |format: Dtype, values: &[f32]| -> Vec<u8> {
        let half = |x: &f32| match format {
            Dtype::F16 => half::f16::from_f32(*x).to_bits().to_le_bytes(),
            _ => half::bf16::from_f32(*x).to_bits().to_le_bytes(),
        };
        match format {
            Dtype::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            _ => values.iter().flat_map(half).collect(),
        }
    };
    // Small whole numbers: every sum is exact in every type, so any order gives the same bits.
    let values = |len: usize, step: usize| -> Vec<f32> { (0..len).map(|i| ((i * step) % 7) as f32 - 3.0).collect() };
    for device in launching() {
        device.load_products().unwrap();
        for (format, y_format) in
            [(Dtype::F32, Dtype::F32), (Dtype::F16, Dtype::F16), (Dtype::Bf16, Dtype::Bf16), (Dtype::Bf16, Dtype::F32)]
        {
            for (rows, n, k, with_bias) in [(1, 5, 3, false), (3, 4, 17, true), (2, 6, 9, true), (3, 4, 17, true)] {
                let (x, w, b) = (values(rows * k, 5), values(n * k, 3), values(n, 2));
                let weights = filled(&*device, &store(format, &w));
                let weights = device::Matrix::dense(format, n, k, weights).unwrap();
                let (x_on, b_on) = (filled(&*device, &store(format, &x)), filled(&*device, &store(y_format, &b)));
                let mut y = filled(&*device, &vec![0x55u8; (rows * n + 1) * y_format.bytes()]);
                let bias = with_bias.then_some(&b_on);
                let factor = weights.factor().unwrap();
                let product = Product { x: &x_on, rows, weights: factor, bias, y: &mut y, y_format, columns: None };
                device.product(product).unwrap();
                let sum = |at: usize| (0..k).map(|i| x[at / n * k + i] * w[at % n * k + i]).sum::<f32>();
                let want = (0..rows * n).map(|at| sum(at) + if with_bias { b[at % n] } else { 0.0 });
                let mut want = store(y_format, &want.collect::<Vec<_>>());
                want.resize(want.len() + y_format.bytes(), 0x55);
                let mut got = vec![0; y.len_bytes()];
                device.download(&y, 0, &mut got).unwrap();
                assert!(got == want, "{} {format:?} to {y_format:?}, {rows} × {n} × {k}", device.name());
                let product =
                    Product { x: &x_on, rows: rows + 1, weights: factor, bias, y: &mut y, y_format, columns: None };
                assert!(matches!(device.product(product), Err(DeviceError::Outside { .. })));
            }
        }
    }
}

#[test]
fn factors_of_8_bits_are_summed_exactly_and_integers_beyond_24_bits_too() {
    for device in launching() {
        // Large codes, so that sums exceed 2^24.
        let (rows, n, k) = (3, 16, 1200);
        let codes = |len: usize, step: usize| -> Vec<i8> { (0..len).map(|i| 127 - (i * step % 5) as i8).collect() };
        let (x, w) = (codes(rows * k, 3), codes(n * k, 7));
        let sum = |at: usize, value: fn(i8) -> i64| -> i64 {
            (0..k).map(|i| value(x[at / n * k + i]) * value(w[at % n * k + i])).sum()
        };
        let [x_on, w_on] = [&x, &w].map(|codes| filled(&*device, &codes.iter().map(|c| *c as u8).collect::<Vec<_>>()));
        let mut y = filled(&*device, &vec![0x55u8; rows * n * 4]);
        let mut multiply = |format, bias, y_format| {
            let weights = Factor { elements: &w_on, format, n, k };
            device.product(Product { x: &x_on, rows, weights, bias, y: &mut y, y_format, columns: None })?;
            Ok::<_, DeviceError>(contents(&*device, &y))
        };
        let found = multiply(FactorType::Int8, None, Dtype::F32).unwrap();
        let want: Vec<i64> = (0..rows * n).map(|at| sum(at, i64::from)).collect();
        assert!(want.iter().any(|sum| *sum > 1 << 24));
        // The fake sums in f32.
        let off = if super::driver::is_fake() && device.name() == "cuda" { 2 } else { 0 };
        assert!(found.iter().zip(&want).all(|(a, b)| (i64::from(*a) - b).abs() <= off), "{}", device.name());
        if !device.features().multiplies_e4m3 {
            continue;
        }
        // As e4m3, 127 is NaN and 123 to 126 are 352 to 448.
        let found = multiply(FactorType::E4m3, None, Dtype::F32).unwrap();
        for (at, found) in found.iter().enumerate() {
            let has_nan = (0..k).any(|i| x[at / n * k + i] == 127 || w[at % n * k + i] == 127);
            assert!(has_nan && f32::from_bits(*found as u32).is_nan(), "{}", device.name());
        }
        let bias = filled(&*device, &[0.0f32; 16]);
        for (bias, y_format) in [(Some(&bias), Dtype::F32), (None, Dtype::F16)] {
            let refused = multiply(FactorType::Int8, bias, y_format);
            assert!(matches!(refused, Err(DeviceError::BadMatrix(_))), "{}", device.name());
        }
    }
}

#[test]
fn a_product_writes_only_its_columns_of_a_wider_matrix_and_adds_their_biases() {
    for device in launching() {
        let (rows, n, k, stride) = (5, 8, 16, 32);
        let (ones, twos) = (filled(&*device, &vec![1.0f32; rows * k]), filled(&*device, &vec![2.0f32; n * k]));
        let bias = filled(&*device, &(0..stride).map(|i| i as f32).collect::<Vec<_>>());
        let mut y = filled(&*device, &vec![-1.0f32; rows * stride]);
        let format = FactorType::Numbers(Dtype::F32);
        let mut at = |first| {
            let weights = Factor { elements: &twos, format, n, k };
            let columns = Some(Columns { first, stride });
            device.product(Product {
                x: &ones,
                rows,
                weights,
                bias: Some(&bias),
                y: &mut y,
                y_format: Dtype::F32,
                columns,
            })
        };
        at(4).unwrap();
        at(20).unwrap();
        assert!(matches!(at(stride - n + 4), Err(DeviceError::BadMatrix(_))), "{}", device.name());
        for (i, found) in contents(&*device, &y).into_iter().map(|bits| f32::from_bits(bits as u32)).enumerate() {
            let column = i % stride;
            let written = (4..12).contains(&column) || (20..28).contains(&column);
            let want = if written { 2.0 * k as f32 + column as f32 } else { -1.0 };
            assert!(found == want, "{}: column {column}: {found}, not {want}", device.name());
        }
    }
}

#[test]
fn a_row_of_a_deterministic_product_has_its_bits_among_any_number_of_others() {
    const MOST: usize = 300;
    let (n, k) = (8, 64);
    let values = |len: usize, step: usize| -> Vec<u8> {
        (0..len).flat_map(|i| (((i * step) % 1009) as f32 / 700.0 - 0.7).to_le_bytes()).collect()
    };
    let rows_of = |device: &dyn Device| -> Vec<Vec<u8>> {
        let weights = device::Matrix::dense(Dtype::F32, n, k, filled(device, &values(n * k, 31))).unwrap();
        let x = filled(device, &values(MOST * k, 17));
        let product = |rows: usize| {
            let mut y = filled(device, &vec![0u8; rows * n * 4]);
            let y_format = Dtype::F32;
            let weights = weights.factor().unwrap();
            device.product(Product { x: &x, rows, weights, bias: None, y: &mut y, y_format, columns: None }).unwrap();
            let mut got = vec![0; y.len_bytes()];
            device.download(&y, 0, &mut got).unwrap();
            got
        };
        [MOST, 1, 2, 3, 17, 64, 128, 129, 257].map(product).to_vec()
    };
    for device in launching() {
        let deterministic = match device.name() {
            "cuda" => {
                let kernels = std::env::var_os("QUIRE_KERNELS_DIR").map(Into::into);
                let options = Options { deterministic: true, kernels, threads: Some(1), ..Options::default() };
                device::open_with("cuda", &options).unwrap()
            }
            _ => Arc::clone(&device),
        };
        let same = |products: &[Vec<u8>]| products.iter().all(|rows| products[0].starts_with(rows));
        assert!(same(&rows_of(&*deterministic)), "{}", device.name());
        // The cuBLASLt in host code uses another order for another number of rows, as the real one may.
        assert!(!super::driver::is_fake() || device.name() != "cuda" || !same(&rows_of(&*device)), "nothing to show");
    }
}

#[test]
fn a_planned_product_asks_for_no_algorithm_whatever_its_number_of_rows() {
    let format = Dtype::F32;
    for device in launching() {
        let (name, device) = (device.name(), &*device);
        let (n, k, most) = (3, 2, 300);
        let weights = device::Matrix::dense(format, n, k, filled(device, &vec![1.0f32; n * k])).unwrap();
        let (x, bias) = (filled(device, &vec![2.0f32; (most + 100) * k]), filled(device, &vec![0.5f32; n]));
        let mut y = device.alloc((most + 100) * n * 4).unwrap();
        let shape = ProductShape { n, k, format: FactorType::Numbers(format), y_format: format, bias: true, stride: n };
        device.plan_product(shape, most).unwrap();
        let weights = weights.factor().unwrap();
        let mut outcomes = Vec::new();
        // A capture refuses to choose one.
        let graph = device
            .capture(&mut || {
                for (rows, bias) in
                    (1..=most).map(|rows| (rows, Some(&bias))).chain([(1, None), (most + 100, Some(&bias))])
                {
                    let product = Product { x: &x, rows, weights, bias, y: &mut y, y_format: format, columns: None };
                    outcomes.push(device.product(product));
                }
                outcomes.push(device.plan_product(ProductShape { bias: false, ..shape }, 1));
            })
            .unwrap();
        let planned = &outcomes[..most];
        assert!(planned.iter().all(Result::is_ok), "{name}: {planned:?}");
        let refused = |outcome: &Result<(), _>| matches!(outcome, Err(DeviceError::Capturing { .. }));
        assert!(name != "cuda" || outcomes[most..].iter().all(refused), "{name}: {:?}", &outcomes[most..]);
        let before = crate::counter::allocations();
        for rows in [1, 7, most] {
            let bias = Some(&bias);
            let product = Product { x: &x, rows, weights, bias, y: &mut y, y_format: format, columns: None };
            device.product(product).unwrap();
        }
        assert!(name != "cuda" || crate::counter::allocations() == before, "{name}: a product allocates");
        device.fill(&mut y, 0, 4 * most * n, 0).unwrap();
        device.replay(&graph).unwrap();
        assert!(contents(device, &y)[..most * n].iter().all(|bits| f32::from_bits(*bits as u32) == 4.5), "{name}");
    }
}
