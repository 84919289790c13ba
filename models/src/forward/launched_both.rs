//! What encoders have on devices that launch kernels: attention to both sides (`csrc/both_sides.cu`) and the types of tokens.

use attention_kernels::{Dtype, KernelError, Mirror};
use device::{Arg, Buffer, Device, DeviceError};

use super::ForwardBatch;
use super::kernels::{count, holds, instance, launch, optional};
use super::ops::BothRows;
use crate::LoadError;
use crate::decoder::Decoder;

/// Greatest size of a head of the kernel.
const MOST_DIM: usize = 512;
const THREADS: u32 = 128;

device::kernel_structs! {
    /// The struct of the same name in `both_sides.cu`.
    struct BothShape: 32 bytes {
        stride: u32,
        heads: u32,
        kv_heads: u32,
        head_dim: u32,
        window: u32,
        reach: u32,
        scale: f32,
        soft_cap: f32,
    }
}

/// What a step says of its rows, u32 each: the row behind the last one of the same sequence, and the type of the token.
pub(super) struct Sides {
    ends: Mirror,
    types: Mirror,
    /// Number of types that the model has.
    num_types: usize,
}

impl Sides {
    /// `None` for a decoder.
    pub fn new(device: &dyn Device, decoder: &Decoder, max_rows: usize) -> Result<Option<Sides>, DeviceError> {
        let array = || Mirror::new(device, max_rows * size_of::<u32>());
        let num_types = decoder.embedding.types.as_ref().map_or(1, |table| table.rows());
        let sides = || Ok(Sides { ends: array()?, types: array()?, num_types });
        decoder.is_encoder().then(sides).transpose()
    }

    /// Bytes of device memory.
    pub fn bytes(decoder: &Decoder, max_rows: usize) -> usize {
        if decoder.is_encoder() { 2 * max_rows * size_of::<u32>() } else { 0 }
    }

    pub fn set(&mut self, batch: &ForwardBatch) -> Result<(), KernelError> {
        let ends = batch.sequences().flat_map(|rows| std::iter::repeat_n(rows.end as u32, rows.len()));
        let ends: Vec<[u8; 4]> = ends.map(u32::to_ne_bytes).collect();
        let types = batch.types().map(|kind| kind.min(self.num_types - 1) as u32);
        let types: Vec<[u8; 4]> = types.map(u32::to_ne_bytes).collect();
        self.ends.set(ends.into_iter())?;
        self.types.set(types.into_iter())?;
        Ok(())
    }

    pub fn arrays(&mut self) -> [&mut Mirror; 2] {
        [&mut self.ends, &mut self.types]
    }

    /// The types of the tokens.
    pub fn types(&self) -> &Buffer {
        self.types.buffer()
    }

    /// [`LayerOps::attend_both`](super::ops::LayerOps::attend_both), given the positions of the rows.
    pub fn attend(
        &self,
        device: &dyn Device,
        dtype: Dtype,
        (positions, rows): (&Buffer, usize),
        BothRows { layer, qkv, output }: BothRows<'_>,
    ) -> Result<(), KernelError> {
        let (declared, stride) = (&layer.declared, layer.declared.row_width());
        let heads = declared.heads;
        holds("elements in the QKV rows", qkv, rows * stride, dtype.bytes())?;
        holds("elements in the output rows", output, rows * heads.query_width(), dtype.bytes())?;
        let width =
            layer.by_distance.as_ref().map_or(0, |table| table.len_bytes() / size_of::<f32>() / heads.num_heads);
        let shape = BothShape {
            stride: count(stride)?,
            heads: count(heads.num_heads)?,
            kv_heads: count(heads.num_kv_heads)?,
            head_dim: count(heads.head_dim)?,
            window: count(declared.window.unwrap_or(0))?,
            reach: count(width / 2)?,
            scale: declared.scale,
            soft_cap: declared.soft_cap.unwrap_or(0.0),
        };
        let args = [
            Arg::pointer(qkv, 0),
            Arg::pointer(positions, 0),
            Arg::pointer(self.ends.buffer(), 0),
            optional(layer.by_distance.as_ref()),
            optional(layer.alibi_slopes.as_ref()),
            Arg::pointer(output, 0),
            Arg::bytes(&shape),
        ];
        launch(device, instance!("attend_both", dtype), [count(rows)?, count(heads.num_heads)?, 1], THREADS, &args)
    }
}

/// Refuses heads that the kernel does not hold, before any weight is read.
pub(super) fn check(decoder: &Decoder, device: &dyn Device) -> Result<(), LoadError> {
    let dim = decoder.heads().head_dim;
    if !decoder.is_encoder() || dim <= MOST_DIM {
        return Ok(());
    }
    let problem = format!(
        "{} attends to both sides with heads of at most {MOST_DIM}, found {dim}; use --device cpu",
        device.name()
    );
    Err(LoadError::Device(problem))
}
