//! `quire bench kernels --counts`: what the simulator counts of each kernel.

use std::collections::BTreeMap;
use std::sync::Arc;

use engine::kernels::{Counts, Device, Measurement, Options, Resources, SECTOR, Tally, open_with};
use serde_json::{Value, json};

use crate::error::CliError;

/// What `--counts` needs.
pub struct Counting {
    pub tally: Arc<Tally>,
    /// By kernel, on [`ARCHITECTURE`].
    resources: BTreeMap<String, Resources>,
}

/// Architecture whose registers and spills are printed.
const ARCHITECTURE: &str = "sm_90a";

/// Tables have this line above each row of [`Counting::lines`], and that of the kernels.
pub const HEAD: &str = "operation   variant                 types          heads  size block batch context rows  \
                        bytes/least    ulps\n  \
                        kernel                          launches   read MB  times written MB  times sect/req wanted \
                        confl/req  busy/blocks    barriers     mma/wgmma regs spill";

/// Why a row has no kernels.
const NOT_COUNTED: &str = "  no kernel of Quire: a GPU computes this with cuBLAS, which is not counted";

impl Counting {
    /// Opens the device and reads the resources of its kernels.
    pub fn open(device: &str, options: Options) -> Result<(Arc<dyn Device>, Counting), CliError> {
        if device != "cuda-sim" {
            let problem = format!("--counts: found --device {device}, expected cuda-sim, the device that counts");
            return Err(CliError::Usage(problem));
        }
        let resources = Resources::find(&options, ARCHITECTURE).map_err(CliError::failed)?;
        let tally = Arc::<Tally>::default();
        let device = open_with(device, &Options { counts: Some(Arc::clone(&tally)), ..options });
        Ok((device.map_err(CliError::failed)?, Counting { tally, resources }))
    }

    /// The lines of a row: one with what the table of times has too, which the caller passes, and one for each kernel.
    pub fn lines(&self, shape: &str, row: &Measurement) -> String {
        let moved: u64 = row.cell.kernels.values().map(|(_, counts)| counts.sectors * SECTOR).sum();
        let moved = if row.cell.kernels.is_empty() { "-".to_owned() } else { ratio(moved, row.cell.bytes) };
        let mut text = format!("{shape} {moved:>12} {:>7.2}", row.cell.ulps);
        if row.cell.kernels.is_empty() {
            text = text + "\n" + NOT_COUNTED;
        }
        for (kernel, counted) in &row.cell.kernels {
            text = text + "\n" + &self.kernel_line(kernel, counted);
        }
        text
    }

    fn kernel_line(&self, kernel: &str, counted: &(u64, Counts)) -> String {
        let (launches, counts) = counted;
        let need = |of: fn(&Resources) -> u32| {
            self.resources.get(kernel).map_or("-".to_owned(), |resources| of(resources).to_string())
        };
        format!(
            "  {kernel:<31} {launches:>8} {:>9.3} {:>6} {:>10.3} {:>6} {:>8} {:>6} {:>9} {:>12} {:>11} {:>13} {:>4} {:>5}",
            counts.read_bytes as f64 / 1e6,
            ratio(counts.read_bytes, counts.distinct_read_bytes),
            counts.written_bytes as f64 / 1e6,
            ratio(counts.written_bytes, counts.distinct_written_bytes),
            ratio(counts.sectors, counts.requests),
            share(counts.wanted_bytes, counts.sectors * SECTOR),
            ratio(counts.bank_conflicts, counts.shared_requests),
            format!("{}/{}", counts.busy_blocks, counts.blocks),
            counts.barriers,
            format!("{}/{}", counts.products, counts.warpgroup_products),
            need(|resources| resources.registers),
            need(|resources| resources.spill_bytes),
        )
    }

    /// What a row has instead of times, as JSON.
    pub fn row(&self, row: &Measurement) -> Value {
        let kernels = row.cell.kernels.iter();
        json!({ "kernels": kernels.map(|(kernel, counted)| self.kernel(kernel, counted)).collect::<Vec<_>>() })
    }

    fn kernel(&self, kernel: &str, counted: &(u64, Counts)) -> Value {
        let (launches, counts) = counted;
        let resources = self.resources.get(kernel);
        json!({
            "kernel": kernel,
            "launches": launches,
            "blocks": counts.blocks,
            "busy_blocks": counts.busy_blocks,
            "read_bytes": counts.read_bytes,
            "distinct_read_bytes": counts.distinct_read_bytes,
            "written_bytes": counts.written_bytes,
            "distinct_written_bytes": counts.distinct_written_bytes,
            "requests": counts.requests,
            "sectors": counts.sectors,
            "distinct_sectors": counts.distinct_sectors,
            "wanted_bytes": counts.wanted_bytes,
            "shared_requests": counts.shared_requests,
            "shared_passes": counts.shared_passes,
            "bank_conflicts": counts.bank_conflicts,
            "barriers": counts.barriers,
            "products": counts.products,
            "warpgroup_products": counts.warpgroup_products,
            "multiply_adds": counts.multiply_adds,
            "exponentials": counts.exponentials,
            "registers": resources.map(|resources| resources.registers),
            "spill_bytes": resources.map(|resources| resources.spill_bytes),
        })
    }
}

fn ratio(part: u64, whole: u64) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.2}", part as f64 / whole as f64) }
}

fn share(part: u64, whole: u64) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.0}%", part as f64 / whole as f64 * 100.0) }
}
