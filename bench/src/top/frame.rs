//! One frame of `quire top`: from the state's document to lines of text. Pure.
//!
//! ```text
//! quire-demo   context 1024   up 12 s                                 2 running  1 waiting  0 swapped
//! decode   812.0 tok/s   prefill   96.0 tok/s   batch  2.0   steps  400.0/s   cache hits 63 %   preempted 0
//! blocks [####++++........]  in use 24  cached 80  free 510  of 614
//! ```

use std::cmp::Reverse;
use std::fmt::Write;

use serde_json::Value;

use super::Sort;

/// Colours of text (SGR), where there are any.
const BOLD: &str = "1";
const SOFT: &str = "2";
const BLUE: &str = "34";

/// A frame of at most so many columns and lines.
pub fn draw(state: &Value, sort: Sort, (width, height): (usize, usize), colour: bool) -> String {
    let paint = |code: &str, text: &str| if colour { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_string() };
    let mut lines = vec![
        paint(BOLD, &cut(&title(state), width)),
        cut(&speed(state), width),
        pool(state, width, &|code, text| paint(code, text)),
        String::new(),
        paint(SOFT, &cut(HEAD, width)),
    ];
    let requests = sorted(state, sort);
    let room = height.saturating_sub(lines.len() + 1);
    let unlisted = state["requests_left_out"].as_u64().unwrap_or(0) as usize;
    let shown = if requests.len() + unlisted > room { room.saturating_sub(1) } else { requests.len() };
    lines.extend(requests.iter().take(shown).map(|request| cut(&row(request), width)));
    match requests.len() + unlisted - shown.min(requests.len()) {
        0 if requests.is_empty() => lines.push("nothing runs".to_string()),
        0 => {}
        more => lines.push(format!("… and {more} more")),
    }
    let order = format!("{sort:?}").to_lowercase();
    lines.push(paint(SOFT, &cut(&format!("order: {order}   s: next order   q: end"), width)));
    lines.join("\n") + "\n"
}

const HEAD: &str = " REQUEST  STATE        AGE  SEQS   PROMPT   CACHED    DRAWN   BLOCKS  PREEMPTED";

fn title(state: &Value) -> String {
    let stats = &state["stats"];
    let model = state["model"].as_str().unwrap_or("?");
    format!(
        "{model}   context {}   up {:.0} s   {} running  {} waiting  {} swapped",
        state["max_model_len"],
        state["uptime"].as_f64().unwrap_or(0.0),
        stats["running"],
        stats["waiting"],
        stats["swapped"]
    )
}

fn speed(state: &Value) -> String {
    let (rates, stats) = (&state["rates"], &state["stats"]);
    let rate = |name: &str| rates[name].as_f64().unwrap_or(0.0);
    let count = |name: &str| stats[name].as_u64().unwrap_or(0);
    let hits = match count("prefix_cache_queries") {
        0 => "-".to_string(),
        queries => format!("{} %", 100 * count("prefix_cache_hits") / queries),
    };
    format!(
        "decode {:.1} tok/s   prefill {:.1} tok/s   batch {:.1}   steps {:.1}/s   cache hits {hits}   preempted {}",
        rate("decode"),
        rate("prefill"),
        rate("batch"),
        rate("steps"),
        count("preemptions")
    )
}

/// A bar of the pool: `#` in use, `+` cached, `.` free; whatever there is has at least one character.
fn pool(state: &Value, width: usize, paint: &dyn Fn(&str, &str) -> String) -> String {
    let blocks = &state["blocks"];
    let count = |name: &str| blocks[name].as_u64().unwrap_or(0) as usize;
    let (total, used, cached) = (count("total"), count("in_use"), count("cached"));
    let numbers = format!("  in use {used}  cached {cached}  free {}  of {total}", count("free"));
    let room = width.saturating_sub("blocks []".len() + numbers.len()).clamp(1, 60);
    let share = |count: usize| (count * room).div_ceil(total.max(1)).min(room);
    let used = share(used);
    let cached = share(cached).min(room - used);
    let free = ".".repeat(room - used - cached);
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
    let mut line = format!("{:>8}  {state:<11}", number("id"));
    // Writing to a string can not fail.
    let _ = write!(line, "{:>5.1}", request["age"].as_f64().unwrap_or(0.0));
    for (name, width) in [
        ("sequences", 6),
        ("prompt_tokens", 9),
        ("cached_tokens", 9),
        ("generated_tokens", 9),
        ("blocks", 9),
        ("preemptions", 11),
    ] {
        let _ = write!(line, "{:>width$}", number(name));
    }
    line
}

fn cut(line: &str, width: usize) -> String {
    line.chars().take(width).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn state() -> Value {
        let request = |id: u64, state: &str, age: f64, computed: u64, drawn: u64, blocks: u64| {
            json!({"id": id, "state": state, "age": age, "sequences": 1, "prompt_tokens": 100, "cached_tokens": 16,
                   "computed_tokens": computed, "generated_tokens": drawn, "blocks": blocks, "preemptions": 0})
        };
        json!({
            "model": "m", "max_model_len": 1024, "uptime": 12.3,
            "blocks": {"total": 100, "in_use": 1, "cached": 49, "free": 50},
            "stats": {"running": 2, "waiting": 1, "swapped": 0, "preemptions": 3, "prefix_cache_queries": 200, "prefix_cache_hits": 50},
            "rates": {"prefill": 10.0, "decode": 20.5, "batch": 2.0, "steps": 9.0},
            "requests": [request(1, "running", 2.0, 120, 20, 8), request(2, "running", 3.0, 50, 0, 9), request(3, "waiting", 1.0, 0, 0, 0)],
            "requests_left_out": 4,
        })
    }

    #[test]
    fn a_frame_has_the_speed_the_pool_and_every_request_that_fits() {
        let text = draw(&state(), Sort::Queue, (100, 40), false);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "m   context 1024   up 12 s   2 running  1 waiting  0 swapped");
        assert!(lines[1].contains("decode 20.5 tok/s") && lines[1].contains("cache hits 25 %"), "{}", lines[1]);
        assert!(
            lines[2].starts_with("blocks [#+") && lines[2].ends_with("free 50  of 100"),
            "one block shows: {}",
            lines[2]
        );
        let rows: Vec<Vec<&str>> = lines[5..8].iter().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["1", "running", "2.0", "1", "100", "16", "20", "8", "0"]);
        assert_eq!(rows[1][1..3], ["prefill", "50%"]);
        assert_eq!(lines[8], "… and 4 more");
        assert!(!text.contains('\x1b'));
    }

    #[test]
    fn orders_put_the_greatest_first_and_a_small_terminal_is_kept_to() {
        let first = |sort| {
            let text = draw(&state(), sort, (100, 40), false);
            text.lines().nth(5).and_then(|line| line.split_whitespace().next()).map(str::to_string)
        };
        assert_eq!(first(Sort::Age).as_deref(), Some("2"));
        assert_eq!(first(Sort::Blocks).as_deref(), Some("2"));
        assert_eq!(first(Sort::Tokens).as_deref(), Some("1"));
        let small = draw(&state(), Sort::Queue, (40, 8), false);
        assert!(small.lines().count() <= 8 && small.contains("… and 6 more"), "{small}");
        assert!(small.lines().filter(|line| !line.starts_with("blocks")).all(|line| line.chars().count() <= 40));
        assert!(draw(&state(), Sort::Queue, (100, 40), true).contains("\x1b[34m#\x1b[0m"));
        assert!(
            draw(&json!({}), Sort::Queue, (0, 0), false).contains("nothing runs"),
            "a stranger's document is no panic"
        );
    }
}
