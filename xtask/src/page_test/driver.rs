//! WebDriver (W3C, JSON over HTTP) as far as the checks need it, with Chromium's additions for logs and emulation.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// How long a check waits for what it expects.
const PATIENCE: Duration = Duration::from_secs(30);

/// A running `chromedriver`.
pub struct Driver {
    child: Child,
    port: u16,
    browser: PathBuf,
}

impl Driver {
    /// Starts it and waits until it answers.
    pub fn start(program: &Path, browser: PathBuf) -> Result<Driver, String> {
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let port = free.map_err(|error| format!("no free port: {error}"))?.port();
        let command = Command::new(program).arg(format!("--port={port}")).stdout(Stdio::null()).spawn();
        let child = command.map_err(|error| format!("{}: {error}", program.display()))?;
        let driver = Driver { child, port, browser };
        until("chromedriver answers", || Ok(driver.call("GET", "/status", None).is_ok()))?;
        Ok(driver)
    }

    /// A fresh browser of this size, dark or light, on the page at `url`.
    pub fn open(&self, url: &str, (width, height): (u32, u32), dark: bool) -> Result<Page<'_>, String> {
        let size = format!("--window-size={width},{height}");
        // Without a sandbox, as CI runs in containers; the page is our own.
        let flags = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--hide-scrollbars", &size];
        let options = json!({"binary": self.browser, "args": flags});
        let logs = json!({"browser": "ALL", "performance": "ALL"});
        let wanted = json!({"goog:chromeOptions": options, "goog:loggingPrefs": logs});
        let answer = self.call("POST", "/session", Some(json!({"capabilities": {"alwaysMatch": wanted}})))?;
        let id = answer["sessionId"].as_str().ok_or(format!("no session: {answer}"))?;
        let page = Page { driver: self, session: format!("/session/{id}") };
        let metrics = json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        page.devtools("Emulation.setDeviceMetricsOverride", metrics)?;
        page.scheme(dark)?;
        page.post("/url", json!({"url": url}))?;
        Ok(page)
    }

    fn call(&self, method: &str, path: &str, body: Option<Value>) -> Result<Value, String> {
        let text = body.map(|body| body.to_string()).unwrap_or_default();
        let exchange = || -> std::io::Result<Vec<u8>> {
            let mut stream = TcpStream::connect(("127.0.0.1", self.port))?;
            stream.set_read_timeout(Some(PATIENCE * 2))?;
            let head = format!("{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
            write!(stream, "{head}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{text}", text.len())?;
            let mut reader = BufReader::new(stream);
            let (mut line, mut length) = (String::new(), 0);
            while reader.read_line(&mut line)? > 2 {
                if let Some(("content-length", value)) = line.to_ascii_lowercase().split_once(':') {
                    length = value.trim().parse().unwrap_or(0);
                }
                line.clear();
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body)?;
            Ok(body)
        };
        let body = exchange().map_err(|error| format!("chromedriver, {method} {path}: {error}"))?;
        let mut answer: Value = serde_json::from_slice(&body).map_err(|error| format!("chromedriver: {error}"))?;
        let value = answer["value"].take();
        match value["error"].as_str() {
            Some(_) => Err(format!("{method} {path}: {}", value["message"].as_str().unwrap_or_default())),
            None => Ok(value),
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A browser with the page.
pub struct Page<'a> {
    driver: &'a Driver,
    session: String,
}

impl Page<'_> {
    fn post(&self, path: &str, body: Value) -> Result<Value, String> {
        self.driver.call("POST", &format!("{}{path}", self.session), Some(body))
    }

    /// Loads the page again.
    pub fn reload(&self) -> Result<(), String> {
        self.post("/refresh", json!({})).map(drop)
    }

    /// The value of a script's `return`.
    pub fn script(&self, script: &str) -> Result<Value, String> {
        self.post("/execute/sync", json!({"script": script, "args": []}))
    }

    /// Waits until a script returns something true.
    pub fn until(&self, what: &str, script: &str) -> Result<(), String> {
        until(what, || self.script(script).map(|value| value.as_bool().unwrap_or(!value.is_null())))
    }

    /// Presses keys, one after the other, wherever the focus is; names as in WebDriver's table.
    pub fn keys(&self, keys: &[&str]) -> Result<(), String> {
        let stroke = |key: &&str| [json!({"type": "keyDown", "value": key}), json!({"type": "keyUp", "value": key})];
        let actions: Vec<Value> = keys.iter().flat_map(stroke).collect();
        self.post("/actions", json!({"actions": [{"type": "key", "id": "keys", "actions": actions}]})).map(drop)
    }

    /// Elements of a selector that are shown, with their names in the accessibility tree.
    pub fn names(&self, selector: &str) -> Result<Vec<(String, String)>, String> {
        let shown = format!("return [...document.querySelectorAll('{selector}')].filter((e) => e.checkVisibility())");
        let elements = self.script(&shown)?;
        let mut names = Vec::new();
        for element in elements.as_array().into_iter().flatten() {
            let id = element.as_object().and_then(|fields| fields.values().next()?.as_str()).unwrap_or_default();
            let label = self.driver.call("GET", &format!("{}/element/{id}/computedlabel", self.session), None)?;
            let html =
                self.post("/execute/sync", json!({"script": "return arguments[0].outerHTML", "args": [element]}))?;
            let tag = html.as_str().unwrap_or_default().chars().take(80).collect();
            names.push((tag, label.as_str().unwrap_or_default().to_owned()));
        }
        Ok(names)
    }

    /// The page as PNG, in base 64.
    pub fn screenshot(&self) -> Result<String, String> {
        let image = self.driver.call("GET", &format!("{}/screenshot", self.session), None)?;
        image.as_str().map(str::to_owned).ok_or("no screenshot".to_owned())
    }

    /// Dark or light.
    pub fn scheme(&self, dark: bool) -> Result<(), String> {
        let value = if dark { "dark" } else { "light" };
        let features = json!([{"name": "prefers-color-scheme", "value": value}]);
        self.devtools("Emulation.setEmulatedMedia", json!({"features": features}))
    }

    fn devtools(&self, command: &str, parameters: Value) -> Result<(), String> {
        self.post("/goog/cdp/execute", json!({"cmd": command, "params": parameters})).map(drop)
    }

    /// What the console got, and every address that was asked for.
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
        let _ = self.driver.call("DELETE", &self.session, None);
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
