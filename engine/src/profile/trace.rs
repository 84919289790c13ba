//! Spans as a trace for `chrome://tracing` and Perfetto: complete events (`"ph": "X"`) in microseconds, with a thread for each
//! track.
//!
//! Format: "Trace Event Format", Google, <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>.

use std::io::{self, Write};
use std::time::Duration;

use device::profile::{Recorded, Span, Track};
use serde_json::{Value, json};

/// Writes the recorded spans as JSON.
///
/// # Errors
/// Writing to `out` failed.
pub fn trace(recorded: &Recorded, out: &mut impl Write) -> io::Result<()> {
    let dropped = recorded.steps - recorded.kept_steps;
    let about = json!({"steps": recorded.steps, "steps_before_the_first_shown": dropped});
    write!(out, "{{\"displayTimeUnit\": \"ms\", \"otherData\": {about}, \"traceEvents\": [")?;
    for (track, name) in [(Track::Host, "host"), (Track::Compute, "device"), (Track::Copy, "copies beside")] {
        let tid = track as u32;
        let comma = if track == Track::Host { "" } else { "," };
        let named = json!({"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}});
        write!(out, "{comma}\n{named}")?;
    }
    for span in &recorded.spans {
        write!(out, ",\n{}", event(span))?;
    }
    writeln!(out, "\n]}}")
}

fn event(Span { name, start, end, cost }: &Span) -> Value {
    let mut args = json!({});
    for (key, amount) in [("bytes", cost.bytes), ("operations", cost.operations)] {
        if amount > 0 {
            args[key] = amount.into();
        }
    }
    if !name.variant.is_empty() {
        args["variant"] = name.variant.into();
    }
    let (ts, dur) = (microseconds(*start), microseconds(*end - *start));
    let tid = name.track as u32;
    json!({"ph": "X", "name": name.operation, "cat": "step", "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args})
}

fn microseconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1000.0
}
