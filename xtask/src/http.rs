//! A client for JSON, and programs that serve on a port.

use std::fs::File;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use ureq::Agent;

/// Time limit of a request.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Time limit for the start of a program; vLLM compiles its model first.
const START: Duration = Duration::from_secs(300);

/// Time limit for the end of a program.
const END: Duration = Duration::from_secs(10);

/// A client of one server.
#[derive(Clone)]
pub struct Client {
    agent: Agent,
    url: String,
}

impl Client {
    /// Client of a server at `http://HOST:PORT`.
    pub fn new(url: impl Into<String>) -> Client {
        let config = Agent::config_builder().http_status_as_error(false).timeout_global(Some(TIMEOUT));
        Client { agent: config.build().new_agent(), url: url.into() }
    }

    /// Posts JSON and returns the answer.
    ///
    /// # Errors
    /// There is none, its status is not 200, or it is not JSON.
    pub fn post(&self, path: &str, body: &Value) -> Result<Value, String> {
        let (url, body) = (format!("{}{path}", self.url), body.to_string());
        let sent = self.agent.post(&url).header("content-type", "application/json").send(body);
        let mut answer = sent.map_err(|error| format!("{url}: {error}"))?;
        let text = answer.body_mut().read_to_string().map_err(|error| format!("{url}: {error}"))?;
        match answer.status().is_success() {
            true if text.is_empty() => Ok(Value::Null),
            true => serde_json::from_str(&text).map_err(|error| format!("{url}: {error}")),
            false => Err(format!("{url}: {}: {text}", answer.status())),
        }
    }

    /// Returns the sum of the samples of a metric.
    ///
    /// # Errors
    /// The page cannot be read.
    pub fn metric(&self, name: &str) -> Result<f64, String> {
        let url = format!("{}/metrics", self.url);
        let mut answer = self.agent.get(&url).call().map_err(|error| format!("{url}: {error}"))?;
        let page = answer.body_mut().read_to_string().map_err(|error| format!("{url}: {error}"))?;
        let samples = page.lines().filter(|line| line.split('{').next() == Some(name));
        Ok(samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum())
    }
}

/// Returns a port that nothing listens on.
///
/// # Errors
/// The system has none.
pub fn free_port() -> Result<u16, String> {
    let listener = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    listener.map(|address| address.port()).map_err(|error| format!("found no free port: {error}"))
}

/// A program that ends when its value is dropped.
pub struct Service(Child);

impl Service {
    /// Starts a program that prints to the file `log`, and waits until `is_ready`.
    ///
    /// # Errors
    /// It does not start, ends, or is not ready in time.
    pub fn start(mut command: Command, log: &Path, is_ready: impl Fn() -> bool) -> Result<Service, String> {
        let name = command.get_program().to_string_lossy().into_owned();
        let at = |error: std::io::Error| format!("{}: {error}", log.display());
        let file = File::create(log).map_err(at)?;
        command.stdin(Stdio::null()).stdout(file.try_clone().map_err(at)?).stderr(file);
        let mut service = Service(command.spawn().map_err(|error| format!("{name}: {error}"))?);
        let begun = Instant::now();
        while !is_ready() {
            let ended = service.0.try_wait().ok().flatten();
            if ended.is_some() || begun.elapsed() > START {
                let what = ended.map_or("is not ready in time".to_owned(), |status| format!("ended with {status}"));
                return Err(format!("{name} {what}; {} has what it printed", log.display()));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(service)
    }
}

impl Drop for Service {
    /// Asks the program to end, so that it can end its own processes; kills it if it does not.
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(self.0.id().to_string()).status();
        let begun = Instant::now();
        while begun.elapsed() < END && self.0.try_wait().is_ok_and(|status| status.is_none()) {
            std::thread::sleep(Duration::from_millis(50));
        }
        // It may have ended already, and has nothing to save.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
