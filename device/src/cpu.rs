//! The `cpu` backend: host memory, host threads.

use crate::gemm::{PackedMatrix, Quantization, WeightFormat};
use crate::{Buffer, Device, DeviceError, Isa, Matrix, MemoryInfo, Pool};

pub(crate) struct Cpu {
    pool: Pool,
}

impl Cpu {
    pub(crate) fn new(threads: Option<usize>) -> Result<Cpu, DeviceError> {
        Ok(Cpu { pool: Pool::new(threads)? })
    }
}

impl Device for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn description(&self) -> String {
        format!("{} threads, vector unit {}", self.pool.threads(), Isa::best())
    }

    fn memory(&self) -> MemoryInfo {
        let mut system = sysinfo::System::new();
        system.refresh_memory();
        let (total, available) = (system.total_memory(), system.available_memory());
        // Inside a container the limit is the group's, not the machine's.
        match system.cgroup_limits() {
            Some(limits) if limits.total_memory > 0 => {
                MemoryInfo { total: total.min(limits.total_memory), available: available.min(limits.free_memory) }
            }
            _ => MemoryInfo { total, available },
        }
    }

    fn alloc(&self, bytes: usize) -> Result<Buffer, DeviceError> {
        Buffer::zeroed_host("cpu", bytes)
    }

    fn matrix(&self, k: usize, parts: &[(WeightFormat, &[u8])]) -> Result<Matrix, DeviceError> {
        PackedMatrix::pack(k, parts).map(Matrix).ok_or(DeviceError::BadMatrix(k))
    }

    fn quantized_matrix(
        &self,
        quantization: Quantization,
        k: usize,
        parts: &[(WeightFormat, &[u8])],
    ) -> Result<Matrix, DeviceError> {
        PackedMatrix::quantize(&self.pool, quantization, k, parts).map(Matrix)
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }
}
