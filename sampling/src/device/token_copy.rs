//! Copies of drawn tokens into the next forward pass, on the device.

use device::{Arg, Buffer, Launch};

use super::DeviceSampler;
use super::args::{CopyShape, MODULE, ROW_THREADS, TokenCopy};
use super::arrays::Array;
use super::limits::{SampleError, at_most};

impl DeviceSampler {
    /// Sets what the next [`copy_tokens`](DeviceSampler::copy_tokens) copies. The list is sent with the next
    /// [`stage`](DeviceSampler::stage).
    ///
    /// # Errors
    /// [`SampleError::TooMany`], [`SampleError::NotSet`], and those of the device.
    pub fn set_token_copies(&mut self, copies: &[TokenCopy]) -> Result<(), SampleError> {
        at_most("token copies of a step", copies.len(), self.limits.max_num_seqs)?;
        copies.iter().try_for_each(|copy| self.find(copy.slot).map(|_| ()))?;
        self.token_copies.clear();
        self.token_copies.extend_from_slice(copies);
        if !self.sent_token_copies.starts_with(copies) {
            self.reserve(size_of_val(copies))?;
            self.staging.upload(Array::TokenCopies, 0, copies);
            self.sent_token_copies.clone_from(&self.token_copies);
        }
        Ok(())
    }

    /// Enqueues the copies into `tokens`, an array of u32. Each sequence's last token is the one that the steps
    /// launched so far drew, whether or not the host knows it yet.
    ///
    /// # Errors
    /// [`SampleError::TokenIndex`] if an index is behind the end of the array, and those of the device.
    pub fn copy_tokens(&self, tokens: &Buffer) -> Result<(), SampleError> {
        let len = tokens.len_bytes() / size_of::<u32>();
        if let Some(&TokenCopy { index, .. }) = self.token_copies.iter().find(|copy| copy.index as usize >= len) {
            return Err(SampleError::TokenIndex { index, len });
        }
        if self.token_copies.is_empty() {
            return Ok(());
        }
        let copies = self.token_copies.len() as u32;
        let shape = CopyShape { copies, tail_tokens: self.limits.tail_tokens() as u32 };
        let args = [
            Arg::pointer(&self.arrays[Array::TokenCopies], 0),
            Arg::pointer(&self.arrays[Array::State], 0),
            Arg::pointer(tokens, 0),
            Arg::bytes(&shape),
        ];
        let (grid, block) = ([copies.div_ceil(ROW_THREADS), 1, 1], [ROW_THREADS, 1, 1]);
        let launch = Launch { module: MODULE, kernel: "sample_copy_tokens", grid, block, shared_bytes: 0, args: &args };
        Ok(self.device.launch(&launch)?)
    }
}
