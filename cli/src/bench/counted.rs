//! `quire bench kernels --counts`: what the simulator counts of each kernel, and the time that it predicts for a card.

use std::collections::BTreeMap;
use std::sync::Arc;

use engine::kernels::{
    Bound, Card, Counts, Device, Dtype, Measurement, Options, Prediction, Resources, SECTOR, Tally, assumption,
    open_with,
};
use serde_json::{Value, json};

use crate::error::CliError;

/// What `--counts` needs.
pub struct Counting {
    pub tally: Arc<Tally>,
    card: Card,
    /// Predicted times are those of so many times the counted work.
    scale: u64,
    /// By kernel, on the architecture of the card.
    resources: BTreeMap<String, Resources>,
}

/// Tables have this line above each row of [`Counting::lines`], and that of the kernels.
pub const HEAD: &str = "operation   variant                 types          heads  size block batch context rows   \
                        least us  predicted of least  bytes/least    ulps\n  \
                        kernel                          launches   read MB  times written MB  times sect/req wanted \
                        confl/req  busy/blocks    barriers     mma/wgmma regs spill   predicted bound";

/// Why a row has no kernels.
const NOT_COUNTED: &str = "  no kernel of Quire: a GPU computes this with cuBLAS, which is not counted";

impl Counting {
    /// Opens the device and finds the card.
    pub fn open(
        device: &str,
        options: Options,
        card: Option<&str>,
        scale: Option<u64>,
    ) -> Result<(Arc<dyn Device>, Counting), CliError> {
        if device != "cuda-sim" {
            let problem = format!("--counts: found --device {device}, expected cuda-sim, the device that counts");
            return Err(CliError::Usage(problem));
        }
        let card = card.map_or(Ok(Card::ALL[0]), Card::find);
        let card = card.map_err(|unknown| CliError::Usage(format!("--card: {unknown}")))?;
        let resources = Resources::find(&options, card.architecture).map_err(CliError::failed)?;
        let tally = Arc::<Tally>::default();
        let device = open_with(device, &Options { counts: Some(Arc::clone(&tally)), ..options });
        let counting = Counting { tally, card, scale: scale.unwrap_or(1), resources };
        Ok((device.map_err(CliError::failed)?, counting))
    }

    /// What the predicted times are, in a few lines.
    pub fn about(&self) -> String {
        let Counting { card, scale, .. } = self;
        let times = if *scale == 1 { String::new() } else { format!(", of {scale} times the counted work") };
        format!(
            "predicted: microseconds in a graph on {}{times}, from counts; no GPU was timed\n\
             least: the time of the bytes and operations that a call cannot avoid, at {:.0}% of {:.0} GB/s and at {:.0} TFLOP/s",
            card.name,
            assumption::MEMORY_SHARE * 100.0,
            card.memory / 1e9,
            card.wgmma.unwrap_or(card.mma) / 1e12,
        )
    }

    fn predict(&self, (launches, counts): &(u64, Counts)) -> Prediction {
        self.card.predict(*launches, &counts.scaled(self.scale))
    }

    /// The seconds of a row; `None` if nothing was counted.
    fn seconds(&self, row: &Measurement, of: fn(&Prediction) -> f64) -> Option<f64> {
        let kernels = row.cell.kernels.values();
        (!row.cell.kernels.is_empty()).then(|| kernels.map(|counted| of(&self.predict(counted))).sum())
    }

    fn least_seconds(&self, row: &Measurement) -> f64 {
        let (bytes, operations) =
            (row.cell.bytes.saturating_mul(self.scale), row.cell.operations.saturating_mul(self.scale));
        self.card.least_seconds(bytes, operations, row.shape.dtype != Dtype::F32)
    }

    /// The lines of a row: one with what the table of times has too, which the caller passes, and one for each kernel.
    pub fn lines(&self, shape: &str, row: &Measurement) -> String {
        let seconds = self.seconds(row, Prediction::seconds);
        let least = self.least_seconds(row);
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let moved: u64 = row.cell.kernels.values().map(|(_, counts)| counts.sectors * SECTOR).sum();
        let mut text = format!(
            "{shape} {:>10.2} {:>10} {:>8} {:>12} {:>7.2}",
            least * 1e6,
            or_none(seconds.map(|seconds| format!("{:.2}", seconds * 1e6))),
            or_none(seconds.map(|seconds| format!("{:.0}%", least / seconds * 100.0))),
            if seconds.is_some() { ratio(moved, row.cell.bytes) } else { "-".to_owned() },
            row.cell.ulps,
        );
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
        let prediction = self.predict(counted);
        let need = |of: fn(&Resources) -> u32| {
            self.resources.get(kernel).map_or("-".to_owned(), |resources| of(resources).to_string())
        };
        format!(
            "  {kernel:<31} {launches:>8} {:>9.3} {:>6} {:>10.3} {:>6} {:>8} {:>6} {:>9} {:>12} {:>11} {:>13} {:>4} {:>5} {:>11.2} {}",
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
            prediction.seconds() * 1e6,
            prediction.bound().name(),
        )
    }

    /// The card and the assumptions as JSON.
    pub fn record(&self) -> Value {
        json!({
            "card": self.card.name,
            "scale": self.scale,
            "memory_share": assumption::MEMORY_SHARE,
            "l2_share": assumption::L2_SHARE,
            "graph_launch_seconds": assumption::GRAPH_LAUNCH,
            "eager_launch_seconds": assumption::EAGER_LAUNCH,
        })
    }

    /// What a row has instead of times, as JSON.
    pub fn row(&self, row: &Measurement) -> Value {
        let kernels = row.cell.kernels.iter();
        json!({
            "predicted_seconds": self.seconds(row, Prediction::seconds),
            "predicted_eager_seconds": self.seconds(row, Prediction::eager_seconds),
            "least_seconds": self.least_seconds(row),
            "kernels": kernels.map(|(kernel, counted)| self.kernel(kernel, counted)).collect::<Vec<_>>(),
        })
    }

    fn kernel(&self, kernel: &str, counted: &(u64, Counts)) -> Value {
        let (launches, counts) = counted;
        let (prediction, resources) = (self.predict(counted), self.resources.get(kernel));
        let parts = prediction.parts.iter().map(|&(bound, seconds)| (Bound::name(bound).to_owned(), json!(seconds)));
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
            "predicted_seconds": prediction.seconds(),
            "predicted_eager_seconds": prediction.eager_seconds(),
            "bound": prediction.bound().name(),
            "seconds_of": parts.collect::<serde_json::Map<_, _>>(),
        })
    }
}

fn ratio(part: u64, whole: u64) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.2}", part as f64 / whole as f64) }
}

fn share(part: u64, whole: u64) -> String {
    if whole == 0 { "-".to_owned() } else { format!("{:.0}%", part as f64 / whole as f64 * 100.0) }
}
