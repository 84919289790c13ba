//! How long a call takes, by the device's own clock.

use std::time::{Duration, Instant};

use device::{Device, Event, Queue};

use crate::error::KernelError;

/// Times of one call, in order of length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Time(Vec<Duration>);

impl From<Vec<Duration>> for Time {
    fn from(mut times: Vec<Duration>) -> Time {
        times.sort_unstable();
        Time(times)
    }
}

impl Time {
    /// Number of repetitions.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nothing was timed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The middle one.
    pub fn median(&self) -> Duration {
        self.quantile(0.5)
    }

    /// Half of the distance between the quarter points over the median: how far a repetition is off as a rule.
    pub fn spread(&self) -> f64 {
        let half = (self.quantile(0.75) - self.quantile(0.25)).as_secs_f64() / 2.0;
        half / self.median().as_secs_f64().max(1e-9)
    }

    fn quantile(&self, share: f64) -> Duration {
        let last = self.0.len().saturating_sub(1);
        self.0.get((last as f64 * share).round() as usize).copied().unwrap_or_default()
    }
}

/// Repetitions end after so long, but for the first three.
const LONGEST: Duration = Duration::from_secs(1);

/// Runs a call `warmup` times, and then `repeat` times (at least once, fewer where they take more than a second) between marks in the device's queue. On a GPU these are
/// events of its stream, given to it ahead of its work, so that a launch's way there counts only where the GPU waits for
/// it; elsewhere the wall clock. `run` gets the number of the call, for inputs that take turns.
///
/// # Errors
/// Of the call.
pub fn time(
    device: &dyn Device,
    warmup: usize,
    repeat: usize,
    mut run: impl FnMut(usize) -> Result<(), KernelError>,
) -> Result<Time, KernelError> {
    (0..warmup).try_for_each(&mut run)?;
    device.synchronize()?;
    let start = Instant::now();
    let mut marks: Vec<Event> = vec![device.record(Queue::Compute)?];
    for i in 0..repeat.max(1) {
        if i >= 3 && start.elapsed() > LONGEST {
            break;
        }
        run(warmup + i)?;
        marks.push(device.record(Queue::Compute)?);
    }
    device.synchronize()?;
    let mut times = Vec::with_capacity(repeat);
    for pair in marks.windows(2) {
        times.push(pair[1].since(&pair[0])?);
    }
    Ok(times.into())
}
