//! Problems on devices, and the results of kernels.

use std::ops::Range;
use std::sync::Arc;

use device::{Buffer, Device, DeviceError};

use crate::numbers::{element, from_bytes, to_byte, to_bytes, tolerance, ulp};
use crate::problem::{Problem, Truth};
use attention_kernels::KernelError;
use attention_kernels::KvShape;
use attention_kernels::Variant;
use attention_kernels::{AttentionArgs, KvCache, KvScales, Values};
use attention_kernels::{CacheFormat, Dtype, KvDtype};
use attention_kernels::{Workspace, WorkspaceLimits};

impl Problem {
    /// Copies the inputs to a device, with space to split the context of every row.
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn on(&self, device: &Arc<dyn Device>) -> Result<OnDevice<'_>, KernelError> {
        self.with_partials(device, usize::MAX)
    }

    /// As [`Problem::on`], with space for `max_partials` partial results ([`WorkspaceLimits::max_partials`]).
    ///
    /// # Errors
    /// As [`Problem::on`].
    pub fn with_partials(&self, device: &Arc<dyn Device>, max_partials: usize) -> Result<OnDevice<'_>, KernelError> {
        let cache = |which: usize, numbers: &[f32]| {
            let own = KvShape { num_blocks: self.own_blocks(), ..self.shape };
            let piece = cache_bytes(self.format, &own, which, numbers, &self.token_scales[which]);
            repeated(&**device, &piece, self.shape.num_blocks * self.format.block_bytes(&self.shape))
        };
        let scales = match &self.scales {
            None => None,
            Some([keys, values]) => Some(Arc::new(KvScales {
                keys: floats(&**device, keys)?,
                values: floats(&**device, values)?,
                per_head: keys.len() > 1,
            })),
        };
        let rows = self.batch.num_rows();
        let mut query = Vec::new();
        for row in self.query.chunks(self.width()) {
            query.extend_from_slice(row);
            query.resize(query.len() + self.query_gap, f32::NAN);
        }
        let limits = WorkspaceLimits {
            max_seqs: self.batch.num_seqs(),
            max_rows: rows,
            max_blocks: self.batch.block_tables.longest(),
            num_blocks: self.shape.num_blocks,
            block_size: self.shape.block_size,
            num_heads: self.num_heads,
            head_dim: self.shape.head_dim,
            max_partials,
            items_at_once: 0,
            max_copies: 0,
        };
        let mut workspace = Workspace::new(&**device, limits)?;
        workspace.load(&**device, &self.batch, &[], self.window)?;
        let of_heads = |numbers: &Option<Vec<f32>>| numbers.as_ref().map(|it| floats(&**device, it)).transpose();
        Ok(OnDevice {
            problem: self,
            device: device.clone(),
            query: buffer(&**device, &to_bytes(self.format.dtype, &query))?,
            cache: KvCache {
                shape: self.shape,
                format: self.format,
                keys: cache(0, &self.keys)?,
                values: match self.latent {
                    Some(dim) => Values::InKeys { dim },
                    None => cache(1, &self.values)?.into(),
                },
                scales,
            },
            slopes: of_heads(&self.slopes)?,
            sinks: of_heads(&self.sinks)?,
            workspace,
        })
    }
}

/// A problem whose inputs are on a device.
pub struct OnDevice<'a> {
    problem: &'a Problem,
    device: Arc<dyn Device>,
    query: Buffer,
    /// Keys and values.
    pub cache: KvCache,
    slopes: Option<Buffer>,
    sinks: Option<Buffer>,
    workspace: Workspace,
}

/// Output of a kernel.
#[derive(Clone, PartialEq, Debug)]
pub struct Results {
    /// Output as stored.
    pub output: Vec<u8>,
    /// Log of the sum of exp(score) as stored, if it was requested.
    pub lse: Option<Vec<u8>>,
}

/// Byte that fills output and lse before a kernel runs; rows of other sequences must keep it.
pub const UNTOUCHED: u8 = 0x55;

impl OnDevice<'_> {
    /// Makes the list of work anew, for a kernel that computes so many items at once ([`WorkspaceLimits::items_at_once`]).
    ///
    /// # Errors
    /// As [`Problem::on`].
    pub fn split_for(mut self, items_at_once: usize) -> Result<Self, KernelError> {
        let limits = WorkspaceLimits { items_at_once, ..*self.workspace.limits() };
        self.workspace = Workspace::new(&*self.device, limits)?;
        self.workspace.load(&*self.device, &self.problem.batch, &[], self.problem.window)?;
        Ok(self)
    }

    /// Allocates the output of all rows, filled with [`UNTOUCHED`].
    ///
    /// # Errors
    /// The device has not enough memory.
    pub fn output(&self) -> Result<Buffer, DeviceError> {
        let problem = self.problem;
        let bytes = problem.batch.num_rows() * problem.out_width() * problem.format.dtype.bytes();
        buffer(&*self.device, &vec![UNTOUCHED; bytes])
    }

    /// Enqueues a call of a variant on some of the sequences.
    ///
    /// # Errors
    /// The variant fails.
    pub fn call(
        &self,
        variant: &Variant,
        seqs: Range<usize>,
        output: &mut Buffer,
        lse: Option<&mut Buffer>,
    ) -> Result<(), KernelError> {
        let problem = self.problem;
        let args = AttentionArgs {
            query: &self.query,
            query_stride: problem.width() + problem.query_gap,
            num_heads: problem.num_heads,
            output,
            lse,
            cache: &self.cache,
            batch: &problem.batch,
            seqs,
            scale: problem.scale,
            window: problem.window,
            sparse: problem.sparse,
            soft_cap: problem.soft_cap,
            alibi_slopes: self.slopes.as_ref(),
            sinks: self.sinks.as_ref(),
            workspace: Some(&self.workspace),
        };
        variant.attention(&*self.device, args)
    }

    /// Runs a variant on some of the sequences and returns its output.
    ///
    /// # Errors
    /// The variant fails.
    pub fn run(&self, variant: &Variant, seqs: Range<usize>, lse: bool) -> Result<Results, KernelError> {
        let device = &*self.device;
        let mut output = self.output()?;
        let sums = self.problem.batch.num_rows() * self.problem.num_heads * size_of::<f32>();
        let mut sums = if lse { Some(buffer(device, &vec![UNTOUCHED; sums])?) } else { None };
        self.call(variant, seqs, &mut output, sums.as_mut())?;
        let lse = sums.map(|sums| bytes(device, &sums)).transpose()?;
        Ok(Results { output: bytes(device, &output)?, lse })
    }
}

impl Results {
    /// Returns the bytes of the output and of the lse of some rows.
    pub fn rows(&self, problem: &Problem, rows: Range<usize>) -> (&[u8], &[u8]) {
        let (row, heads) = (problem.out_width() * problem.format.dtype.bytes(), problem.num_heads * 4);
        let lse = self.lse.as_ref().map_or(&[][..], |lse| &lse[rows.start * heads..rows.end * heads]);
        (&self.output[rows.start * row..rows.end * row], lse)
    }

    /// Iterates over the elements of the expected rows: index, actual value, and error in ulps of the output's type at the
    /// mean of |v| under the row's weights.
    fn errors(&self, problem: &Problem, truth: &Truth) -> impl Iterator<Item = (usize, f32, f64)> {
        let (dtype, width) = (problem.format.dtype, problem.out_width());
        truth.rows.iter().flat_map(move |&row| {
            let (elements, _) = self.rows(problem, row..row + 1);
            let numbers = from_bytes(dtype, elements).into_iter();
            numbers.enumerate().map(move |(i, got)| {
                let at = row * width + i;
                (at, got, (f64::from(got) - truth.output[at]).abs() / ulp(dtype, truth.magnitude[at]))
            })
        })
    }

    /// Returns the greatest error in ulps; infinity if there is a NaN.
    pub fn worst(&self, problem: &Problem, truth: &Truth) -> f64 {
        let ulps = self.errors(problem, truth).map(|(.., ulps)| if ulps.is_nan() { f64::INFINITY } else { ulps });
        ulps.fold(0.0, f64::max)
    }

    /// Returns the greatest error in ulps.
    ///
    /// # Errors
    /// An error exceeds the [`tolerance`]: the first such element of the output, else of the lse.
    pub fn check(&self, variant: &Variant, problem: &Problem, truth: &Truth) -> Result<f64, Wrong> {
        let allowed = tolerance(&variant.capabilities, problem.format);
        let (width, dim, heads) = (problem.out_width(), problem.value_dim(), problem.num_heads);
        let mut worst = 0.0f64;
        let outputs = self.errors(problem, truth).map(|(at, got, ulps)| {
            worst = worst.max(ulps);
            let place = [at / width, at / dim % heads, at % dim];
            (
                ulps <= allowed.output,
                Wrong { part: "output", place, got, want: truth.output[at], error: ulps, wrong: 0, of: 0 },
            )
        });
        Wrong::first(outputs)?;
        let sums = self.lse.iter().flat_map(|lse| from_bytes(Dtype::F32, lse)).enumerate().map(|(at, got)| {
            let want = truth.lse[at];
            let error = (f64::from(got) - want).abs();
            let close = error <= allowed.lse * want.abs().max(1.0) || f64::from(got) == want;
            (close, Wrong { part: "lse", place: [at / heads, at % heads, 0], got, want, error, wrong: 0, of: 0 })
        });
        Wrong::first(sums)?;
        // No error is NaN: that exceeds every tolerance.
        Ok(worst)
    }
}

/// The first element of a result that is further from the truth than permitted, and how many are.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{part} of (row, head, element) {place:?} is {got}, want {want}, error {error:.2}; {wrong} of {of} are wrong")]
pub struct Wrong {
    /// `output` or `lse`.
    pub part: &'static str,
    /// Row, head and element; in the lse, which has one number per head, element 0.
    pub place: [usize; 3],
    /// Actual value.
    pub got: f32,
    /// Expected value.
    pub want: f64,
    /// Error: of the output in ulps, of the lse as a number.
    pub error: f64,
    /// Number of wrong elements.
    pub wrong: usize,
    /// Number of compared elements.
    pub of: usize,
}

impl Wrong {
    /// Returns `Ok` if every one of some elements is right. [`Wrong::wrong`] and [`Wrong::of`] of the elements are not read.
    ///
    /// # Errors
    /// The first that is not, with the counts.
    pub fn first(elements: impl Iterator<Item = (bool, Wrong)>) -> Result<(), Wrong> {
        let (mut first, mut wrong, mut of) = (None, 0, 0);
        for (is_right, element) in elements {
            of += 1;
            if !is_right {
                wrong += 1;
                first.get_or_insert(element);
            }
        }
        first.map_or(Ok(()), |first| Err(Wrong { wrong, of, ..first }))
    }
}

/// Returns the bytes of keys (`which` is 0) or values (1) from their numbers, in the order of [`KvShape::offset`], and the scales
/// of tokens.
pub fn cache_bytes(format: CacheFormat, shape: &KvShape, which: usize, numbers: &[f32], of_tokens: &[f32]) -> Vec<u8> {
    let dim = shape.head_dim;
    // Where the numbers of a block are in its bytes, which is the same in every block.
    let places = |slot: usize, head: usize| {
        (0..dim).map(move |column| {
            (shape.offset(slot, head) + column, format.layout.index(shape, which, slot, head, column))
        })
    };
    let of_heads = |slot: usize| (0..shape.num_kv_heads).flat_map(move |head| places(slot, head));
    let places: Vec<_> = (0..shape.block_size).flat_map(of_heads).collect();
    let mut ordered = vec![0.0; numbers.len()];
    let blocks = ordered.chunks_mut(shape.block_elements().max(1)).zip(numbers.chunks(shape.block_elements().max(1)));
    for (ordered, numbers) in blocks {
        places.iter().for_each(|&(from, to)| ordered[to] = numbers[from]);
    }
    if let Some(dtype) = element(format) {
        return to_bytes(dtype, &ordered);
    }
    match format.kv_dtype {
        KvDtype::Int8PerToken => {
            // The scales follow the rows of each block and head.
            let mut bytes = Vec::new();
            for (unit, rows) in ordered.chunks(shape.block_size * dim).enumerate() {
                let (block, head) = (unit / shape.num_kv_heads, unit % shape.num_kv_heads);
                bytes.extend(rows.iter().map(|&v| v as i8 as u8));
                for slot in block * shape.block_size..(block + 1) * shape.block_size {
                    bytes.extend(of_tokens[slot * shape.num_kv_heads + head].to_le_bytes());
                }
            }
            bytes
        }
        // −128 marks memory that must not be read: int8 has no NaN.
        KvDtype::Int8 => ordered.iter().map(|&v| v as i8 as u8).collect(),
        other => ordered.iter().map(|&v| to_byte(other, v)).collect(),
    }
}

/// Returns a buffer with these contents.
///
/// # Errors
/// The device has not enough memory.
pub fn buffer(device: &dyn Device, bytes: &[u8]) -> Result<Buffer, DeviceError> {
    let mut buffer = device.alloc(bytes.len())?;
    device.upload(&mut buffer, 0, bytes)?;
    Ok(buffer)
}

/// Returns a buffer of some bytes that repeats a piece.
pub(super) fn repeated(device: &dyn Device, piece: &[u8], size: usize) -> Result<Buffer, DeviceError> {
    let piece = buffer(device, piece)?;
    let mut filled = device.alloc(size)?;
    for at in (0..size).step_by(piece.len_bytes().max(1)) {
        device.copy(&piece, 0, &mut filled, at, piece.len_bytes().min(size - at))?;
    }
    Ok(filled)
}

/// Returns a buffer of float32.
///
/// # Errors
/// As [`buffer`].
pub fn floats(device: &dyn Device, values: &[f32]) -> Result<Buffer, DeviceError> {
    buffer(device, &to_bytes(Dtype::F32, values))
}

/// Returns the contents of a buffer.
///
/// # Errors
/// The work that wrote the buffer failed.
pub fn bytes(device: &dyn Device, buffer: &Buffer) -> Result<Vec<u8>, DeviceError> {
    let mut bytes = vec![0; buffer.len_bytes()];
    device.download(buffer, 0, &mut bytes)?;
    Ok(bytes)
}
