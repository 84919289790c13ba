//! The simulated fleet in `examples/simulate/sim/fleet`.

use proptest::prelude::*;

use crate::simulator::sim;
use sim::cost::CostModel;
use sim::fleet::coarse::Coarse;
use sim::fleet::measure::{Histogram, Report};
use sim::fleet::prefixes::Prefixes;
use sim::fleet::replica::{Detailed, MAX_NUM_SEQS};
use sim::fleet::route::Routing;
use sim::fleet::table::{Row, draw};
use sim::fleet::traffic::{Conversation, Shape};
use sim::fleet::{DAY, LOAD, PRICE, Setup};
use sim::measure::Run;
use sim::paged;
use sim::trace::{Arrival, Lengths, generate};

/// Conversations for fleets of `replicas` that are busy, but meet their limits.
fn chat(replicas: usize, day: f64, seed: u64) -> Shape {
    Shape { think: 10.0, ..Shape::chat(day, 1.5 * replicas as f64, 8192, seed) }
}

fn coarse(setup: &Setup, shape: &Shape) -> Report {
    let gpu = CostModel::llama_8b_on_h100();
    setup.run(shape, shape.conversations(), || Coarse::new(&gpu))
}

fn setup(replicas: usize, routing: Routing) -> Setup {
    Setup::new(replicas, routing, &CostModel::llama_8b_on_h100(), 1)
}

#[test]
fn every_request_of_a_fleet_finishes_once_with_the_tokens_it_asked_for() {
    for routing in Routing::ALL {
        for (replicas, rate) in [(2, 1.5), (9, 1.5), (3, 8.0)] {
            let shape = Shape { rate: rate * replicas as f64, ..chat(replicas, 30.0, 3) };
            let report = coarse(&setup(replicas, routing), &shape);
            let what = format!("{routing:?}, {replicas} replicas");
            assert!(report.requests > 100, "{what}: {}", report.requests);
            assert_eq!((report.finished, report.first.count), (report.requests, report.requests), "{what}");
            assert_eq!(report.output_tokens, report.asked_tokens, "{what}");
            assert_eq!(report.tally.intervals.count, report.output_tokens - report.requests, "{what}");
            assert!(report.utilisation() > 0.3 && report.utilisation() <= 1.0, "{what}: {}", report.utilisation());
            assert_eq!(report, coarse(&setup(replicas, routing), &shape), "{what}: not a function of its input");
            let other = Shape { seed: 4, ..shape };
            assert_ne!(report, coarse(&setup(replicas, routing), &other), "{what}: the seed has no effect");
        }
    }
}

/// The times to the first token and between tokens, the hit rate, and the time that replicas compute.
fn figures(report: &Report) -> [f64; 6] {
    let [first, between] = [&report.first, &report.tally.intervals].map(|h| [0.5, 0.99].map(|q| h.quantile(q)));
    [first[0], first[1], between[0], between[1], report.hit_rate(), report.busy]
}

#[test]
fn a_fleet_of_one_detailed_replica_is_the_plain_simulation() {
    let gpu = CostModel::opt_13b_on_a100();
    for (lengths, rate) in [(Lengths::ShareGpt, 2.0), (Lengths::Alpaca, 20.0)] {
        let trace = generate(lengths, 60, rate, 5);
        let plain = paged::run(&trace, &gpu, MAX_NUM_SEQS, 16, 1);
        let shape = chat(1, 1.0, 1);
        let arrivals = || (0..).zip(&trace).map(|(number, arrival)| Conversation::single(number, *arrival));
        let setup = Setup::new(1, Routing::RoundRobin, &gpu, 1);
        let detailed = setup.run(&shape, arrivals(), || Detailed::new(&gpu));
        let end = trace[0].at + plain.elapsed;
        assert!((detailed.elapsed - end).abs() < 1e-9 * end, "{} {end}", detailed.elapsed);
        assert!((detailed.busy - plain.device).abs() < 1e-9 * plain.device, "{} {}", detailed.busy, plain.device);
        assert_eq!(detailed.output_tokens as usize, plain.output_tokens);
        // The model of a replica: within 1 % of the end and of the time that the device computes.
        let model = setup.run(&shape, arrivals(), || Coarse::new(&gpu));
        assert!((model.elapsed / end - 1.0).abs() < 0.01, "{} {end}", model.elapsed);
        let busy = plain.device + gpu.host_seconds * plain.steps as f64;
        assert!((model.busy / busy - 1.0).abs() < 0.01, "{} {busy}", model.busy);
        assert_eq!(model.hit_rate(), 0.0);
    }
}

#[test]
fn a_request_alone_takes_exactly_the_time_of_its_steps() {
    let gpu = CostModel::opt_13b_on_a100();
    let trace = [Arrival { at: 1.0, prompt: 700, output: 1 }, Arrival { at: 60.0, prompt: 30, output: 200 }];
    let shape = chat(1, 1.0, 1);
    let model = Setup::new(1, Routing::RoundRobin, &gpu, 1).run(
        &shape,
        (0..).zip(trace).map(|(number, arrival)| Conversation::single(number, arrival)),
        || Coarse::new(&gpu),
    );
    let plain = paged::run(&trace, &gpu, 1, 16, 1);
    let end = 1.0 + plain.elapsed;
    assert!((model.elapsed - end).abs() < 1e-6, "{} {end}", model.elapsed);
}

#[test]
fn a_coarse_replica_is_within_5_percent_of_the_real_scheduler() {
    let gpu = CostModel::llama_8b_on_h100();
    // The largest differences found: 4.1, 0, 0, 1.0, 2.1 and 1.2 %.
    let bounds = [0.05, 0.015, 0.015, 0.015, 0.03, 0.015];
    for (routing, seed) in [(Routing::RoundRobin, 1), (Routing::LeastLoaded, 2), (Routing::PrefixAware, 3)] {
        let shape = chat(2, 25.0, seed);
        let setup = setup(2, routing);
        let detailed = setup.run(&shape, shape.conversations(), || Detailed::new(&gpu));
        let (model, real) = (figures(&coarse(&setup, &shape)), figures(&detailed));
        for ((model, real), bound) in model.into_iter().zip(real).zip(bounds) {
            assert!((model / real - 1.0).abs() < bound, "{routing:?}: {model} for {real}, bound {bound}");
        }
    }
}

#[test]
fn prefix_aware_routing_never_finds_fewer_prefixes_than_round_robin() {
    for seed in 0..12 {
        for replicas in [2, 5, 16] {
            let shape = chat(replicas, 20.0, seed);
            let [plain, aware] =
                [Routing::RoundRobin, Routing::PrefixAware].map(|r| coarse(&setup(replicas, r), &shape));
            assert!(aware.hit_rate() >= plain.hit_rate(), "seed {seed}: {} < {}", aware.hit_rate(), plain.hit_rate());
            assert!(plain.hit_rate() > 0.0);
        }
    }
}

#[test]
fn least_loaded_routing_has_the_lower_99th_percentile_if_requests_are_skewed() {
    let gpu = CostModel::llama_8b_on_h100();
    for replicas in [4, 8] {
        // Every fourth request is long, so round-robin sends all long ones to a quarter of the replicas.
        let long = |k: u64| k.is_multiple_of(4);
        let arrival = |k: u64| Arrival {
            at: k as f64 * 0.2 / replicas as f64,
            prompt: if long(k) { 6000 } else { 100 },
            output: if long(k) { 100 } else { 20 },
        };
        let trace = || (0..600).map(|k| Conversation::single(k, arrival(k)));
        let run = |routing| setup(replicas, routing).run(&chat(1, 1.0, 1), trace(), || Coarse::new(&gpu));
        let [plain, least, two] =
            [Routing::RoundRobin, Routing::LeastLoaded, Routing::TwoChoices].map(|r| run(r).first.quantile(0.99));
        assert!(least < plain && two < plain, "{replicas} replicas: {least} and {two}, round-robin {plain}");
    }
}

#[test]
fn the_page_shows_what_the_simulator_computes() {
    let page = include_str!("../../docs/fleet.md");
    let rows: Vec<Row> = page.lines().filter_map(Row::parse).collect();
    assert_eq!(rows.len(), 20);
    let title = page.lines().find_map(|line| line.strip_prefix("![")?.split_once(']')).unwrap().0;
    // The row that depends on most: both policies, the prefix cache and the links.
    let shape = Shape::chat(DAY, LOAD / 60.0 * 10.0, 8192, 1);
    let row = Row::new(Routing::Disaggregated, &coarse(&setup(10, Routing::Disaggregated), &shape), PRICE, [None; 2]);
    let same = |shown: &&Row| (shown.routing, shown.replicas) == (row.routing, row.replicas);
    let shown = rows.iter().find(same).unwrap();
    assert_eq!(Row { capacity: [None; 2], ..*shown }, row);
    assert!(draw(title, &rows) == include_str!("../../docs/fleet.svg"), "the chart is not that of the table");
}

#[test]
fn quantiles_of_a_histogram_are_within_half_a_percent() {
    let seconds: Vec<f64> = (0..5000).map(|k| 1e-4 * 1.002f64.powi(k * 37 % 5000)).collect();
    let mut histogram = Histogram::default();
    seconds.iter().for_each(|s| histogram.add(*s, 1));
    for q in [0.01, 0.5, 0.9, 0.99, 1.0] {
        let exact = Run::quantile(&seconds, q);
        assert!((histogram.quantile(q) / exact - 1.0).abs() <= 0.0051, "{q}: {} {exact}", histogram.quantile(q));
    }
}

proptest! {
    #[test]
    fn cached_prefixes_are_those_of_a_list_in_order_of_use(
        operations in prop::collection::vec((0..4u8, 0..12u64, 1..100u32), 1..120),
    ) {
        let (mut prefixes, mut list) = (Prefixes::default(), Vec::<(u64, u32)>::new());
        for (operation, key, tokens) in operations {
            let found = list.iter().position(|(k, _)| *k == key);
            match operation {
                0 | 1 => {
                    found.map(|at| list.remove(at));
                    list.push((key, tokens));
                    prefixes.insert(key, tokens);
                }
                2 => prop_assert_eq!(prefixes.take(key), found.map(|at| list.remove(at).1)),
                _ => {
                    let most = u64::from(tokens) * 5;
                    prefixes.trim(most);
                    let mut excess = list.iter().map(|e| u64::from(e.1)).sum::<u64>().saturating_sub(most) as u32;
                    while excess > 0 {
                        let removed = excess.min(list[0].1);
                        (list[0].1, excess) = (list[0].1 - removed, excess - removed);
                        list.retain(|e| e.1 > 0);
                    }
                }
            }
            prop_assert_eq!(prefixes.tokens, list.iter().map(|e| u64::from(e.1)).sum::<u64>());
            for key in 0..12 {
                prop_assert_eq!(prefixes.get(key), list.iter().find(|e| e.0 == key).map(|e| e.1));
            }
        }
    }
}
