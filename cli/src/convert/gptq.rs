//! GPTQ: rounds the weights of a row one input after the other, and lets those that follow make up for the error of the outputs
//! (Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2023).
//!
//! With H = XᵀX of the inputs X of a layer, the error of its outputs is least if an error e of weight j changes weight m > j by
//! −e · U\[j\]\[m\] / U\[j\]\[j\], where U is the upper triangular matrix with UᵀU = H⁻¹.

use simd::Pool;

use super::round::Form;

/// Added to the diagonal of H: this share of its mean.
const DAMPING: f64 = 0.01;

/// The matrix U of a layer's inputs, `[k, k]`.
pub(super) struct Inverse {
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

    /// Rounds rows `[n, k]` and writes their scales `[n, groups]`.
    pub fn round(&self, pool: &Pool, form: Form, rows: &mut [f32], scales: &mut [f32]) {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use engine::Dtype;

    use super::*;

    #[test]
    fn outputs_of_correlated_inputs_change_less_than_by_rounding() {
        let (n, k, count) = (16, 64, 200);
        let mut state = 7u64;
        let mut draw = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        let common: Vec<f32> = (0..count).map(|_| draw()).collect();
        let x: Vec<f32> = (0..count * k).map(|at| 0.3 * draw() + common[at / k] * (1.0 + (at % 3) as f32)).collect();
        let w: Vec<f32> = (0..n * k).map(|_| draw()).collect();
        let h: Vec<f32> =
            (0..k * k).map(|at| (0..count).map(|r| x[r * k + at / k] * x[r * k + at % k]).sum()).collect();
        let form = Form { bits: 4, group: 32, scale: Dtype::F16 };
        let pool = Pool::new(Some(2)).unwrap();
        let error = |rounded: &[f32]| -> f64 {
            let output = |row: usize, r: usize| -> f64 {
                (0..k).map(|i| f64::from(rounded[row * k + i] - w[row * k + i]) * f64::from(x[r * k + i])).sum()
            };
            (0..n * count).map(|at| output(at / count, at % count).powi(2)).sum()
        };
        let (mut nearest, mut scales) = (w.clone(), vec![0.0; n * k / 32]);
        nearest.chunks_mut(k).zip(scales.chunks_mut(k / 32)).for_each(|(row, scales)| form.nearest(row, scales));
        let mut rounded = w.clone();
        Inverse::new(&h, k).unwrap().round(&pool, form, &mut rounded, &mut scales);
        assert!(error(&rounded) < 0.5 * error(&nearest), "{} {}", error(&rounded), error(&nearest));
        for (row, scales) in rounded.chunks(k).zip(scales.chunks(k / 32)) {
            let is_code = |(i, w): (usize, &f32)| *w == scales[i / 32] * form.integer(*w, scales[i / 32]);
            assert!(row.iter().enumerate().all(is_code));
        }
        assert!(Inverse::new(&vec![f32::NAN; k * k], k).is_none());
        assert!(Inverse::new(&vec![0.0; k * k], k).is_some(), "inputs that are always zero");
    }
}
