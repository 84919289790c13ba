//! How answers are shown while they are streamed: Markdown, selections, reasoning, tool calls, probabilities; and what requests say.

use testkit::workspace;

use super::conversations::{open, scripted};
use super::{IDLE, LIVE, SMALL, Site, require, require_text};

/// The file checks what users expect, hostile texts, that cutting a text into pieces changes nothing, and that the work is linear.
#[test]
#[ignore = "only by cargo xtask page-test"]
fn markdown_is_complete_safe_and_linear() -> Result<(), String> {
    let Some(site) = Site::start(&SMALL)? else { return Ok(()) };
    let page = open(&site, "/")?;
    let wrong = page.script(&format!("return (async () => {{ {} }})()", include_str!("markdown.js")))?;
    require(wrong.as_array().is_some_and(Vec::is_empty), || format!("{wrong}"))?;
    // The same from a server: what a model writes cannot run.
    page.script(r#"window.scripted([text('<img src=x onerror="window.hit=1"> [x](javascript:window.hit=1)'), text(' ```')]); say('hi')"#)?;
    page.until("the answer is complete", IDLE)?;
    require(page.script("return document.querySelectorAll('.turn img, .turn a').length")? == 0, || {
        "an answer made an image or a link".to_owned()
    })?;
    require(page.script("return window.hit === undefined")? == true, || "a script ran".to_owned())?;
    site.close(&page)
}

#[test]
#[ignore = "only by cargo xtask page-test"]
fn a_selection_survives_an_answer_that_goes_on() -> Result<(), String> {
    let Some(site) = Site::start(&SMALL)? else { return Ok(()) };
    let page = open(&site, "/")?;
    page.script(
        "window.scripted([text('Some **bold** text in the first block.\\n\\n- an item\\n- another '), 'hold', text('item with *more*\\n- third'), text('\\n\\nAnd an end.\\n')]);
         say('hi')",
    )?;
    page.until("the first part", "return turns().includes('another')")?;
    // From the first block, which is complete, into the last item, which is not.
    page.script(
        "const box = document.querySelector('.turn.assistant .text');
         const [first, last] = [box.querySelector('strong').firstChild, [...box.querySelectorAll('li')].at(-1).firstChild];
         getSelection().setBaseAndExtent(first, 0, last, 7);
         window.before = [box.firstChild, getSelection().toString()];
         window.release()",
    )?;
    page.until("the answer is complete", IDLE)?;
    let kept = "window.before[1].startsWith('bold') && getSelection().toString() === window.before[1] && document.querySelector('.turn.assistant .text').firstChild === window.before[0]";
    let found = page.script(&format!("return [{kept}, getSelection().toString(), window.before[1]]"))?;
    require(found[0] == true, || format!("the selection: {found}"))?;
    // Copies of code and of the answer.
    page.script(
        "window.copied = [];
         navigator.clipboard.writeText = async (text) => { window.copied.push(text); };
         window.scripted([text('```js\\nlet a = 1;\\n```\\n')]); say('code')",
    )?;
    page.until("the answer is complete", IDLE)?;
    page.script("document.querySelector('.code .copy').click(); press('Copy', -2)")?;
    let copied = "return window.copied.join('|') === 'let a = 1;|code'";
    page.until("both are copied", copied)?;
    page.until("the button says so", "return document.querySelector('.code .copy').textContent === 'Copied'")?;
    site.close(&page)
}

#[test]
#[ignore = "only by cargo xtask page-test"]
fn reasoning_is_folded_and_tool_calls_are_shown_and_answered() -> Result<(), String> {
    let Some(site) = Site::start(&SMALL)? else { return Ok(()) };
    let page = open(&site, "/")?;
    page.script(
        "const delta = (delta) => ({ choices: [{ index: 0, delta }] });
         const tools = [{ type: 'function', function: { name: 'weather', parameters: { type: 'object' } } }];
         set('tools', JSON.stringify(tools)); set('effort', 'low');
         window.scripted([delta({ reasoning_content: 'Let me ' }), delta({ reasoning_content: 'think.' }), 'hold', text('I ask.'),
             delta({ tool_calls: [{ index: 0, id: 'a', function: { name: 'weather', arguments: '{\"city\":' } }] }),
             delta({ tool_calls: [{ index: 0, function: { arguments: '\"Bern\"}' } }] }),
             delta({ tool_calls: [{ index: 1, id: 'b', function: { name: 'time', arguments: '{}' } }] })],
             [text('Sunny.')]);
         say('weather?')",
    )?;
    let summary = "document.querySelector('.turn.assistant summary')?.textContent";
    page.until("it thinks", &format!("return {summary} === 'Thinking…'"))?;
    let folded = "return !document.querySelector('.turn.assistant details').open && document.querySelector('.thoughts').textContent === 'Let me think.'";
    require(page.script(folded)? == true, || "the reasoning is not folded".to_owned())?;
    page.script("window.release()")?;
    page.until("the answer is complete", IDLE)?;
    require_text(&page, "the summary", summary, |text| text == "Reasoning")?;
    let calls = "document.querySelector('.calls').textContent.replace(/\\s+/g, ' ')";
    require_text(&page, "the calls", calls, |text| text == "Call of weather{ \"city\": \"Bern\" }Call of time{}")?;
    let fields = "JSON.stringify([window.bodies[0].tools[0].function.name, window.bodies[0].reasoning_effort])";
    require_text(&page, "the request", fields, |text| text == r#"["weather","low"]"#)?;
    // Each message is the result of a call; the last one goes on.
    let asks = "document.getElementById('message').placeholder";
    require_text(&page, "the message box", asks, |text| text == "Result of weather")?;
    page.script("say('sun')")?;
    require_text(&page, "the message box", asks, |text| text == "Result of time")?;
    require(page.script("return window.bodies.length")? == 1, || "a request lacks a result".to_owned())?;
    page.script("say('noon')")?;
    page.until("the next answer is complete", "return idle() && turns().endsWith('Sunny.')")?;
    let sent = "window.bodies[1].messages.map(({ role, tool_calls, tool_call_id }) => `${role} ${(tool_calls ?? []).map(({ id }) => id)} ${tool_call_id ?? ''}`.trim()).join(' | ')";
    require_text(&page, "the messages", sent, |text| text == "user | assistant a,b | tool  a | tool  b")?;
    require_text(&page, "the message box", asks, |text| text == "Message")?;
    site.close(&page)
}

#[test]
#[ignore = "only by cargo xtask page-test"]
fn schemas_bind_answers_and_probabilities_show_on_hover() -> Result<(), String> {
    let Some(site) = Site::start(&SMALL)? else { return Ok(()) };
    let page = open(&site, "/")?;
    page.script("set('temperature', '0'); set('schema', '{\"type\": \"object\"'); say('hi')")?;
    require_text(&page, "wrong JSON", "document.getElementById('schema-problem').textContent", |text| {
        text.starts_with("Not JSON")
    })?;
    require_text(&page, "the focus", "document.activeElement.id", |id| id == "schema")?;
    require(page.script("return window.bodies.length")? == 0, || "a wrong schema was sent".to_owned())?;
    page.script(
        "set('schema', '{\"type\": \"object\", \"properties\": {\"ok\": {\"type\": \"boolean\"}}, \"required\": [\"ok\"], \"additionalProperties\": false}');
         set('logprobs', true); document.getElementById('send').click()",
    )?;
    page.until("the answer is complete", "return idle() && document.querySelectorAll('.turn').length === 2")?;
    require_text(
        &page,
        "the answer",
        "document.querySelector('.turn.assistant .text').textContent.replace(/\\s/g, '')",
        |text| text == r#"{"ok":true}"# || text == r#"{"ok":false}"#,
    )?;
    // The real server's log-probabilities.
    let count = page.script("return document.querySelectorAll('.tokens span').length")?;
    require(count.as_u64() > Some(2), || format!("{count} tokens have a probability"))?;
    require_text(&page, "the tokens", "document.querySelector('.tokens').textContent.replace(/\\s/g, '')", |text| {
        text.starts_with(r#"{"ok":"#)
    })?;
    let hidden = "return document.querySelector('.alternatives').hidden";
    require(page.script(hidden)? == true, || "alternatives show without a pointer".to_owned())?;
    page.script("document.querySelectorAll('.tokens span')[1].dispatchEvent(new PointerEvent('pointerover', { bubbles: true }))")?;
    let shown =
        "document.querySelector('.alternatives').hidden ? '' : document.querySelector('.alternatives').textContent";
    require_text(&page, "on hover", shown, |text| text.contains('%') && text.contains("log -"))?;
    let alternatives = page.script("return document.querySelectorAll('.alternatives li').length")?;
    require(alternatives == 5, || format!("{alternatives} alternatives"))?;
    page.script("document.querySelector('.tokens').focus()")?;
    page.keys(&["\u{E014}"])?;
    require_text(&page, "after an arrow key", "document.querySelector('.tokens .at').className", |name| {
        name.contains("at")
    })?;
    page.script("press('Tokens')")?;
    let text = "return document.querySelector('.token-view').hidden && !document.querySelector('.turn.assistant .text').hidden";
    require(page.script(text)? == true, || "the button does not show the text".to_owned())?;
    site.close(&page)
}

/// A cut answer goes on; an error shows, and what was received stays.
#[test]
#[ignore = "only by cargo xtask page-test"]
fn an_answer_that_was_cut_goes_on() -> Result<(), String> {
    let Some(site) = Site::start(&SMALL)? else { return Ok(()) };
    let page = open(&site, "/")?;
    page.script("set('temperature', '0'); set('max_tokens', '8'); say('Tell me a story about a fox.')")?;
    page.until("the answer is complete", IDLE)?;
    let first = page.script("return document.querySelector('.turn.assistant .text').textContent")?;
    let first = first.as_str().unwrap_or_default().trim_end().to_owned();
    page.script("set('max_tokens', '12'); press('Continue')")?;
    page.until("more of it", "return idle() && document.querySelector('.foot').textContent !== ''")?;
    require_text(&page, "the whole answer", "document.querySelector('.turn.assistant .text').textContent", |text| {
        text.starts_with(&first) && text.len() > first.len() + 10
    })?;
    require_text(&page, "below it", "[...document.querySelectorAll('.foot')].at(-1).textContent", |foot| {
        foot.starts_with("20 tokens")
    })?;
    let body = "JSON.stringify([window.bodies[1].continue_final_message, window.bodies[1].messages.length])";
    require_text(&page, "the request", body, |text| text == "[true,2]")?;
    page.script("window.scripted([text('half an ans'), {error: {message: 'the engine failed'}}]); say('more')")?;
    page.until(
        "the error shows",
        "return idle() && notice().includes('the engine failed') && turns().endsWith('half an ans')",
    )?;
    page.script("window.scripted([text('a lost conn'), 'end']); say('lost')")?;
    page.until("the loss shows", "return idle() && notice().includes('The connection to the server ended.')")?;
    require_text(&page, "below it", "[...document.querySelectorAll('.foot')].at(-1).textContent", |foot| {
        foot.ends_with("ended by an error")
    })?;
    page.script("window.scripted({error: {message: 'not now'}}); say('again')")?;
    page.until(
        "the question returns",
        "return idle() && notice().includes('not now') && document.getElementById('message').value === 'again'",
    )?;
    site.close(&page)
}

#[test]
#[ignore = "only by cargo xtask page-test"]
fn models_adapters_and_themes_are_chosen_and_kept() -> Result<(), String> {
    // The demo model as a folder: several names need a model before them.
    let folder = workspace::root().join("models/demo");
    let named = [folder.to_str().unwrap_or_default(), "--served-model-name", "first", "second"];
    let Some(site) = Site::start(&[&named[..], &SMALL].concat())? else { return Ok(()) };
    let page = open(&site, "/")?;
    page.script("set('model', 'second'); set('temperature', '0'); say('What is 2 plus 2?')")?;
    page.until("the answer is complete", IDLE)?;
    require_text(&page, "the request", "window.bodies[0].model", |model| model == "second")?;
    require_text(&page, "the answer is of", "document.querySelector('.turn.assistant .who').textContent", |who| {
        who == "second"
    })?;
    // An adapter is a model with a parent; the server has none.
    page.script(
        "const before = window.fetch;
         window.fetch = async (url, options) => String(url).endsWith('v1/models')
             ? new Response(JSON.stringify({ data: [{ id: 'first' }, { id: 'second' }, { id: 'sql', parent: 'first' }] }))
             : before(url, options);
         return import('/page/models.js').then(({ Models }) => { const models = new Models(() => {}); models.context = 9; return models.read(); })",
    )?;
    let adapter = "document.querySelector('#model optgroup[label*=LoRA] option')?.value";
    require_text(&page, "the adapter", adapter, |name| name == "sql")?;
    require_text(&page, "the choice", "document.getElementById('model').value", |model| model == "second")?;
    let background = "getComputedStyle(document.body).backgroundColor";
    let light = page.script(&format!("return {background}"))?;
    page.script("set('theme', 'dark')")?;
    let dark = page.script(&format!("return {background}"))?;
    require(light != dark, || format!("the colours did not change: {dark}"))?;
    page.reload()?;
    page.until("the page shows the engine", LIVE)?;
    require(page.script(&format!("return {background}"))? == dark, || "the theme is lost".to_owned())?;
    require_text(&page, "the choice after a reload", "document.getElementById('model').value", |model| {
        model == "second"
    })?;
    site.close(&page)
}

/// Two ranks, a host tier, drafts and stored responses, which the real server has; adapters from a state as the server sends it.
#[test]
#[ignore = "only by cargo xtask page-test"]
fn the_engine_view_shows_ranks_the_host_tier_drafts_adapters_and_stored_work() -> Result<(), String> {
    let ngram = r#"{"method": "ngram", "num_speculative_tokens": 3}"#;
    let args = ["--tensor-parallel-size", "2", "--kv-offloading-size", "0.01", "--speculative-config", ngram];
    let Some(site) = Site::start(&[&SMALL[..], &args].concat())? else { return Ok(()) };
    let page = open(&site, "/")?;
    page.script(
        "return fetch('/v1/responses', { method: 'POST', headers: { 'Content-Type': 'application/json' },
             body: JSON.stringify({ input: 'one two one two one two one two', max_output_tokens: 60, temperature: 0, store: true }) }).then((r) => r.text())",
    )?;
    let facts = "document.getElementById('facts').textContent";
    page.until("the ranks", &format!("return {facts}.includes('2: tensor parallel 2, pipeline parallel 1')"))?;
    page.until("the host tier", &format!("return /Host tier0 blocks swapped, [0-9,]+ cached of [1-9]/.test({facts})"))?;
    page.until("stored records", &format!("return /Stored[1-9][0-9]* records, .*0 in the background/.test({facts})"))?;
    page.script(
        "set('temperature', '0'); set('min_tokens', '200'); set('max_tokens', '200'); say('one two one two one two')",
    )?;
    page.until("the drafts", "return !document.getElementById('drafts-tile').hidden && document.getElementById('drafts').textContent !== '–'")?;
    page.until("the answer is complete", IDLE)?;
    page.script("document.getElementById('min_tokens').value = ''")?;
    scripted(&page, "hi", "there")?;
    page.script(
        "return Promise.all([import('/page/engine.js'), fetch('/quire/state').then((r) => r.json())]).then(([{ Engine }, state]) => {
             state.adapters = [{ name: 'sql', rank: 8, bytes: 1, running: 2, waiting: 1 }];
             state.adapters_left_out = 3;
             Engine.prototype.facts.call({}, state);
             window.found = document.getElementById('facts').textContent;
         })",
    )?;
    require_text(&page, "the adapters", "window.found", |text| {
        text.contains("Adapter sql2 running, 1 waiting") && text.contains("Adapters3 more")
    })?;
    site.close(&page)
}
