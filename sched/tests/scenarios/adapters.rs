//! At most `max_loras` different adapters run at once.

use sched::{Request, RequestState, SchedConfig, Scheduler};

use super::scheduler;
use crate::common::{commit_all, config, request, spans};

fn with(id: u64, adapter: Option<&str>, max_tokens: usize) -> Request {
    Request { adapter: adapter.map(str::to_string), ..request(id, 20, max_tokens) }
}

fn is_running(s: &Scheduler, id: u64) -> bool {
    s.requests().any(|it| it.id().0 == id && it.state() == RequestState::Running)
}

#[test]
fn a_request_of_another_adapter_waits_and_those_behind_it_pass() {
    let mut s = scheduler(SchedConfig { max_loras: 2, ..config(200, 16) });
    for (id, adapter) in [(0, Some("a")), (1, Some("b")), (2, Some("c")), (3, None), (4, Some("a")), (5, Some("c"))] {
        s.submit(with(id, adapter, if id == 1 { 2 } else { 4 })).unwrap();
    }
    let mut steps = Vec::new();
    for _ in 0..4 {
        let plan = s.plan();
        steps.push(spans(&plan).into_iter().map(|(id, _)| id).collect::<Vec<_>>());
        commit_all(&mut s, &plan, 7);
    }
    // After the only request of adapter b has ended, those of c are admitted in order.
    assert_eq!(steps, [vec![0, 1, 3, 4], vec![0, 1, 3, 4], vec![0, 3, 4, 2, 5], vec![0, 3, 4, 2, 5]]);
}

#[test]
fn an_endless_stream_of_one_adapter_does_not_starve_another() {
    let mut s = scheduler(SchedConfig { max_loras: 1, ..config(200, 16) });
    (0..2).for_each(|id| s.submit(with(id, Some("a"), 2 + 3 * id as usize)).unwrap());
    s.submit(with(2, Some("b"), 2)).unwrap();
    let (mut next, mut passed) = (3, (0, 0));
    while !is_running(&s, 2) {
        while s.stats().num_waiting < 4 {
            s.submit(with(next, (next % 3 > 0).then_some("a"), 5)).unwrap();
            next += 1;
        }
        let plan = s.plan();
        for span in plan.spans.iter().filter(|span| span.start == 0 && span.seq.request.0 > 2) {
            *(if span.seq.request.0 % 3 > 0 { &mut passed.0 } else { &mut passed.1 }) += 1;
        }
        commit_all(&mut s, &plan, 7);
        assert!(next < 1_000, "starved");
    }
    assert_eq!(passed.0, 32, "requests of adapter a");
    assert!(passed.1 > 16, "requests without an adapter");
}

#[test]
fn a_request_whose_adapter_is_not_in_memory_waits_and_a_place_is_kept_for_it() {
    let mut s = scheduler(SchedConfig { max_loras: 2, ..config(200, 16) });
    for (id, adapter) in [(0, Some("a")), (1, Some("c")), (2, Some("b")), (3, None), (4, Some("a")), (5, Some("c"))] {
        s.submit(with(id, adapter, 4)).unwrap();
    }
    let step = |s: &mut Scheduler| {
        let plan = s.plan();
        commit_all(s, &plan, 7);
        spans(&plan).into_iter().map(|(id, _)| id).collect::<Vec<_>>()
    };
    let ready =
        |s: &mut Scheduler, names: &[&str]| s.set_ready_adapters(names.iter().map(|it| it.to_string()).collect());
    ready(&mut s, &["a", "b"]);
    // Adapter b is in memory, but would take the last place.
    assert_eq!((step(&mut s), s.adapter_to_read()), (vec![0, 3, 4], Some("c")));
    ready(&mut s, &["a", "c"]);
    assert_eq!((step(&mut s), s.adapter_to_read()), (vec![0, 3, 4, 1, 5], None));
    assert_eq!(s.list_running_adapters(), ["a", "c"]);
    // One that cannot be read ends, and b has the place.
    s.abort(sched::RequestId(1));
    s.abort(sched::RequestId(5));
    ready(&mut s, &["a", "b"]);
    assert_eq!(step(&mut s), [0, 3, 4, 2]);
}

#[test]
fn without_a_limit_adapters_do_not_matter() {
    let mut s = scheduler(config(200, 16));
    (0..9).for_each(|id| s.submit(with(id, Some(&id.to_string()), 2)).unwrap());
    assert_eq!(s.plan().spans.len(), 9);
    let error = Scheduler::new(SchedConfig { max_loras: 0, ..config(200, 16) }).err().unwrap().to_string();
    assert_eq!(error, "--max-loras: found 0, expected at least 1");
}
