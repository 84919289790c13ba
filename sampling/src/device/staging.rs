//! Changes of slots on their way to the device: gathered in host memory, then sent together.
//!
//! [`Staging::send`] copies the gathered bytes to one of two page-locked buffers and enqueues the uploads and the
//! kernel launches between them in call order. The two buffers alternate, so that the host rarely waits for an upload
//! that is still running.

use device::{Arg, Device, DeviceError, Element, Event, Launch, Pinned, Queue, bytes_of};

use super::args::{ForkShape, HistoryShape, MODULE, ROW_THREADS};
use super::arrays::{Array, Arrays};

enum Command {
    /// Copies the next `len` staged bytes to an array, from byte `at` on.
    Upload { to: Array, at: usize, len: usize },
    /// Launches `sample_history` for the tokens uploaded last.
    History(HistoryShape),
    /// Launches `sample_fork`.
    Fork(ForkShape),
}

pub(super) struct Staging {
    bytes: Vec<u8>,
    commands: Vec<Command>,
    /// Page-locked buffers, each with the event after its last upload.
    buffers: [(Pinned, Option<Event>); 2],
    /// Index of the buffer to use next.
    next: usize,
}

impl Staging {
    pub fn new(device: &dyn Device, capacity: usize) -> Result<Staging, DeviceError> {
        let buffer = || Ok::<_, DeviceError>((device.pinned(capacity)?, None));
        let (bytes, commands) = (Vec::with_capacity(capacity), Vec::new());
        Ok(Staging { bytes, commands, buffers: [buffer()?, buffer()?], next: 0 })
    }

    /// Whether `bytes` more bytes fit.
    pub fn fits(&self, bytes: usize) -> bool {
        self.bytes.len() + bytes <= self.bytes.capacity()
    }

    /// Stages `values` for an array, from element `at` on.
    pub fn upload<T: Element>(&mut self, to: Array, at: usize, values: &[T]) {
        self.bytes.extend_from_slice(bytes_of(values));
        self.commands.push(Command::Upload { to, at: at * size_of::<T>(), len: size_of_val(values) });
    }

    pub fn history(&mut self, shape: HistoryShape) {
        self.commands.push(Command::History(shape));
    }

    pub fn fork(&mut self, shape: ForkShape) {
        self.commands.push(Command::Fork(shape));
    }

    /// Enqueues everything staged on the compute queue. Afterwards nothing is staged, even if the device fails.
    pub fn send(&mut self, device: &dyn Device, arrays: &mut Arrays) -> Result<(), DeviceError> {
        let outcome = if self.commands.is_empty() { Ok(()) } else { self.enqueue(device, arrays) };
        self.commands.clear();
        self.bytes.clear();
        outcome
    }

    fn enqueue(&mut self, device: &dyn Device, arrays: &mut Arrays) -> Result<(), DeviceError> {
        let (pinned, uploaded) = &mut self.buffers[self.next];
        if let Some(uploaded) = uploaded.take() {
            uploaded.synchronize()?;
        }
        pinned.host_mut::<u8>()?[..self.bytes.len()].copy_from_slice(&self.bytes);
        let mut from = 0;
        for command in self.commands.drain(..) {
            match command {
                Command::Upload { to, at, len } => {
                    device.upload_async(Queue::Compute, pinned, from, &mut arrays[to], at, len)?;
                    from += len;
                }
                Command::History(shape) => {
                    let [history, counts, state] =
                        [Array::History, Array::Counts, Array::State].map(|array| Arg::pointer(&arrays[array], 0));
                    launch_one(device, "sample_history", &[history, counts, state, Arg::bytes(&shape)])?;
                }
                Command::Fork(shape) => {
                    use Array::{Allowed, Constraints, Counts, Lists, Params, State};
                    let [params, lists, constraints, allowed, counts, state] =
                        [Params, Lists, Constraints, Allowed, Counts, State]
                            .map(|array| Arg::pointer(&arrays[array], 0));
                    let args = [params, lists, constraints, allowed, counts, state, Arg::bytes(&shape)];
                    launch_one(device, "sample_fork", &args)?;
                }
            }
        }
        *uploaded = Some(device.record(Queue::Compute)?);
        self.next = 1 - self.next;
        Ok(())
    }
}

fn launch_one(device: &dyn Device, kernel: &str, args: &[Arg<'_>]) -> Result<(), DeviceError> {
    let (grid, block) = ([1, 1, 1], [ROW_THREADS, 1, 1]);
    device.launch(&Launch { module: MODULE, kernel, grid, block, shared_bytes: 0, args })
}
