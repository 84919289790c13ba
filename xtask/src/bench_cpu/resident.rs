//! An engine behind a script in Python that measures what each line of its input asks for.

use std::io::{BufRead, BufReader, Lines, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value;

/// A script that is running; it ends when its value is dropped.
pub(super) struct Resident {
    pub name: &'static str,
    child: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Resident {
    /// Starts a script.
    ///
    /// # Errors
    /// The interpreter does not start.
    pub fn start(
        name: &'static str,
        python: &Path,
        (script, args): (&str, &[&str]),
        environment: &[(&str, &str)],
    ) -> Result<Resident, String> {
        let mut command = Command::new(python);
        command.args(["-c", script]).args(args).envs(environment.iter().copied());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(|error| format!("{}: {error}", python.display()))?;
        match (child.stdin.take(), child.stdout.take()) {
            (Some(input), Some(output)) => Ok(Resident { name, child, input, output: BufReader::new(output).lines() }),
            _ => Err(format!("{name} has no pipes")),
        }
    }

    /// Measures sequences at once, tokens of each prompt, and tokens to generate. Lines that are no JSON are messages.
    ///
    /// # Errors
    /// The script has ended.
    pub fn measure(&mut self, (batch, input, output): (usize, usize, usize)) -> Result<Value, String> {
        let ended = || format!("{} ended; run its script by hand to see why", self.name);
        writeln!(self.input, "{batch} {input} {output}").map_err(|_| ended())?;
        loop {
            let line = self.output.next().ok_or_else(ended)?;
            let line = line.map_err(|error| format!("{}: {error}", self.name))?;
            if let Ok(figures @ Value::Object(_)) = serde_json::from_str(&line) {
                return Ok(figures);
            }
        }
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        // It may have ended already, and has nothing to save.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
