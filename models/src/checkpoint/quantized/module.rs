//! The tensors of a quantised module, found and checked. Only headers, zero points and orders of inputs are read.

mod cut;
mod four_bits;

use std::sync::Arc;

use linear::{Codes, Offset, Rounding, Scale, StoredFormat, StoredPart, StoredRow, StoredRows};
use safetensors::Dtype;

use super::config::{Activations, Kind, Scheme};
use super::rows::{Awq, Bytes, Gptq, Packed, RowScales, Scales, Words};
use crate::checkpoint::error::LoadError;
use crate::checkpoint::weights::{RawTensor, RoundActivations, Weights};
use crate::decoder::{Part, Pick};

/// Rows of a quantised module that are a part of a linear layer.
pub(crate) struct Module<'a> {
    /// Names of its tensors, all of which are read.
    pub tensors: Vec<&'a str>,
    /// Bytes of its weights in the file that belong to the part.
    pub bytes: u64,
    /// Where the codes lie, to be released when they have been read.
    pub codes: &'a [u8],
    /// Whether the rows of the part are rows of the module. Otherwise the part is cut out of [`Module::numbers`].
    pub in_rows: bool,
    /// Rows and inputs of the module.
    shape: [usize; 2],
    rows: usize,
    format: StoredFormat,
    source: Box<dyn StoredRows + Send + 'a>,
    /// Where the part lies in [`Module::numbers`].
    pub pick: Pick,
    order: Option<Arc<[u32]>>,
    rounding: Rounding,
}

impl Module<'_> {
    /// The rows for a product.
    pub fn part(&self) -> StoredPart<'_> {
        let Module { rows, format, rounding, .. } = *self;
        StoredPart { rows, format, source: self, order: self.order.as_deref(), rounding }
    }

    /// All weights of the module as little-endian float32 numbers, in the shape of the plain tensor.
    pub fn numbers(&self) -> Vec<u8> {
        let [n, k] = self.shape;
        let (mut row, mut columns) = (StoredRow::new(&self.format, k), vec![0.0f32; k]);
        let mut all = vec![0; n * k * size_of::<f32>()];
        for (index, out) in all.chunks_exact_mut((k * size_of::<f32>()).max(1)).enumerate() {
            self.source.read(index, &mut row);
            row.values(&self.format, &mut columns);
            let out = out.as_chunks_mut::<4>().0;
            for (column, value) in columns.iter().enumerate() {
                let input = self.order.as_ref().map_or(column, |order| order[column] as usize);
                out[input] = value.to_le_bytes();
            }
        }
        all
    }

    /// Whether products take rows that are quantised in blocks.
    pub fn takes_blocks(&self) -> bool {
        self.rounding == Rounding::Blocks && self.order.is_none()
    }
}

/// The module of a part whose rows have `inputs` weights; `None` if the checkpoint has plain weights for it.
///
/// # Errors
/// A tensor that is missing or has an unexpected shape or type, or a group that does not divide a row.
pub(crate) fn find<'a>(weights: &'a Weights, part: &Part, inputs: usize) -> Result<Option<Module<'a>>, LoadError> {
    let all = part.pick.inputs.map_or(inputs, |(_, all)| all);
    let [n, k] = if part.pick.transposed { [all, part.pick.total] } else { [part.pick.total, all] };
    let in_rows = !part.pick.transposed;
    let name = part.weight();
    if let Some(raw) = weights.raw(&name) {
        if let Some((format, source)) = raw.encoded_rows(k) {
            raw.expect(&part.pick.shape(inputs), None)?;
            let module = Module {
                tensors: vec![raw.name],
                bytes: (raw.data.len() * part.rows / part.pick.total.max(1)) as u64,
                codes: raw.data,
                in_rows,
                shape: [n, k],
                rows: part.rows,
                format,
                source,
                pick: part.pick,
                order: None,
                rounding: rounded(weights, &format, Rounding::None),
            };
            return Ok(Some(module.checked(inputs)));
        }
        if matches!(raw.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Ok(None);
        }
    }
    let Some(config) = weights.quantization() else { return Ok(None) };
    // Without a tensor in a stored form the module is plain; the caller reports what it lacks.
    let Some(stem) = ["qweight", "weight_packed", "weight"]
        .iter()
        .find_map(|suffix| {
            let raw = weights.raw(&format!("{}.{suffix}", part.name))?;
            Some(raw.name.strip_suffix(suffix)?.trim_end_matches('.').to_string())
        })
        .or_else(|| {
            let raw = weights.raw(&format!("{}_blocks", part.name))?;
            Some(raw.name.strip_suffix("_blocks")?.to_string())
        })
    else {
        return Ok(None);
    };
    let Some(scheme) = config.scheme(&stem)? else { return Ok(None) };
    let scheme = weights.raw_exactly(&format!("{stem}.weight")).map_or(scheme, |raw| scheme.of_type(raw.dtype));
    // MXFP4 has rows of outputs whatever the plain form of the checkpoint has.
    let by_rows = scheme.kind == Kind::Mxfp4;
    let [n, k] = if by_rows { [part.pick.total, all] } else { [n, k] };
    let reader = Reader { weights, config_file: &config.file, stem, n, k, tensors: Vec::new() };
    Ok(Some(reader.module(part, scheme, in_rows || by_rows)?.checked(inputs)))
}

/// The rounding of a product with these weights; `own`: that of the checkpoint.
fn rounded(weights: &Weights, format: &StoredFormat, own: Rounding) -> Rounding {
    match weights.rounds() {
        RoundActivations::Auto => own,
        RoundActivations::Never => Rounding::None,
        RoundActivations::Int8 if format.takes_bytes() => Rounding::Blocks,
        RoundActivations::Int8 => own,
    }
}

/// The format of a module, its rows, and the order of its inputs.
type Found<'a> = (StoredFormat, Box<dyn StoredRows + Send + 'a>, Option<Arc<[u32]>>, &'a [u8]);

/// Finds the tensors of a module `[n, k]`.
struct Reader<'a, 'c> {
    weights: &'a Weights,
    config_file: &'c str,
    stem: String,
    n: usize,
    k: usize,
    tensors: Vec<&'a str>,
}

impl<'a> Reader<'a, '_> {
    fn module(mut self, part: &Part, scheme: Scheme, in_rows: bool) -> Result<Module<'a>, LoadError> {
        let matrix = part.pick.matrix;
        let (format, source, order, codes) = match scheme.kind {
            Kind::Mxfp4 => self.mxfp4(matrix)?,
            _ if matrix.is_some() => {
                return Err(self.wrong("stacked matrices of experts", "MXFP4, or one module an expert"));
            }
            Kind::Gptq { bits, group, stored_less_one } => self.gptq(bits, group, stored_less_one)?,
            Kind::Awq { group } => self.awq(group)?,
            Kind::Packed { bits, group, symmetric } => self.packed(bits, group, symmetric)?,
            Kind::Int8 { group, symmetric } => self.int8(group, symmetric)?,
            Kind::Fp8 { block } => self.fp8(block)?,
            Kind::Mixed => self.fp8(None)?,
            Kind::Nvfp4 { divides } => self.nvfp4(divides)?,
            Kind::Nf4 => self.nf4()?,
        };
        let own = match scheme.activations {
            Activations::None => Rounding::None,
            Activations::Int8 => Rounding::Row,
            Activations::Fp8(group) => Rounding::Floats(group.unwrap_or(self.k)),
            Activations::Static => Rounding::Static(self.static_scale()?),
        };
        Ok(Module {
            bytes: (codes.len() * part.rows / self.n.max(1)) as u64,
            tensors: self.tensors,
            codes,
            in_rows,
            shape: [self.n, self.k],
            rows: part.rows,
            format,
            source,
            // The rows are those of one matrix already.
            pick: Pick { transposed: !in_rows, matrix: None, ..part.pick },
            order,
            rounding: rounded(self.weights, &format, own),
        })
    }

    fn wrong(&self, found: impl Into<String>, expected: impl Into<String>) -> LoadError {
        let (module, file) = (self.stem.clone(), self.config_file.to_string());
        LoadError::QuantizedModule { file, module, found: found.into(), expected: expected.into() }
    }

    /// A tensor of the module, which is read.
    fn optional(&mut self, suffix: &str) -> Option<RawTensor<'a>> {
        let raw = self.weights.raw_exactly(&format!("{}{suffix}", self.stem))?;
        self.tensors.push(raw.name);
        Some(raw)
    }

    fn tensor(&mut self, suffix: &str, shape: &[usize], dtype: Dtype) -> Result<RawTensor<'a>, LoadError> {
        let raw = self.required(suffix, &format!("{shape:?}"))?;
        raw.expect(shape, Some(dtype))?;
        Ok(raw)
    }

    fn required(&mut self, suffix: &str, shape: &str) -> Result<RawTensor<'a>, LoadError> {
        match self.optional(suffix) {
            Some(raw) => Ok(raw),
            None => Err(self.weights.missing(&format!("{}{suffix}", self.stem), shape)),
        }
    }

    fn words(&mut self, suffix: &str, [rows, columns]: [usize; 2]) -> Result<Words<'a>, LoadError> {
        Ok(Words { data: self.tensor(suffix, &[rows, columns], Dtype::I32)?.data, columns })
    }

    /// A tensor of scales `[rows, columns]` (or of as many in one dimension), and their type.
    fn scales(&mut self, suffix: &str, [rows, columns]: [usize; 2]) -> Result<(Scales<'a>, Scale), LoadError> {
        let raw = self.required(suffix, &format!("[{rows}, {columns}]"))?;
        let flat = columns == 1 && raw.shape == [rows] || rows * columns == 1 && raw.shape.is_empty();
        if !flat {
            raw.expect(&[rows, columns], None)?;
        }
        let scale = match raw.dtype {
            Dtype::F32 => Scale::F32,
            Dtype::F16 => Scale::F16,
            Dtype::BF16 => Scale::Bf16,
            _ => return Err(raw.wrong_dtype("F32, F16 or BF16")),
        };
        let bytes = if scale == Scale::F32 { 4 } else { 2 };
        Ok((Scales { data: raw.data.into(), columns, bytes }, scale))
    }

    /// Scales of rows with `groups` groups, or one for the whole matrix.
    fn row_scales(&mut self, suffix: &str, groups: usize) -> Result<(RowScales<'a>, Scale), LoadError> {
        let shape = self.weights.raw_exactly(&format!("{}{suffix}", self.stem)).map(|raw| raw.shape.iter().product());
        let rows = if shape == Some(1) { 1 } else { self.n };
        let height = self.n.div_ceil(rows).max(1);
        let (scales, scale) = self.scales(suffix, [rows, if rows == 1 { 1 } else { groups }])?;
        Ok((RowScales { scales, height }, scale))
    }

    /// The scale of activations, under the name of vLLM or that of transformers.
    fn static_scale(&mut self) -> Result<f32, LoadError> {
        const NAMES: [&str; 2] = [".input_scale", ".activation_scale"];
        let has = |suffix: &&str| self.weights.raw_exactly(&format!("{}{suffix}", self.stem)).is_some();
        let name = NAMES.into_iter().find(has).unwrap_or(NAMES[0]);
        self.number(name)
    }

    /// A tensor of one number that is positive.
    fn number(&mut self, suffix: &str) -> Result<f32, LoadError> {
        let (scales, scale) = self.scales(suffix, [1, 1])?;
        let bits = scales.at(0, 0);
        let number = match scale {
            Scale::F32 => f32::from_bits(bits),
            Scale::F16 => half::f16::from_bits(bits as u16).to_f32(),
            _ => half::bf16::from_bits(bits as u16).to_f32(),
        };
        match number.is_finite() && number > 0.0 {
            true => Ok(number),
            false => Err(self.wrong(format!("{suffix} = {number}"), "a positive number")),
        }
    }

    /// Number of groups of a row, all whole.
    fn groups(&self, group: Option<usize>) -> Result<usize, LoadError> {
        match group {
            None => Ok(1),
            Some(size) if self.k.is_multiple_of(size) => Ok(self.k / size),
            Some(size) => {
                Err(self.wrong(format!("rows of {} weights", self.k), format!("a multiple of the group size, {size}")))
            }
        }
    }

    /// Checks that words of `per` codes are whole.
    fn whole(&self, what: &str, count: usize, per: usize) -> Result<(), LoadError> {
        match count.is_multiple_of(per) {
            true => Ok(()),
            false => Err(self.wrong(format!("{count} {what}"), format!("a multiple of {per}, the codes of a word"))),
        }
    }

    /// The order in which the inputs of each group follow each other; `None` if it is that of the inputs.
    fn order(&mut self, suffix: &str, group: Option<usize>) -> Result<Option<Arc<[u32]>>, LoadError> {
        let Some(raw) = self.optional(suffix) else { return Ok(None) };
        raw.expect(&[self.k], Some(Dtype::I32))?;
        let size = group.unwrap_or(self.k);
        let index = Words { data: raw.data, columns: 1 };
        let group_of = |input: u32| index.at(input as usize, 0);
        let mut order: Vec<u32> = (0..self.k as u32).collect();
        if order.iter().all(|input| group_of(*input) as usize == *input as usize / size) {
            return Ok(None);
        }
        order.sort_by_key(|input| group_of(*input));
        let whole = order.iter().enumerate().all(|(at, input)| group_of(*input) as usize == at / size);
        match whole {
            true => Ok(Some(order.into())),
            false => {
                Err(self.wrong(format!("groups of other sizes in {suffix}"), format!("{size} inputs in each group")))
            }
        }
    }

    fn gptq(&mut self, bits: u32, group: Option<usize>, stored_less_one: bool) -> Result<Found<'a>, LoadError> {
        let (n, k, per) = (self.n, self.k, 32 / bits as usize);
        self.whole("inputs", k, per)?;
        self.whole("outputs", n, per)?;
        let groups = self.groups(group)?;
        let codes = self.words(".qweight", [k / per, n])?;
        let zeros = self.words(".qzeros", [groups, n / per])?;
        let (scales, scale) = self.scales(".scales", [groups, n])?;
        let order = self.order(".g_idx", group)?;
        let zero_bias = u32::from(stored_less_one);
        let source = Gptq { bits, codes, zeros, scales, order: order.clone(), zero_bias };
        let (offset, zero) = self.zero_points(bits, groups, |group, output| source.zero(group, output))?;
        let format = self.format(Codes::Integers { bits, zero }, group, scale, offset);
        Ok((format, Box::new(source), order, codes.data))
    }

    /// Whether zero points differ, and the one that all groups have if they do not.
    fn zero_points(
        &self,
        bits: u32,
        groups: usize,
        zero: impl Fn(usize, usize) -> u32,
    ) -> Result<(Offset, u8), LoadError> {
        let mut all = (0..groups).flat_map(|group| (0..self.n).map(move |output| (group, output)));
        let first = zero(0, 0);
        let one = all.clone().all(|(group, output)| zero(group, output) == first);
        match (one, bits) {
            (true, 8) if first == 128 => Ok((Offset::None, 128)),
            (true, 0..8) => Ok((Offset::None, first as u8)),
            _ => match all.find(|(group, output)| zero(*group, *output) > u32::from(u8::MAX)) {
                None => Ok((Offset::ZeroPoint, 0)),
                Some(_) => Err(self.wrong("a zero point of 256", "zero points of at most 255")),
            },
        }
    }

    fn awq(&mut self, group: Option<usize>) -> Result<Found<'a>, LoadError> {
        let (n, k) = (self.n, self.k);
        self.whole("outputs", n, 8)?;
        let groups = self.groups(group)?;
        let codes = self.words(".qweight", [k, n / 8])?;
        let zeros = self.words(".qzeros", [groups, n / 8])?;
        let (scales, scale) = self.scales(".scales", [groups, n])?;
        let format = self.format(Codes::Integers { bits: 4, zero: 0 }, group, scale, Offset::ZeroPoint);
        Ok((format, Box::new(Awq { codes, zeros, scales }), None, codes.data))
    }

    fn packed(&mut self, bits: u32, group: Option<usize>, symmetric: bool) -> Result<Found<'a>, LoadError> {
        let (n, k, per) = (self.n, self.k, 32 / bits as usize);
        let groups = self.groups(group)?;
        let codes = self.words(".weight_packed", [n, k.div_ceil(per)])?;
        // Says what the other tensors say.
        self.optional(".weight_shape");
        let (scales, scale) = self.row_scales(".weight_scale", groups)?;
        let zeros = if symmetric { None } else { Some(self.words(".weight_zero_point", [n.div_ceil(per), groups])?) };
        let order = self.order(".weight_g_idx", group)?;
        let (offset, zero) = if symmetric { (Offset::None, 1u8 << (bits - 1)) } else { (Offset::ZeroPoint, 0) };
        let format = self.format(Codes::Integers { bits, zero }, group, scale, offset);
        Ok((format, Box::new(Packed { bits, codes, zeros, scales, order: order.clone() }), order, codes.data))
    }

    fn int8(&mut self, group: Option<usize>, symmetric: bool) -> Result<Found<'a>, LoadError> {
        let groups = self.groups(group)?;
        let codes = self.tensor(".weight", &[self.n, self.k], Dtype::I8)?.data;
        let (scales, scale) = self.row_scales(".weight_scale", groups)?;
        let mut zeros = None;
        if !symmetric {
            let raw = self.tensor(".weight_zero_point", &[self.n, groups], Dtype::I8)?;
            zeros = Some(Scales { data: raw.data.into(), columns: groups, bytes: 1 });
        }
        let (offset, zero) = if symmetric { (Offset::None, 128) } else { (Offset::ZeroPoint, 0) };
        let format = self.format(Codes::Integers { bits: 8, zero }, group, scale, offset);
        Ok((format, Box::new(Bytes { codes, k: self.k, plus: 128, scales, zeros }), None, codes))
    }

    fn fp8(&mut self, block: Option<[usize; 2]>) -> Result<Found<'a>, LoadError> {
        let codes = self.tensor(".weight", &[self.n, self.k], Dtype::F8_E4M3)?.data;
        let inverse = self.weights.raw_exactly(&format!("{}.weight_scale_inv", self.stem)).is_some();
        let suffix = if inverse { ".weight_scale_inv" } else { ".weight_scale" };
        let ((scales, scale), group) = match block {
            None => (self.row_scales(suffix, 1)?, None),
            Some([height, width]) => {
                let shape = [self.n.div_ceil(height), self.k.div_ceil(width)];
                let (scales, scale) = self.scales(suffix, shape)?;
                ((RowScales { scales, height }, scale), Some(width))
            }
        };
        let format = self.format(Codes::E4m3, group, scale, Offset::None);
        Ok((format, Box::new(Bytes { codes, k: self.k, plus: 0, scales, zeros: None }), None, codes))
    }

    fn format(&self, codes: Codes, group: Option<usize>, scale: Scale, offset: Offset) -> StoredFormat {
        StoredFormat { codes, group: group.unwrap_or(usize::MAX), scale, offset }
    }
}
