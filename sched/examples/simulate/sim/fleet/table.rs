//! The table and the chart of a fleet's results.

use std::fmt;

use super::super::svg::{COLOURS, Panel, legend, open, text};
use super::measure::Report;
use super::route::Routing;

/// Limits that a fleet has to meet.
#[derive(Clone, Copy, Debug)]
pub struct Goal {
    /// 99th percentiles of the time to the first token and of the time between tokens, in seconds.
    pub first: f64,
    pub between: f64,
}

impl Goal {
    /// The goals of the tables: a loose and a tight one.
    pub const ALL: [Goal; 2] = [Goal { first: 0.5, between: 0.05 }, Goal { first: 0.5, between: 0.025 }];

    /// Returns whether a run meets the goal. The wait for a decode replica counts towards the first token: it is one of
    /// hundreds of intervals, so their percentile hides it.
    pub fn is_met(&self, report: &Report) -> bool {
        let [first, handover, between] =
            [&report.first, &report.tally.handovers, &report.tally.intervals].map(|seconds| seconds.quantile(0.99));
        first + handover <= self.first && between <= self.between
    }
}

/// The greatest load that meets a goal, and its cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Capacity {
    /// New conversations per minute and replica.
    pub load: f64,
    /// Price of a million output tokens.
    pub cost: f64,
}

/// A line of the table, as precise as it is printed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row {
    pub routing: Routing,
    pub replicas: usize,
    /// Milliseconds to the first token and between tokens, 50th and 99th percentile.
    pub first: [f64; 2],
    pub between: [f64; 2],
    /// In percent.
    pub hit_rate: f64,
    pub utilisation: f64,
    /// Price of a million output tokens at the common load.
    pub cost: f64,
    /// By goal. `None` if it was not searched for, or no load meets the goal.
    pub capacity: [Option<Capacity>; Goal::ALL.len()],
}

impl Row {
    /// The head of the table.
    pub const HEAD: &'static str = "\
        | routing | replicas | first token p50, p99 ms | between p50, p99 ms | hits | busy | $/M | loose: load | $/M | tight: load | $/M |\n\
        |---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|";

    pub fn new(routing: Routing, report: &Report, price: f64, capacity: [Option<Capacity>; Goal::ALL.len()]) -> Row {
        let both = |histogram: &super::measure::Histogram| [0.5, 0.99].map(|q| 1e3 * histogram.quantile(q));
        let row = Row {
            routing,
            replicas: report.replicas,
            first: both(&report.first),
            between: both(&report.tally.intervals),
            hit_rate: 100.0 * report.hit_rate(),
            utilisation: 100.0 * report.utilisation(),
            cost: report.cost_per_million(price),
            capacity,
        };
        Row::parse(&row.to_string()).unwrap_or(row)
    }

    /// Reads a line of the table; `None` if it is none.
    pub fn parse(line: &str) -> Option<Row> {
        let cells: Vec<&str> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
        let [routing, replicas, first, between, hits, busy, cost, loose, loose_cost, tight, tight_cost] = cells[..]
        else {
            return None;
        };
        let pair = |cell: &str| {
            let (a, b) = cell.split_once(", ")?;
            Some([a.parse().ok()?, b.parse().ok()?])
        };
        let number = |cell: &str| cell.trim_end_matches(" %").parse::<f64>().ok();
        let capacity = |load, cost| Some(Capacity { load: number(load)?, cost: number(cost)? });
        Some(Row {
            routing: Routing::ALL.into_iter().find(|r| r.name() == routing)?,
            replicas: replicas.replace(',', "").parse().ok()?,
            first: pair(first)?,
            between: pair(between)?,
            hit_rate: number(hits)?,
            utilisation: number(busy)?,
            cost: number(cost)?,
            capacity: [capacity(loose, loose_cost), capacity(tight, tight_cost)],
        })
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { routing, replicas, first, between, hit_rate, utilisation, cost, capacity } = self;
        write!(f, "| {} | {replicas} | {:.0}, {:.0} |", routing.name(), first[0], first[1])?;
        write!(f, " {:.1}, {:.1} |", between[0], between[1])?;
        write!(f, " {hit_rate:.1} % | {utilisation:.1} % | {cost:.3} |")?;
        capacity.iter().try_for_each(|capacity| match capacity {
            Some(Capacity { load, cost }) => write!(f, " {load:.0} | {cost:.3} |"),
            None => write!(f, " – | – |"),
        })
    }
}

const FIRST: Panel = Panel { left: 64.0, top: 64.0, width: 210.0, height: 250.0 };
const BETWEEN: Panel = Panel { left: 340.0, ..FIRST };
const LOOSE: Panel = Panel { left: 590.0, width: 260.0, height: 95.0, ..FIRST };
const TIGHT: Panel = Panel { top: 219.0, ..LOOSE };

/// Draws the rows of a table: times by number of replicas, and costs of the largest fleet for which they are known.
pub fn draw(title: &str, rows: &[Row]) -> String {
    let mut svg = open(870, 410);
    text(&mut svg, (FIRST.left, 24.0), "start", title);
    let of = |routing: Routing| rows.iter().filter(move |row| row.routing == routing);
    let marks: Vec<String> = of(Routing::ALL[0]).map(|row| row.replicas.to_string()).collect();
    let series = |value: fn(&Row) -> f64| {
        let lines = COLOURS.into_iter().zip(Routing::ALL);
        lines.map(|(colour, routing)| (colour, of(routing).map(value).collect())).collect::<Vec<(&str, Vec<f64>)>>()
    };
    FIRST.lines(&mut svg, "first token, p99 in ms, by replicas", &marks, &series(|row| row.first[1]));
    BETWEEN.lines(&mut svg, "between tokens, p99 in ms", &marks, &series(|row| row.between[1]));
    for (goal, panel) in [LOOSE, TIGHT].into_iter().enumerate() {
        let cost = |routing| of(routing).filter_map(|row| Some(row.capacity[goal]?.cost)).next_back();
        let costs = Routing::ALL.map(|routing| cost(routing).unwrap_or(0.0));
        let most = costs.into_iter().fold(1e-9, f64::max);
        let bars: Vec<_> = COLOURS.into_iter().zip(costs).map(|(c, cost)| (c, cost, format!("{cost:.2}"))).collect();
        let limit = 1e3 * Goal::ALL[goal].between;
        panel.bars(&mut svg, &format!("$ per million tokens, p99 of {limit:.0} ms between"), most, &bars);
    }
    legend(&mut svg, (FIRST.left, 368.0), COLOURS.into_iter().zip(Routing::ALL.map(Routing::name)));
    svg.push_str("</svg>\n");
    svg
}
