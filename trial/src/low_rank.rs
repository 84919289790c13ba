//! Generated low-rank additions with known results.

use std::sync::Arc;

use device::{Buffer, Device};
use linear::{Arithmetic, DownFactor, LowRank, UpFactor};
use simd::Pool;

use crate::numbers::{Random, from_bytes, round, to_bytes, ulp};
use crate::run::{buffer, bytes};
use attention_kernels::Dtype;
use attention_kernels::KernelError;
use attention_kernels::Variant;
use attention_kernels::{LowRankArgs, LowRankFactors, LowRankRows, LowRankSize, LowRankSlots};

/// Rank of an adapter in each part of a layer; `None`: it does not target that part. An empty slot targets none.
pub type SlotRanks = Vec<Option<usize>>;

/// Rows of several adapters of one layer.
pub struct LowRankProblem {
    /// Type of activations and factors.
    pub dtype: Dtype,
    size: LowRankSize,
    /// First output of each part.
    parts: Vec<usize>,
    /// Factors of each slot and part.
    slots: Vec<Vec<Option<Factors>>>,
    of_rows: Vec<Option<u32>>,
    x: Vec<f32>,
    y: Vec<f32>,
}

struct Factors {
    rank: usize,
    scale: f32,
    /// `[rank, inputs]`.
    down: Vec<f32>,
    /// `[outputs of the part, rank]`.
    up: Vec<f32>,
}

impl LowRankProblem {
    /// A layer whose parts have these outputs, adapters of at most rank `rank`, and the slot of each row.
    pub fn new(
        seed: u64,
        dtype: Dtype,
        [inputs, rank]: [usize; 2],
        parts: &[usize],
        slots: &[SlotRanks],
        of_rows: Vec<Option<u32>>,
    ) -> LowRankProblem {
        let mut random = Random::new(seed);
        let mut draw =
            |len: usize, size: f32| (0..len).map(|_| round(dtype, size * random.unit())).collect::<Vec<f32>>();
        let mut factors = |rank: usize, outputs: usize| Factors {
            rank,
            scale: 1.0 / (1 + rank % 3) as f32,
            down: draw(rank * inputs, 1.0 / (inputs as f32).sqrt()),
            up: draw(outputs * rank, 1.0 / (rank as f32).sqrt()),
        };
        let slots = slots.iter().map(|slot| {
            slot.iter().zip(parts).map(|(rank, outputs)| rank.map(|rank| factors(rank, *outputs))).collect()
        });
        let slots = slots.collect();
        let outputs = parts.iter().sum();
        let (x, y) = (draw(of_rows.len() * inputs, 1.0), draw(of_rows.len() * outputs, 1.0));
        let size = LowRankSize { inputs, outputs, parts: parts.len(), rank };
        let parts = parts.iter().scan(0, |end, outputs| Some(std::mem::replace(end, *end + outputs))).collect();
        LowRankProblem { dtype, size, parts, slots, of_rows, x, y }
    }

    /// The same adapters with some of the rows, in this order, each with its own slot or another.
    pub fn with_rows(self, rows: &[(usize, Option<u32>)]) -> LowRankProblem {
        let of = |numbers: &[f32], width: usize| {
            rows.iter().flat_map(|(row, _)| &numbers[row * width..][..width]).copied().collect()
        };
        let (x, y) = (of(&self.x, self.size.inputs), of(&self.y, self.size.outputs));
        LowRankProblem { x, y, of_rows: rows.iter().map(|(_, slot)| *slot).collect(), ..self }
    }

    /// Number of rows.
    pub fn num_rows(&self) -> usize {
        self.of_rows.len()
    }

    /// The outputs before the addition `[rows, outputs]`.
    pub fn before(&self) -> &[f32] {
        &self.y
    }

    /// The addition of a slot; `None` if it is empty.
    fn packed(&self, pool: &Pool, slot: &[Option<Factors>]) -> Result<Option<LowRank>, KernelError> {
        let bytes = |factors: &Factors| [&factors.down, &factors.up].map(|numbers| to_bytes(self.dtype, numbers));
        let targeted = slot.iter().zip(&self.parts).filter_map(|(factors, first)| Some((factors.as_ref()?, *first)));
        let targeted: Vec<_> = targeted.map(|(factors, first)| (factors.scale, first, bytes(factors))).collect();
        if targeted.is_empty() {
            return Ok(None);
        }
        let dtype = self.dtype;
        let down = targeted.iter().map(|(scale, _, [data, _])| DownFactor { dtype, data, scale: *scale });
        let up = targeted.iter().enumerate();
        let up = up.map(|(down, (_, first, [_, data]))| UpFactor { dtype, data, first_output: *first, down });
        Ok(Some(LowRank::pack(
            pool,
            Arithmetic::Exact,
            self.size.inputs,
            &down.collect::<Vec<_>>(),
            &up.collect::<Vec<_>>(),
        )?))
    }

    /// Copies the inputs to a device.
    ///
    /// # Errors
    /// The device has not enough memory, or a rank exceeds the greatest.
    pub fn on(&self, device: &Arc<dyn Device>) -> Result<LowRankOnDevice<'_>, KernelError> {
        let (rows, width) = (self.num_rows(), self.size.width());
        let additions =
            self.slots.iter().map(|slot| self.packed(device.pool(), slot)).collect::<Result<Vec<_>, _>>()?;
        let mut slots = None;
        if device.features().launches {
            let mut stage = device.pinned(self.size.slot_bytes(self.dtype))?;
            let mut filled = LowRankSlots::new(&**device, self.dtype, additions.len(), self.size)?;
            for (slot, addition) in additions.iter().enumerate() {
                filled.set(&**device, &mut stage, slot, addition.as_ref())?;
            }
            slots = Some(filled);
        }
        let mut of_rows = LowRankRows::new(&**device, rows, additions.len())?;
        of_rows.load(&**device, self.of_rows.iter().copied())?;
        Ok(LowRankOnDevice {
            problem: self,
            device: Arc::clone(device),
            x: buffer(&**device, &to_bytes(self.dtype, &self.x))?,
            y: buffer(&**device, &to_bytes(self.dtype, &self.y))?,
            t: buffer(&**device, &vec![0xff; rows * width * size_of::<f32>()])?,
            rows: of_rows,
            slots,
            additions,
        })
    }

    /// Returns the greatest error of every `step`-th row of a result against float64, in ulps of the type at the sum of the
    /// magnitudes. Rows without an adapter must be unchanged: otherwise it is infinite.
    pub fn worst(&self, found: &[f32], step: usize) -> f64 {
        let LowRankSize { inputs, outputs, .. } = self.size;
        let mut worst = 0.0f64;
        for row in (0..self.num_rows()).step_by(step.max(1)) {
            let (found, before) = (&found[row * outputs..][..outputs], &self.y[row * outputs..][..outputs]);
            let mut sums: Vec<[f64; 2]> =
                before.iter().map(|before| [f64::from(*before), f64::from(before.abs())]).collect();
            let mut exact = vec![true; outputs];
            let slot = self.of_rows[row].map(|slot| &self.slots[slot as usize][..]).unwrap_or_default();
            for (factors, first) in slot.iter().zip(&self.parts).filter_map(|(it, first)| Some((it.as_ref()?, *first)))
            {
                let Factors { rank, scale, down, up } = factors;
                let x = &self.x[row * inputs..][..inputs];
                let t: Vec<[f64; 2]> = (0..*rank).map(|r| dot(x.iter().zip(&down[r * inputs..][..inputs]))).collect();
                for (i, up) in up.chunks_exact(*rank).enumerate() {
                    exact[first + i] = false;
                    for (up, [sum, magnitude]) in up.iter().zip(&t) {
                        let up = f64::from(*scale) * f64::from(*up);
                        sums[first + i][0] += up * sum;
                        sums[first + i][1] += (up * magnitude).abs();
                    }
                }
            }
            for ((found, [want, magnitude]), exact) in found.iter().zip(sums).zip(exact) {
                let error = (f64::from(*found) - want).abs() / ulp(self.dtype, magnitude);
                worst = if error.is_nan() || exact && error > 0.0 { f64::INFINITY } else { worst.max(error) };
            }
        }
        worst
    }
}

/// Sum of products, and of their magnitudes.
fn dot<'a>(pairs: impl Iterator<Item = (&'a f32, &'a f32)>) -> [f64; 2] {
    let products = pairs.map(|(a, b)| f64::from(*a) * f64::from(*b));
    products.fold([0.0, 0.0], |[sum, magnitude], product| [sum + product, magnitude + product.abs()])
}

/// A problem whose inputs are on a device.
pub struct LowRankOnDevice<'a> {
    problem: &'a LowRankProblem,
    device: Arc<dyn Device>,
    x: Buffer,
    y: Buffer,
    t: Buffer,
    rows: LowRankRows,
    slots: Option<LowRankSlots>,
    additions: Vec<Option<LowRank>>,
}

impl LowRankOnDevice<'_> {
    /// Runs a variant once.
    ///
    /// # Errors
    /// As for [`Variant::low_rank`].
    pub fn call(&mut self, variant: &Variant) -> Result<(), KernelError> {
        let LowRankOnDevice { problem, device, x, y, t, rows, slots, additions } = self;
        let of = |slot: u32| additions.get(slot as usize)?.as_ref();
        let LowRankSize { inputs, outputs, .. } = problem.size;
        let factors = match slots {
            Some(slots) => LowRankFactors::Device { slots, t },
            None => LowRankFactors::Host { inputs, outputs, of: &of, first: 0 },
        };
        variant.low_rank(&**device, LowRankArgs { x, y, num_rows: problem.num_rows(), rows, factors })
    }

    /// Restores the outputs before the addition.
    ///
    /// # Errors
    /// The copy fails.
    pub fn reset(&mut self) -> Result<(), KernelError> {
        Ok(self.device.upload(&mut self.y, 0, &to_bytes(self.problem.dtype, &self.problem.y))?)
    }

    /// Returns the outputs `[rows, outputs]`.
    ///
    /// # Errors
    /// The copy fails.
    pub fn output(&self) -> Result<Vec<f32>, KernelError> {
        Ok(from_bytes(self.problem.dtype, &bytes(&*self.device, &self.y)?))
    }
}
