//! The page of `quire serve` in a real headless Chromium: `cargo xtask page-test`.
//!
//! Each test serves the demo model on a free port and has a browser of its own, which it controls over WebDriver (`chromedriver`, from
//! Debian's `chromium-driver` or from Chrome's downloads). Tests wait for what they expect up to a time limit. None depends on how
//! long something took.

mod answers;
mod conversations;
mod driver;

use base64::prelude::{BASE64_STANDARD, Engine};
use testkit::capability::{self, Capability};
use testkit::{not_run, workspace};
use xtask::cargo;
use xtask::server::Server;

use driver::{Driver, Page};

/// API key of the server that has one.
const KEY: &str = "page-test-key";

/// A small cache, so that the grid of blocks is small.
const SMALL: [&str; 2] = ["--kv-cache-memory-bytes", "64M"];

const DESKTOP: (u32, u32) = (1280, 800);
const PHONE: (u32, u32) = (390, 844);

/// WebDriver's names of keys.
const TAB: &str = "\u{E004}";
const ENTER: &str = "\u{E007}";
const ESCAPE: &str = "\u{E00C}";
const RIGHT: &str = "\u{E014}";

const CAPITAL: &str = "What is the capital of France?";
const PARIS: &str = "The capital of France is Paris.";
const STORY: &str = "Tell me a story about a fox.";
/// Settings for a long answer.
const LONG: &[(&str, &str)] = &[("min_tokens", "900"), ("max_tokens", "900")];
const GREEDY: &[(&str, &str)] = &[("temperature", "0")];

/// An answer with each kind of block.
const MUCH: &str = "# Head\\n\\n1. one\\n   - two\\n\\n| a | b |\\n|---|---|\\n| `1` | [2](https://example.org) |\\n\\n> quote\\n\\n```js\\nlet a = 1;\\n```\\n\\nend";

/// Text of the newest answer, and the line below it.
const ANSWER: &str = "([...document.querySelectorAll('.turn.assistant .text')].at(-1)?.textContent ?? '')";
const FOOT: &str = "[...document.querySelectorAll('.turn.assistant .foot')].at(-1).textContent";
const FOCUS: &str = "document.activeElement.id";
const IDLE: &str = "return !document.getElementById('send').hidden";
const LIVE: &str = "return document.getElementById('link').dataset.state === 'live' && document.querySelector('#model option') !== null";

/// A server and a driver of browsers, for one test.
struct Site {
    driver: Driver,
    server: Server,
}

impl Site {
    /// Builds and starts both; reports a test that did not run and returns `None` without a browser.
    fn start(args: &[&str]) -> Result<Option<Site>, String> {
        let Some((driver, browser)) = capability::chromium() else {
            not_run::report(Capability::Chromium, "found no chromedriver and Chromium on PATH");
            return Ok(None);
        };
        let binary = cargo::build_quire(&workspace::root(), "dev")?;
        let server = Server::start(&binary, ["--shutdown-timeout", "0"].iter().chain(args).copied())?;
        Ok(Some(Site { driver: Driver::start(&driver, browser)?, server }))
    }

    fn open(&self, size: (u32, u32), dark: bool) -> Result<Page<'_>, String> {
        let page = self.driver.open(&self.server.url, size, dark)?;
        page.until("the page shows the engine", LIVE)?;
        Ok(page)
    }

    /// Requires an empty console, and requests to the server only.
    fn close(&self, page: &Page<'_>) -> Result<(), String> {
        let (console, addresses) = page.logs()?;
        require(console.is_empty(), || format!("on the console: {}", console.join("; ")))?;
        self.require_own(&addresses)
    }

    fn require_own(&self, addresses: &[String]) -> Result<(), String> {
        let foreign: Vec<&String> =
            addresses.iter().filter(|url| url.starts_with("http") && !url.starts_with(&self.server.url)).collect();
        require(foreign.is_empty(), || format!("requests to other servers: {foreign:?}"))?;
        require(addresses.iter().any(|url| url.ends_with("/quire/events")), || format!("no events in {addresses:?}"))
    }
}

fn require(holds: bool, problem: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(problem()) }
}

/// Requires that the text of a JavaScript expression meets a condition.
fn require_text(page: &Page<'_>, what: &str, script: &str, holds: impl Fn(&str) -> bool) -> Result<(), String> {
    let value = page.script(&format!("return {script}"))?;
    let text = value.as_str().unwrap_or_default();
    require(holds(text), || format!("{what}: found {text:?}"))
}

/// Sends a message with these settings, and records every text that the answer has had.
fn send(page: &Page<'_>, message: &str, settings: &[(&str, &str)]) -> Result<(), String> {
    for (id, value) in settings {
        page.script(&format!("document.getElementById('{id}').value = '{value}'"))?;
    }
    page.script(&format!(
        "window.seen = [];
         new MutationObserver(() => {{ const text = {ANSWER}; if (window.seen.at(-1) !== text) window.seen.push(text); }})
             .observe(document.getElementById('log'), {{ childList: true, subtree: true, characterData: true }});
         document.getElementById('message').value = '{message}';
         document.getElementById('send').click()"
    ))
    .map(drop)
}

/// Sends a message and waits for the end of the answer.
fn ask(page: &Page<'_>, message: &str, settings: &[(&str, &str)]) -> Result<(), String> {
    send(page, message, settings)?;
    page.until("the answer is complete", IDLE)
}

/// Runs a script in the page as soon as the answer has some text.
fn at_first_text(page: &Page<'_>, script: &str) -> Result<(), String> {
    let timer = format!(
        "const timer = setInterval(() => {{ if ({ANSWER}.length > 10) {{ clearInterval(timer); {script} }} }}, 1)"
    );
    page.script(&timer).map(drop)
}

#[test]
#[ignore = "only by cargo xtask page-test"]
fn an_answer_is_streamed() -> Result<(), String> {
    let Some(site) = Site::start(&SMALL)? else { return Ok(()) };
    let page = site.open(DESKTOP, false)?;
    ask(&page, CAPITAL, GREEDY)?;
    require_text(&page, "the answer", ANSWER, |text| text == PARIS)?;
    ask(&page, STORY, &[("min_tokens", "400"), ("max_tokens", "400")])?;
    let steps =
        page.script("return window.seen.filter((text, i) => i === 0 || text.startsWith(window.seen[i - 1])).length")?;
    require(steps.as_u64() > Some(3), || format!("the text came in {steps} pieces"))?;
    require_text(&page, "below the answer", FOOT, |foot| foot.starts_with("400 tokens") && foot.contains("limit"))?;
    // What a screen reader says at the end.
    require_text(&page, "the status", "document.getElementById('status').textContent", |status| {
        status.starts_with("Answer complete. 400 tokens")
    })?;
    site.close(&page)
}

#[test]
#[ignore = "only by cargo xtask page-test"]
fn a_stop_ends_the_answer_and_frees_its_blocks() -> Result<(), String> {
    let Some(site) = Site::start(&SMALL)? else { return Ok(()) };
    let page = site.open(DESKTOP, false)?;
    at_first_text(&page, "document.getElementById('stop').click();")?;
    ask(&page, STORY, LONG)?;
    require_text(&page, "below the answer", FOOT, |foot| foot.ends_with("stopped"))?;
    page.until("the blocks are freed", "return document.getElementById('blocks').ariaLabel.includes(' 0 in use')")?;
    let length = page.script(&format!("return {ANSWER}.length"))?;
    page.script("return new Promise((done) => setTimeout(done, 300))")?;
    require(page.script(&format!("return {ANSWER}.length"))? == length, || "the text went on".to_owned())?;
    site.close(&page)
}

/// Records the body of every request of the page.
const RECORD_BODIES: &str = "window.bodies = [];
    window.real = window.real ?? window.fetch;
    window.fetch = (url, options) => {
        if (options?.body) window.bodies.push(JSON.parse(options.body));
        return window.real.call(window, url, options);
    }";

/// Roles and texts of the messages of the last request.
const LAST_MESSAGES: &str =
    "window.bodies.at(-1).messages.map((message) => `${message.role}: ${message.content}`).join(' | ')";

#[test]
#[ignore = "only by cargo xtask page-test"]
fn a_new_chat_drops_the_answer_that_is_still_streaming() -> Result<(), String> {
    let Some(site) = Site::start(&SMALL)? else { return Ok(()) };
    let page = site.open(DESKTOP, false)?;
    page.script(RECORD_BODIES)?;
    at_first_text(
        &page,
        &format!(
            "document.getElementById('fresh').click();
             document.getElementById('max_tokens').value = document.getElementById('min_tokens').value = '';
             document.getElementById('message').value = '{CAPITAL}';
             document.getElementById('send').click();"
        ),
    )?;
    send(&page, STORY, &[GREEDY, LONG].concat())?;
    page.until(
        "the new chat is answered",
        &format!("return {ANSWER} === '{PARIS}' && !document.getElementById('send').hidden"),
    )?;
    let turns = page.script("return document.querySelectorAll('.turn').length")?;
    require(turns == 2, || format!("the new chat shows {turns} turns"))?;
    send(&page, "What is 12 plus 7?", &[])?;
    page.until(
        "the next answer is complete",
        "return window.bodies.length === 3 && !document.getElementById('send').hidden",
    )?;
    let expected = format!("user: {CAPITAL} | assistant: {PARIS} | user: What is 12 plus 7?");
    require_text(&page, "the next request", LAST_MESSAGES, |sent| sent == expected)?;
    site.close(&page)
}

#[test]
#[ignore = "only by cargo xtask page-test"]
fn a_stopped_question_can_be_sent_again() -> Result<(), String> {
    let Some(site) = Site::start(&SMALL)? else { return Ok(()) };
    let page = site.open(DESKTOP, false)?;
    page.script(RECORD_BODIES)?;
    // No token comes, so only the stop ends the answer.
    page.script(
        "window.recording = window.fetch;
         window.fetch = (url, { signal }) => new Promise((_, reject) =>
             signal.addEventListener('abort', () => reject(new DOMException('stopped', 'AbortError'))))",
    )?;
    send(&page, "What is 2 plus 2?", GREEDY)?;
    page.until("the stop button is shown", "return !document.getElementById('stop').hidden")?;
    page.script("document.getElementById('stop').click()")?;
    page.until("the answer is stopped", IDLE)?;
    require_text(&page, "the message", "document.getElementById('notice').textContent", |text| {
        text.starts_with("Stopped before the first token.")
    })?;
    let message = "document.getElementById('message').value";
    require_text(&page, "the message box", message, |left| left == "What is 2 plus 2?")?;
    page.script("window.fetch = window.recording")?;
    send(&page, CAPITAL, &[])?;
    page.until(
        "the answer is complete",
        "return window.bodies.length === 1 && !document.getElementById('send').hidden",
    )?;
    require_text(&page, "the next request", LAST_MESSAGES, |sent| sent == format!("user: {CAPITAL}"))?;
    site.close(&page)
}

#[test]
#[ignore = "only by cargo xtask page-test"]
fn invalid_stored_settings_are_ignored() -> Result<(), String> {
    let Some(site) = Site::start(&SMALL)? else { return Ok(()) };
    let page = site.open(DESKTOP, false)?;
    for invalid in ["{", "null", "[1]", "5", r#"{"system": {"a": 1}, "seed": "x", "top_k": "7"}"#] {
        page.script(&format!("localStorage.setItem('quire-settings', '{invalid}')"))?;
        page.reload()?;
        page.until("the page shows the engine", LIVE)?;
    }
    let settings = "['system', 'seed', 'top_k'].map((id) => document.getElementById(id).value).join('|')";
    require_text(&page, "the settings", settings, |shown| shown == "||7")?;
    site.close(&page)
}

#[test]
#[ignore = "only by cargo xtask page-test"]
fn blocks_appear_and_stay_cached() -> Result<(), String> {
    let Some(site) = Site::start(&SMALL)? else { return Ok(()) };
    let page = site.open(DESKTOP, false)?;
    let idle = page.script(include_str!("colours.js"))?;
    require(idle == 1, || format!("an idle pool has {idle} colours"))?;
    send(&page, STORY, LONG)?;
    page.until("a request is listed, and blocks have its colour", "return window.rows === 1 && window.owned >= 2")?;
    page.until("the answer is complete", IDLE)?;
    page.until("the list is empty", "return !document.getElementById('none').hidden")?;
    page.until("its blocks stay cached", "return Number(document.getElementById('count-cached').textContent) > 50")?;
    page.until("cached blocks have a colour", "return window.colours().size === 2")?;
    require_text(&page, "owned blocks", "document.getElementById('count-owned').textContent", |owned| owned == "0")?;
    site.close(&page)
}

#[test]
#[ignore = "only by cargo xtask page-test"]
fn the_page_can_be_used_with_the_keyboard_only() -> Result<(), String> {
    let Some(site) = Site::start(&SMALL)? else { return Ok(()) };
    let page = site.open(DESKTOP, false)?;
    require_text(&page, "the focus at the start", FOCUS, |id| id == "message")?;
    page.keys(&"What is 2 plus 2?".split("").filter(|key| !key.is_empty()).collect::<Vec<_>>())?;
    page.keys(&[ENTER])?;
    page.until(
        "Enter sends, and the answer comes",
        &format!("return {ANSWER}.length > 0 && !document.getElementById('send').hidden"),
    )?;
    page.keys(&[TAB, TAB, ENTER])?;
    require_text(&page, "the focus after two Tabs", FOCUS, |id| id == "settings-toggle")?;
    page.until("the settings open", "return !document.getElementById('settings').hidden")?;
    for _ in 0..40 {
        page.keys(&[TAB])?;
        if page.script(&format!("return {FOCUS}"))? == "blocks" {
            break;
        }
    }
    require_text(&page, "the focus after more Tabs", FOCUS, |id| id == "blocks")?;
    page.keys(&[RIGHT])?;
    let detail = "document.getElementById('block-detail').textContent";
    require_text(&page, "the block after an arrow key", detail, |detail| detail.starts_with("Block 1: "))?;
    page.script("document.getElementById('message').focus(); document.getElementById('min_tokens').value = 900; document.getElementById('max_tokens').value = 900")?;
    page.keys(&["H", "i", ENTER, ESCAPE])?;
    page.until("Escape stops", IDLE)?;
    // Below the answer, or instead of it if no token came before Escape.
    let stopped = format!("{FOOT} + document.getElementById('notice').textContent");
    require_text(&page, "what was stopped", &stopped, |text| text.to_lowercase().contains("stopped"))?;
    let outline = "getComputedStyle(document.querySelector('.write')).boxShadow";
    require_text(&page, "the outline of the focus", outline, |outline| outline != "none")?;
    site.close(&page)
}

#[test]
#[ignore = "only by cargo xtask page-test"]
fn every_layout_is_legible_labelled_and_fits() -> Result<(), String> {
    let Some(site) = Site::start(&SMALL)? else { return Ok(()) };
    for (size, dark) in [(DESKTOP, false), (DESKTOP, true), (PHONE, false), (PHONE, true), ((320, 640), false)] {
        let layout = format!("{} pixels, {}", size.0, if dark { "dark" } else { "light" });
        let page = site.open(size, dark)?;
        page.script(include_str!("tools.js"))?;
        page.script("set('logprobs', true)")?;
        ask(&page, CAPITAL, GREEDY)?;
        conversations::scripted(&page, "Show much.", MUCH)?;
        page.script("press('Edit', -2); set('schema', '['); document.getElementById('settings-toggle').click()")?;
        for view in ["chat", "engine", "list"] {
            match view {
                "list" => page.script("document.getElementById('chats-open').click()")?,
                _ => page.script(&format!("document.getElementById('view-{view}').click()"))?,
            };
            page.script("return new Promise((done) => setTimeout(done, 200))")?;
            let over = page.script("return document.documentElement.scrollWidth - window.innerWidth")?;
            require(over.as_i64() <= Some(0), || format!("{layout}, {view}: {over} pixels too wide"))?;
            let faint = page.script(include_str!("contrast.js"))?;
            require(faint.as_array().is_some_and(Vec::is_empty), || {
                format!("{layout}, {view}: too little contrast: {faint}")
            })?;
            // What is behind a dialog has no name.
            let within = if view == "list" { "#chats " } else { "" };
            let kinds = "button, input, textarea, select, a, canvas, meter, img[alt]:not([alt=\"\"]), [role]";
            for (element, name) in page.names(&format!("{within}:is({kinds})"))? {
                let speaks = ["role=\"status\"", "role=\"alert\""].iter().any(|role| element.contains(role));
                require(!name.trim().is_empty() || speaks, || {
                    format!("{layout}, {view}: no accessible name: {element}")
                })?;
            }
        }
        let is_dark = page.script("return getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 100")?;
        require(is_dark == dark, || format!("{layout}: the background has the other colour scheme"))?;
        site.close(&page)?;
    }
    Ok(())
}

/// With `--api-key`, the page asks for a key, rejects a wrong one, and works with the right one.
#[test]
#[ignore = "only by cargo xtask page-test"]
fn the_page_asks_for_a_key() -> Result<(), String> {
    let Some(site) = Site::start(&[&SMALL[..], &["--api-key", KEY]].concat())? else { return Ok(()) };
    let page = site.driver.open(&site.server.url, DESKTOP, false)?;
    page.until("the page asks for a key", "return !document.getElementById('key-form').hidden")?;
    let enter = |key: &str| {
        page.script(&format!(
            "document.getElementById('key').value = '{key}'; document.getElementById('key-form').requestSubmit()"
        ))
    };
    enter("wrong")?;
    page.until(
        "a wrong key is rejected",
        "return document.getElementById('key-hint').textContent.includes('does not take')",
    )?;
    enter(KEY)?;
    page.until("the right key shows the engine", LIVE)?;
    send(&page, CAPITAL, GREEDY)?;
    page.until("the chat works with the key", &format!("return {ANSWER} === '{PARIS}'"))
}

/// Writes a PNG of the page under load, for the README, to the file that `QUIRE_SCREENSHOT` names.
#[test]
#[ignore = "only by cargo xtask page-test --screenshot"]
fn a_picture_of_the_page_under_load() -> Result<(), String> {
    let Some(site) = Site::start(&["--kv-cache-memory-bytes", "24M"])? else { return Ok(()) };
    let page = site.open(DESKTOP, false)?;
    ask(&page, CAPITAL, GREEDY)?;
    ask(&page, STORY, GREEDY)?;
    page.script(include_str!("load.js"))?;
    page.until("the charts have something to show", "return document.querySelectorAll('#requests tr').length >= 4")?;
    page.script("return new Promise((done) => setTimeout(done, 6000))")?;
    let image = BASE64_STANDARD.decode(page.screenshot()?).map_err(|error| format!("the screenshot: {error}"))?;
    let file = std::env::var_os("QUIRE_SCREENSHOT").ok_or("QUIRE_SCREENSHOT: found nothing, expected a file name")?;
    std::fs::write(&file, image).map_err(|error| format!("{}: {error}", file.display()))
}
