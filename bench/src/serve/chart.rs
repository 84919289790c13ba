//! The chart of a run as an SVG: distributions of the time to the first token and of the inter-token latency, and throughput over time.

use std::fmt::Write;

use super::measure::{Record, Report};
use crate::statistics::percentile;

const WIDTH: f64 = 240.0;
const HEIGHT: f64 = 170.0;
const TOP: f64 = 80.0;
const LEFTS: [f64; 3] = [56.0, 366.0, 676.0];
const NUM_BARS: usize = 40;

/// Draws the chart of a run.
pub fn draw(model: &str, report: &Report, records: &[Record]) -> String {
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 950 300\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"950\" height=\"300\" fill=\"#ffffff\"/>\n",
    );
    let title = format!(
        "{model}: {} requests, {:.1} req/s, {:.0} output tokens/s, {} failed",
        report.completed, report.request_throughput, report.output_throughput, report.failed
    );
    text(&mut svg, (LEFTS[0], 28.0), "start", &title);
    let done = || records.iter().filter(|record| record.problem.is_none());
    shares(&mut svg, LEFTS[0], "time to first token, ms", done().filter_map(Record::ttft).collect());
    shares(&mut svg, LEFTS[1], "inter-token latency, ms", done().flat_map(Record::itl).collect());
    throughput(&mut svg, LEFTS[2], report.seconds, records);
    svg.push_str("</svg>\n");
    svg
}

/// Draws the cumulative distribution of times up to the 99.5th percentile.
fn shares(svg: &mut String, left: f64, name: &str, mut seconds: Vec<f64>) {
    seconds.sort_by(f64::total_cmp);
    let count = seconds.len().max(1) as f64;
    let end = percentile(&seconds, 99.5) * 1000.0;
    let top = axes(svg, left, name, end, 100.0, "% of requests or tokens");
    let mut path = String::new();
    for step in 0..=200 {
        let at = step as f64 / 200.0 * top;
        let share = seconds.partition_point(|value| value * 1000.0 <= at) as f64 / count;
        let _ = write!(path, "{:.1},{:.1} ", left + at / top * WIDTH, TOP + HEIGHT * (1.0 - share));
    }
    let _ = writeln!(svg, "<polyline points=\"{path}\" fill=\"none\" stroke=\"#2f6f8f\" stroke-width=\"2\"/>");
}

/// Draws the pieces of text per second over the run.
fn throughput(svg: &mut String, left: f64, seconds: f64, records: &[Record]) {
    let width = (seconds / NUM_BARS as f64).max(f64::MIN_POSITIVE);
    let mut bars = [0usize; NUM_BARS];
    for at in records.iter().flat_map(|record| &record.pieces) {
        bars[((at / width) as usize).min(NUM_BARS - 1)] += 1;
    }
    let most = bars.iter().max().copied().unwrap_or(0) as f64 / width;
    let top = axes(svg, left, "seconds since the start", seconds, most, "pieces of text per second");
    let high = ceiling(most);
    for (index, count) in bars.iter().enumerate() {
        let x = left + index as f64 * width / top * WIDTH;
        let height = *count as f64 / width / high * HEIGHT;
        let wide = (width / top * WIDTH - 0.6).max(0.5);
        let y = TOP + HEIGHT - height;
        let _ = writeln!(
            svg,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{wide:.1}\" height=\"{height:.1}\" fill=\"#d98c3f\"/>"
        );
    }
}

/// Draws axes with labels and returns the end of the horizontal one.
fn axes(svg: &mut String, left: f64, across: &str, end: f64, most: f64, up: &str) -> f64 {
    let (end, most) = (ceiling(end), ceiling(most));
    for mark in 0..=4 {
        let share = f64::from(mark) / 4.0;
        let y = TOP + HEIGHT * (1.0 - share);
        let _ = writeln!(svg, "<line x1=\"{left}\" y1=\"{y}\" x2=\"{}\" y2=\"{y}\" stroke=\"#dddddd\"/>", left + WIDTH);
        text(svg, (left - 6.0, y + 4.0), "end", &number(most * share));
        text(svg, (left + WIDTH * share, TOP + HEIGHT + 18.0), "middle", &number(end * share));
    }
    text(svg, (left, TOP - 14.0), "start", up);
    text(svg, (left + WIDTH / 2.0, TOP + HEIGHT + 38.0), "middle", across);
    end
}

/// The next greater number that has round quarters.
fn ceiling(value: f64) -> f64 {
    if !(value > 0.0 && value.is_finite()) {
        return 1.0;
    }
    let power = 10f64.powf(value.log10().floor());
    [1.0, 1.2, 1.6, 2.0, 2.4, 3.2, 4.0, 5.0, 6.0, 8.0, 10.0]
        .into_iter()
        .map(|step| step * power)
        .find(|bound| *bound >= value)
        .unwrap_or(value)
}

fn number(value: f64) -> String {
    if value >= 10.0 { format!("{value:.0}") } else { format!("{}", (value * 1000.0).round() / 1000.0) }
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{words}</text>");
}
