//! Launches of the low-rank additions.

use device::{Arg, Device, Launch};

use super::names::{MODULE, Name};
use super::parameters::{LowRankShape, count};
use crate::error::KernelError;
use crate::low_rank::{LowRankArgs, LowRankFactors, Sizes};

/// Outputs of a thread block of `expand_low_rank`.
const OUTPUTS: usize = 128;

/// Two launches, whatever the adapters of the rows. Their grids depend only on the number of rows.
pub(super) fn low_rank(device: &dyn Device, args: LowRankArgs<'_>) -> Result<(), KernelError> {
    let variant = "cuda.low_rank";
    let Sizes { inputs, outputs, width } = args.check()?;
    let LowRankFactors::Device { slots, t } = &args.factors else {
        return Err(KernelError::Unsupported { variant, found: "factors on the host".to_string() });
    };
    let table = args.table().ok_or(KernelError::NotLoaded { variant, what: "rows of adapters" })?;
    if args.num_rows == 0 {
        return Ok(()); // a driver refuses an empty grid
    }
    let shape = LowRankShape {
        slot_bytes: slots.slot_bytes as i64,
        inputs: count(inputs)?,
        outputs: count(outputs)?,
        width: count(width)?,
        reserved: 0,
    };
    let (tasks, dtype) = (count(args.most_tasks())?, args.dtype());
    let [x, y, t, factors, table] =
        [args.x, &*args.y, &**t, &slots.memory, table].map(|buffer| Arg::pointer(buffer, 0));
    for (kernel, blocks, threads, args) in [
        ("shrink", width / 16, 256, [x, factors, table, t, Arg::bytes(&shape)]),
        ("expand", outputs.div_ceil(OUTPUTS), OUTPUTS as u32, [t, factors, table, y, Arg::bytes(&shape)]),
    ] {
        device.launch(&Launch {
            module: MODULE,
            kernel: &Name::new(format_args!("{kernel}_low_rank_{dtype}")),
            grid: [count(blocks)?, tasks, 1],
            block: [threads, 1, 1],
            shared_bytes: 0,
            args: &args,
        })?;
    }
    Ok(())
}
