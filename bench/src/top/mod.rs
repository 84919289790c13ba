//! `quire top`: shows a running server in the terminal, from the same state as the server's page.
//!
//! It reads `/quire/state` every `--interval` and draws a frame of text. Colours are used only on a terminal, without `--once`, and if
//! `NO_COLOR` is not set. `q` quits, `s` selects the next order of the requests.

pub mod frame;

use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers, poll, read};
use crossterm::{cursor, execute, terminal};
use serde_json::Value;
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::client::Server;
use crate::{Error, values};

/// Time limit for an answer of the server.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);

/// Greatest time that a new state waits to be drawn.
const KEY_INTERVAL: Duration = Duration::from_millis(50);

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
    ///
    /// At least 100.
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
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    if args.once || !io::stdout().is_terminal() {
        let state = runtime.block_on(fetch(&server)).map_err(Error::Failed)?;
        return Ok(write!(io::stdout(), "{}", frame::draw(&state, args.sort, (100, 40), false))?);
    }
    let _screen = Screen::enter()?;
    let colour = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut sort = args.sort;
    let interval = Duration::from_millis(args.interval.max(100));
    // Another thread waits for the server, so that keys count meanwhile.
    let (sender, mut states) = watch::channel(Err(format!("connecting to {}", args.url)));
    runtime.spawn(async move {
        while sender.send(fetch(&server).await).is_ok() {
            sleep(interval).await;
        }
    });
    let quit = loop {
        let size = terminal::size().unwrap_or((80, 24));
        let text = match &*states.borrow_and_update() {
            Ok(state) => frame::draw(state, sort, (size.0.into(), usize::from(size.1).saturating_sub(1)), colour),
            Err(problem) => format!("{problem}\n\ntrying again; press q to quit\n"),
        };
        if let Err(error) = show(&text) {
            break Err(error);
        }
        match next_key(&states) {
            Ok(Some(key)) if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) => {
                break Ok(());
            }
            Ok(Some(key)) if matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) => break Ok(()),
            Ok(Some(key)) if key.code == KeyCode::Char('s') => sort = sort.next(),
            Ok(_) => {}
            Err(error) => break Err(error),
        }
    };
    // A name may still be looked up, which cannot be cancelled.
    runtime.shutdown_background();
    Ok(quit?)
}

/// Waits for a key, a new state or another size of the terminal; `None` without a key.
fn next_key(states: &watch::Receiver<Result<Value, String>>) -> io::Result<Option<KeyEvent>> {
    while !states.has_changed().unwrap_or(false) {
        if poll(KEY_INTERVAL)? {
            return Ok(if let Event::Key(key) = read()? { Some(key) } else { None });
        }
    }
    Ok(None)
}

/// Requests the state of the server.
async fn fetch(server: &Server) -> Result<Value, String> {
    let text = async { server.send("/quire/state", None).await?.text().await };
    let text = timeout(FETCH_TIMEOUT, text).await;
    let seconds = FETCH_TIMEOUT.as_secs();
    let text = text.map_err(|_| format!("/quire/state: found no whole answer within {seconds} s, expected one"))??;
    serde_json::from_str(&text)
        .map_err(|error| format!("/quire/state: found an answer that is not JSON ({error}), expected a Quire server"))
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
