//! The memory of a device sampler on the device.

use device::{Buffer, Device, DeviceError};

use super::limits::Limits;

/// Where words go.
#[derive(Clone, Copy)]
pub(super) enum Target {
    Rows,
    Params,
    Lists,
    Constraints,
    Allowed,
    History,
    Places,
}

/// The buffers on the device; `csrc/args.cuh` has their shapes.
pub(super) struct Buffers {
    pub rows: Buffer,
    pub params: Buffer,
    pub lists: Buffer,
    pub constraints: Buffer,
    pub allowed: Buffer,
    pub counts: Buffer,
    pub state: Buffer,
    pub scaled: Buffer,
    pub chunks: Buffer,
    pub cuts: Buffer,
    pub results: Buffer,
    pub tops: Buffer,
    pub history: Buffer,
    pub places: Buffer,
}

impl Buffers {
    pub fn new(device: &dyn Device, limits: &Limits) -> Result<Buffers, DeviceError> {
        let sizes = limits.sizes();
        let [
            rows,
            params,
            lists,
            constraints,
            allowed,
            counts,
            state,
            scaled,
            chunks,
            cuts,
            results,
            tops,
            history,
            places,
        ] = sizes.map(|bytes| device.alloc(bytes));
        Ok(Buffers {
            rows: rows?,
            params: params?,
            lists: lists?,
            constraints: constraints?,
            allowed: allowed?,
            counts: counts?,
            state: state?,
            scaled: scaled?,
            chunks: chunks?,
            cuts: cuts?,
            results: results?,
            tops: tops?,
            history: history?,
            places: places?,
        })
    }

    pub fn of(&mut self, target: Target) -> &mut Buffer {
        match target {
            Target::Rows => &mut self.rows,
            Target::Params => &mut self.params,
            Target::Lists => &mut self.lists,
            Target::Constraints => &mut self.constraints,
            Target::Allowed => &mut self.allowed,
            Target::History => &mut self.history,
            Target::Places => &mut self.places,
        }
    }
}
