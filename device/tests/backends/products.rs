//! Matrix products on every backend that launches.

use std::sync::Arc;

use device::gemm::Product;
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
                let product = Product { x: &x_on, rows, weights: &weights, bias, y: &mut y, y_format };
                device.product(product).unwrap();
                let sum = |at: usize| (0..k).map(|i| x[at / n * k + i] * w[at % n * k + i]).sum::<f32>();
                let want = (0..rows * n).map(|at| sum(at) + if with_bias { b[at % n] } else { 0.0 });
                let mut want = store(y_format, &want.collect::<Vec<_>>());
                want.resize(want.len() + y_format.bytes(), 0x55);
                let mut got = vec![0; y.len_bytes()];
                device.download(&y, 0, &mut got).unwrap();
                assert!(got == want, "{} {format:?} to {y_format:?}, {rows} × {n} × {k}", device.name());
                let product = Product { x: &x_on, rows: rows + 1, weights: &weights, bias, y: &mut y, y_format };
                assert!(matches!(device.product(product), Err(DeviceError::Outside { .. })));
            }
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
            device.product(Product { x: &x, rows, weights: &weights, bias: None, y: &mut y, y_format }).unwrap();
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
        device.plan_product(&weights, most, true, format).unwrap();
        let mut outcomes = Vec::new();
        // A capture refuses to choose one.
        let graph = device
            .capture(&mut || {
                for (rows, bias) in
                    (1..=most).map(|rows| (rows, Some(&bias))).chain([(1, None), (most + 100, Some(&bias))])
                {
                    let product = Product { x: &x, rows, weights: &weights, bias, y: &mut y, y_format: format };
                    outcomes.push(device.product(product));
                }
                outcomes.push(device.plan_product(&weights, 1, false, format));
            })
            .unwrap();
        let planned = &outcomes[..most];
        assert!(planned.iter().all(Result::is_ok), "{name}: {planned:?}");
        let refused = |outcome: &Result<(), _>| matches!(outcome, Err(DeviceError::Capturing { .. }));
        assert!(name != "cuda" || outcomes[most..].iter().all(refused), "{name}: {:?}", &outcomes[most..]);
        let before = crate::counter::allocations();
        for rows in [1, 7, most] {
            let product = Product { x: &x, rows, weights: &weights, bias: Some(&bias), y: &mut y, y_format: format };
            device.product(product).unwrap();
        }
        assert!(name != "cuda" || crate::counter::allocations() == before, "{name}: a product allocates");
        device.fill(&mut y, 0, 4 * most * n, 0).unwrap();
        device.replay(&graph).unwrap();
        assert!(contents(device, &y)[..most * n].iter().all(|bits| f32::from_bits(*bits as u32) == 4.5), "{name}");
    }
}
