//! Layers whose weights are numbers, where a row's bits must not depend on the number of rows: slices of k, and the kernel that
//! computes what the device has no algorithm for.

use std::sync::Arc;

use attention_kernels::{Dtype, Rewritten, slices};
use device::{CudaError, Device, DeviceError, FactorType, Features, Product};
use linear::{Matrix, Purpose, Uploader, WeightRows};
use trial::numbers::{Random, to_bytes};

use super::devices;
use super::linear::{HALVES, check, multiply, numbers};
use super::rewritten::{products, scratch};
use crate::support::hooked::{Hooked, Hooks};

fn matrix(device: &dyn Device, dtype: Dtype, weights: &[f32], k: usize) -> Matrix {
    let raw = to_bytes(dtype, weights);
    let rows = [WeightRows::Numbers(dtype, &raw)];
    let shape = [weights.len() / k, k];
    Uploader::new(device).unwrap().matrix(None, dtype, shape, &rows, Purpose::Product).unwrap()
}

#[test]
fn few_outputs_of_many_inputs_are_sums_of_slices_that_do_not_depend_on_the_other_rows() {
    for device in devices::deterministic() {
        let (n, k, most, at_once) = (12, 4096, 20, 8);
        for (dtype, output, with_bias) in
            [(Dtype::Bf16, Dtype::Bf16, true), (Dtype::F16, Dtype::F32, true), (Dtype::Bf16, Dtype::F32, false)]
        {
            let mut random = Random::new(3);
            let (x, w) = (numbers(&mut random, dtype, most * k), numbers(&mut random, dtype, n * k));
            let bias = if with_bias { numbers(&mut random, output, n) } else { vec![0.0; n] };
            let weights = matrix(&*device, dtype, &w, k);
            let count = slices(device.features(), [n, k], FactorType::Numbers(dtype));
            assert_eq!(count, 2);
            // Space for some of the rows at a time.
            let mut space = scratch(&*device, Rewritten::Slices(count), [n, k], at_once);
            let given = with_bias.then_some(&bias[..]);
            let all = multiply(&*device, &weights, &x, given, output, Some(&mut space));
            let what = format!("{dtype} to {output} on {}", device.name());
            check(&all, &x, &w, &bias, k, output).unwrap();
            for rows in [0..1, 3..20, 7..8, 8..17] {
                let part = &x[rows.start * k..rows.end * k];
                let alone = multiply(&*device, &weights, part, given, output, Some(&mut space));
                assert!(alone == all[rows.start * n..rows.end * n], "{what}: rows {rows:?} alone");
            }
            let planned = products(&*device, &weights, with_bias, output, &space, most);
            let (shape, rows) = planned[0];
            assert!(planned.len() == 1 && rows == at_once && shape.slices == count && !shape.bias, "{planned:?}");
        }
    }
}

#[test]
fn the_number_of_slices_depends_on_the_shape_alone_and_only_where_bits_must_hold() {
    let of = |deterministic, n, k, format| {
        slices(Features { deterministic, ..Features::LAUNCHING }, [n, k], FactorType::Numbers(format))
    };
    for (n, k, wanted) in
        [(4096, 14336, 2), (2048, 8192, 2), (4096, 4096, 1), (28672, 4096, 1), (8192, 28672, 1), (64, 256, 1)]
    {
        assert_eq!(of(true, n, k, Dtype::Bf16), wanted, "{n} outputs of {k} inputs");
        assert_eq!(of(false, n, k, Dtype::Bf16), 1);
    }
    // A slice begins at a multiple of 16 bytes.
    assert_eq!([of(true, 64, 8200, Dtype::F16), of(true, 64, 8208, Dtype::F16)], [1, 2]);
    assert_eq!(of(true, 64, 8192, Dtype::F32), 1);
}

/// A device that has no algorithm for any product.
struct NoProducts;

impl Hooks for NoProducts {
    fn product(&self, _: &dyn Device, product: Product<'_>) -> Result<(), DeviceError> {
        Err(CudaError::NoAlgorithm(format!("{} outputs", product.weights.n)).into())
    }
}

#[test]
fn a_layer_without_an_algorithm_is_computed_by_our_own_kernel() {
    for device in devices::deterministic() {
        let device: Arc<dyn Device> = Arc::new(Hooked { device, hooks: NoProducts });
        for (i, dtype) in [HALVES[0], HALVES[1], Dtype::F32].into_iter().enumerate() {
            for (n, k, with_bias) in [(40, 200, true), (33, 96, false), (8, 4096, true)] {
                let mut random = Random::new(i as u64);
                let (x, w) = (numbers(&mut random, dtype, 37 * k), numbers(&mut random, dtype, n * k));
                let bias = if with_bias { numbers(&mut random, dtype, n) } else { vec![0.0; n] };
                let given = with_bias.then_some(&bias[..]);
                let weights = matrix(&*device, dtype, &w, k);
                let mut space = scratch(&*device, Rewritten::Slices(2), [n, k], 37);
                let mut multiply = |x: &[f32]| multiply(&*device, &weights, x, given, dtype, Some(&mut space));
                let all = multiply(&x);
                check(&all, &x, &w, &bias, k, dtype).unwrap();
                for rows in [0..1, 5..37, 8..16] {
                    let alone = multiply(&x[rows.start * k..rows.end * k]);
                    assert!(alone == all[rows.start * n..rows.end * n], "{dtype}: rows {rows:?} alone");
                }
            }
        }
    }
}
