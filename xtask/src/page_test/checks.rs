//! What must hold of the page, each check in a browser of its own.

use super::driver::{Driver, Page};
use super::serve::Server;

/// The key of the server that asks for one.
pub const KEY: &str = "page-test-key";

const DESKTOP: (u32, u32) = (1280, 800);
const PHONE: (u32, u32) = (390, 844);

/// WebDriver's names of keys.
const TAB: &str = "\u{E004}";
const ENTER: &str = "\u{E007}";
const ESCAPE: &str = "\u{E00C}";
const RIGHT: &str = "\u{E014}";

/// Text of the newest answer.
const ANSWER: &str = "[...document.querySelectorAll('.turn.assistant .text')].at(-1)?.textContent ?? ''";
const FOOT: &str = "[...document.querySelectorAll('.turn.assistant .foot')].at(-1).textContent";
const IDLE: &str = "return !document.getElementById('send').hidden";
const LIVE: &str = "return document.getElementById('link').dataset.state === 'live' && /context/.test(document.getElementById('model').textContent)";

type Check = fn(&Driver, &Server) -> Result<(), String>;

/// All that need no key.
pub const ALL: [(&str, Check); 9] = [
    ("a message is answered as it streams", a_message_is_answered_as_it_streams),
    ("a stop ends the answer and frees its blocks", a_stop_ends_the_answer_and_frees_its_blocks),
    ("a new chat forgets the answer that still streams", a_new_chat_forgets_the_answer_that_still_streams),
    ("a question that was stopped unanswered can be sent again", a_stopped_question_can_be_sent_again),
    ("broken settings are ignored", broken_settings_are_ignored),
    ("blocks appear while a request runs and are cached after it", blocks_appear_and_go),
    ("the keyboard is enough", the_keyboard_is_enough),
    ("text of a model never becomes markup", text_never_becomes_markup),
    ("every look is legible, named and fits", every_look_is_legible_named_and_fits),
];

fn open<'a>(driver: &'a Driver, server: &Server, size: (u32, u32), dark: bool) -> Result<Page<'a>, String> {
    let page = driver.open(&server.url, size, dark)?;
    page.until("the page shows the engine", LIVE)?;
    Ok(page)
}

/// Nothing on the console, and no request to anybody but the server.
fn close(page: &Page<'_>, server: &Server) -> Result<(), String> {
    let (console, addresses) = page.logs()?;
    require(console.is_empty(), || format!("on the console: {}", console.join("; ")))?;
    let foreign: Vec<&String> =
        addresses.iter().filter(|url| url.starts_with("http") && !url.starts_with(&server.url)).collect();
    require(foreign.is_empty(), || format!("asked for {foreign:?}"))?;
    require(addresses.iter().any(|url| url.ends_with("/quire/events")), || format!("no events in {addresses:?}"))
}

fn require(holds: bool, problem: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(problem()) }
}

fn text(page: &Page<'_>, script: &str) -> Result<String, String> {
    Ok(page.script(&format!("return {script}"))?.as_str().unwrap_or_default().to_owned())
}

/// Sends a message with these settings, and notes every text that the answer has had.
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

fn a_message_is_answered_as_it_streams(driver: &Driver, server: &Server) -> Result<(), String> {
    let page = open(driver, server, DESKTOP, false)?;
    send(&page, "What is the capital of France?", &[("temperature", "0")])?;
    page.until("the answer is complete", IDLE)?;
    let answer = text(&page, ANSWER)?;
    require(answer == "The capital of France is Paris.", || format!("answered {answer:?}"))?;
    send(&page, "Tell me a story about a fox.", &[("min_tokens", "400"), ("max_tokens", "400")])?;
    page.until("the answer is complete", IDLE)?;
    let steps =
        page.script("return window.seen.filter((text, i) => i === 0 || text.startsWith(window.seen[i - 1])).length")?;
    require(steps.as_u64() > Some(3), || format!("the text came in {steps} pieces"))?;
    let foot = text(&page, FOOT)?;
    require(foot.starts_with("400 tokens") && foot.contains("limit"), || format!("below the answer: {foot:?}"))?;
    close(&page, server)
}

fn a_stop_ends_the_answer_and_frees_its_blocks(driver: &Driver, server: &Server) -> Result<(), String> {
    let page = open(driver, server, DESKTOP, false)?;
    // The stop is pressed from within the page, as soon as there is text.
    page.script(&format!(
        "const timer = setInterval(() => {{ if (({ANSWER}).length > 10) {{ clearInterval(timer); document.getElementById('stop').click(); }} }}, 1)"
    ))?;
    send(&page, "Tell me a story about a fox.", &[("min_tokens", "900"), ("max_tokens", "900")])?;
    page.until("the stop is taken", IDLE)?;
    let foot = text(&page, FOOT)?;
    require(foot.ends_with("stopped"), || format!("below the answer: {foot:?}"))?;
    page.until(
        "the blocks are given back",
        "return document.getElementById('blocks').ariaLabel.includes(' 0 in use')",
    )?;
    let length = page.script(&format!("return ({ANSWER}).length"))?;
    page.script("return new Promise((done) => setTimeout(done, 300))")?;
    require(page.script(&format!("return ({ANSWER}).length"))? == length, || "the text went on".to_owned())?;
    close(&page, server)
}

/// Notes the body of every request of the page.
const NOTE_BODIES: &str = "window.bodies = [];
    window.real = window.real ?? window.fetch;
    window.fetch = (url, options) => {
        if (options?.body) window.bodies.push(JSON.parse(options.body));
        return window.real.call(window, url, options);
    }";

/// Roles and texts of the messages of the last request.
const LAST_MESSAGES: &str =
    "window.bodies.at(-1).messages.map((message) => `${message.role}: ${message.content}`).join(' | ')";

fn a_new_chat_forgets_the_answer_that_still_streams(driver: &Driver, server: &Server) -> Result<(), String> {
    let page = open(driver, server, DESKTOP, false)?;
    page.script(NOTE_BODIES)?;
    // From within the page, as soon as there is text: a new chat, and at once its first message.
    page.script(&format!(
        "const timer = setInterval(() => {{
             if (({ANSWER}).length < 10) return;
             clearInterval(timer);
             document.getElementById('fresh').click();
             document.getElementById('max_tokens').value = document.getElementById('min_tokens').value = '';
             document.getElementById('message').value = 'What is the capital of France?';
             document.getElementById('send').click();
         }}, 1)"
    ))?;
    send(&page, "Tell me a story about a fox.", &[("temperature", "0"), ("min_tokens", "900"), ("max_tokens", "900")])?;
    let want = "The capital of France is Paris.";
    page.until(
        "the new chat is answered",
        &format!("return ({ANSWER}) === '{want}' && !document.getElementById('send').hidden"),
    )?;
    let turns = page.script("return document.querySelectorAll('.turn').length")?;
    require(turns == 2, || format!("the new chat shows {turns} turns"))?;
    send(&page, "What is 12 plus 7?", &[])?;
    page.until(
        "the next answer is complete",
        "return window.bodies.length === 3 && !document.getElementById('send').hidden",
    )?;
    let sent = text(&page, LAST_MESSAGES)?;
    let expected = format!("user: What is the capital of France? | assistant: {want} | user: What is 12 plus 7?");
    require(sent == expected, || format!("the next request had {sent:?}"))?;
    close(&page, server)
}

fn a_stopped_question_can_be_sent_again(driver: &Driver, server: &Server) -> Result<(), String> {
    let page = open(driver, server, DESKTOP, false)?;
    page.script(NOTE_BODIES)?;
    // No token comes: the answer ends with the stop alone.
    page.script(
        "window.noting = window.fetch;
         window.fetch = (url, { signal }) => new Promise((_, reject) =>
             signal.addEventListener('abort', () => reject(new DOMException('stopped', 'AbortError'))))",
    )?;
    send(&page, "What is 2 plus 2?", &[("temperature", "0")])?;
    page.until("the stop is offered", "return !document.getElementById('stop').hidden")?;
    page.script("document.getElementById('stop').click()")?;
    page.until("the stop is taken", IDLE)?;
    let foot = text(&page, FOOT)?;
    require(foot == "stopped before the first token", || format!("below the answer: {foot:?}"))?;
    let left = text(&page, "document.getElementById('message').value")?;
    require(left == "What is 2 plus 2?", || format!("the message box has {left:?}"))?;
    page.script("window.fetch = window.noting")?;
    send(&page, "What is the capital of France?", &[])?;
    page.until(
        "the answer is complete",
        "return window.bodies.length === 1 && !document.getElementById('send').hidden",
    )?;
    let sent = text(&page, LAST_MESSAGES)?;
    require(sent == "user: What is the capital of France?", || format!("the next request had {sent:?}"))?;
    close(&page, server)
}

fn broken_settings_are_ignored(driver: &Driver, server: &Server) -> Result<(), String> {
    let page = open(driver, server, DESKTOP, false)?;
    for broken in ["{", "null", "[1]", "5", r#"{"system": {"a": 1}, "seed": "x", "top_k": "7"}"#] {
        page.script(&format!("localStorage.setItem('quire-settings', '{broken}')"))?;
        page.reload()?;
        page.until("the page shows the engine", LIVE)?;
    }
    let shown = text(&page, "['system', 'seed', 'top_k'].map((id) => document.getElementById(id).value).join('|')")?;
    require(shown == "||7", || format!("the settings are {shown:?}"))?;
    close(&page, server)
}

fn blocks_appear_and_go(driver: &Driver, server: &Server) -> Result<(), String> {
    let page = open(driver, server, DESKTOP, false)?;
    // Colours of the cells: the grid is a canvas, and what it shows is what counts.
    page.script(
        "window.colours = () => {
             const canvas = document.getElementById('blocks');
             const copy = Object.assign(document.createElement('canvas'), { width: canvas.width, height: canvas.height });
             const pen = copy.getContext('2d', { willReadFrequently: true });
             pen.drawImage(canvas, 0, 0);
             const { data } = pen.getImageData(0, 0, copy.width, copy.height);
             const found = new Set();
             for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) found.add(`${data[i]},${data[i + 1]},${data[i + 2]}`);
             return found;
         };
         window.before = window.colours();
         window.owned = 0; window.rows = 0;
         new MutationObserver(() => {
             window.rows = Math.max(window.rows, document.querySelectorAll('#requests tr').length);
             if (document.querySelector('#requests tr')) window.owned = Math.max(window.owned, window.colours().size);
         }).observe(document.getElementById('requests'), { childList: true });",
    )?;
    require(page.script("return window.before.size")? == 1, || "an idle pool has more than one colour".to_owned())?;
    send(&page, "Tell me a story about a fox.", &[("min_tokens", "900"), ("max_tokens", "900")])?;
    page.until("a request is listed, and cells have its colour", "return window.rows === 1 && window.owned >= 2")?;
    page.until("the answer is complete", IDLE)?;
    page.until("the list is empty", "return !document.getElementById('none').hidden")?;
    page.until(
        "what was computed stays cached",
        "return Number(document.getElementById('count-cached').textContent) > 50",
    )?;
    page.until("its cells say so", "return window.colours().size === 2")?;
    let owned = text(&page, "document.getElementById('count-owned').textContent")?;
    require(owned == "0", || format!("{owned} blocks are owned by nobody"))?;
    close(&page, server)
}

fn the_keyboard_is_enough(driver: &Driver, server: &Server) -> Result<(), String> {
    let page = open(driver, server, DESKTOP, false)?;
    let focus = "document.activeElement.id";
    require(text(&page, focus)? == "message", || "the message has not the focus".to_owned())?;
    page.keys(&"What is 2 plus 2?".split("").filter(|key| !key.is_empty()).collect::<Vec<_>>())?;
    page.keys(&[ENTER])?;
    page.until(
        "Enter sends and the answer comes",
        &format!("return ({ANSWER}).length > 0 && !document.getElementById('send').hidden"),
    )?;
    page.keys(&[TAB, TAB, ENTER])?;
    require(text(&page, focus)? == "settings-toggle", || "Tab does not lead to the settings".to_owned())?;
    page.until("the settings open", "return !document.getElementById('settings').hidden")?;
    let mut order = Vec::new();
    for _ in 0..12 {
        page.keys(&[TAB])?;
        order.push(text(&page, focus)?);
        if order.last().is_some_and(|id| id == "blocks") {
            break;
        }
    }
    require(order.last().is_some_and(|id| id == "blocks"), || format!("Tab does not lead to the blocks: {order:?}"))?;
    page.keys(&[RIGHT])?;
    let detail = text(&page, "document.getElementById('block-detail').textContent")?;
    require(detail.starts_with("Block 1: "), || format!("the arrow shows {detail:?}"))?;
    page.script("document.getElementById('message').focus(); document.getElementById('min_tokens').value = 900; document.getElementById('max_tokens').value = 900")?;
    page.keys(&["H", "i", ENTER, ESCAPE])?;
    page.until("Escape stops", IDLE)?;
    let foot = text(&page, FOOT)?;
    require(foot.contains("stopped"), || format!("below the answer: {foot:?}"))?;
    let outline = text(&page, "getComputedStyle(document.querySelector('.write')).boxShadow")?;
    require(outline != "none", || "the focus can not be seen".to_owned())?;
    close(&page, server)
}

fn text_never_becomes_markup(driver: &Driver, server: &Server) -> Result<(), String> {
    let page = open(driver, server, DESKTOP, false)?;
    page.script(
        r#"return import('/page/markdown.js').then(({ render }) => {
            const text = '# A *title*\n\nsome **bold** `code` <img src=x onerror="window.hit=1">\n- one\n- [good](https://example.org/a) [bad](javascript:window.hit=1)\n```\n<script>window.hit=1</script>\n```';
            const box = document.createElement('div');
            box.id = 'box';
            box.append(...render(text));
            document.getElementById('log').append(box);
        })"#,
    )?;
    let tags = text(&page, "[...document.querySelectorAll('#box *')].map((e) => e.localName).join(' ')")?;
    require(tags == "h3 em p strong code ul li li a pre code", || format!("it became {tags}"))?;
    let shown = text(&page, "document.getElementById('box').textContent")?;
    for part in ["<img src=x", "<script>", "[bad](javascript:"] {
        require(shown.contains(part), || format!("{part} is not shown as it was written: {shown}"))?;
    }
    require(page.script("return window.hit === undefined")? == true, || "a script of the text ran".to_owned())?;
    close(&page, server)
}

fn every_look_is_legible_named_and_fits(driver: &Driver, server: &Server) -> Result<(), String> {
    for (size, dark) in [(DESKTOP, false), (DESKTOP, true), (PHONE, false), (PHONE, true), ((320, 640), false)] {
        let look = format!("{} pixels, {}", size.0, if dark { "dark" } else { "light" });
        let page = open(driver, server, size, dark)?;
        send(&page, "What is the capital of France?", &[("temperature", "0")])?;
        page.until("the answer is complete", IDLE)?;
        page.script("document.getElementById('settings-toggle').click()")?;
        for view in ["chat", "engine"] {
            page.script(&format!("document.getElementById('view-{view}').click()"))?;
            let over = page.script("return document.documentElement.scrollWidth - window.innerWidth")?;
            require(over.as_i64() <= Some(0), || format!("{look}, {view}: {over} pixels too wide"))?;
            let faint = page.script(include_str!("contrast.js"))?;
            require(faint.as_array().is_some_and(Vec::is_empty), || format!("{look}, {view}: too faint: {faint}"))?;
            for (element, name) in
                page.names("button, input, textarea, select, a, canvas, img[alt]:not([alt=\"\"]), [role]")?
            {
                require(!name.trim().is_empty() || element.contains("role=\"status\""), || {
                    format!("{look}, {view}: no name: {element}")
                })?;
            }
        }
        let dark_now = page.script("return getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 100")?;
        require(dark_now == dark, || format!("{look}: the background is not"))?;
        close(&page, server)?;
    }
    Ok(())
}

/// With `--api-key`: the page says what it lacks, takes the key, and works.
pub fn a_key_is_asked_for_and_taken(driver: &Driver, server: &Server) -> Result<(), String> {
    let page = driver.open(&server.url, DESKTOP, false)?;
    page.until("the page asks for a key", "return !document.getElementById('key-form').hidden")?;
    let set = |key: &str| {
        format!("document.getElementById('key').value = '{key}'; document.getElementById('key-form').requestSubmit()")
    };
    page.script(&set("wrong"))?;
    page.until(
        "a wrong key is told",
        "return document.getElementById('key-hint').textContent.includes('does not take')",
    )?;
    page.script(&set(KEY))?;
    page.until("the right key opens the engine", LIVE)?;
    send(&page, "What is the capital of France?", &[("temperature", "0")])?;
    page.until("and the chat", &format!("return ({ANSWER}) === 'The capital of France is Paris.'"))
}

/// The page under load, for the README.
pub fn picture(driver: &Driver, server: &Server) -> Result<Vec<u8>, String> {
    let page = open(driver, server, DESKTOP, false)?;
    for message in ["What is the capital of France?", "Tell me a story about a fox."] {
        send(&page, message, &[("temperature", "0")])?;
        page.until("the answer is complete", IDLE)?;
    }
    page.script(
        "const ask = async (i) => {
             for (let round = 0; round < 60; round += 1) {
                 const prompt = 'Answer as a helpful assistant that knows one small world. '.repeat(3) + i % 5 + ' ' + round;
                 const body = JSON.stringify({ prompt, max_tokens: 120 + 25 * i, n: 1 + i % 3, ignore_eos: true, temperature: 1 });
                 await fetch('/v1/completions', { method: 'POST', headers: { 'Content-Type': 'application/json' }, body });
             }
         };
         // A browser opens six connections to a server, and one has the events.
         for (let i = 0; i < 5; i += 1) ask(i);
         document.getElementById('message').blur();",
    )?;
    page.until("the charts have something to show", "return document.querySelectorAll('#requests tr').length >= 4")?;
    page.script("return new Promise((done) => setTimeout(done, 6000))")?;
    base64(&page.screenshot()?).ok_or_else(|| "the screenshot is not base 64".to_owned())
}

/// The bytes of a text in base 64 (RFC 4648, section 4).
fn base64(text: &str) -> Option<Vec<u8>> {
    let value = |byte: u8| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    };
    let digits: Vec<u8> = text.trim_end_matches('=').bytes().map(value).collect::<Option<_>>()?;
    let decode = |group: &[u8]| {
        let bits = group.iter().fold(0u32, |bits, digit| bits << 6 | u32::from(*digit)) << (6 * (4 - group.len()));
        bits.to_be_bytes().into_iter().skip(1).take(group.len() - 1).collect::<Vec<u8>>()
    };
    Some(digits.chunks(4).flat_map(decode).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_64_gives_the_bytes_of_the_standard() {
        for (text, bytes) in [("", &b""[..]), ("Zg==", b"f"), ("Zm8=", b"fo"), ("Zm9v", b"foo"), ("Zm9vYg==", b"foob")]
        {
            assert_eq!(base64(text).as_deref(), Some(bytes));
        }
        assert_eq!(base64("Z!"), None);
    }
}
