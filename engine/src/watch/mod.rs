//! Snapshots of a running engine: a bounded [`Snapshot`] of blocks, requests and speed.
//!
//! A snapshot contains counts and ids, but no tokens and no text. The engine thread takes one between two steps, and only while
//! there are watchers. The recent history is always counted, with a few additions per step. A snapshot costs one pass over the
//! block tables and the pool's counts (the test `a_snapshot_of_a_large_pool_is_cheap_and_bounded` prints the time).

mod map;
mod recent;

use sched::{RequestState, RequestView, Scheduler};
use serde::{Serialize, Serializer};
use serde_json::json;

use crate::api::EngineStats;
pub use map::{BlockMap, Owner};
pub(crate) use recent::{Counters, Recent};
pub use recent::{History, Rates};

/// Greatest number of requests that a snapshot lists. The others are counted.
pub const MAX_REQUESTS: usize = 256;

/// The state of an engine at one moment. `GET /quire/state` returns it as JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Snapshot {
    /// Seconds since the engine was created.
    pub uptime: f64,
    /// Tokens per block.
    pub block_size: usize,
    /// Gauges and counters: numbers of blocks as `blocks`, others as `stats`.
    #[serde(flatten, serialize_with = "shown")]
    pub stats: EngineStats,
    /// The owners of all blocks.
    pub map: BlockMap,
    /// Live requests, at most [`MAX_REQUESTS`]: running, then swapped, then waiting ones, each in scheduling order.
    pub requests: Vec<RequestInfo>,
    /// Number of live requests that are not listed.
    pub requests_left_out: usize,
    /// Speed over the last two seconds.
    pub rates: Rates,
    /// The last minute.
    pub history: History,
}

/// The statistics that a snapshot shows, under the names of `docs/state.md`.
fn shown<S: Serializer>(stats: &EngineStats, to: S) -> Result<S::Ok, S::Error> {
    let counts = &stats.scheduler;
    json!({
        "blocks": {
            "total": counts.blocks_total,
            "in_use": counts.blocks_in_use,
            "cached": counts.blocks_cached,
            "free": counts.blocks_free,
            "peak": counts.blocks_peak,
            "host_total": counts.host_blocks_total,
            "host_in_use": counts.host_blocks_in_use,
            "host_cached": counts.host_blocks_cached,
        },
        "stats": {
            "running": counts.num_running,
            "waiting": counts.num_waiting,
            "swapped": counts.num_swapped,
            "steps": stats.steps,
            "prompt_tokens": counts.prompt_tokens,
            "generation_tokens": stats.generation_tokens,
            "prefix_cache_queries": counts.prefix_queries,
            "prefix_cache_hits": counts.prefix_hits,
            "preemptions": counts.preemptions,
            "swap_preemptions": counts.swap_preemptions,
            "spec_decode": stats.spec_decode,
        },
    })
    .serialize(to)
}

/// A live request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RequestInfo {
    /// Id of the request.
    pub id: u64,
    /// `running`, `swapped` or `waiting`.
    pub state: &'static str,
    /// Seconds since it was submitted.
    pub age: f64,
    /// Number of sequences that have not ended.
    pub sequences: usize,
    /// Number of prompt tokens.
    pub prompt_tokens: usize,
    /// Number of prompt tokens that came from the prefix cache.
    pub cached_tokens: usize,
    /// Number of tokens whose keys and values are in the request's blocks.
    pub computed_tokens: usize,
    /// Number of tokens drawn.
    pub generated_tokens: usize,
    /// Number of blocks that the request owns, alone or shared.
    pub blocks: usize,
    /// Number of preemptions of the request.
    pub preemptions: u32,
}

/// Takes a snapshot. `age` returns the seconds since a request was submitted.
pub(crate) fn snapshot(
    scheduler: &Scheduler,
    stats: EngineStats,
    recent: &mut Recent,
    age: impl Fn(sched::RequestId) -> f64,
) -> Snapshot {
    let views: Vec<RequestView<'_>> = scheduler.requests().collect();
    let (map, blocks_of) = map::draw(scheduler.pool(), &views);
    let listed = views.iter().zip(blocks_of).take(MAX_REQUESTS);
    let requests: Vec<RequestInfo> = listed.map(|(view, blocks)| describe(view, blocks, age(view.id()))).collect();
    Snapshot {
        uptime: recent.uptime(),
        block_size: scheduler.pool().block_size(),
        map,
        requests_left_out: views.len() - requests.len(),
        requests,
        stats,
        rates: recent.rates(),
        history: recent.history(),
    }
}

fn describe(view: &RequestView<'_>, blocks: usize, age: f64) -> RequestInfo {
    RequestInfo {
        id: view.id().0,
        state: match view.state() {
            RequestState::Running => "running",
            RequestState::Swapped => "swapped",
            RequestState::Waiting => "waiting",
        },
        age,
        sequences: view.num_sequences(),
        prompt_tokens: view.prompt_tokens(),
        cached_tokens: view.cached_tokens(),
        computed_tokens: view.computed_tokens(),
        generated_tokens: view.generated_tokens(),
        blocks,
        preemptions: view.preemptions(),
    }
}
