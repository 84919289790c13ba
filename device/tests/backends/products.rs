//! Matrix products on every backend that launches.

use std::sync::Arc;

use device::{
    Columns, CudaError, Device, DeviceError, Dtype, Factor, FactorType, Options, Product, ProductShape, Slices,
};

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
                let (x_on, b_on) = (filled(&*device, &store(format, &x)), filled(&*device, &store(y_format, &b)));
                let mut y = filled(&*device, &vec![0x55u8; (rows * n + 1) * y_format.bytes()]);
                let bias = with_bias.then_some(&b_on);
                let factor = Factor { elements: &weights, format: FactorType::Numbers(format), n, k };
                let product =
                    Product { x: &x_on, rows, weights: factor, bias, y: &mut y, y_format, columns: None, slices: None };
                device.product(product).unwrap();
                let sum = |at: usize| (0..k).map(|i| x[at / n * k + i] * w[at % n * k + i]).sum::<f32>();
                let want = (0..rows * n).map(|at| sum(at) + if with_bias { b[at % n] } else { 0.0 });
                let mut want = store(y_format, &want.collect::<Vec<_>>());
                want.resize(want.len() + y_format.bytes(), 0x55);
                let mut got = vec![0; y.len_bytes()];
                device.download(&y, 0, &mut got).unwrap();
                assert!(got == want, "{} {format:?} to {y_format:?}, {rows} × {n} × {k}", device.name());
                let product = Product {
                    x: &x_on,
                    rows: rows + 1,
                    weights: factor,
                    bias,
                    y: &mut y,
                    y_format,
                    columns: None,
                    slices: None,
                };
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
            device.product(Product {
                x: &x_on,
                rows,
                weights,
                bias,
                y: &mut y,
                y_format,
                columns: None,
                slices: None,
            })?;
            Ok::<_, DeviceError>(contents(&*device, &y))
        };
        let found = multiply(FactorType::Int8, None, Dtype::F32).unwrap();
        let want: Vec<i64> = (0..rows * n).map(|at| sum(at, i64::from)).collect();
        assert!(want.iter().any(|sum| *sum > 1 << 24));
        // The fake sums in f32.
        let off = if super::is_fake() && device.name() == "cuda" { 2 } else { 0 };
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
            assert!(matches!(refused, Err(DeviceError::BadProduct(_))), "{}", device.name());
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
                slices: None,
            })
        };
        at(4).unwrap();
        at(20).unwrap();
        assert!(matches!(at(stride - n + 4), Err(DeviceError::BadProduct(_))), "{}", device.name());
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
    const MOST: usize = 1100;
    let (n, k) = (8, 64);
    let values = |len: usize, step: usize| -> Vec<u8> {
        (0..len).flat_map(|i| (((i * step) % 1009) as f32 / 700.0 - 0.7).to_le_bytes()).collect()
    };
    let rows_of = |device: &dyn Device| -> Vec<Vec<u8>> {
        let weights = filled(device, &values(n * k, 31));
        let x = filled(device, &values(MOST * k, 17));
        let product = |rows: usize| {
            let mut y = filled(device, &vec![0u8; rows * n * 4]);
            let y_format = Dtype::F32;
            let weights = Factor { elements: &weights, format: FactorType::Numbers(y_format), n, k };
            device
                .product(Product { x: &x, rows, weights, bias: None, y: &mut y, y_format, columns: None, slices: None })
                .unwrap();
            let mut got = vec![0; y.len_bytes()];
            device.download(&y, 0, &mut got).unwrap();
            got
        };
        [MOST, 1, 2, 3, 17, 64, 128, 129, 257, 1000].map(product).to_vec()
    };
    for device in launching() {
        let deterministic = deterministic(&device);
        let same = |products: &[Vec<u8>]| products.iter().all(|rows| products[0].starts_with(rows));
        assert!(same(&rows_of(&*deterministic)), "{}", device.name());
        // The cuBLASLt in host code uses another order for another number of rows, as the real one may.
        assert!(!super::is_fake() || device.name() != "cuda" || !same(&rows_of(&*device)), "nothing to show");
    }
}

/// The same device, whose products do not depend on the number of rows.
fn deterministic(device: &Arc<dyn Device>) -> Arc<dyn Device> {
    if device.name() != "cuda" {
        return Arc::clone(device);
    }
    let kernels = testkit::kernels::compiled();
    let options = Options { deterministic: true, kernels, threads: Some(1), ..Options::default() };
    device::open_with("cuda", &options).unwrap()
}

#[test]
fn slices_of_k_are_products_of_their_own_with_the_same_bits_for_any_number_of_rows() {
    let (most, n, k, count) = (130, 8, 96, 3);
    // Small whole numbers: every sum is exact.
    let values = |len: usize, step: usize| -> Vec<f32> { (0..len).map(|i| ((i * step) % 7) as f32 - 3.0).collect() };
    let (x, w) = (values(most * k, 5), values(n * k, 3));
    for device in launching().map(|device| deterministic(&device)) {
        let (x_on, w_on) = (filled(&*device, &x), filled(&*device, &w));
        let format = FactorType::Numbers(Dtype::F32);
        let product = |rows: usize, first_row, count, bias: Option<&device::Buffer>| {
            let mut y = filled(&*device, &vec![0.5f32; (count * rows + 1) * n]);
            let (weights, slices) = (Factor { elements: &w_on, format, n, k }, Some(Slices { count, first_row }));
            let (y_format, columns) = (Dtype::F32, None);
            device.product(Product { x: &x_on, rows, weights, bias, y: &mut y, y_format, columns, slices })?;
            Ok::<_, DeviceError>(contents(&*device, &y).iter().map(|b| f32::from_bits(*b as u32)).collect::<Vec<_>>())
        };
        for (rows, first) in [(1, 0), (2, 7), (30, 100), (129, 1), (most, 0)] {
            let found = product(rows, first, count, None).unwrap();
            let sum = |slice: usize, row: usize, output: usize| -> f32 {
                let inputs = slice * k / count..(slice + 1) * k / count;
                inputs.map(|i| x[(first + row) * k + i] * w[output * k + i]).sum()
            };
            for (at, found) in found[..count * rows * n].iter().enumerate() {
                let want = sum(at / n / rows, at / n % rows, at % n);
                assert_eq!(*found, want, "{}: {rows} rows from {first}, element {at}", device.name());
            }
            assert!(found[count * rows * n..].iter().all(|x| *x == 0.5), "{}: {rows} rows", device.name());
        }
        for (rows, first, count, bias) in [(1, 0, 5, None), (1, 0, 0, None), (1, 0, 3, Some(&w_on))] {
            let refused = product(rows, first, count, bias);
            assert!(matches!(refused, Err(DeviceError::BadProduct(_))), "{}: {count} slices", device.name());
        }
        assert!(matches!(product(most, 1, count, None), Err(DeviceError::Outside { .. })), "{}", device.name());
    }
}

#[test]
fn a_shape_without_an_algorithm_is_planned_and_its_products_are_refused_for_any_number_of_rows() {
    let fakes = launching().filter(|device| super::is_fake() && device.name() == "cuda");
    for device in fakes.map(|device| deterministic(&device)) {
        // The cuBLASLt in host code has no algorithm for 1 row of 12 outputs.
        let (n, k) = (12, 16);
        let format = FactorType::Numbers(Dtype::F32);
        let (weights, x) = (filled(&*device, &vec![1.0f32; n * k]), filled(&*device, &vec![1.0f32; 300 * k]));
        let shape = ProductShape { n, k, format, y_format: Dtype::F32, bias: false, stride: n, slices: 1 };
        device.plan_product(shape, &weights, 300).unwrap();
        let mut y = device.alloc(300 * n * 4).unwrap();
        for rows in [1, 2, 100, 128, 300] {
            let (weights, y_format) = (Factor { elements: &weights, format, n, k }, Dtype::F32);
            let product =
                Product { x: &x, rows, weights, bias: None, y: &mut y, y_format, columns: None, slices: None };
            let refused = device.product(product);
            assert!(matches!(refused, Err(DeviceError::Cuda(CudaError::NoAlgorithm(_)))), "{rows} rows: {refused:?}");
        }
    }
}

#[test]
fn a_planned_product_asks_for_no_algorithm_whatever_its_number_of_rows() {
    let format = Dtype::F32;
    for device in launching() {
        let (name, device) = (device.name(), &*device);
        let (n, k, most) = (3, 2, 300);
        let weights = filled(device, &vec![1.0f32; n * k]);
        let (x, bias) = (filled(device, &vec![2.0f32; (most + 100) * k]), filled(device, &vec![0.5f32; n]));
        let mut y = device.alloc((most + 100) * n * 4).unwrap();
        let shape = ProductShape {
            n,
            k,
            format: FactorType::Numbers(format),
            y_format: format,
            bias: true,
            stride: n,
            slices: 1,
        };
        device.plan_product(shape, &weights, most).unwrap();
        let weights = Factor { elements: &weights, format: FactorType::Numbers(format), n, k };
        let mut outcomes = Vec::new();
        // A capture refuses to choose one.
        let graph = device
            .capture(&mut || {
                for (rows, bias) in
                    (1..=most).map(|rows| (rows, Some(&bias))).chain([(1, None), (most + 100, Some(&bias))])
                {
                    let product = Product {
                        x: &x,
                        rows,
                        weights,
                        bias,
                        y: &mut y,
                        y_format: format,
                        columns: None,
                        slices: None,
                    };
                    outcomes.push(device.product(product));
                }
                outcomes.push(device.plan_product(ProductShape { bias: false, ..shape }, weights.elements, 1));
            })
            .unwrap();
        let planned = &outcomes[..most];
        assert!(planned.iter().all(Result::is_ok), "{name}: {planned:?}");
        let refused = |outcome: &Result<(), _>| matches!(outcome, Err(DeviceError::Capturing { .. }));
        assert!(name != "cuda" || outcomes[most..].iter().all(refused), "{name}: {:?}", &outcomes[most..]);
        let before = crate::counter::allocations();
        for rows in [1, 7, most] {
            let bias = Some(&bias);
            let product =
                Product { x: &x, rows, weights, bias, y: &mut y, y_format: format, columns: None, slices: None };
            device.product(product).unwrap();
        }
        assert!(name != "cuda" || crate::counter::allocations() == before, "{name}: a product allocates");
        device.fill(&mut y, 0, 4 * most * n, 0).unwrap();
        device.replay(&graph).unwrap();
        assert!(contents(device, &y)[..most * n].iter().all(|bits| f32::from_bits(*bits as u32) == 4.5), "{name}");
    }
}
