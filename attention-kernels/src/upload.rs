//! The inputs of a step on their way to the device: one copy, and one small kernel that scatters it.
//!
//! ```text
//! arrays on the host    [..x..xx.....]   [x.......]   [.........xxx]       x: changed since the last step
//!                           \  |           |                |
//! page-locked stage     [ changed words of all arrays | array, place, length of each range ]
//!                           | one copy on the compute queue
//! packed buffer         [ the same ]
//!                           | one launch of `scatter_words`
//! arrays on the device  [..x..xx.....]   [x.......]   [.........xxx]
//! ```
//!
//! The host waits for nothing: stages are used in turn, so the next ones can be written while copies from others, for steps that
//! are still running, are pending. Changes that do not fit a stage are sent in several parts, so memory is bounded whatever
//! changes; only if the parts use all stages at once does the host wait for the device. A device that launches no kernels gets
//! each range in a copy of its own.

use device::{Arg, Device, DeviceError, Launch, Pinned, Queue, bytes_of};

use crate::cuda::names::MODULE;
use crate::error::KernelError;
use crate::mirror::{Mirror, WORD};

/// Size of a stage: the inputs of 8192 tokens with room to spare.
const STAGE: usize = 256 << 10;
/// Number of stages: two steps with up to four uploads each (inputs, needed rows, block copies, what the sampler reads).
const STAGES: usize = 8;
/// Arrays that a launch writes to, the parameters of `scatter_words`: those of four groups of layers. If more change, there is
/// another copy.
const ARRAYS: usize = 28;
/// Most words of a piece of a range; a warp copies one piece.
const PIECE: usize = 256;
/// Pieces that a thread block copies.
const PIECES_OF_BLOCK: usize = 4;

device::kernel_structs! {
    /// The struct of the same name in `scatter_words.cu`.
    struct Piece: 16 bytes {
        array: u32,
        at: u32,
        words: u32,
        from: u32,
    }
}

/// Sends the changes of [`Mirror`]s.
pub struct Upload(Option<Path>);

/// Memory on a device that launches kernels.
struct Path {
    stages: Vec<Pinned>,
    next: usize,
    packed: device::Buffer,
    /// Pieces whose words are in the current stage; kept for its memory.
    pieces: Vec<Piece>,
}

impl Upload {
    /// Allocates the stages.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn new(device: &dyn Device) -> Result<Upload, DeviceError> {
        if !device.features().launches {
            return Ok(Upload(None));
        }
        let stages = (0..STAGES).map(|_| device.pinned(STAGE)).collect::<Result<Vec<_>, _>>()?;
        Ok(Upload(Some(Path { stages, next: 0, packed: device.alloc(STAGE)?, pieces: Vec::new() })))
    }

    /// Returns the bytes of device memory on a device that launches kernels.
    pub fn bytes() -> usize {
        STAGE
    }

    /// Sends the changes of these arrays, in order with later launches. Arrays without changes cost nothing.
    ///
    /// # Errors
    /// Errors of the copy or the launch. Words that may not have arrived are sent again when they are set again.
    pub fn send<'a>(
        &mut self,
        device: &dyn Device,
        arrays: impl IntoIterator<Item = &'a mut Mirror>,
    ) -> Result<(), KernelError> {
        let mut changed = arrays.into_iter().filter(|array| !array.changed.is_empty());
        let Some(path) = &mut self.0 else { return Ok(changed.try_for_each(|array| array.send(device))?) };
        loop {
            let mut group = [const { None }; ARRAYS];
            for (place, array) in group.iter_mut().zip(&mut changed) {
                *place = Some(array);
            }
            if group[0].is_none() {
                return Ok(());
            }
            let outcome = path.send(device, &group);
            for array in group.into_iter().flatten() {
                array.changed.clear();
                if outcome.is_err() {
                    // It is unknown which of its words have arrived.
                    array.forget();
                }
            }
            outcome?;
        }
    }
}

type Group<'a> = [Option<&'a mut Mirror>; ARRAYS];

impl Path {
    fn send(&mut self, device: &dyn Device, group: &Group<'_>) -> Result<(), KernelError> {
        let mut words = 0;
        self.pieces.clear();
        for (number, array) in group.iter().flatten().enumerate() {
            for range in &array.changed {
                for start in range.clone().step_by(PIECE * WORD) {
                    let bytes = &array.known[start..range.end.min(start + PIECE * WORD)];
                    if words * WORD + bytes.len() + (self.pieces.len() + 1) * size_of::<Piece>() > STAGE {
                        self.flush(device, group, words)?;
                        words = 0;
                    }
                    self.stage(device)?[words * WORD..][..bytes.len()].copy_from_slice(bytes);
                    let (array, at, from) = (number as u32, (start / WORD) as u32, words as u32);
                    self.pieces.push(Piece { array, at, words: (bytes.len() / WORD) as u32, from });
                    words += bytes.len() / WORD;
                }
            }
        }
        self.flush(device, group, words)
    }

    /// Returns the current stage.
    fn stage(&mut self, device: &dyn Device) -> Result<&mut [u8], DeviceError> {
        let stage = &mut self.stages[self.next];
        if matches!(stage.host::<u8>(), Err(DeviceError::InFlight)) {
            // Only if two steps send more than all stages hold.
            device.synchronize()?;
        }
        stage.host_mut()
    }

    /// Enqueues the copy of the current stage, which has `words` words and then the pieces, and the launch.
    fn flush(&mut self, device: &dyn Device, group: &Group<'_>, words: usize) -> Result<(), KernelError> {
        let pieces = std::mem::take(&mut self.pieces);
        let (list, count) = (bytes_of(&pieces), pieces.len() as u32);
        let bytes = words * WORD + list.len();
        self.stage(device)?[words * WORD..bytes].copy_from_slice(list);
        self.pieces = pieces;
        self.pieces.clear();
        let stage = &self.stages[self.next];
        self.next = (self.next + 1) % STAGES;
        device.upload_async(Queue::Compute, stage, 0, &mut self.packed, 0, bytes)?;
        let mut args = [Arg::null(); 3 + ARRAYS];
        args[..3].copy_from_slice(&[Arg::pointer(&self.packed, 0), (words as u32).into(), count.into()]);
        for (arg, array) in args[3..].iter_mut().zip(group.iter().flatten()) {
            *arg = Arg::pointer(&array.buffer, 0);
        }
        let grid = [count.div_ceil(PIECES_OF_BLOCK as u32), 1, 1];
        let block = [32 * PIECES_OF_BLOCK as u32, 1, 1];
        let (kernel, shared_bytes) = ("scatter_words", 0);
        Ok(device.launch(&Launch { module: MODULE, kernel, grid, block, shared_bytes, args: &args })?)
    }
}
