//! The ranks of a tensor-parallel group, which exchange their parts of rows ([`Decoder::shard`](crate::Decoder::shard)).

use std::sync::Arc;

use attention_kernels::KernelError;
use device::{Buffer, Collective, Device};

/// This rank's place in its group.
pub(super) struct Ranks {
    group: Arc<dyn Collective>,
    /// Bytes of each rank's part of a row; reused.
    widths: Vec<usize>,
}

impl Ranks {
    pub fn new(group: Arc<dyn Collective>) -> Ranks {
        let widths = Vec::with_capacity(group.size());
        Ranks { group, widths }
    }

    /// `all` = the rows of all ranks side by side, of `widths` elements of `size` bytes each; `own` are those of this rank.
    pub fn gather(
        &mut self,
        device: &dyn Device,
        own: &Buffer,
        (rows, widths, size): (usize, &[usize], usize),
        all: &mut Buffer,
    ) -> Result<(), KernelError> {
        self.widths.clear();
        self.widths.extend(widths.iter().map(|width| width * size));
        Ok(self.group.all_gather_on(device, own, rows, &self.widths, all)?)
    }
}

/// The ranks that a sharded model needs.
pub(super) fn needed(ranks: &mut Option<Ranks>) -> Result<&mut Ranks, KernelError> {
    ranks.as_mut().ok_or(KernelError::Shape { what: "ranks of a model with a part of its rows", found: 0, expected: 1 })
}
