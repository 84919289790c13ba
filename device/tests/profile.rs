//! Profiles on a CPU.

use std::sync::Arc;
use std::time::Duration;

use device::profile::{Cost, KEPT_SPANS, Running, Track, start};
use device::{Device, Options, Profile, Queue};

fn profiled() -> (Arc<Profile>, Arc<dyn Device>) {
    let profile = Arc::new(Profile::default());
    let options = Options { threads: Some(1), profile: Some(profile.clone()), ..Default::default() };
    (profile, device::open_with("cpu", &options).unwrap())
}

fn operation<'a>(device: &'a dyn Device, name: &'static str) -> Option<Running<'a>> {
    start(device, Queue::Compute, name, "cpu.test", Cost::default)
}

#[test]
fn own_times_of_a_track_add_up_to_the_time_of_the_outermost_span() {
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
    let plain = device::open("cpu", Some(1)).unwrap();
    assert!(Profile::step(&plain).is_none() && operation(&*plain, "never").is_none());
}

#[test]
fn the_oldest_steps_are_dropped_from_the_trace_and_stay_in_the_sums() {
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
