//! A server under test: `quire serve` on a free port, which ends when its value is dropped.

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
    /// Starts the server with these arguments and waits until it listens. Its messages go to standard error.
    ///
    /// # Errors
    /// One line: the program does not start, or ends before it listens.
    pub fn start<'a>(program: &Path, args: impl IntoIterator<Item = &'a str>) -> Result<Server, String> {
        let mut command = Command::new(program);
        command.args(["serve", "--port", "0"]).args(args).stdin(Stdio::null()).stderr(Stdio::piped());
        let child = command.spawn().map_err(|error| format!("{}: {error}", program.display()))?;
        let mut server = Server { child, url: String::new() };
        let stderr = server.child.stderr.take().map(BufReader::new);
        let mut lines = stderr.into_iter().flat_map(|stderr| stderr.lines().map_while(Result::ok));
        let url = lines.by_ref().find_map(|line| {
            let url = line.split_once("listening on ").and_then(|(_, rest)| rest.split(',').next());
            if url.is_none() {
                eprintln!("{line}");
            }
            url.map(str::to_owned)
        });
        // A full pipe would stop the server.
        std::thread::spawn(move || lines.for_each(|line| eprintln!("{line}")));
        server.url = url.ok_or("the server ended before it listened; its messages are above")?;
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already, and has nothing to save.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
