//! The conformance table: every registered variant, with everything that it claims, on every device of this machine,
//! against float64.
//!
//! An ordinary run takes claims in pairs; `QUIRE_TEST_ALL=1` takes them by threes and replays far more launches under the
//! sanitizers. What cannot run here prints one line that begins with `NOT RUN:`. Slots past a context hold NaN and table
//! entries past a row hold garbage, so a kernel that reads them fails loudly. Tolerances are in
//! [`attention_kernels::trial::numbers`].

mod attention;
mod caches;
mod covering;
mod devices;
mod looks;
mod plugins;
mod reference;
mod refusals;
mod sanitizers;
mod transfers;
