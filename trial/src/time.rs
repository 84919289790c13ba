//! Timing of calls with the clock of the device.

use std::time::{Duration, Instant};

use device::{Device, Event, Queue};

use attention_kernels::KernelError;

/// Times of repeated calls in ascending order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Time(Vec<Duration>);

impl From<Vec<Duration>> for Time {
    fn from(mut times: Vec<Duration>) -> Time {
        times.sort_unstable();
        Time(times)
    }
}

impl Time {
    /// Number of timed calls.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether no call was timed.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the median.
    pub fn median(&self) -> Duration {
        self.quantile(0.5)
    }

    /// Returns half the interquartile range over the median: the typical relative deviation of a call.
    pub fn spread(&self) -> f64 {
        let half = (self.quantile(0.75) - self.quantile(0.25)).as_secs_f64() / 2.0;
        half / self.median().as_secs_f64().max(1e-9)
    }

    fn quantile(&self, share: f64) -> Duration {
        let last = self.0.len().saturating_sub(1);
        self.0.get((last as f64 * share).round() as usize).copied().unwrap_or_default()
    }
}

/// After this time no further call is timed, except for the first three.
const LONGEST: Duration = Duration::from_secs(1);

/// Calls of a graph; fewer if one takes long.
const CALLS: usize = 16;

/// Runs a call `warmup` times untimed and then `repeat` times timed (at least once, fewer if they take more than a second). `run`
/// gets the index of the call, to use several inputs in turn.
///
/// On a GPU a timed call is the replay of a graph of sixteen calls, divided by their number, between events in the stream: the
/// engine replays graphs too, and the host's launches do not count. Other devices use the wall clock.
///
/// # Errors
/// The call fails.
pub fn time(
    device: &dyn Device,
    warmup: usize,
    repeat: usize,
    mut run: impl FnMut(usize) -> Result<(), KernelError>,
) -> Result<Time, KernelError> {
    (0..warmup).try_for_each(&mut run)?;
    device.synchronize()?;
    if device.name() == "cuda" {
        return time_replays(device, repeat, run);
    }
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

/// The times of the calls of a graph.
fn time_replays(
    device: &dyn Device,
    repeat: usize,
    mut run: impl FnMut(usize) -> Result<(), KernelError>,
) -> Result<Time, KernelError> {
    let start = Instant::now();
    run(0)?;
    device.synchronize()?;
    let calls =
        (LONGEST.as_secs_f64() / 4.0 / start.elapsed().as_secs_f64().max(1e-9)).clamp(1.0, CALLS as f64) as usize;
    let mut outcome = Ok(());
    let graph = device.capture(&mut || outcome = (0..calls).try_for_each(&mut run))?;
    outcome?;
    device.replay(&graph)?;
    device.synchronize()?;
    let (start, mut times) = (Instant::now(), Vec::with_capacity(repeat));
    for i in 0..repeat.max(1) {
        if i >= 3 && start.elapsed() > LONGEST {
            break;
        }
        let before = device.record(Queue::Compute)?;
        device.replay(&graph)?;
        let after = device.record(Queue::Compute)?;
        device.synchronize()?;
        times.push(after.since(&before)? / calls as u32);
    }
    Ok(times.into())
}
