//! GPTQ: rounds the weights of a row one input after the other, and lets those that follow make up for the error of the outputs
//! (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2023).
//!
//! With H = XᵀX of the inputs X of a layer, the error of its outputs is least if an error e of weight j changes weight m > j by
//! −e · U\[j\]\[m\] / U\[j\]\[j\], where U is the upper triangular matrix with UᵀU = H⁻¹.

mod form;

pub use form::IntegerForm;
use simd::Pool;

/// Added to the diagonal of H: this share of its mean.
const DAMPING: f64 = 0.01;

/// The matrix U of a layer's inputs, `[k, k]`.
pub struct Inverse {
    u: Vec<f32>,
    k: usize,
}

impl Inverse {
    /// Of H `[k, k]`; `None` if H is not positive definite, which inputs that are not finite cause.
    ///
    /// With J, which reverses the order of rows, and J·H·J = L·Lᵀ: U = J·L⁻¹·J.
    pub fn new(h: &[f32], k: usize) -> Option<Inverse> {
        let mean = (0..k).map(|i| f64::from(h[i * k + i])).sum::<f64>() / k as f64;
        // Inputs that are always zero: any weight serves.
        let damping = if mean > 0.0 { DAMPING * mean } else { 1.0 };
        let reversed = |i: usize, j: usize| {
            let (i, j) = (k - 1 - i, k - 1 - j);
            f64::from(h[i * k + j]) + if i == j { damping } else { 0.0 }
        };
        let mut l = vec![0.0f64; k * k];
        for i in 0..k {
            let (above, row) = l.split_at_mut(i * k);
            for j in 0..=i {
                let other = if j == i { None } else { Some(&above[j * k..][..=j]) };
                match other {
                    Some(other) => row[j] = (reversed(i, j) - dot(&row[..j], &other[..j])) / other[j],
                    None => {
                        let square = reversed(i, i) - dot(&row[..i], &row[..i]);
                        if !(square > 0.0 && square.is_finite()) {
                            return None;
                        }
                        row[i] = square.sqrt();
                    }
                }
            }
        }
        // L⁻¹, row by row.
        let mut inverse = vec![0.0f64; k * k];
        for i in 0..k {
            let (above, row) = inverse.split_at_mut(i * k);
            let (row, factors) = (&mut row[..=i], &l[i * k..][..=i]);
            for (j, factor) in factors[..i].iter().enumerate() {
                row[..=j].iter_mut().zip(&above[j * k..][..=j]).for_each(|(x, y)| *x -= factor * y);
            }
            row[i] = 1.0;
            row.iter_mut().for_each(|x| *x /= factors[i]);
        }
        let u = (0..k * k).map(|at| inverse[(k - 1 - at / k) * k + (k - 1 - at % k)] as f32).collect();
        Some(Inverse { u, k })
    }

    /// Rounds rows `[n, k]` to values of the form and writes their scales `[n, groups]`.
    pub fn round(&self, pool: &Pool, form: IntegerForm, rows: &mut [f32], scales: &mut [f32]) {
        let (k, groups) = (self.k, self.k.div_ceil(form.group));
        pool.zip_chunks_mut((rows, k), (scales, groups), k * k, |_, row, scales| {
            for j in 0..k {
                if j % form.group == 0 {
                    scales[j / form.group] = form.scale(&row[j..(j + form.group).min(k)]);
                }
                let scale = scales[j / form.group];
                let rounded = scale * form.integer(row[j], scale);
                let u = &self.u[j * k..][..k];
                let error = (row[j] - rounded) / u[j];
                row[j] = rounded;
                row[j + 1..].iter_mut().zip(&u[j + 1..]).for_each(|(w, u)| *w -= error * u);
            }
        });
    }
}

/// The scalar product, in eight sums.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    let mut sums = [0.0; 8];
    for (a, b) in a.iter().zip(b) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    sums.iter().sum::<f64>() + a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum::<f64>()
}
