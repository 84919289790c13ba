//! Products of many rows with weights that are codes: a kernel unpacks some outputs, [`Device::product`] multiplies with them.
//!
//! This is the way of many rows where `csrc/linear_sm90.cu` does not run. `linear.cu` unpacks codes again for every 32 rows, so its
//! time is proportional to the rows, while this way takes about the same for 33 and for 128. On an H200 (4096 inputs, 28672 outputs) the
//! times are equal at some 85 rows of 4 bits and 80 of 8.
//!
//! On Hopper it is the way of more than 256 rows. By the times of their parts on an H200, in 4 bits: of 4096 -> 28672, unpacking takes 95 us,
//! 256 more rows of numbers 73 us and of codes 98 us, so codes would take less time up to some 1,000 rows; of 4096 -> 4096 it is 11, 10
//! and 25 us, so this way is right from 257 rows on. No step between has been timed.

use device::{Arg, Buffer, Columns, Device, Factor, FactorType, Launch, Product};
use linear::{PANEL, Tiles};

use super::names::{MODULE, Name};
use super::parameters::count;
use super::tiles::{form_name, of_weights, table};
use crate::error::KernelError;
use crate::format::Dtype;
use crate::scratch::{LinearScratch, strips};

/// Threads of a block, each of whose warps unpacks [`TILE`] inputs.
const THREADS: u32 = 256;
const TILE: usize = 64;

/// As many outputs at a time as the scratch memory holds.
pub(super) fn linear(
    device: &dyn Device,
    (tiles, dtype): (&Tiles, Dtype),
    (x, rows): (&Buffer, usize),
    bias: Option<&Buffer>,
    (y, y_format): (&mut Buffer, Dtype),
    [stride, k]: [usize; 2],
    scratch: &mut LinearScratch,
) -> Result<(), KernelError> {
    for segment in tiles.segments() {
        let most = scratch.unpacked_outputs(k, dtype);
        for (first, n) in strips(segment, most) {
            let shape = of_weights(Some(segment), [n, k])?;
            let panel = first / PANEL;
            let weights = Arg::pointer(&segment.panels, panel * segment.form.panel_bytes());
            device.launch(&Launch {
                module: MODULE,
                kernel: &Name::new(format_args!("unpack_{}_{dtype}", form_name(Some(&segment.form), dtype))),
                grid: [count(n.div_ceil(PANEL))?, count(k.div_ceil(TILE).div_ceil(THREADS as usize / 32))?, 1],
                block: [THREADS, 1, 1],
                shared_bytes: 0,
                args: &[weights, table(segment), Arg::pointer(&scratch.wide, 0), Arg::bytes(&shape)],
            })?;
            let weights = Factor { elements: &scratch.wide, format: FactorType::Numbers(dtype), n, k };
            let columns = Some(Columns { first: segment.first + first, stride });
            device.product(Product { x, rows, weights, bias, y, y_format, columns, slices: None })?;
        }
    }
    Ok(())
}
