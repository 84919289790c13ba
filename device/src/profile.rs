//! Profiling: the time of device operations and host phases within each step.
//!
//! The caller of an operation holds the guard of [`start`] meanwhile, host code holds the guard of [`Profile::phase`], and a
//! step lasts while its [`Profile::step`] exists. Without a profile each of these is one branch. Nothing is recorded outside of
//! a step, so loading and warm-up do not count.
//!
//! ```text
//! Host     |step   |plan| |inputs| |launch  ...  |wait        | | |sample |publish| | |commit| |
//! Compute           |embed|rms_norm|linear|heads |cache_write| |decode|linear| ...
//! Copy              |swap_out|
//! ```
//!
//! **Clocks.** The time of an operation is that between two [`Event`]s: measured by the stream on a GPU, by the host elsewhere.
//! Events are read when the step is over, which waits for them. An event recorded at the start of the step, while the queues
//! are idle, maps them to the clock of the host, as accurately as the host sees that event complete. On each track, spans are
//! nested or disjoint.
//!
//! **Costs.** An operation costs two events, which are two calls of the driver each on a GPU; there, host and device no longer
//! overlap two steps. Memory is bounded: sums by name, and the spans of the last steps, at most [`KEPT_SPANS`] (about 25 MB).
//! A profile belongs to one engine. Spans of two threads would not nest, so only the thread that runs the step is recorded: where
//! threads compute whole operations of some rows each, the record has the share of that thread.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use simd::lock;

use crate::{Device, Event, Queue};

/// Maximum number of spans that are kept for a trace. The oldest steps are dropped first, each as a whole.
pub const KEPT_SPANS: usize = 1 << 18;

/// Where something ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// The thread that runs the steps.
    Host,
    /// [`Queue::Compute`]. On a CPU that is the host thread and the other threads of its pool.
    Compute,
    /// [`Queue::Copy`].
    Copy,
}

/// Name of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    /// Where it ran.
    pub track: Track,
    /// Name of the operation, or of the host phase.
    pub operation: &'static str,
    /// Implementation of the operation; empty for a phase.
    pub variant: &'static str,
}

/// Minimum amount of data and computation of an operation, where it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes read and written, counting each byte once.
    pub bytes: u64,
    /// Number of multiplications and additions.
    pub operations: u64,
}

/// An operation or phase with its times, which count from the creation of the profile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Its name.
    pub name: Name,
    /// Start time.
    pub start: Duration,
    /// End time.
    pub end: Duration,
    /// Its minimum cost.
    pub cost: Cost,
}

/// Sums over all spans with one name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Total {
    /// Number of spans.
    pub calls: u64,
    /// Total time.
    pub time: Duration,
    /// Total time without the nested spans; over all names of a track this adds up to the busy time of the track.
    pub own: Duration,
    /// Total minimum cost.
    pub cost: Cost,
}

/// Everything that a profile has recorded so far.
#[derive(Clone, Debug, Default)]
pub struct Recorded {
    /// Number of steps.
    pub steps: u64,
    /// Sums of all steps, by name. Host phases are nested in `step`, whose time is that of all steps.
    pub totals: BTreeMap<Name, Total>,
    /// Spans of the last [`Recorded::kept_steps`] steps, by track and start time.
    pub spans: Vec<Span>,
    /// Number of steps that `spans` covers.
    pub kept_steps: u64,
    /// Number of spans without a time, because the device had failed.
    pub lost: u64,
    /// Mixtures of experts.
    pub experts: ExpertCounts,
}

/// Work of the experts of all mixtures and steps, where the host knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpertCounts {
    /// Rows that each expert computed, by its number, over all layers.
    pub rows: Vec<u64>,
    /// Number of experts that computed at least one row, over all mixtures and steps.
    pub touched: u64,
    /// Number of mixtures that were computed.
    pub calls: u64,
}

/// A record of step times, enabled by [`Options::profile`](crate::Options::profile).
pub struct Profile {
    origin: Instant,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The thread whose step is running.
    recording: Option<ThreadId>,
    /// Spans of that step, in order of their start.
    under_way: Vec<Open>,
    /// For each track, indices in `under_way` of the spans that have not ended.
    open: [Vec<usize>; 3],
    /// End of the last step on each track.
    ends: [Duration; 3],
    /// Spans of the last steps.
    kept: VecDeque<Vec<Span>>,
    num_kept: usize,
    steps: u64,
    lost: u64,
    totals: BTreeMap<Name, Total>,
    experts: ExpertCounts,
}

/// A span of the current step.
struct Open {
    name: Name,
    parent: Option<usize>,
    cost: Cost,
    start: Point,
    end: Option<Point>,
}

enum Point {
    Host(Duration),
    Device(Event),
}

impl Default for Profile {
    fn default() -> Self {
        Profile { origin: Instant::now(), state: Mutex::default() }
    }
}

impl std::fmt::Debug for Profile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Profile of {} steps", lock(&self.state).steps)
    }
}

impl Profile {
    /// Starts a step, which ends when the result is dropped. Returns `None` if the device has no profile.
    pub fn step(device: &Arc<dyn Device>) -> Option<Step> {
        let profile = Arc::clone(device.profile()?);
        lock(&profile.state).recording = Some(std::thread::current().id());
        let whole = profile.phase("step");
        // Since the end of the last step, nothing but copies was enqueued.
        let anchor = device.record(Queue::Compute).ok().filter(|event| event.synchronize().is_ok());
        let anchor = anchor.map(|event| (event, profile.origin.elapsed()));
        Some(Step { profile, anchor, whole })
    }

    /// Starts a host phase, which ends when the result is dropped. Returns `None` outside of a step.
    pub fn phase(self: &Arc<Self>, name: &'static str) -> Option<Phase> {
        let name = Name { track: Track::Host, operation: name, variant: "" };
        let index = self.begin(name, Cost::default(), Point::Host(self.origin.elapsed()))?;
        Some(Phase { profile: Arc::clone(self), index })
    }

    /// Returns everything recorded so far.
    pub fn recorded(&self) -> Recorded {
        let state = lock(&self.state);
        let mut spans: Vec<Span> = state.kept.iter().flatten().copied().collect();
        // At equal starts an enclosing span comes before a nested one.
        spans.sort_by_key(|span| (span.name.track, span.start, std::cmp::Reverse(span.end)));
        let (kept_steps, totals) = (state.kept.len() as u64, state.totals.clone());
        let experts = state.experts.clone();
        Recorded { steps: state.steps, totals, spans, kept_steps, lost: state.lost, experts }
    }

    /// Adds the rows that the `count` experts of a mixture compute in a step: pairs of an expert's number and its rows, without
    /// experts that have none.
    pub fn experts(&self, count: usize, rows: impl Iterator<Item = (usize, u64)>) {
        let mut state = lock(&self.state);
        if state.recording.is_none() {
            return;
        }
        let counts = &mut state.experts;
        counts.calls += 1;
        let len = counts.rows.len().max(count);
        counts.rows.resize(len, 0);
        for (expert, rows) in rows.filter(|(expert, _)| *expert < count) {
            counts.rows[expert] += rows;
            counts.touched += 1;
        }
    }

    fn begin(&self, name: Name, cost: Cost, start: Point) -> Option<usize> {
        let mut state = lock(&self.state);
        if state.recording != Some(std::thread::current().id()) {
            return None;
        }
        let (index, track) = (state.under_way.len(), name.track as usize);
        let parent = state.open[track].last().copied();
        state.under_way.push(Open { name, parent, cost, start, end: None });
        state.open[track].push(index);
        Some(index)
    }

    fn end(&self, index: usize, end: Option<Point>) {
        let mut state = lock(&self.state);
        if let Some(span) = state.under_way.get_mut(index) {
            span.end = end;
            let track = span.name.track as usize;
            state.open[track].retain(|open| *open != index);
        }
    }

    /// Reads the times of the finished step and adds them to the sums.
    fn finish(&self, anchor: Option<&(Event, Duration)>) {
        let (under_way, ends) = {
            let mut state = lock(&self.state);
            state.recording = None;
            state.open.iter_mut().for_each(Vec::clear);
            (std::mem::take(&mut state.under_way), state.ends)
        };
        let time = |point: &Point| match (point, anchor) {
            (Point::Host(time), _) => Some(*time),
            (Point::Device(event), Some((start, at))) => event.since(start).ok().map(|time| *at + time),
            (Point::Device(_), None) => None,
        };
        let read = |open: &Open| {
            // Mapping the clock of a GPU differs between two steps by microseconds.
            let earliest = ends[open.name.track as usize];
            let start = time(&open.start)?.max(earliest);
            let end = time(open.end.as_ref()?)?.max(start);
            Some(Span { name: open.name, start, end, cost: open.cost })
        };
        let spans: Vec<Option<Span>> = under_way.iter().map(read).collect();
        let mut within = vec![Duration::ZERO; spans.len()];
        for (span, open) in spans.iter().zip(&under_way) {
            if let (Some(span), Some(parent)) = (span, open.parent) {
                within[parent] += span.end - span.start;
            }
        }
        let mut state = lock(&self.state);
        state.steps += 1;
        for (span, within) in spans.iter().zip(within) {
            let Some(span) = span else {
                state.lost += 1;
                continue;
            };
            let total = state.totals.entry(span.name).or_default();
            let time = span.end - span.start;
            total.calls += 1;
            total.time += time;
            total.own += time.saturating_sub(within);
            total.cost.bytes += span.cost.bytes;
            total.cost.operations += span.cost.operations;
            let end = &mut state.ends[span.name.track as usize];
            *end = span.end.max(*end);
        }
        let spans: Vec<Span> = spans.into_iter().flatten().collect();
        state.num_kept += spans.len();
        state.kept.push_back(spans);
        while state.num_kept > KEPT_SPANS && state.kept.len() > 1 {
            state.num_kept -= state.kept.pop_front().map_or(0, |oldest| oldest.len());
        }
    }
}

/// A running step; see [`Profile::step`].
pub struct Step {
    profile: Arc<Profile>,
    anchor: Option<(Event, Duration)>,
    whole: Option<Phase>,
}

impl Drop for Step {
    fn drop(&mut self) {
        self.whole = None;
        self.profile.finish(self.anchor.as_ref());
    }
}

/// A running host phase; see [`Profile::phase`].
pub struct Phase {
    profile: Arc<Profile>,
    index: usize,
}

impl Drop for Phase {
    fn drop(&mut self) {
        self.profile.end(self.index, Some(Point::Host(self.profile.origin.elapsed())));
    }
}

/// A running operation; see [`start`].
pub struct Running<'a> {
    device: &'a dyn Device,
    profile: &'a Profile,
    queue: Queue,
    index: usize,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.profile.end(self.index, self.device.record(self.queue).ok().map(Point::Device));
    }
}

/// Starts an operation: the work that is enqueued on `queue` until the result is dropped. Returns `None` without a profile, and
/// outside of a step.
///
/// ```
/// use std::sync::Arc;
/// use device::{Options, Profile, Queue, profile};
/// let profile = Arc::new(Profile::default());
/// let options = Options { threads: Some(1), profile: Some(profile.clone()), ..Options::default() };
/// let device = device::open_with("cpu", &options)?;
/// let step = Profile::step(&device);
/// {
///     let _time = profile::start(&*device, Queue::Compute, "add", "cpu.plain", || profile::Cost { bytes: 12, operations: 1 });
/// }
/// drop(step);
/// let calls = |operation| profile.recorded().totals.iter().find(|(name, _)| name.operation == operation).map(|(_, t)| t.calls);
/// assert_eq!((calls("step"), calls("add")), (Some(1), Some(1)));
/// # Ok::<(), device::DeviceError>(())
/// ```
pub fn start<'a>(
    device: &'a dyn Device,
    queue: Queue,
    operation: &'static str,
    variant: &'static str,
    cost: impl FnOnce() -> Cost,
) -> Option<Running<'a>> {
    let profile = device.profile()?;
    let track = match queue {
        Queue::Compute => Track::Compute,
        Queue::Copy => Track::Copy,
    };
    let start = Point::Device(device.record(queue).ok()?);
    let index = profile.begin(Name { track, operation, variant }, cost(), start)?;
    Some(Running { device, profile, queue, index })
}
