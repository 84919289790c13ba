//! What a device can prepare before the first request, so that no request waits for it.

use attention_kernels::{AttentionBatch, Dtype, KernelError, KvCache, linear_products};

use super::op::Op;
use super::{ForwardBatch, GroupBatch, Model};

impl Model {
    /// Plans all products ([`Device::plan_product`](device::Device::plan_product)), then runs a step of the largest size that reads
    /// and writes no cache, so that code is loaded before the first request.
    ///
    /// # Errors
    /// A product that the device cannot compute, and the errors of a step.
    pub fn warm_up(&mut self, caches: &mut [KvCache]) -> Result<(), KernelError> {
        self.plan_products()?;
        let rows = self.step.max_rows;
        let attention = AttentionBatch {
            query_starts: vec![0, rows as u32],
            context_lens: vec![0],
            block_tables: [[-1]].into_iter().collect(),
        };
        let group = GroupBatch { slot_mapping: vec![-1; rows], attention };
        let groups = vec![group; self.layout.groups.len()];
        let (tokens, positions) = (vec![0; rows], vec![0; rows]);
        let batch = ForwardBatch { tokens, positions, groups, ..ForwardBatch::default() };
        self.forward(&batch, caches)?;
        self.logits(&[0]).map(drop)
    }

    fn plan_products(&self) -> Result<(), KernelError> {
        let (loaded, dtype) = (&self.loaded, self.kernels.format.dtype);
        let plan = |weights, bias, output, max_rows| {
            let mut products =
                linear_products(self.device.features(), weights, bias, output, &self.scratch, max_rows).into_iter();
            products.try_for_each(|planned| self.device.plan_product(planned.shape, planned.weights, planned.max_rows))
        };
        for op in &self.program.ops {
            if let Op::Linear { linear, .. } = *op {
                let linear = &loaded.linears[linear];
                plan(&linear.weights, linear.bias.is_some(), dtype, self.step.max_rows)?;
            }
        }
        let (head, bias) = loaded.head(&self.decoder);
        Ok(plan(&head.weights, bias.is_some(), Dtype::F32, self.result_rows)?)
    }
}
