//! The part of WebDriver (W3C, JSON over HTTP) that the checks need, with Chromium's extensions for logs and emulation.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use ureq::Agent;

/// How long a check waits for what it expects.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running `chromedriver`.
pub struct Driver {
    child: Child,
    url: String,
    agent: Agent,
    browser: PathBuf,
}

impl Driver {
    /// Starts the program and waits until it answers.
    pub fn start(program: &Path, browser: PathBuf) -> Result<Driver, String> {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let port = free.map_err(|error| format!("found no free port: {error}"))?.port();
        let child = Command::new(program).arg(format!("--port={port}")).stdout(Stdio::null()).spawn();
        let child = child.map_err(|error| format!("{}: {error}", program.display()))?;
        let config = Agent::config_builder().http_status_as_error(false).timeout_global(Some(PATIENCE * 2));
        let driver = Driver { child, url: format!("http://127.0.0.1:{port}"), agent: config.build().into(), browser };
        until("chromedriver answers", || Ok(driver.get("/status").is_ok()))?;
        Ok(driver)
    }

    /// Opens the page at `url` in a new browser of this size, in the dark or the light colour scheme.
    pub fn open(&self, url: &str, (width, height): (u32, u32), dark: bool) -> Result<Page<'_>, String> {
        let size = format!("--window-size={width},{height}");
        // Without a sandbox, because CI runs in containers; the page is our own.
        let flags = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars", &size];
        let options = json!({"binary": self.browser, "args": flags});
        let logs = json!({"browser": "ALL", "performance": "ALL"});
        let wanted = json!({"goog:chromeOptions": options, "goog:loggingPrefs": logs});
        let answer = self.post("/session", &json!({"capabilities": {"alwaysMatch": wanted}}))?;
        let id = answer["sessionId"].as_str().ok_or(format!("chromedriver opened no session: {answer}"))?;
        let page = Page { driver: self, session: format!("/session/{id}") };
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        page.devtools("Emulation.setDeviceMetricsOverride", metrics)?;
        let features = json!([{"name": "prefers-color-scheme", "value": if dark { "dark" } else { "light" }}]);
        page.devtools("Emulation.setEmulatedMedia", json!({"features": features}))?;
        page.post("/url", json!({"url": url}))?;
        Ok(page)
    }

    fn get(&self, path: &str) -> Result<Value, String> {
        value(path, self.agent.get(format!("{}{path}", self.url)).call())
    }

    fn post(&self, path: &str, body: &Value) -> Result<Value, String> {
        let request = self.agent.post(format!("{}{path}", self.url)).header("Content-Type", "application/json");
        value(path, request.send(body.to_string()))
    }
}

/// Returns the value of an answer, or the message of its error.
fn value(path: &str, response: Result<ureq::http::Response<ureq::Body>, ureq::Error>) -> Result<Value, String> {
    let failed = |error: ureq::Error| format!("chromedriver, {path}: {error}");
    let text = response.map_err(failed)?.body_mut().read_to_string().map_err(failed)?;
    let mut answer: Value = serde_json::from_str(&text).map_err(|error| format!("chromedriver, {path}: {error}"))?;
    let value = answer["value"].take();
    match value["error"].as_str() {
        Some(_) => Err(format!("chromedriver, {path}: {}", value["message"].as_str().unwrap_or_default())),
        None => Ok(value),
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A browser that shows the page.
pub struct Page<'a> {
    driver: &'a Driver,
    session: String,
}

impl Page<'_> {
    fn post(&self, path: &str, body: Value) -> Result<Value, String> {
        self.driver.post(&format!("{}{path}", self.session), &body)
    }

    /// Reloads the page.
    pub fn reload(&self) -> Result<(), String> {
        self.post("/refresh", json!({})).map(drop)
    }

    /// Runs a script and returns what it returns.
    pub fn script(&self, script: &str) -> Result<Value, String> {
        self.post("/execute/sync", json!({"script": script, "args": []}))
    }

    /// Waits until a script returns something true.
    pub fn until(&self, what: &str, script: &str) -> Result<(), String> {
        until(what, || self.script(script).map(|value| value.as_bool().unwrap_or(!value.is_null())))
    }

    /// Presses keys, one after the other, in the focused element; names as in WebDriver's table.
    pub fn keys(&self, keys: &[&str]) -> Result<(), String> {
        let stroke = |key: &&str| [json!({"type": "keyDown", "value": key}), json!({"type": "keyUp", "value": key})];
        let actions: Vec<Value> = keys.iter().flat_map(stroke).collect();
        self.post("/actions", json!({"actions": [{"type": "key", "id": "keys", "actions": actions}]})).map(drop)
    }

    /// Returns the visible elements of a selector, each as the start of its HTML and its name in the accessibility tree.
    pub fn names(&self, selector: &str) -> Result<Vec<(String, String)>, String> {
        let elements = self.script(&format!(
            "return [...document.querySelectorAll('{selector}')].filter((e) => e.checkVisibility()).map((e) => [e, e.outerHTML.slice(0, 80)])"
        ))?;
        let mut names = Vec::new();
        for element in elements.as_array().into_iter().flatten() {
            // A reference to an element is an object whose one value is its id.
            let id = element[0].as_object().and_then(|fields| fields.values().next()?.as_str()).unwrap_or_default();
            let label = self.driver.get(&format!("{}/element/{id}/computedlabel", self.session))?;
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            names.push((text(&element[1]), text(&label)));
        }
        Ok(names)
    }

    /// Returns the page as PNG, in base64.
    pub fn screenshot(&self) -> Result<String, String> {
        let image = self.driver.get(&format!("{}/screenshot", self.session))?;
        image.as_str().map(str::to_owned).ok_or("chromedriver returned no screenshot".to_owned())
    }

    fn devtools(&self, command: &str, parameters: Value) -> Result<(), String> {
        self.post("/goog/cdp/execute", json!({"cmd": command, "params": parameters})).map(drop)
    }

    /// Returns the messages on the console, and the address of every request.
    pub fn logs(&self) -> Result<(Vec<String>, Vec<String>), String> {
        let read = |kind: &str| self.post("/se/log", json!({"type": kind}));
        let console = read("browser")?;
        let console = console.as_array().into_iter().flatten().map(|entry| entry["message"].to_string()).collect();
        let mut addresses = Vec::new();
        for entry in read("performance")?.as_array().into_iter().flatten() {
            let message: Value =
                serde_json::from_str(entry["message"].as_str().unwrap_or_default()).unwrap_or_default();
            if message["message"]["method"] == "Network.requestWillBeSent" {
                let url = &message["message"]["params"]["request"]["url"];
                addresses.push(url.as_str().unwrap_or_default().to_owned());
            }
        }
        Ok((console, addresses))
    }
}

impl Drop for Page<'_> {
    fn drop(&mut self) {
        let _ = self.driver.agent.delete(format!("{}{}", self.driver.url, self.session)).call();
    }
}

fn until(what: &str, mut holds: impl FnMut() -> Result<bool, String>) -> Result<(), String> {
    let end = Instant::now() + PATIENCE;
    while !holds()? {
        if Instant::now() > end {
            return Err(format!("not within {} s: {what}", PATIENCE.as_secs()));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
