//! `quire top`: shows a running server in the terminal, from the same state as the server's page.
//!
//! It reads `/quire/state` every `--interval` and draws a frame of text. Colours are used only on a terminal, without `--once`, and if
//! `NO_COLOR` is not set. `q` quits, `s` selects the next order of the requests.

pub mod frame;

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use crossterm::event::{Event, KeyCode, KeyModifiers, poll, read};
use crossterm::{cursor, execute, terminal};
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::Error;
use crate::client::Server;
use crate::values;

/// Order of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Sort {
    /// Running, swapped, then waiting requests, as in the engine.
    Queue,
    /// Oldest first.
    Age,
    /// Most blocks first.
    Blocks,
    /// Most output tokens first.
    Tokens,
}

impl Sort {
    /// The next order, after the last one the first.
    fn next(self) -> Sort {
        let all = Sort::value_variants();
        all[(self as usize + 1) % all.len()]
    }
}

/// Flags of `quire top`.
#[derive(Debug, Args)]
pub struct TopArgs {
    /// Address of the server
    #[arg(value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// Settings file; its keys are flags without the leading dashes
    #[arg(long, value_name = "FILE", env = "QUIRE_CONFIG")]
    pub config: Option<PathBuf>,
    /// API key for the server
    #[arg(long, value_name = "KEY", value_parser = values::key, env = "QUIRE_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
    /// Order of the requests; press s for the next one
    #[arg(long, value_enum, default_value = "queue")]
    pub sort: Sort,
    /// Milliseconds between two updates
    #[arg(long, value_name = "MS", default_value_t = 500, value_parser = values::whole::<u64>)]
    pub interval: u64,
    /// Print one frame without colours and quit
    #[arg(long)]
    pub once: bool,
}

/// Shows the server once, or until `q` is pressed.
///
/// # Errors
/// The address is invalid; with `--once` or without a terminal also if the server does not answer.
pub fn run(args: &TopArgs) -> Result<(), Error> {
    let server =
        Server::new(&args.url, args.api_key.clone()).map_err(|problem| Error::Usage(format!("URL: {problem}")))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    if args.once || !io::stdout().is_terminal() {
        let state = fetch(&runtime, &server).map_err(Error::Failed)?;
        return Ok(write!(io::stdout(), "{}", frame::draw(&state, args.sort, (100, 40), false))?);
    }
    let _screen = Screen::enter()?;
    let colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut sort = args.sort;
    let mut state = fetch(&runtime, &server);
    let mut fetched = Instant::now();
    loop {
        let size = terminal::size().unwrap_or((80, 24));
        let text = match &state {
            Ok(state) => frame::draw(state, sort, (size.0.into(), usize::from(size.1) - 1), colour),
            Err(problem) => format!("{problem}\n\ntrying again; press q to quit\n"),
        };
        show(&text)?;
        let interval = Duration::from_millis(args.interval.max(100));
        if poll(interval.saturating_sub(fetched.elapsed()))? {
            match read()? {
                Event::Key(key) if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) => {
                    return Ok(());
                }
                Event::Key(key) if matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) => return Ok(()),
                Event::Key(key) if key.code == KeyCode::Char('s') => sort = sort.next(),
                _ => {}
            }
        } else {
            state = fetch(&runtime, &server);
            fetched = Instant::now();
        }
    }
}

fn fetch(runtime: &Runtime, server: &Server) -> Result<Value, String> {
    runtime.block_on(async {
        let text = server.send("/quire/state", None).await?.text().await?;
        serde_json::from_str(&text).map_err(|error| {
            format!("/quire/state: found an answer that is not JSON ({error}), expected a Quire server")
        })
    })
}

/// Draws a frame over the last one. Lines are overwritten, not cleared first, so that the screen does not flicker.
fn show(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    execute!(out, cursor::MoveTo(0, 0))?;
    for line in text.lines() {
        write!(out, "{line}\x1b[K\r\n")?;
    }
    write!(out, "\x1b[J")?;
    out.flush()
}

/// The terminal's alternate screen in raw mode; the terminal is restored on drop.
struct Screen;

impl Screen {
    fn enter() -> io::Result<Screen> {
        terminal::enable_raw_mode()?;
        let screen = Screen;
        execute!(io::stdout(), terminal::EnterAlternateScreen, cursor::Hide)?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // An error here cannot be reported: the terminal is gone.
        let _ = execute!(io::stdout(), cursor::Show, terminal::LeaveAlternateScreen);
        let _ = terminal::disable_raw_mode();
    }
}
