//! Modules of two codes a byte: MXFP4, NVFP4 and NF4.

use linear::{Codes, Offset, Scale, StoredFormat};
use safetensors::Dtype;
use serde::Deserialize;
use simd::small_float::e4m3_to_f32;

use super::{Found, Reader};
use crate::checkpoint::error::{LoadError, one_line};
use crate::checkpoint::gguf::E2M1_DOUBLED;
use crate::checkpoint::quantized::config::NVFP4_GROUP;
use crate::checkpoint::quantized::rows::{Nibbles, Scales};

/// Inputs that share a scale in MXFP4 ("OCP Microscaling Formats", 2023).
const MXFP4_GROUP: usize = 32;

/// Quantiles of the normal distribution that 4-bit codes stand for (Dettmers et al., "QLoRA", 2023, appendix E).
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// `quant_state` of bitsandbytes.
#[derive(Deserialize)]
struct Nf4State {
    blocksize: usize,
    shape: Vec<usize>,
    #[serde(default)]
    nested_blocksize: Option<usize>,
    #[serde(default)]
    nested_offset: f32,
}

impl<'a> Reader<'a, '_> {
    pub(super) fn mxfp4(&mut self, matrix: Option<(usize, usize)>) -> Result<Found<'a>, LoadError> {
        let (n, k, groups) = (self.n, self.k, self.groups(Some(MXFP4_GROUP))?);
        let (index, count) = matrix.unwrap_or((0, 1));
        let shape = |last: &[usize]| {
            [matrix.map(|(_, count)| vec![count]).unwrap_or_default(), vec![n, groups], last.to_vec()].concat()
        };
        let codes = self.tensor("_blocks", &shape(&[MXFP4_GROUP / 2]), Dtype::U8)?.data;
        let scales = self.tensor("_scales", &shape(&[]), Dtype::U8)?.data;
        let part = |data: &'a [u8]| &data[data.len() / count * index..data.len() / count * (index + 1)];
        let scales = Scales { data: part(scales).into(), columns: groups, bytes: 1 };
        let format = StoredFormat {
            codes: Codes::Table(&E2M1_DOUBLED),
            group: MXFP4_GROUP,
            scale: Scale::Exponent,
            offset: Offset::None,
        };
        Ok((format, Box::new(Nibbles { codes: part(codes), k, high_first: false, scales }), None, part(codes)))
    }

    /// NVFP4: two codes a byte, the low one first. A weight is its code times its scales, of which that of all is in single precision.
    pub(super) fn nvfp4(&mut self, divides: bool) -> Result<Found<'a>, LoadError> {
        let (n, k, groups) = (self.n, self.k, self.groups(Some(NVFP4_GROUP))?);
        let [codes, of_all, inputs] = match divides {
            true => [".weight_packed", ".weight_global_scale", ".input_global_scale"],
            false => [".weight", ".weight_scale_2", ".input_scale"],
        };
        let codes = self.tensor(codes, &[n, k / 2], Dtype::U8)?.data;
        let scales = self.tensor(".weight_scale", &[n, groups], Dtype::F8_E4M3)?.data;
        let of_all = self.number(of_all)?;
        // A scale of activations, which are not rounded.
        self.optional(inputs);
        let scale = |bits: &u8| match divides {
            true => e4m3_to_f32(*bits) / of_all,
            false => e4m3_to_f32(*bits) * of_all,
        };
        // The numbers of the table are twice those of the codes.
        let data = scales.iter().flat_map(|bits| (0.5 * scale(bits)).to_le_bytes()).collect::<Vec<u8>>();
        let scales = Scales { data: data.into(), columns: groups, bytes: 4 };
        let format = self.format(Codes::Table(&E2M1_DOUBLED), Some(NVFP4_GROUP), Scale::F32, Offset::None);
        Ok((format, Box::new(Nibbles { codes, k, high_first: false, scales }), None, codes))
    }

    /// bitsandbytes: two codes a byte, the high one first, in blocks of the flattened matrix. A nested scale is a byte: an
    /// index into a table, whose number is multiplied by the scale of a group of blocks; then a mean is added.
    pub(super) fn nf4(&mut self) -> Result<Found<'a>, LoadError> {
        let (n, k) = (self.n, self.k);
        let codes = self.tensor(".weight", &[n * k / 2, 1], Dtype::U8)?.data;
        let state = self.required(".weight.quant_state.bitsandbytes__nf4", "[bytes of JSON]")?;
        let state: Nf4State = serde_json::from_slice(state.data).map_err(|error| {
            self.wrong(format!("a state that cannot be read ({})", one_line(error)), "NF4 of bitsandbytes")
        })?;
        let table = self.tensor(".weight.quant_map", &[NF4.len()], Dtype::F32)?.data;
        let mut numbers = [0.0; NF4.len()];
        device::Dtype::F32.read_row(table, &mut numbers);
        if state.shape != [n, k] || numbers.iter().zip(NF4).any(|(a, b)| (a - b).abs() > 1e-6 || a.is_nan()) {
            return Err(
                self.wrong(format!("shape {:?} and table {numbers:?}", state.shape), format!("[{n}, {k}] and {NF4:?}"))
            );
        }
        let size = state.blocksize;
        if size == 0 || !size.is_multiple_of(32) {
            return Err(self.wrong(format!("blocks of {size}"), "a multiple of 32"));
        }
        let blocks = n * self.groups(Some(size))?;
        let mut absmax = vec![0.0; blocks];
        match state.nested_blocksize {
            None => {
                let scales = self.tensor(".weight.absmax", &[blocks], Dtype::F32)?.data;
                device::Dtype::F32.read_row(scales, &mut absmax);
            }
            Some(width) => {
                let width = width.max(1);
                let bytes = self.tensor(".weight.absmax", &[blocks], Dtype::U8)?.data;
                let (mut table, mut outer) = ([0.0; 256], vec![0.0; blocks.div_ceil(width)]);
                device::Dtype::F32
                    .read_row(self.tensor(".weight.nested_quant_map", &[256], Dtype::F32)?.data, &mut table);
                let nested = self.tensor(".weight.nested_absmax", &[outer.len()], Dtype::F32)?;
                device::Dtype::F32.read_row(nested.data, &mut outer);
                for (i, (scale, byte)) in absmax.iter_mut().zip(bytes).enumerate() {
                    *scale = table[usize::from(*byte)] * outer[i / width] + state.nested_offset;
                }
            }
        }
        let data = absmax.iter().flat_map(|scale| scale.to_le_bytes()).collect::<Vec<u8>>();
        let scales = Scales { data: data.into(), columns: k / size, bytes: 4 };
        let format = self.format(Codes::Floats(&NF4), Some(size), Scale::F32, Offset::None);
        Ok((format, Box::new(Nibbles { codes, k, high_first: true, scales }), None, codes))
    }
}
