//! Statistics, figures of a run, arrival times, how they are written, and numbers in flags.

use bench::serve::chart::draw;
use bench::serve::load::arrivals;
use bench::serve::measure::{Goal, Record, Report, Spread};
use bench::serve::report::table;
use bench::statistics::{mean, median_and_spread, percentile};
use bench::values::whole;

use crate::args;

#[test]
fn whole_numbers_name_their_range() {
    assert_eq!(whole::<u16>("65535"), Ok(65535));
    assert_eq!(whole::<u64>("18446744073709551615"), Ok(u64::MAX));
    for bad in ["65536", "-1", "1.5", "", "x"] {
        assert_eq!(whole::<u16>(bad), Err("expected a whole number from 0 to 65535".to_string()));
    }
}

#[test]
fn percentiles_are_those_of_numpy() {
    // numpy.percentile([1, 2, 3, 4, 5], [50, 90, 95, 99])
    for (percent, expected) in [(50.0, 3.0), (90.0, 4.6), (95.0, 4.8), (99.0, 4.96)] {
        let found = percentile(&[1.0, 2.0, 3.0, 4.0, 5.0], percent);
        assert!((found - expected).abs() < 1e-12, "{found} is percentile {percent}, expected {expected}");
    }
    assert_eq!((percentile(&[7.0], 99.0), percentile(&[], 50.0)), (7.0, 0.0));
}

#[test]
fn means_medians_and_spreads_do_not_depend_on_the_order() {
    assert_eq!((mean(&[3.0, 1.0, 2.0]), mean(&[])), (2.0, 0.0));
    assert_eq!(median_and_spread(vec![3.0, 1.0, 2.0]), (2.0, 1.0));
    assert_eq!(median_and_spread(Vec::new()), (0.0, 0.0));
}

fn record(meant: f64, pieces: &[f64], output_tokens: usize) -> Record {
    let end = pieces.last().copied().unwrap_or(meant);
    let sent = meant + 0.25;
    let pieces = pieces.to_vec();
    Record { meant, sent, pieces, end, prompt_tokens: 10, output_tokens, counted_by_usage: true, ..Record::default() }
}

fn close(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-6, "found {found}, expected {expected}");
}

#[test]
fn latencies_are_measured_from_the_scheduled_time() {
    // Five tokens in three pieces.
    let record = record(1.0, &[1.5, 1.75, 2.5], 5);
    close(record.ttft().unwrap(), 0.5);
    close(record.e2el().unwrap(), 1.5);
    close(record.tpot().unwrap(), 0.25);
    assert_eq!(record.itl().collect::<Vec<_>>(), [0.25, 0.75]);
    let report = Report::new(&[record], 2.0, &[], &[50.0, 90.0, 95.0, 99.0]);
    close(report.late.max, 250.0);
    close(report.output_throughput, 2.5);
    close(report.total_throughput, 7.5);
    assert_eq!(report.goodput, None);
}

#[test]
fn a_spread_is_in_milliseconds_and_that_of_no_times_is_empty() {
    let records: Vec<Record> = (1..=5).map(|n| record(0.0, &[f64::from(n) / 1000.0], 1)).collect();
    let report = Report::new(&records, 1.0, &[], &[50.0, 90.0, 95.0, 99.0]);
    close(report.ttft.mean, 3.0);
    close(report.ttft.percentiles[1], 4.6);
    assert_eq!(report.itl, Spread { percentiles: vec![0.0; 4], ..Spread::default() });
}

#[test]
fn goodput_counts_requests_that_meet_every_limit() {
    let records = [
        record(0.0, &[0.1, 0.2, 0.3], 3),
        record(0.0, &[0.4, 0.5, 0.6], 3),
        record(0.0, &[0.1, 0.5, 0.6], 3),
        record(0.0, &[0.1], 1),
    ];
    let good = |goals: &str| {
        let goals: Vec<Goal> = goals.split(' ').map(|goal| goal.parse().unwrap()).collect();
        Report::new(&records, 1.0, &goals, &[50.0, 90.0, 95.0, 99.0]).goodput
    };
    assert_eq!(good("ttft:200"), Some(3.0));
    assert_eq!(good("itl:200"), Some(3.0));
    assert_eq!(good("ttft:200 itl:200"), Some(2.0));
    assert_eq!(good("e2el:350"), Some(2.0));
    assert_eq!(good("tpot:150"), Some(3.0));
    for wrong in ["ttft", "ttft:", "ttft:-1", "ttft:0", "speed:3", "itl:nan"] {
        assert!(wrong.parse::<Goal>().is_err(), "{wrong}");
    }
}

#[test]
fn failed_requests_count_in_no_other_figure() {
    let failed = Record { problem: Some("503".into()), ..record(0.0, &[0.1, 9.0], 2) };
    let empty = record(0.0, &[], 0);
    let report = Report::new(&[record(0.0, &[0.5, 1.0], 2), failed, empty], 1.0, &[], &[50.0, 90.0, 95.0, 99.0]);
    assert_eq!((report.completed, report.failed, report.output_tokens), (1, 2, 2));
    assert_eq!((report.ttft.count, report.itl.count, report.e2el.max), (1, 1, 1000.0));
}

#[test]
fn intervals_have_the_mean_of_the_rate_and_the_variance_of_the_burstiness() {
    for shape in [0.25, 1.0, 4.0] {
        let times = arrivals(40_001, 50.0, shape, 7).unwrap();
        let pauses: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let average = mean(&pauses);
        let squares: Vec<f64> = pauses.iter().map(|pause| (pause - average).powi(2)).collect();
        let variance = mean(&squares);
        // Standard errors at 40,000 draws are below 1 % of the mean and 4 % of the variance.
        assert!((average * 50.0 - 1.0).abs() < 0.04, "shape {shape}: mean {average}");
        assert!((variance / (average * average) * shape - 1.0).abs() < 0.15, "shape {shape}: variance {variance}");
        assert_eq!(times[0], 0.0);
    }
    assert_eq!(arrivals(9, 3.0, 1.0, 1), arrivals(9, 3.0, 1.0, 1));
    assert_ne!(arrivals(9, 3.0, 1.0, 1), arrivals(9, 3.0, 1.0, 2));
    assert_eq!(arrivals(9, f64::INFINITY, 1.0, 1), None);
}

#[test]
fn a_model_name_is_escaped_and_a_run_may_be_empty() {
    let empty = Report::new(&[], 0.0, &[], &[50.0, 90.0, 95.0, 99.0]);
    let svg = draw("a<b&c", &empty, &[]);
    assert!(svg.contains("a&lt;b&amp;c") && !svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    let record = Record { pieces: vec![0.5, 0.5], ..Record::default() };
    let svg = draw("m", &Report::new(std::slice::from_ref(&record), 1.0, &[], &[50.0, 90.0, 95.0, 99.0]), &[record]);
    assert!(!svg.contains("NaN") && svg.matches("<polyline").count() == 2);
}

#[test]
fn the_table_fits_in_100_columns_for_a_long_run_of_a_model_with_a_long_name() {
    let name = format!("/srv/checkpoints/{}/Llama-4-Maverick-17B-128E-Instruct-FP8", "long/".repeat(20));
    // A day of requests, each of which took hours.
    let slow = |n: u32| Record {
        sent: 9_000.0,
        pieces: vec![40_000.0 + f64::from(n), 86_000.0 + f64::from(n)],
        prompt_tokens: 1_000_000_000,
        output_tokens: 1_000_000_000,
        ..Record::default()
    };
    let report =
        Report::new(&[slow(0), slow(1), slow(2)], 86_400.0, &["ttft:1".parse().unwrap()], &[50.0, 90.0, 95.0, 99.0]);
    for load in [&[][..], &["--request-rate", "12345.678"], &["--max-concurrency", "100000"]] {
        let text = table(&args(load), &name, &report);
        let wide = text.lines().find(|line| line.chars().count() > 100);
        assert!(wide.is_none(), "{wide:?}");
        assert!(text.contains("Llama-4-Maverick-17B-128E-Instruct-FP8\n"), "{text}");
        let row: Vec<&str> = text.lines().last().unwrap().split_whitespace().collect();
        assert_eq!(
            row[3..],
            ["86001000.00", "86001000.00", "86001800.00", "86001900.00", "86001980.00", "86002000.00"]
        );
    }
}
