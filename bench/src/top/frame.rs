//! One frame of `quire top`: formats the server's state as lines of text, without I/O.
//!
//! ```text
//! quire-demo  context 1024  up 12 s  2 running  1 waiting  0 swapped
//! decode 812.0 tok/s  prefill 96.0 tok/s  batch 2.0  steps 400.0/s  cache hits 63 %  preempted 0
//! blocks [####++++........]  in use 24  cached 80  free 510  of 614
//! ranks 4  tensor parallel 2  pipeline parallel 2
//! host blocks 300  swapped 12  cached 100
//! drafts 412  accepted 63 %  by position 80 65 44 %
//! adapters 3  sql 2 running 1 waiting  fr 1 running 0 waiting
//! stored 120  5 MB  in the background 2  resumed 1  left 0
//! ```
//!
//! Each line after the third is missing if there is nothing to show: one rank, no host tier, no verified draft, no
//! adapter, nothing stored.
//!
//! The numbers of a large server fit in 100 columns; a long model name is shortened to make room for them.

use std::cmp::Reverse;
use std::fmt::Write;

use serde_json::Value;

use super::Sort;

/// SGR codes of text.
const BOLD: &str = "1";
const SOFT: &str = "2";
const BLUE: &str = "34";

/// Formats a frame of at most this many columns and lines.
pub fn draw(state: &Value, sort: Sort, (width, height): (usize, usize), colour: bool) -> String {
    let paint = |code: &str, text: &str| if colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_string() };
    let mut lines = vec![
        paint(BOLD, &cut(&title(state, width), width)),
        cut(&speed(state), width),
        pool(state, width, &|code, text| paint(code, text)),
    ];
    let further = [ranks(state), host(state), drafts(state), adapters(state), stored(state)];
    lines.extend(further.into_iter().flatten().map(|line| cut(&line, width)));
    lines.extend([String::new(), paint(SOFT, &cut(HEAD, width))]);
    let requests = sorted(state, sort);
    let rows = height.saturating_sub(lines.len() + 1);
    let unlisted = state["requests_left_out"].as_u64().unwrap_or(0) as usize;
    let shown = if requests.len() + unlisted > rows { rows.saturating_sub(1) } else { requests.len() };
    lines.extend(requests.iter().take(shown).map(|request| cut(&row(request), width)));
    match requests.len() + unlisted - shown.min(requests.len()) {
        0 if requests.is_empty() => lines.push("no requests".to_string()),
        0 => {}
        more => lines.push(format!("… and {more} more")),
    }
    let order = format!("{sort:?}").to_lowercase();
    lines.push(paint(SOFT, &cut(&format!("order: {order}   s: next order   q: quit"), width)));
    lines.join("\n") + "\n"
}

const HEAD: &str = "   REQUEST  STATE            AGE  SEQS   PROMPT   CACHED   OUTPUT   BLOCKS  PREEMPTED";

fn title(state: &Value, width: usize) -> String {
    let stats = &state["stats"];
    let numbers = format!(
        "  context {}  up {:.0} s  {} running  {} waiting  {} swapped",
        state["max_model_len"],
        state["uptime"].as_f64().unwrap_or(0.0),
        stats["running"],
        stats["waiting"],
        stats["swapped"]
    );
    cut(state["model"].as_str().unwrap_or("?"), width.saturating_sub(numbers.len())) + &numbers
}

/// A number in at most five characters, up to 999 million.
fn compact(number: f64) -> String {
    match number {
        n if n < 999.95 => format!("{n:.1}"),
        n if n < 99_999.5 => format!("{n:.0}"),
        n if n < 9_999_500.0 => format!("{:.0}k", n / 1e3),
        n => format!("{:.0}M", n / 1e6),
    }
}

fn speed(state: &Value) -> String {
    let (rates, stats) = (&state["rates"], &state["stats"]);
    let rate = |name: &str| compact(rates[name].as_f64().unwrap_or(0.0));
    let count = |name: &str| stats[name].as_u64().unwrap_or(0);
    let hits = match count("prefix_cache_queries") {
        0 => "-".to_string(),
        queries => format!("{} %", share(count("prefix_cache_hits"), queries)),
    };
    format!(
        "decode {} tok/s  prefill {} tok/s  batch {}  steps {}/s  cache hits {hits}  preempted {}",
        rate("decode"),
        rate("prefill"),
        rate("batch"),
        rate("steps"),
        count("preemptions")
    )
}

/// The ranks; `None` if there is one.
fn ranks(state: &Value) -> Option<String> {
    let size = |name: &str| state["ranks"][name].as_u64().unwrap_or(1);
    let (tensor, pipeline) = (size("tensor_parallel"), size("pipeline_parallel"));
    let all = tensor.saturating_mul(pipeline);
    (all > 1).then(|| format!("ranks {all}  tensor parallel {tensor}  pipeline parallel {pipeline}"))
}

/// The blocks of host memory; `None` if there are none.
fn host(state: &Value) -> Option<String> {
    let count = |name: &str| state["blocks"][name].as_u64().unwrap_or(0);
    let total = Some(count("host_total")).filter(|total| *total > 0)?;
    Some(format!("host blocks {total}  swapped {}  cached {}", count("host_in_use"), count("host_cached")))
}

/// The LoRA adapters, those with requests first; `None` if there are none.
fn adapters(state: &Value) -> Option<String> {
    let listed = state["adapters"].as_array().filter(|list| !list.is_empty())?;
    let count = |adapter: &Value, name: &str| adapter[name].as_u64().unwrap_or(0);
    let mut used: Vec<&Value> = listed.iter().collect();
    used.retain(|adapter| count(adapter, "running") > 0 || count(adapter, "waiting") > 0);
    used.sort_by_key(|adapter| Reverse((count(adapter, "running"), count(adapter, "waiting"))));
    let mut line = format!("adapters {}", listed.len() as u64 + state["adapters_left_out"].as_u64().unwrap_or(0));
    for adapter in used {
        let name = adapter["name"].as_str().unwrap_or("?");
        // Writing to a String cannot fail.
        let _ = write!(line, "  {name} {} running {} waiting", count(adapter, "running"), count(adapter, "waiting"));
    }
    Some(line)
}

/// How many drafts were accepted, in all and by position; `None` if there were none.
fn drafts(state: &Value) -> Option<String> {
    let stats = &state["stats"]["spec_decode"];
    let count = |name: &str| stats[name].as_u64().filter(|count| *count > 0);
    let (verified, drafts) = (count("num_drafts")?, count("num_draft_tokens")?);
    let accepted = count("num_accepted_tokens").unwrap_or(0);
    let mut line = format!("drafts {drafts}  accepted {} %  by position", share(accepted, drafts));
    for accepted in stats["accepted_per_pos"].as_array().into_iter().flatten() {
        // Writing to a String cannot fail.
        let _ = write!(line, " {}", share(accepted.as_u64().unwrap_or(0), verified));
    }
    Some(line + " %")
}

/// What the server has stored, and the work that goes on without a client; `None` if there is nothing.
fn stored(state: &Value) -> Option<String> {
    let stored = &state["stored"];
    let count = |name: &str| stored[name].as_u64().unwrap_or(0);
    let (records, bytes) = (count("records"), count("bytes"));
    if records == 0 {
        return None;
    }
    let (running, resumed, left) = (count("running"), count("resumed"), count("left"));
    Some(format!(
        "stored {records}  {} MB  in the background {running}  resumed {resumed}  left {left}",
        bytes.div_ceil(1 << 20)
    ))
}

/// A part in percent, rounded down.
fn share(part: u64, all: u64) -> u64 {
    (u128::from(part) * 100 / u128::from(all.max(1))) as u64
}

/// The pool as a bar: `#` in use, `+` cached, `.` free. A count above 0 has at least one character.
fn pool(state: &Value, width: usize, paint: &dyn Fn(&str, &str) -> String) -> String {
    let blocks = &state["blocks"];
    let count = |name: &str| blocks[name].as_u64().unwrap_or(0) as usize;
    let (total, used, cached) = (count("total"), count("in_use"), count("cached"));
    let numbers = format!("  in use {used}  cached {cached}  free {}  of {total}", count("free"));
    let columns = width.saturating_sub("blocks []".len() + numbers.len()).clamp(1, 60);
    let share = |count: usize| (count * columns).div_ceil(total.max(1)).min(columns);
    let used = share(used);
    let cached = share(cached).min(columns - used);
    let free = ".".repeat(columns - used - cached);
    format!("blocks [{}{}{free}]{numbers}", paint(BLUE, &"#".repeat(used)), paint(SOFT, &"+".repeat(cached)))
}

fn sorted(state: &Value, sort: Sort) -> Vec<&Value> {
    let mut requests: Vec<&Value> = state["requests"].as_array().into_iter().flatten().collect();
    let number = |request: &Value, name: &str| request[name].as_u64().unwrap_or(0);
    match sort {
        Sort::Queue => {}
        Sort::Age => requests.sort_by(|a, b| {
            let age = |request: &Value| request["age"].as_f64().unwrap_or(0.0);
            age(b).total_cmp(&age(a))
        }),
        Sort::Blocks => requests.sort_by_key(|request| Reverse(number(request, "blocks"))),
        Sort::Tokens => requests.sort_by_key(|request| Reverse(number(request, "generated_tokens"))),
    }
    requests
}

fn row(request: &Value) -> String {
    let number = |name: &str| request[name].as_u64().unwrap_or(0);
    let state = match (request["state"].as_str(), number("computed_tokens"), number("prompt_tokens")) {
        (Some("running"), computed, prompt) if computed < prompt => format!("prefill {}%", 100 * computed / prompt),
        (state, ..) => state.unwrap_or("?").to_string(),
    };
    let mut line = format!("{:>10}  {state:<11}{:>9.1}", number("id"), request["age"].as_f64().unwrap_or(0.0));
    for (name, width) in [
        ("sequences", 6),
        ("prompt_tokens", 9),
        ("cached_tokens", 9),
        ("generated_tokens", 9),
        ("blocks", 9),
        ("preemptions", 11),
    ] {
        // Writing to a String cannot fail.
        let _ = write!(line, "{:>width$}", number(name));
    }
    line
}

/// The first characters of a line, without what the server sent to control the terminal.
fn cut(line: &str, width: usize) -> String {
    line.chars().filter(|c| !c.is_control()).take(width).collect()
}
