//! What is on its way to the device: changes of slots, gathered and sent at once.
//!
//! Words wait in plain memory until [`Stage::send`] copies them to one of two page-locked buffers and orders their uploads,
//! each a few kilobytes, and the launches that go with them, in the order in which they came. The buffer that is written is
//! the one that the last but one `send` used, so that the host waits for none that is under way.

use device::{Arg, Device, DeviceError, Event, Launch, Pinned, Queue};

use super::buffers::{Buffers, Target};
use super::layout::{MODULE, ROW_THREADS};

/// Something to do, in words of the stage.
enum Act {
    Upload {
        to: Target,
        /// Word of the buffer.
        at: usize,
        len: usize,
    },
    /// `HistoryShape`; the tokens are what was uploaded last.
    History([u32; 8]),
    /// `ForkShape`.
    Fork([u32; 6]),
}

pub(super) struct Stage {
    words: Vec<u32>,
    acts: Vec<Act>,
    buffers: [(Pinned, Option<Event>); 2],
    /// The buffer to be used next.
    next: usize,
}

impl Stage {
    pub fn new(device: &dyn Device, words: usize) -> Result<Stage, DeviceError> {
        let buffer = || Ok::<_, DeviceError>((device.pinned(words * size_of::<u32>())?, None));
        Ok(Stage { words: Vec::with_capacity(words), acts: Vec::new(), buffers: [buffer()?, buffer()?], next: 0 })
    }

    /// Whether so many words more can be sent together with what waits.
    pub fn has_room(&self, words: usize) -> bool {
        self.words.len() + words <= self.words.capacity()
    }

    pub fn upload(&mut self, to: Target, at: usize, words: &[u32]) {
        self.words.extend_from_slice(words);
        self.acts.push(Act::Upload { to, at, len: words.len() });
    }

    pub fn history(&mut self, shape: [u32; 8]) {
        self.acts.push(Act::History(shape));
    }

    pub fn fork(&mut self, shape: [u32; 6]) {
        self.acts.push(Act::Fork(shape));
    }

    /// Orders all that waits on the compute queue. Nothing waits any more afterwards, even if the device fails.
    pub fn send(&mut self, device: &dyn Device, to: &mut Buffers) -> Result<(), DeviceError> {
        let outcome = if self.acts.is_empty() { Ok(()) } else { self.order(device, to) };
        self.acts.clear();
        self.words.clear();
        outcome
    }

    fn order(&mut self, device: &dyn Device, to: &mut Buffers) -> Result<(), DeviceError> {
        let (pinned, used) = &mut self.buffers[self.next];
        if let Some(used) = used.take() {
            used.synchronize()?;
        }
        pinned.host_mut::<u32>()?[..self.words.len()].copy_from_slice(&self.words);
        const WORD: usize = size_of::<u32>();
        let mut from = 0;
        for act in self.acts.drain(..) {
            match act {
                Act::Upload { to: target, at, len } => {
                    device.upload_async(Queue::Compute, pinned, from * WORD, to.of(target), at * WORD, len * WORD)?;
                    from += len;
                }
                Act::History(shape) => {
                    let args = [
                        Arg::pointer(&to.history, 0),
                        Arg::pointer(&to.counts, 0),
                        Arg::pointer(&to.state, 0),
                        Arg::bytes(&shape),
                    ];
                    launch_one(device, "sample_history", &args)?;
                }
                Act::Fork(shape) => {
                    let buffers = [&to.params, &to.lists, &to.constraints, &to.allowed, &to.counts, &to.state];
                    let [a, b, c, d, e, f] = buffers.map(|buffer| Arg::pointer(buffer, 0));
                    launch_one(device, "sample_fork", &[a, b, c, d, e, f, Arg::bytes(&shape)])?;
                }
            }
        }
        *used = Some(device.record(Queue::Compute)?);
        self.next = 1 - self.next;
        Ok(())
    }
}

fn launch_one(device: &dyn Device, kernel: &str, args: &[Arg<'_>]) -> Result<(), DeviceError> {
    let (grid, block) = ([1, 1, 1], [ROW_THREADS, 1, 1]);
    device.launch(&Launch { module: MODULE, kernel, grid, block, shared_bytes: 0, args })
}
