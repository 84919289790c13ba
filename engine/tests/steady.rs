//! A decode step in steady state: how often it allocates, copies and waits. The device does nothing, so that what is left
//! is the host's.

use std::sync::atomic::Ordering::Relaxed;

use crate::common::noop::{NoOp, decoding};
use crate::counter::allocations;

#[test]
fn a_decode_step_in_steady_state_waits_once_and_hardly_allocates() {
    const SEQUENCES: usize = 64;
    let device = NoOp::new();
    let mut engine = decoding(&device, SEQUENCES);
    // The lists of a step have grown to what they need.
    (0..100).for_each(|_| engine.step(|_, _| {}));
    let (launches, synchronized) = (device.launches.load(Relaxed), device.synchronized.load(Relaxed));
    let mut calls = Vec::new();
    let mut drawn = 0;
    for _ in 0..100 {
        let before = allocations();
        engine.step(|_, _| drawn += 1);
        calls.push(allocations() - before);
    }
    assert_eq!(drawn, 100 * SEQUENCES, "each sequence draws in each step");
    assert_eq!(device.synchronized.load(Relaxed), synchronized, "a step waits for its own draws alone");
    assert_eq!((device.launches.load(Relaxed) - launches) % 100, 0, "every step launches the same");
    calls.sort_unstable();
    assert!(calls[50] < SEQUENCES / 2, "{} allocations: some for each sequence", calls[50]);
    println!("allocations of a step of {SEQUENCES} sequences: median {}, most {}", calls[50], calls[99]);
}
