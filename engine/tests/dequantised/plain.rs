//! Products with quantised weights by their plain meaning, as kernel variants of this test alone: the weights as the numbers
//! that they stand for, the activations rounded by their definition and turned back, multiplied in double precision.
//!
//! Where an activation lies between two integers, the last bit of a float decides which it becomes, and that is a 127th
//! part of its block's greatest. So there are three of them:
//!
//! | variant | whose result goes on | integers of the activations |
//! |---|---|---|
//! | `test.beside` | our product's; the plain one is compared with it | kept in [`Notes`] |
//! | `test.instead` | the plain one's | rounded anew |
//! | `test.agreed` | the plain one's | those that `test.beside` kept in the same call; how they differ is kept |

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use attention_kernels::{Capabilities, Kernel, KernelError, LinearArgs, Operation, Variant};
use device::Device;
use linear::{Gemm, Rows, gemm};
use simd::Isa;

const BLOCK: usize = 32;

const CAPABILITIES: Capabilities = Capabilities::CPU;

attention_kernels::inventory::submit! { Variant {
    name: "test.beside", operation: Operation::Linear, capabilities: CAPABILITIES, kernel: Kernel::Linear(beside),
} }
attention_kernels::inventory::submit! { Variant {
    name: "test.instead", operation: Operation::Linear, capabilities: CAPABILITIES, kernel: Kernel::Linear(instead),
} }
attention_kernels::inventory::submit! { Variant {
    name: "test.agreed", operation: Operation::Linear, capabilities: CAPABILITIES, kernel: Kernel::Linear(agreed),
} }

/// What the variants saw since [`Notes::begin`].
#[derive(Default)]
pub struct Notes {
    /// The greatest difference of a number of our product from the plain one, in terms of the lengths of its two vectors.
    pub product_off: f64,
    /// The integers of each call of `test.beside` that no call of `test.agreed` has taken.
    pub integers: VecDeque<Vec<f32>>,
    /// Activations of `test.agreed`.
    pub activations: usize,
    /// Those of them that are another integer when they are rounded anew.
    pub flips: usize,
    /// The greatest distance of one of these from the number between its two integers, in units of these.
    pub from_tie: f64,
}

static NOTES: Mutex<Option<Notes>> = Mutex::new(None);

fn notes() -> MutexGuard<'static, Option<Notes>> {
    NOTES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Notes {
    pub fn begin() {
        *notes() = Some(Notes::default());
    }

    pub fn end() -> Notes {
        notes().take().unwrap()
    }
}

fn beside(device: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
    let mut integers = Vec::new();
    let plain = plain(&args, |_, own| {
        integers.push(own);
        own
    })?;
    let (weights, rows) = (args.weights.host()?, args.rows);
    let y = &mut args.y.host_mut::<f32>()?[..plain.len()];
    let bias: Option<&[f32]> = args.bias.map(|bias| bias.host()).transpose()?;
    let x = Rows::Numbers(&args.x.numbers("test.beside")?.host()?[..rows * weights.k()]);
    gemm(Isa::best(), device.pool(), Gemm { x, weights, bias, y });
    let mut notes = notes();
    let notes = notes.get_or_insert_default();
    let offs = y.iter().zip(&plain).map(|(ours, plain)| (f64::from(*ours) - plain.sum).abs() / plain.scale);
    notes.product_off = offs.fold(notes.product_off, f64::max);
    notes.integers.push_back(integers);
    Ok(())
}

fn instead(_: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
    let plain = plain(&args, |_, own| own)?;
    write(args, &plain)
}

fn agreed(_: &dyn Device, args: LinearArgs<'_>) -> Result<(), KernelError> {
    let mut notes = notes();
    let notes = notes.get_or_insert_default();
    let mut theirs = notes.integers.pop_front().unwrap_or_default().into_iter();
    let plain = plain(&args, |exact, own| {
        // Nothing would be compared if the calls were not the same ones.
        let theirs = theirs.next().unwrap_or(f32::NAN);
        notes.activations += 1;
        if theirs != own {
            notes.flips += 1;
            notes.from_tie = notes.from_tie.max(f64::from((exact - (own + theirs) / 2.0).abs()));
        }
        theirs
    })?;
    write(args, &plain)
}

/// A number of a product.
struct Number {
    sum: f64,
    /// The product of the lengths of the two vectors, and the bias: what the rounding of sums is measured by.
    scale: f64,
}

fn write(args: LinearArgs<'_>, plain: &[Number]) -> Result<(), KernelError> {
    let y = &mut args.y.host_mut::<f32>()?[..plain.len()];
    y.iter_mut().zip(plain).for_each(|(y, plain)| *y = plain.sum as f32);
    Ok(())
}

/// The product; `integer` gives an activation's integer, from what is rounded and what that gives.
fn plain(args: &LinearArgs<'_>, mut integer: impl FnMut(f32, f32) -> f32) -> Result<Vec<Number>, KernelError> {
    let weights = args.weights.host()?;
    let (n, k) = (weights.n(), weights.k());
    let mut dense = vec![0.0f32; n * k];
    dense.chunks_mut(k).enumerate().for_each(|(row, out)| weights.copy_row(row, out));
    let dense: Vec<f64> = dense.into_iter().map(f64::from).collect();
    let lengths: Vec<f64> = dense.chunks(k).map(length).collect();
    let bias: Option<&[f32]> = args.bias.map(|bias| bias.host()).transpose()?;
    let mut y = Vec::with_capacity(args.rows * n);
    let mut numbers = Vec::with_capacity(k);
    for x in args.x.numbers("test.plain")?.host::<f32>()?[..args.rows * k].chunks(k) {
        numbers.clear();
        for block in x.chunks(BLOCK) {
            let greatest = block.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            let (scale, inverse) = if greatest < 1e-30 { (0.0, 0.0) } else { (greatest / 127.0, 127.0 / greatest) };
            numbers.extend(block.iter().map(|x| {
                let exact = x * inverse;
                f64::from(integer(exact, exact.round_ties_even())) * f64::from(scale)
            }));
        }
        let own = length(&numbers);
        for (column, row) in dense.chunks(k).enumerate() {
            let bias = bias.map_or(0.0, |bias| f64::from(bias[column]));
            // Not 0 where both are 0, and a difference would be none.
            let scale = (own * lengths[column] + bias.abs()).max(f64::MIN_POSITIVE);
            y.push(Number { sum: dot(&numbers, row) + bias, scale });
        }
    }
    Ok(y)
}

fn length(x: &[f64]) -> f64 {
    dot(x, x).sqrt()
}

/// In eight sums, which a processor adds to at once, and without a loop over them: this file is not optimised.
fn dot(x: &[f64], w: &[f64]) -> f64 {
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = [0.0; 8];
    let ((x, x_rest), (w, w_rest)) = (x.as_chunks::<8>(), w.as_chunks::<8>());
    for (x, w) in x.iter().zip(w) {
        a += x[0] * w[0];
        b += x[1] * w[1];
        c += x[2] * w[2];
        d += x[3] * w[3];
        e += x[4] * w[4];
        f += x[5] * w[5];
        g += x[6] * w[6];
        h += x[7] * w[7];
    }
    a + b + c + d + e + f + g + h + x_rest.iter().zip(w_rest).map(|(x, w)| x * w).sum::<f64>()
}
