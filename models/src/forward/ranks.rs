//! What a model exchanges with other ranks: parts of rows in a tensor-parallel group ([`Decoder::shard`](crate::Decoder::shard)), whole
//! rows between the stages of a pipeline ([`Decoder::stage`](crate::Decoder::stage)).

use std::sync::Arc;

use attention_kernels::{Dtype, KernelError};
use collective::{Collective, CollectiveError};
use device::{Buffer, Device};

fn failed(error: CollectiveError) -> KernelError {
    KernelError::Ranks(error.into())
}

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
        self.group.all_gather_on(device, own, rows, &self.widths, all).map_err(failed)
    }

    /// Adds the first `count` numbers of all ranks.
    pub fn sum(&self, device: &dyn Device, dtype: Dtype, values: &mut Buffer, count: usize) -> Result<(), KernelError> {
        self.group.sum_on(device, dtype, values, count).map_err(failed)
    }
}

/// This rank's place in a pipeline: the rank before computes the layers before its own.
pub(super) struct Stages {
    pipeline: Arc<dyn Collective>,
    /// Rows on their way between a device and another rank; reused.
    staged: Vec<u8>,
}

impl Stages {
    pub fn new(pipeline: Arc<dyn Collective>) -> Stages {
        Stages { pipeline, staged: Vec::new() }
    }

    /// Receives the first `bytes` of a buffer from the stage before.
    pub fn receive(&mut self, device: &dyn Device, bytes: usize, to: &mut Buffer) -> Result<(), KernelError> {
        let from = self.pipeline.rank().wrapping_sub(1);
        if let Ok(to) = to.host_mut::<u8>()
            && let Some(to) = to.get_mut(..bytes)
        {
            return self.pipeline.receive(from, to).map_err(failed);
        }
        self.staged.resize(bytes, 0);
        self.pipeline.receive(from, &mut self.staged).map_err(failed)?;
        Ok(device.upload(to, 0, &self.staged)?)
    }

    /// Sends the first `bytes` of a buffer to the stage behind.
    pub fn send(&mut self, device: &dyn Device, bytes: usize, from: &Buffer) -> Result<(), KernelError> {
        let to = self.pipeline.rank() + 1;
        if let Ok(from) = from.host::<u8>()
            && let Some(from) = from.get(..bytes)
        {
            return self.pipeline.send(to, from).map_err(failed);
        }
        self.staged.resize(bytes, 0);
        device.download(from, 0, &mut self.staged)?;
        self.pipeline.send(to, &self.staged).map_err(failed)
    }
}

/// The pipeline that a stage needs.
pub(super) fn stages(stages: &mut Option<Stages>) -> Result<&mut Stages, KernelError> {
    stages.as_mut().ok_or(KernelError::Shape {
        what: "stages of a model with some of its layers",
        found: 0,
        expected: 1,
    })
}

/// The ranks that a sharded model needs.
pub(super) fn needed(ranks: &mut Option<Ranks>) -> Result<&mut Ranks, KernelError> {
    ranks.as_mut().ok_or(KernelError::Shape { what: "ranks of a model with a part of its rows", found: 0, expected: 1 })
}
