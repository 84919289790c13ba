//! The server under test: `quire serve` with the demo model, on a free port, ended with its value.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// A running server.
pub struct Server {
    child: Child,
    /// `http://127.0.0.1:PORT`.
    pub url: String,
}

impl Server {
    /// Starts it with these flags beside a small cache, and waits until it listens.
    pub fn start(binary: &Path, flags: &[&str]) -> Result<Server, String> {
        let mut command = Command::new(binary);
        command.args(["serve", "--port", "0", "--shutdown-timeout", "0"]).args(flags);
        if !flags.contains(&"--kv-cache-memory-bytes") {
            command.args(["--kv-cache-memory-bytes", "64M"]);
        }
        let spawned = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut child = spawned.map_err(|error| format!("{}: {error}", binary.display()))?;
        let mut lines = BufReader::new(child.stderr.take().ok_or("no standard error")?).lines().map_while(Result::ok);
        let mut seen = String::new();
        let url = lines.by_ref().find_map(|line| {
            seen += &line;
            line.split_once("listening on ").and_then(|(_, rest)| Some(rest.split(',').next()?.to_owned()))
        });
        // The server must not wait for a reader of what else it says.
        std::thread::spawn(move || lines.for_each(drop));
        let mut server = Server { child, url: String::new() };
        server.url = url.ok_or(format!("the server did not start: {seen}"))?;
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself; there is nothing to save.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
