//! The engine alive, for whoever watches: one bounded [`Snapshot`] of blocks, requests and speed.
//!
//! It holds counts and ids, never a token or a text. The engine thread makes one between two steps, and only while somebody
//! watches; what happened lately is counted always, a few additions a step. Cost of a snapshot: one pass over the block tables
//! and the pool's counts (the test `a_snapshot_of_a_large_pool_is_cheap_and_bounded` prints it).

mod map;
mod recent;

use sched::{RequestState, RequestView, Scheduler};
use serde::Serialize;

use crate::api::EngineStats;
pub use map::{BlockMap, Owner};
pub(crate) use recent::{Counters, Recent};
pub use recent::{History, Rates};

/// Requests that a snapshot lists; the others are counted.
pub const MAX_REQUESTS: usize = 256;

/// The engine at one moment. Serialised, it is the document of `GET /quire/state`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Snapshot {
    /// Seconds since the engine was made.
    pub uptime: f64,
    /// Tokens per block.
    pub block_size: usize,
    /// Where the blocks are; `in_use`, `cached` and `free` sum to `total`.
    pub blocks: Blocks,
    /// Who owns which block.
    pub map: BlockMap,
    /// Live requests: running, then swapped, then waiting, in their orders; at most [`MAX_REQUESTS`].
    pub requests: Vec<RequestInfo>,
    /// Live requests that are not listed.
    pub requests_left_out: usize,
    /// Gauges and counters, as for metrics.
    pub stats: Stats,
    /// Speed over the last two seconds.
    pub rates: Rates,
    /// The last minute.
    pub history: History,
}

/// How many blocks are where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Blocks {
    /// All blocks.
    pub total: usize,
    /// Owned by live requests.
    pub in_use: usize,
    /// Kept for the prefix that they hold, and to be had when needed.
    pub cached: usize,
    /// Hold nothing.
    pub free: usize,
    /// Most that were ever in use at once.
    pub peak: usize,
    /// Blocks of host memory, for swapped requests.
    pub host_total: usize,
    /// Those of them that swapped requests own.
    pub host_in_use: usize,
}

/// Gauges now and counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Requests that hold blocks.
    pub running: usize,
    /// Requests that wait for blocks.
    pub waiting: usize,
    /// Requests that wait in host memory.
    pub swapped: usize,
    /// Steps with work.
    pub steps: u64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Tokens drawn.
    pub generation_tokens: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_cache_queries: u64,
    /// Prompt tokens found there.
    pub prefix_cache_hits: u64,
    /// Requests that gave their blocks back.
    pub preemptions: u64,
    /// Those of them that were swapped out.
    pub swap_preemptions: u64,
}

/// One live request, in numbers.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RequestInfo {
    /// The engine's number for it.
    pub id: u64,
    /// `running`, `swapped` or `waiting`.
    pub state: &'static str,
    /// Seconds since it was submitted.
    pub age: f64,
    /// Sequences that have not ended.
    pub sequences: usize,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Those of them that the prefix cache had.
    pub cached_tokens: usize,
    /// Tokens whose keys and values lie in its blocks.
    pub computed_tokens: usize,
    /// Tokens drawn.
    pub generated_tokens: usize,
    /// Blocks that it owns, alone or with others.
    pub blocks: usize,
    /// How often it had to give its blocks back.
    pub preemptions: u32,
}

/// Puts the parts together; `age` gives the seconds since a request came.
pub(crate) fn snapshot(
    scheduler: &Scheduler,
    stats: &EngineStats,
    recent: &mut Recent,
    age: impl Fn(sched::RequestId) -> f64,
) -> Snapshot {
    let counts = scheduler.stats();
    let views: Vec<RequestView<'_>> = scheduler.requests().collect();
    let (map, blocks_of) = map::draw(scheduler.pool(), &views);
    let listed = views.iter().zip(blocks_of).take(MAX_REQUESTS);
    let requests: Vec<RequestInfo> = listed.map(|(view, blocks)| describe(view, blocks, age(view.id()))).collect();
    Snapshot {
        uptime: recent.uptime(),
        block_size: scheduler.pool().block_size(),
        blocks: Blocks {
            total: counts.blocks_total,
            in_use: counts.blocks_in_use,
            cached: counts.blocks_cached,
            free: counts.blocks_free,
            peak: counts.blocks_peak,
            host_total: counts.host_blocks_total,
            host_in_use: counts.host_blocks_in_use,
        },
        map,
        requests_left_out: views.len() - requests.len(),
        requests,
        stats: Stats {
            running: stats.num_running,
            waiting: stats.num_waiting,
            swapped: stats.num_swapped,
            steps: stats.steps,
            prompt_tokens: stats.prompt_tokens,
            generation_tokens: stats.generation_tokens,
            prefix_cache_queries: stats.prefix_cache_queries,
            prefix_cache_hits: stats.prefix_cache_hits,
            preemptions: stats.num_preemptions,
            swap_preemptions: stats.num_swap_preemptions,
        },
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
