//! Names of the compiled kernels: `<kernel>_<type>[_h<head size>][_kv8]`.

use std::fmt::{self, Write};
use std::ops::Deref;

use crate::format::{CacheFormat, Dtype};

/// Name of this crate in the file names of its compiled kernels.
pub const MODULE: &str = "attention_kernels";

/// The head sizes that kernels are compiled for.
pub(super) const HEAD_SIZES: [usize; 8] = head_sizes(include_bytes!("../../csrc/instantiate.cuh"));

/// Head sizes up to 128. `prefill_128` is compiled only for these.
pub(super) const NARROW_HEADS: &[usize] = HEAD_SIZES.split_at(6).0;

/// Greatest head size of `paged_generic`, `WIDEST_HEAD` in `csrc/args.cuh`.
pub(super) const WIDEST_HEAD: usize = 576;

/// Elements of a key and of a value in the latent caches that kernels of `csrc/paged_latent.cu` are compiled for.
pub(super) const LATENTS: [[usize; 2]; 1] = [[576, 512]];

/// Block sizes that divide the 128 tokens of a tile of `prefill_sm90`.
pub(super) const SM90_BLOCK_SIZES: [usize; 5] = [8, 16, 32, 64, 128];

/// Head sizes that `prefill_sm90` is compiled for.
pub(super) const SM90_HEAD_SIZES: [usize; 2] = [64, 128];

/// Returns the numbers n of each `X(n, ` in the source of `QUIRE_EACH_HEAD_SIZE`.
const fn head_sizes<const N: usize>(source: &[u8]) -> [usize; N] {
    let (mut sizes, mut found, mut at) = ([0; N], 0, 0);
    while at + 2 < source.len() {
        if source[at] == b'X' && source[at + 1] == b'(' && source[at + 2].is_ascii_digit() {
            at += 2;
            while source[at].is_ascii_digit() {
                sizes[found] = 10 * sizes[found] + (source[at] - b'0') as usize;
                at += 1;
            }
            found += 1;
        }
        at += 1;
    }
    assert!(found == N, "as many head sizes as instantiate.cuh lists");
    sizes
}

/// The name of a kernel, on the stack: a launch allocates nothing.
pub(super) struct Name {
    bytes: [u8; 40],
    len: usize,
}

impl Name {
    /// Returns the formatted name. A longer one than any kernel has is cut.
    pub fn new(text: fmt::Arguments<'_>) -> Name {
        let mut name = Name { bytes: [0; 40], len: 0 };
        let _ = name.write_fmt(text);
        name
    }
}

impl fmt::Write for Name {
    fn write_str(&mut self, part: &str) -> fmt::Result {
        let to = self.bytes.get_mut(self.len..self.len + part.len()).ok_or(fmt::Error)?;
        to.copy_from_slice(part.as_bytes());
        self.len += part.len();
        Ok(())
    }
}

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        std::str::from_utf8(&self.bytes[..self.len]).unwrap_or_default()
    }
}

/// Returns the instance of a kernel that is compiled for each head size; `None` if there is none for this cache.
pub(super) fn instance(kernel: &str, format: CacheFormat, head_dim: usize) -> Option<Name> {
    let exists = format.dtype != Dtype::F32 && HEAD_SIZES.contains(&head_dim);
    exists.then(|| Name::new(format_args!("{kernel}_{}_h{head_dim}{}", format.dtype, suffix(format))))
}

/// Returns the instance of a kernel for latents of `dim` elements, in tiles of `rows` rows.
pub(super) fn latent(kernel: &str, rows: usize, format: CacheFormat, dim: usize) -> Name {
    Name::new(format_args!("{kernel}_{rows}_{}_h{dim}{}", format.dtype, suffix(format)))
}

/// Returns the part of a name that says that elements of the cache have 8 bits.
pub(super) fn suffix(format: CacheFormat) -> &'static str {
    if format.kv_dtype.is_byte() { "_kv8" } else { "" }
}
