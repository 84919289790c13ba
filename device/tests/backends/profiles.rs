//! Profiles on every backend: events of both queues are mapped to the clock of the host.

use std::sync::Arc;
use std::time::{Duration, Instant};

use device::profile::{Cost, Span, Track, start};
use device::{Options, Profile, Queue, open_with};

use super::{add_one, contents, devices};

#[test]
fn work_of_both_queues_has_its_time_within_its_step_and_in_order() {
    for plain in devices() {
        let (began, profile) = (Instant::now(), Arc::new(Profile::default()));
        let kernels = testkit::kernels::compiled();
        let options = Options { threads: Some(1), kernels, profile: Some(profile.clone()), ..Options::default() };
        let device = open_with(plain.name(), &options).unwrap();
        let mut values = device.alloc(256).unwrap();
        let pinned = device.pinned(256).unwrap();
        for _ in 0..2 {
            let _step = Profile::step(&device);
            let copy = start(&*device, Queue::Copy, "swap_in", "", || Cost { bytes: 256, operations: 0 });
            device.upload_async(Queue::Copy, &pinned, 0, &mut values, 0, 256).unwrap();
            drop(copy);
            device.wait(Queue::Compute, &device.record(Queue::Copy).unwrap()).unwrap();
            for _ in 0..2 {
                let _time = start(&*device, Queue::Compute, "add", "test.add_one", Cost::default);
                if device.name() != "cpu" {
                    add_one(&*device, &values, 1).unwrap();
                }
            }
        }
        let recorded = profile.recorded();
        assert_eq!((recorded.steps, recorded.lost), (2, 0), "{}", device.name());
        let of = |track| recorded.spans.iter().filter(|span| span.name.track == track).collect::<Vec<&Span>>();
        let (steps, adds, copies) = (of(Track::Host), of(Track::Compute), of(Track::Copy));
        assert_eq!((steps.len(), adds.len(), copies.len()), (2, 4, 2));
        for spans in [&steps, &adds, &copies] {
            assert!(spans.is_sorted_by(|a, b| a.start <= a.end && a.end <= b.start), "{spans:?}");
        }
        // Work starts within its step, but may end after it; then the end of the step waits for it.
        assert!(adds.iter().zip([0, 0, 1, 1]).all(|(add, step)| add.start >= steps[step].start), "{recorded:?}");
        assert!(recorded.spans.iter().all(|span| span.end - span.start < began.elapsed()), "{recorded:?}");
        assert!(adds.last().is_some_and(|add| add.end > Duration::ZERO));
        let ones = if device.name() == "cpu" { 0 } else { 2 };
        assert!(contents(&*device, &values).iter().all(|value| *value == ones));
    }
}
