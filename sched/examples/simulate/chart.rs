//! The chart as an SVG: throughput by batch size, and the used fraction of the reserved cache.

use crate::sim::Policy;
use crate::sim::cost::CostModel;
use crate::sim::measure::Run;
use crate::sim::svg::{COLOURS, Panel, legend, open, text};

const LINES: Panel = Panel { left: 64.0, top: 64.0, width: 400.0, height: 250.0 };
const BARS: Panel = Panel { left: 560.0, width: 52.0 * Policy::ALL.len() as f64, ..LINES };

/// Draws a sweep: one run per batch size and policy.
pub fn draw(trace: &str, cost: &CostModel, batches: &[usize], sweep: &[[Run; Policy::ALL.len()]]) -> String {
    let mut svg = open(860, 410);
    let title = format!("Trace {trace}, all requests at once; model of {}", cost.name);
    text(&mut svg, (LINES.left, 24.0), "start", &title);
    let marks: Vec<String> = batches.iter().map(usize::to_string).collect();
    let speeds = |policy: usize| sweep.iter().map(|runs| runs[policy].throughput()).collect();
    let series: Vec<_> = COLOURS.into_iter().enumerate().map(|(policy, colour)| (colour, speeds(policy))).collect();
    LINES.lines(&mut svg, "output tokens per second, by batch limit", &marks, &series);
    if let Some(largest) = sweep.last() {
        let used = largest.iter().map(Run::kv_utilisation);
        let bars: Vec<_> = COLOURS.into_iter().zip(used).map(|(c, u)| (c, u, format!("{:.0} %", 100.0 * u))).collect();
        BARS.bars(&mut svg, "used fraction of the reserved cache", 1.0, &bars);
    }
    legend(&mut svg, (LINES.left, 368.0), COLOURS.into_iter().zip(Policy::ALL.map(Policy::name)));
    svg.push_str("</svg>\n");
    svg
}
