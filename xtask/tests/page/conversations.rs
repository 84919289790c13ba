//! Conversations: kept, edited, branched, exported, imported, and continued when the context is full.

use super::driver::Page;
use super::{DESKTOP, GREEDY, IDLE, LIVE, SMALL, Site, ask, require, require_text};

/// Opens the page with the functions of `tools.js`.
pub fn open<'a>(site: &'a Site, path: &str) -> Result<Page<'a>, String> {
    let page = site.driver.open(&format!("{}{path}", site.server.url), DESKTOP, false)?;
    page.until("the page shows the engine", LIVE)?;
    page.script(include_str!("tools.js"))?;
    Ok(page)
}

/// Sends a message that gets this answer.
pub fn scripted(page: &Page<'_>, message: &str, answer: &str) -> Result<(), String> {
    page.script(&format!(
        "window.scripted([text('{answer}'), {{choices: [], usage: {{prompt_tokens: 5, completion_tokens: 2, total_tokens: 7}}}}]); say('{message}')"
    ))?;
    page.until("the answer is complete", IDLE)
}

/// Waits until the conversation that the page would restore has this many turns.
fn until_kept(page: &Page<'_>, turns: usize) -> Result<(), String> {
    page.until(
        "the conversation is kept",
        &format!(
            "return (async () => {{
                 const {{ Storage }} = await import('/page/storage.js');
                 const id = sessionStorage.getItem('quire-chat');
                 const tree = id && await new Storage().load(id);
                 return tree?.turns.length === {turns};
             }})()"
        ),
    )
}

#[test]
#[ignore = "only by cargo xtask page-test"]
fn questions_and_answers_have_versions() -> Result<(), String> {
    let Some(site) = Site::start(&SMALL)? else { return Ok(()) };
    let page = open(&site, "/")?;
    scripted(&page, "one", "first")?;
    scripted(&page, "two", "second")?;
    require_text(&page, "the turns", "turns()", |turns| turns == "one | first | two | second")?;
    page.script("window.scripted([text('again')]); press('Regenerate')")?;
    page.until("the answer is made again", "return idle() && turns().endsWith('again')")?;
    require_text(&page, "the request", "sent()", |sent| sent == "user: one | assistant: first | user: two")?;
    page.script("press('Previous version')")?;
    require_text(&page, "the first version", "turns()", |turns| turns == "one | first | two | second")?;
    let focus = "document.activeElement.ariaLabel";
    require_text(&page, "the focus", focus, |label| label == "Next version")?;
    page.script(
        "press('Edit', 0);
         document.querySelector('.edit textarea').value = 'changed';
         window.scripted([text('other')]);
         document.querySelector('.edit .primary').click()",
    )?;
    page.until("the edited question is answered", "return idle() && turns() === 'changed | other'")?;
    require_text(&page, "the request", "sent()", |sent| sent == "user: changed")?;
    let versions = "[...document.querySelectorAll('.versions')].map((node) => node.textContent).join(' ')";
    require_text(&page, "the number of versions", versions, |versions| versions == "2 / 2")?;
    page.script("press('Previous version', 0)")?;
    require_text(&page, "the old branch", "turns()", |turns| turns == "one | first | two | second")?;
    page.script("press('Edit', 0); document.querySelector('.edit textarea').value = 'lost'")?;
    page.keys(&["\u{E00C}"])?;
    require_text(&page, "after Escape", "turns()", |turns| turns.starts_with("one | first"))?;
    // The versions are kept too.
    until_kept(&page, 7)?;
    page.reload()?;
    page.until("the page shows the engine", LIVE)?;
    page.script(include_str!("tools.js"))?;
    page.until("the conversation is back", "return turns() === 'one | first | two | second'")?;
    page.script("press('Next version', 0)")?;
    require_text(&page, "the other branch", "turns()", |turns| turns == "changed | other")?;
    site.close(&page)
}

#[test]
#[ignore = "only by cargo xtask page-test"]
fn conversations_are_listed_exported_and_imported() -> Result<(), String> {
    let Some(site) = Site::start(&SMALL)? else { return Ok(()) };
    let page = open(&site, "/")?;
    ask(&page, "What is 2 plus 2?", GREEDY)?;
    until_kept(&page, 2)?;
    page.script("document.getElementById('fresh').click()")?;
    scripted(&page, "<b>hostile</b> title", "second")?;
    until_kept(&page, 2)?;
    // What the link of an export leads to.
    page.script(
        "window.files = [];
         URL.createObjectURL = (blob) => (window.files.push(blob), 'blob:none');
         HTMLAnchorElement.prototype.click = function () { window.named = this.download; };
         document.getElementById('chats-open').click()",
    )?;
    let titles = "[...document.querySelectorAll('#chat-list .open span')].map((node) => node.textContent).join(' | ')";
    let both = "<b>hostile</b> title | What is 2 plus 2?";
    page.until("both are listed", &format!("return {titles} === '{both}'"))?;
    page.script("document.getElementById('export').click()")?;
    page.until("there is a file", "return window.files.length === 1 && /^quire-.*[.]json$/.test(window.named)")?;
    let read = "return window.files[0].text().then((text) => JSON.parse(text).conversations.map((tree) => tree.turns.length).join())";
    require(page.script(read)? == "2,2", || "the file lacks turns".to_owned())?;
    let remove = "[...document.querySelectorAll('#chat-list li')][0].querySelectorAll('button')[2]";
    page.script(&format!("const remove = {remove}; remove.focus(); remove.click()"))?;
    require_text(&page, "the first press", &format!("{remove}.textContent"), |text| text == "Really delete?")?;
    page.script(&format!("{remove}.click()"))?;
    page.until("one is listed", &format!("return {titles} === 'What is 2 plus 2?'"))?;
    require_text(&page, "the page without the conversation", "turns()", str::is_empty)?;
    let import = |value: &str| {
        page.script(&format!(
            "return (async () => {{
                 const transfer = new DataTransfer();
                 transfer.items.add(new File([{value}], 'chats.json'));
                 const input = document.getElementById('import-file');
                 input.files = transfer.files;
                 input.dispatchEvent(new Event('change'));
             }})()"
        ))
    };
    let problem = "return document.getElementById('chats-problem').textContent";
    for (wrong, part) in [
        ("'{'", "expected conversations that"),
        (
            "'{\"format\": \"quire-conversations\", \"version\": 1, \"conversations\": [{\"id\": \"x\", \"turns\": [{\"parent\": 0, \"role\": \"user\", \"content\": \"\"}]}]}'",
            "conversation 1 is damaged",
        ),
        (
            "'{\"format\": \"quire-conversations\", \"version\": 1, \"conversations\": [{\"id\": \"x\", \"turns\": [{\"parent\": -1, \"role\": \"system\", \"content\": \"\"}]}]}'",
            "conversation 1 is damaged",
        ),
    ] {
        import(wrong)?;
        page.until(part, &format!("{problem}.includes('{part}')"))?;
    }
    import("await window.files[0].text()")?;
    page.until("both are listed again", &format!("return {titles} === '{both}'"))?;
    require_text(&page, "what was imported", "document.getElementById('chats-problem').textContent", |text| {
        text == "1 conversation imported."
    })?;
    page.script("[...document.querySelectorAll('#chat-list .open')][1].click()")?;
    page.until(
        "it is shown",
        "return turns().startsWith('What is 2 plus 2? | ') && !document.getElementById('chats').open",
    )?;
    site.close(&page)
}

/// The bound of the storage, a browser without space, and two tabs that change one conversation.
#[test]
#[ignore = "only by cargo xtask page-test"]
fn a_full_storage_is_a_message() -> Result<(), String> {
    let Some(site) = Site::start(&SMALL)? else { return Ok(()) };
    let page = open(&site, "/")?;
    let bounds = page.script(
        "return (async () => {
             const { Storage } = await import('/page/storage.js');
             const { Tree } = await import('/page/tree.js');
             const make = (text) => { const tree = new Tree(); tree.add(-1, { role: 'user', content: text }); return tree; };
             const found = [];
             const attempt = (storage, tree) => storage.save(tree).then(() => found.push('kept'), (error) => found.push(error.message));
             const two = new Storage({ chats: 2 });
             const first = make('a');
             for (const tree of [first, make('b'), make('c'), first]) await attempt(two, tree);
             await attempt(new Storage({ size: 1000 }), make('x'.repeat(1000)));
             // Another tab.
             const storage = new Storage();
             const copy = await storage.load(first.id);
             copy.add(0, { role: 'assistant', content: 'theirs' });
             await attempt(storage, copy);
             first.add(0, { role: 'assistant', content: 'ours' });
             await attempt(storage, first);
             found.push((await storage.list()).length, first.id !== copy.id);
             return found.map((text) => String(text).slice(0, 30)).join(' | ');
         })()",
    )?;
    let full = "This conversation is not kept:";
    let expected = format!("kept | kept | {full} | kept | {full} | kept | kept | 3 | true");
    require(bounds == expected.as_str(), || format!("found {bounds}, expected {expected}"))?;
    page.script("IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); }")?;
    scripted(&page, "hello", "answer")?;
    page.until("the page says so", "return notice().includes('no space left') && turns() === 'hello | answer'")?;
    site.close(&page)
}

#[test]
#[ignore = "only by cargo xtask page-test"]
fn a_full_context_has_a_way_on() -> Result<(), String> {
    let Some(site) = Site::start(&[&SMALL[..], &["--max-model-len", "120"]].concat())? else { return Ok(()) };
    let page = open(&site, "/")?;
    let meter = "document.getElementById('context-text').textContent";
    require_text(&page, "the meter at the start", meter, |text| text == "0 of 120 tokens")?;
    page.script("set('temperature', '0'); set('max_tokens', '10'); say('What is 2 plus 2?')")?;
    page.until("an answer", "return idle() && turns().length > 20")?;
    let used = "Number(document.getElementById('context').value)";
    page.until("the meter moves", &format!("return {used} > 10 && {meter}.startsWith({used} + ' of')"))?;
    page.script("set('max_tokens', '')")?;
    // Questions until the context is full.
    for _ in 0..8 {
        page.script("if (!notice()) say('What is 12 plus 7? '.repeat(3))")?;
        page.until("an answer or a message", IDLE)?;
        page.script("return new Promise((done) => setTimeout(done, 100))")?;
        if page.script("return notice().includes('The context is full')")? == true {
            break;
        }
    }
    require_text(&page, "the message", "notice()", |text| text.contains("The context is full"))?;
    let before = page.script("return window.bodies.at(-1).messages.length")?;
    page.script(
        "[...document.querySelectorAll('#notice button')].find((node) => node.textContent.startsWith('Drop')).click()",
    )?;
    page.until("the answer comes", "return idle() && !notice().includes('context is full')")?;
    let after = page.script("return window.bodies.at(-1).messages.length")?;
    require(after.as_u64() < before.as_u64(), || format!("{before} messages before, {after} after"))?;
    let shown = "return document.querySelectorAll('.turn.dropped').length > 0 && document.querySelectorAll('.turn.cut').length === 1";
    page.until("the dropped turns are marked", shown)?;
    // A question that does not fit, with turns before it and without.
    let refused =
        "window.scripted({error: {message: 'too many tokens', code: 'context_length_exceeded'}}, [text('fits')])";
    page.script(&format!("{refused}; say('long question')"))?;
    page.until(
        "the message",
        "return idle() && notice().includes('context is full') && notice().includes('too many tokens')",
    )?;
    page.script(
        "[...document.querySelectorAll('#notice button')].find((node) => node.textContent.startsWith('Drop')).click()",
    )?;
    page.until("the question is answered", "return idle() && turns().endsWith('long question | fits')")?;
    require_text(&page, "the request", "sent()", |sent| sent == "user: long question")?;
    page.script(&format!("document.getElementById('fresh').click(); {refused}; say('too long alone')"))?;
    page.until("the message", "return idle() && notice().includes('One turn alone fills it')")?;
    let labels = "[...document.querySelectorAll('#notice button')].map((node) => node.textContent).join(' | ')";
    require_text(&page, "what can be done", labels, |labels| labels == "New chat | Dismiss")?;
    site.close(&page)
}

/// Behind a path prefix all requests have it, and the conversations are those of this prefix.
#[test]
#[ignore = "only by cargo xtask page-test"]
fn the_page_works_behind_a_path_prefix() -> Result<(), String> {
    let Some(site) = Site::start(&[&SMALL[..], &["--root-path", "/llm"]].concat())? else { return Ok(()) };
    let page = open(&site, "/llm")?;
    require_text(&page, "the address", "location.pathname", |path| path == "/llm/")?;
    ask(&page, "What is 2 plus 2?", GREEDY)?;
    page.until(
        "the conversation is kept",
        "return indexedDB.databases().then((all) => all.some(({ name }) => name === 'quire /llm/'))",
    )?;
    let (_, addresses) = page.logs()?;
    let outside = addresses.iter().filter(|url| url.starts_with("http") && !url.contains("/llm"));
    let outside: Vec<&String> = outside.collect();
    require(outside.is_empty(), || format!("requests without the prefix: {outside:?}"))
}
