//! The chart as an SVG: throughput by batch size, and the used fraction of the reserved cache.

use std::fmt::Write;

use crate::sim::Policy;
use crate::sim::cost::CostModel;
use crate::sim::measure::Run;

/// One per policy.
const COLOURS: [&str; Policy::ALL.len()] = ["#b0413e", "#d98c3f", "#8a8d3f", "#2f6f8f", "#1b3a5c"];
/// Top edge and height of both panels.
const TOP: f64 = 64.0;
const HEIGHT: f64 = 250.0;
/// Left edge and width of the line panel.
const LEFT: f64 = 64.0;
const WIDTH: f64 = 400.0;
/// Left edge of the bar panel, and width per bar.
const BARS: f64 = 560.0;
const BAR: f64 = 52.0;

/// Draws a sweep: one run per batch size and policy.
pub fn draw(trace: &str, cost: &CostModel, batches: &[usize], sweep: &[[Run; Policy::ALL.len()]]) -> String {
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 860 410\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"860\" height=\"410\" fill=\"#ffffff\"/>\n",
    );
    let title = format!("Trace {trace}, all requests at once; model of {}", cost.name);
    text(&mut svg, (LEFT, 24.0), "start", &title);
    lines(&mut svg, batches, sweep);
    if let Some(largest) = sweep.last() {
        bars(&mut svg, largest);
    }
    for (k, (policy, colour)) in Policy::ALL.iter().zip(COLOURS).enumerate() {
        let (x, y) = (LEFT + 260.0 * (k % 3) as f64, 368.0 + 22.0 * (k / 3) as f64);
        rect(&mut svg, (x, y - 10.0), (12.0, 12.0), colour);
        text(&mut svg, (x + 18.0, y), "start", policy.name());
    }
    svg.push_str("</svg>\n");
    svg
}

/// Draws throughput over batch size, which doubles from mark to mark.
fn lines(svg: &mut String, batches: &[usize], sweep: &[[Run; Policy::ALL.len()]]) {
    let greatest = sweep.iter().flatten().map(Run::throughput).fold(1.0, f64::max);
    let unit = 10f64.powf(greatest.log10().floor());
    let step = [0.2, 0.5, 1.0, 2.0].into_iter().map(|m| m * unit).find(|s| greatest / s <= 6.0).unwrap_or(unit);
    let top = (greatest / step).ceil() * step;
    let x = |at: usize| LEFT + WIDTH * at as f64 / (batches.len() - 1).max(1) as f64;
    let y = |value: f64| TOP + HEIGHT * (1.0 - value / top);
    text(svg, (LEFT, TOP - 12.0), "start", "output tokens per second, by batch limit");
    for mark in 0..=(top / step).round() as usize {
        let value = mark as f64 * step;
        rect(svg, (LEFT, y(value)), (WIDTH, 1.0), "#dddddd");
        text(svg, (LEFT - 6.0, y(value) + 4.0), "end", &format!("{value:.0}"));
    }
    for (at, batch) in batches.iter().enumerate() {
        text(svg, (x(at), TOP + HEIGHT + 18.0), "middle", &batch.to_string());
    }
    for (policy, colour) in COLOURS.iter().enumerate() {
        let points: Vec<String> = sweep
            .iter()
            .enumerate()
            .map(|(at, runs)| format!("{:.1},{:.1}", x(at), y(runs[policy].throughput())))
            .collect();
        // Writing to a string cannot fail.
        let _ = writeln!(
            svg,
            "<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"2.5\" points=\"{}\"/>",
            points.join(" ")
        );
    }
}

/// Draws the used fraction of the reserved cache, at the greatest batch limit.
fn bars(svg: &mut String, runs: &[Run; Policy::ALL.len()]) {
    text(svg, (BARS, TOP - 12.0), "start", "used fraction of the reserved cache");
    rect(svg, (BARS, TOP + HEIGHT), (BAR * runs.len() as f64, 1.0), "#888888");
    for (k, (run, colour)) in runs.iter().zip(COLOURS).enumerate() {
        let (x, height) = (BARS + BAR * k as f64, HEIGHT * run.kv_utilisation());
        rect(svg, (x + 6.0, TOP + HEIGHT - height), (BAR - 12.0, height), colour);
        let label = format!("{:.0} %", 100.0 * run.kv_utilisation());
        text(svg, (x + BAR / 2.0, TOP + HEIGHT + 18.0), "middle", &label);
    }
}

fn rect(svg: &mut String, (x, y): (f64, f64), (width, height): (f64, f64), colour: &str) {
    let _ = writeln!(
        svg,
        "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{width:.1}\" height=\"{height:.1}\" fill=\"{colour}\"/>"
    );
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, content: &str) {
    let escaped = content.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(svg, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"#222222\">{escaped}</text>");
}
