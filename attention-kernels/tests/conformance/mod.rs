//! The conformance tests: every registered variant, with all its capabilities, on every device of this machine, against
//! float64.
//!
//! An ordinary run combines capabilities in pairs; `QUIRE_TEST_ALL=1` combines them by threes and replays far more launches
//! under the sanitizers. What cannot run here prints a line that starts with `NOT RUN:`. Slots past a context contain NaN
//! and table entries past a row contain garbage, so a kernel that reads them fails visibly. Tolerances are in
//! [`trial::numbers`].

mod asked;
mod attention;
mod caches;
mod chosen;
mod counts;
mod covering;
mod deterministic;
mod devices;
mod failures;
mod graphs;
mod latent;
mod linear;
mod looks;
mod low_rank;
mod merging;
mod mirror;
mod plugins;
mod reference;
mod refusals;
mod rewritten;
mod sanitizers;
mod sinks;
mod sparse;
mod tiled;
mod transfers;
mod wide;
mod yardstick;
