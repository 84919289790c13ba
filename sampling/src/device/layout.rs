//! The layouts of `csrc/args.cuh` and `csrc/slots.cu`, in words of 32 bits.

/// The crate of the kernels, as it stands in file names.
pub(super) const MODULE: &str = "sampling";

/// Tokens of a row that one block of the first and third kernel has.
pub(super) const CHUNK: usize = 8192;
/// Threads of such a block, and of one that has a whole row.
pub(super) const CHUNK_THREADS: u32 = 256;
pub(super) const ROW_THREADS: u32 = 512;

/// Words of `RowParams`.
pub(super) const PARAM_WORDS: usize = 20;
/// Bytes of `Chunk` and of `Cut`.
pub(super) const CHUNK_BYTES: usize = 48;
pub(super) const CUT_BYTES: usize = 32;
/// Words of `RowResult` and of `Top`.
pub(super) const RESULT_WORDS: usize = 4;
pub(super) const TOP_WORDS: usize = 2;

/// `rows`: no slot, a row of padding.
pub(super) const NONE: u32 = u32::MAX;

/// `RowFlag`.
pub(super) mod flag {
    pub const GREEDY: u32 = 1;
    pub const CONSTRAINED: u32 = 2;
    pub const ALLOWED: u32 = 4;
    pub const PENALISED: u32 = 8;
    pub const LOGPROBS: u32 = 16;
}

/// `RowParams`, field by field.
#[derive(Clone, Copy, Default)]
pub(super) struct RowParams {
    pub flags: u32,
    pub temperature: f32,
    pub top_p: f32,
    pub typical_p: f32,
    pub ln_min_p: f32,
    pub top_k: u32,
    pub repetition_penalty: f32,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub min_tokens: u32,
    pub num_biases: u32,
    pub num_stops: u32,
    pub bad_words: u32,
    pub num_top: u32,
    pub seed: u64,
    pub sequence: u32,
}

impl RowParams {
    pub fn words(&self) -> [u32; PARAM_WORDS] {
        [
            self.flags,
            self.temperature.to_bits(),
            self.top_p.to_bits(),
            self.typical_p.to_bits(),
            self.ln_min_p.to_bits(),
            self.top_k,
            self.repetition_penalty.to_bits(),
            self.presence_penalty.to_bits(),
            self.frequency_penalty.to_bits(),
            self.min_tokens,
            self.num_biases,
            self.num_stops,
            self.bad_words,
            self.num_top,
            self.seed as u32,
            (self.seed >> 32) as u32,
            self.sequence,
            0,
            0,
            0,
        ]
    }
}

/// The two words of a 64-bit number, in the order of this machine's memory.
pub(super) fn halves(number: u64) -> [u32; 2] {
    let (low, high) = (number as u32, (number >> 32) as u32);
    if cfg!(target_endian = "little") { [low, high] } else { [high, low] }
}
