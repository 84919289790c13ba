//! `simulate fleet`: a fleet of replicas under the traffic of a day. Prints a table and writes a chart.

use crate::sim::cost::CostModel;
use crate::sim::fleet::coarse::Coarse;
use crate::sim::fleet::measure::Report;
use crate::sim::fleet::replica::Detailed;
use crate::sim::fleet::route::Routing;
use crate::sim::fleet::table::{Capacity, Goal, Row, draw};
use crate::sim::fleet::traffic::{Conversation, Shape};
use crate::sim::fleet::{DAY, LOAD, PREFILL_SHARE, PRICE, Setup};
use crate::sim::trace::{Arrival, parse_csv};

/// Loads of the search, in conversations per minute and replica.
const STEP: f64 = 5.0;
const LOADS: usize = 40;

/// What to simulate.
struct Options {
    replicas: Vec<usize>,
    /// A CSV file of requests, each its own conversation, in place of generated ones.
    trace: Option<Vec<Arrival>>,
    load: f64,
    day: f64,
    price: f64,
    link: f64,
    prefill_share: f64,
    peak_share: f64,
    search_up_to: usize,
    detailed: bool,
    seed: u64,
    svg: Option<String>,
}

const FLAGS: &str = "--replicas, --trace, --load, --day, --price, --link, --prefill-share, --peak-share, --search-up-to, --detailed, \
                     --seed or --svg";

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Options, String> {
        let mut options = Options {
            replicas: vec![10, 100, 1000, 10_000],
            trace: None,
            load: LOAD,
            day: DAY,
            price: PRICE,
            link: 50.0,
            prefill_share: PREFILL_SHARE,
            peak_share: 1.0,
            search_up_to: 100,
            detailed: false,
            seed: 1,
            svg: None,
        };
        while let Some(flag) = args.next() {
            if flag == "--detailed" {
                options.detailed = true;
                continue;
            }
            let value = args.next().ok_or(format!("{flag}: expected a value"))?;
            let wrong = |expected: &str| format!("{flag}: found {value:?}, expected {expected}");
            let positive =
                || value.parse().ok().filter(|v: &f64| *v > 0.0 && v.is_finite()).ok_or(wrong("a number above 0"));
            let share =
                || positive().and_then(|v| if v <= 1.0 { Ok(v) } else { Err(wrong("a number above 0, at most 1")) });
            let count = |text: &str| text.parse().ok().filter(|n| (1..=100_000).contains(n));
            match flag.as_str() {
                "--replicas" => {
                    let counts: Option<Vec<usize>> = value.split(',').map(count).collect();
                    options.replicas = counts.ok_or(wrong("numbers from 1 to 100000, with commas between them"))?;
                }
                "--trace" => {
                    let text = std::fs::read_to_string(&value).map_err(|e| wrong(&format!("a CSV file: {e}")))?;
                    let most = CostModel::llama_8b_on_h100().max_model_len;
                    let trace = parse_csv(&text, most).map_err(|e| format!("--trace {value}: {e}"))?;
                    options.day = trace.last().map_or(options.day, |last| last.at.max(1.0));
                    options.trace = Some(trace);
                }
                "--load" => options.load = positive()?,
                "--day" => options.day = positive()?,
                "--price" => options.price = positive()?,
                "--link" => options.link = positive()?,
                "--prefill-share" => options.prefill_share = share()?,
                "--peak-share" => options.peak_share = share()?,
                "--search-up-to" => options.search_up_to = value.parse().map_err(|_| wrong("a number of replicas"))?,
                "--seed" => options.seed = value.parse().map_err(|_| wrong("an integer"))?,
                "--svg" => options.svg = Some(value),
                _ => return Err(format!("unknown flag {flag}: expected {FLAGS}")),
            }
        }
        Ok(options)
    }

    /// Runs a fleet at a load in conversations per minute and replica.
    fn run(&self, cost: &CostModel, routing: Routing, replicas: usize, load: f64) -> Report {
        let rate = load / 60.0 * replicas as f64;
        let shape = Shape::chat(self.day, rate, cost.max_model_len, self.seed);
        let setup = Setup {
            prefill_share: self.prefill_share,
            link: 1e9 * self.link,
            ..Setup::new(replicas, routing, cost, self.seed)
        };
        let traffic: Box<dyn Iterator<Item = Conversation>> = match &self.trace {
            Some(trace) => Box::new((0..).zip(trace).map(|(number, arrival)| Conversation::single(number, *arrival))),
            None => Box::new(shape.conversations()),
        };
        if self.detailed {
            setup.run(&shape, traffic, || Detailed::new(cost))
        } else {
            setup.run(&shape, traffic, || Coarse::new(cost))
        }
    }

    /// Searches for the greatest load that meets a goal.
    fn capacity(&self, cost: &CostModel, routing: Routing, replicas: usize, goal: Goal) -> Option<Capacity> {
        let (mut met, mut missed) = (0, LOADS + 1);
        let mut best = None;
        while missed - met > 1 {
            let middle = (met + missed) / 2;
            let load = STEP * middle as f64;
            let report = self.run(cost, routing, replicas, load);
            if goal.is_met(&report) {
                (met, best) = (middle, Some(Capacity { load, cost: report.cost_per_million(self.price) }));
            } else {
                missed = middle;
            }
        }
        best
    }

    fn row(&self, cost: &CostModel, routing: Routing, replicas: usize) -> Row {
        let report = self.run(cost, routing, replicas, self.load);
        let is_searched = replicas <= self.search_up_to && self.trace.is_none();
        let capacity = |goal| if is_searched { self.capacity(cost, routing, replicas, goal) } else { None };
        Row::new(routing, &report, self.price, Goal::ALL.map(capacity))
    }
}

/// Runs the subcommand.
pub fn report(args: impl Iterator<Item = String>) -> Result<(), String> {
    let options = Options::parse(args)?;
    let full = CostModel::llama_8b_on_h100();
    let cost = CostModel { peak: full.peak * options.peak_share, ..full };
    let traffic = match &options.trace {
        Some(trace) => format!("{} requests of a file", trace.len()),
        None => format!("{:.0} new conversations per minute and replica", options.load),
    };
    let title = format!("{}; {traffic}", cost.name);
    println!("{title}\n\n{}", Row::HEAD);
    let mut rows = Vec::new();
    for &replicas in &options.replicas {
        // The real scheduler cannot receive a cache, and one replica cannot be two.
        let is_possible = |r: &Routing| *r != Routing::Disaggregated || replicas > 1 && !options.detailed;
        let policies: Vec<Routing> = Routing::ALL.into_iter().filter(is_possible).collect();
        // A run is a pure function, so the threads change nothing but the time.
        let (options, cost) = (&options, &cost);
        let done: Vec<_> = std::thread::scope(|scope| {
            let start = |routing| scope.spawn(move || options.row(cost, routing, replicas));
            let threads: Vec<_> = policies.into_iter().map(start).collect();
            threads.into_iter().map(|thread| thread.join()).collect()
        });
        for row in done {
            let row = row.map_err(|_| "a run failed; its message is above")?;
            println!("{row}");
            rows.push(row);
        }
    }
    if let Some(path) = &options.svg {
        std::fs::write(path, draw(&title, &rows)).map_err(|e| format!("--svg {path}: {e}"))?;
    }
    Ok(())
}
