//! Where the time of steps goes: operations of a device and phases of the host, from start to end.
//!
//! One seam for each kind: whoever calls an operation holds [`start`]'s guard meanwhile, whoever works on the host
//! [`Profile::phase`]'s, and a step is between them while its [`Profile::step`] lives. Without a profile each of them is one
//! branch. Outside of a step nothing is recorded, so loading and warming up do not count.
//!
//! ```text
//! Host     |step   |plan| |inputs| |launch  ...  |wait        | | |sample |publish| | |commit| |
//! Compute           |embed|rms_norm|linear|heads |cache_write| |decode|linear| ...
//! Copy              |swap_out|
//! ```
//!
//! **Clocks.** An operation's time is that between two [`Event`]s: on a GPU the stream's own, elsewhere the host's. Events are
//! read when the step is over, which waits for them, and laid on the host's clock by one that is recorded at the step's start,
//! while the queues are idle: as exactly as the host sees that one end. On each track spans are nested or apart.
//!
//! **Costs.** An operation costs two events, on a GPU two calls of the driver each; there host and device no longer work at once
//! on two steps. Memory is bounded: sums by name, and the spans of the last steps, at most
//! [`KEPT_SPANS`] (some 25 MB). A profile is of one engine: spans of two threads would not nest.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::{Device, Event, Queue};

/// Spans that are kept for a trace, of whole steps; the oldest go first.
pub const KEPT_SPANS: usize = 1 << 18;

/// Who was at work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Track {
    /// The thread that runs the steps.
    Host,
    /// [`Queue::Compute`]. On a CPU that is the same thread, with the others of its pool.
    Compute,
    /// [`Queue::Copy`].
    Copy,
}

/// What was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    /// By whom.
    pub track: Track,
    /// The operation, or the phase of the host.
    pub operation: &'static str,
    /// Which implementation of the operation; empty for a phase.
    pub variant: &'static str,
}

/// The least that an operation must move and compute, where it is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Bytes read and written, each once.
    pub bytes: u64,
    /// Multiplications and additions.
    pub operations: u64,
}

/// Something that took time. Times are since the profile was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// What it was.
    pub name: Name,
    /// When it began.
    pub start: Duration,
    /// When it was over.
    pub end: Duration,
    /// Its least cost.
    pub cost: Cost,
}

/// All spans of one name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Total {
    /// How many.
    pub calls: u64,
    /// Their time.
    pub time: Duration,
    /// The part of it in which no span within them was under way: over the names of a track these sum to its busy time.
    pub own: Duration,
    /// Their least cost.
    pub cost: Cost,
}

/// What a profile has recorded so far.
#[derive(Clone, Debug, Default)]
pub struct Recorded {
    /// Steps.
    pub steps: u64,
    /// By name, of all steps. Phases of the host are parts of `step`, whose time is that of all steps.
    pub totals: BTreeMap<Name, Total>,
    /// The spans of the last [`Recorded::kept_steps`] steps, in the order in which they began on each track.
    pub spans: Vec<Span>,
    /// Steps that `spans` are of.
    pub kept_steps: u64,
    /// Spans whose time the device did not tell, because it had failed.
    pub lost: u64,
}

/// A record of steps; it starts with [`Options::profile`](crate::Options::profile).
pub struct Profile {
    origin: Instant,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// A step is under way.
    recording: bool,
    /// Of that step, in the order in which they began.
    under_way: Vec<Open>,
    /// For each track those that have not ended, as places in `under_way`.
    open: [Vec<usize>; 3],
    /// Where each track's last step ended.
    ends: [Duration; 3],
    /// Spans of the last steps.
    kept: VecDeque<Vec<Span>>,
    num_kept: usize,
    steps: u64,
    lost: u64,
    totals: BTreeMap<Name, Total>,
}

/// A span of the step under way.
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
        write!(f, "Profile of {} steps", self.lock().steps)
    }
}

impl Profile {
    /// Begins a step of a device that has a profile; it is over when the result is dropped.
    pub fn step(device: &Arc<dyn Device>) -> Option<Step> {
        let profile = Arc::clone(device.profile()?);
        profile.lock().recording = true;
        let whole = profile.phase("step");
        // Nothing was given to the queues since the last step was read, but for copies.
        let anchor = device.record(Queue::Compute).ok().filter(|event| event.synchronize().is_ok());
        let anchor = anchor.map(|event| (event, profile.origin.elapsed()));
        Some(Step { profile, anchor, whole })
    }

    /// Begins a phase of the host; it is over when the result is dropped. `None` where no step is under way.
    pub fn phase(self: &Arc<Self>, name: &'static str) -> Option<Phase> {
        let name = Name { track: Track::Host, operation: name, variant: "" };
        let index = self.begin(name, Cost::default(), Point::Host(self.origin.elapsed()))?;
        Some(Phase { profile: Arc::clone(self), index })
    }

    /// What there is so far.
    pub fn recorded(&self) -> Recorded {
        let state = self.lock();
        let mut spans: Vec<Span> = state.kept.iter().flatten().copied().collect();
        // Stable: what encloses comes before what begins with it.
        spans.sort_by_key(|span| (span.name.track, span.start, std::cmp::Reverse(span.end)));
        let (kept_steps, totals) = (state.kept.len() as u64, state.totals.clone());
        Recorded { steps: state.steps, totals, spans, kept_steps, lost: state.lost }
    }

    fn begin(&self, name: Name, cost: Cost, start: Point) -> Option<usize> {
        let mut state = self.lock();
        if !state.recording {
            return None;
        }
        let (index, track) = (state.under_way.len(), name.track as usize);
        let parent = state.open[track].last().copied();
        state.under_way.push(Open { name, parent, cost, start, end: None });
        state.open[track].push(index);
        Some(index)
    }

    fn end(&self, index: usize, end: Option<Point>) {
        let mut state = self.lock();
        if let Some(span) = state.under_way.get_mut(index) {
            span.end = end;
            let track = span.name.track as usize;
            state.open[track].retain(|open| *open != index);
        }
    }

    /// Reads the times of a step and adds them up.
    fn finish(&self, anchor: Option<&(Event, Duration)>) {
        let (under_way, ends) = {
            let mut state = self.lock();
            state.recording = false;
            state.open.iter_mut().for_each(Vec::clear);
            (std::mem::take(&mut state.under_way), state.ends)
        };
        let time = |point: &Point| match (point, anchor) {
            (Point::Host(time), _) => Some(*time),
            (Point::Device(event), Some((start, at))) => event.since(start).ok().map(|time| *at + time),
            (Point::Device(_), None) => None,
        };
        let read = |open: &Open| {
            // Two steps' readings of a GPU's clock differ by microseconds.
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
        let mut state = self.lock();
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

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere ends the engine; what was recorded before it is whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A step under way; see [`Profile::step`].
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

/// A phase of the host under way; see [`Profile::phase`].
pub struct Phase {
    profile: Arc<Profile>,
    index: usize,
}

impl Drop for Phase {
    fn drop(&mut self) {
        self.profile.end(self.index, Some(Point::Host(self.profile.origin.elapsed())));
    }
}

/// An operation under way; see [`start`].
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

/// Begins an operation: what `queue` is given until the result is dropped. `None` without a profile, and where no step is under
/// way.
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn profiled() -> (Arc<Profile>, Arc<dyn Device>) {
        let profile = Arc::new(Profile::default());
        let options = crate::Options { threads: Some(1), profile: Some(profile.clone()), ..Default::default() };
        (profile, crate::open_with("cpu", &options).unwrap())
    }

    fn operation<'a>(device: &'a dyn Device, name: &'static str) -> Option<Running<'a>> {
        start(device, Queue::Compute, name, "cpu.test", Cost::default)
    }

    #[test]
    fn own_times_of_a_track_sum_to_the_time_of_what_encloses_all() {
        let (profile, device) = profiled();
        for _ in 0..3 {
            let _step = Profile::step(&device);
            let _outer = operation(&*device, "outer");
            for _ in 0..2 {
                let _inner = operation(&*device, "inner");
                let _phase = profile.phase("launch");
            }
        }
        let recorded = profile.recorded();
        assert_eq!((recorded.steps, recorded.kept_steps, recorded.lost), (3, 3, 0));
        let own = |track| -> Duration {
            recorded.totals.iter().filter(|(name, _)| name.track == track).map(|(_, total)| total.own).sum()
        };
        let total = |operation| *recorded.totals.iter().find(|(name, _)| name.operation == operation).unwrap().1;
        assert_eq!(own(Track::Compute), total("outer").time);
        assert_eq!(own(Track::Host), total("step").time);
        assert_eq!((total("outer").calls, total("inner").calls, total("launch").calls), (3, 6, 6));
    }

    #[test]
    fn outside_of_a_step_and_without_a_profile_nothing_is_recorded() {
        let (profile, device) = profiled();
        assert!(operation(&*device, "early").is_none() && profile.phase("early").is_none());
        drop(Profile::step(&device));
        assert!(operation(&*device, "late").is_none());
        assert_eq!(profile.recorded().spans.len(), 1);
        let plain = crate::open("cpu", Some(1)).unwrap();
        assert!(Profile::step(&plain).is_none() && operation(&*plain, "never").is_none());
    }

    #[test]
    fn the_oldest_steps_leave_the_trace_and_stay_in_the_sums() {
        let (profile, device) = profiled();
        let in_a_step = KEPT_SPANS / 4;
        for _ in 0..6 {
            let _step = Profile::step(&device);
            (1..in_a_step).for_each(|_| drop(profile.phase("plan")));
        }
        let recorded = profile.recorded();
        assert_eq!((recorded.steps, recorded.kept_steps, recorded.spans.len()), (6, 4, KEPT_SPANS));
        let calls: u64 = recorded.totals.values().map(|total| total.calls).sum();
        assert_eq!(calls, 6 * in_a_step as u64);
    }
}
