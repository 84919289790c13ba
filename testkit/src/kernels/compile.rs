//! One run of a compiler or linker, skipped if nothing that its output was made from has changed.
//!
//! Each output has three files beside it: `.d`, the dependency file of the compiler; `.log`, its messages; `.record`, a hash of the
//! compiler's version, its arguments and the contents of every file that it read, followed by the names of those files. Time stamps
//! do not count, so a new checkout, a copy, or another branch and back builds nothing twice. The one exception is a file that was
//! written while the compiler ran. The compiler may have read either contents, so that output gets no record, and the next run
//! makes it again.

use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

use crate::at;

/// A run of a compiler or linker.
#[derive(Clone, Debug)]
pub struct Compile {
    /// `"compile"` or `"link"`, for messages.
    pub action: &'static str,
    /// The compiler.
    pub program: PathBuf,
    /// The output of its `--version`.
    pub version: String,
    /// All arguments except the inputs, the output and the dependency file.
    pub args: Vec<String>,
    /// Sources or objects.
    pub inputs: Vec<PathBuf>,
    /// The file to write.
    pub output: PathBuf,
}

impl Compile {
    /// Runs the compiler if anything has changed, and returns the messages of the run that made the output.
    ///
    /// # Errors
    /// The messages of the compiler, after a line that names the output.
    pub fn run(&self) -> Result<String, String> {
        if let Some(log) = self.current() {
            return Ok(log);
        }
        if let Some(folder) = self.output.parent() {
            std::fs::create_dir_all(folder).map_err(at(folder))?;
        }
        let (record, dependencies, unfinished) = (self.beside("record"), self.beside("d"), self.beside("new"));
        for stale in [&record, &dependencies] {
            let _ = std::fs::remove_file(stale);
        }
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .arg("-MMD")
            .arg("-MF")
            .arg(&dependencies)
            .arg("-o")
            .arg(&unfinished)
            .args(&self.inputs);
        let began = SystemTime::now();
        let output = command.output().map_err(at(&self.program))?;
        let log = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            let names: Vec<_> = self.inputs.iter().map(|input| input.display().to_string()).collect();
            let program = self.program.display();
            return Err(format!("{program} did not {} {}:\n{log}", self.action, names.join(" ")));
        }
        // A run that only links writes no dependency file.
        let rule = std::fs::read_to_string(&dependencies).unwrap_or_default();
        let mut files: Vec<String> = self.inputs.iter().map(|input| input.to_string_lossy().into_owned()).collect();
        files.extend(
            prerequisites(&rule).into_iter().filter(|file| !self.inputs.iter().any(|input| input == Path::new(file))),
        );
        std::fs::write(self.beside("log"), &log).map_err(at(&self.output))?;
        // A program that has the old output open keeps it.
        std::fs::rename(&unfinished, &self.output).map_err(at(&self.output))?;
        if !files.iter().any(|file| written_since(file, began)) {
            let lines = [vec![self.hash(&files)], files].concat();
            std::fs::write(&record, lines.join("\n")).map_err(at(&record))?;
        }
        Ok(log)
    }

    /// Returns the messages of the run that made the output, if another run would make the same output.
    fn current(&self) -> Option<String> {
        let record = std::fs::read_to_string(self.beside("record")).ok()?;
        let mut lines = record.lines().map(str::to_owned);
        let (hash, files) = (lines.next()?, lines.collect::<Vec<_>>());
        (self.output.is_file() && hash == self.hash(&files)).then_some(())?;
        std::fs::read_to_string(self.beside("log")).ok()
    }

    /// Returns a hash of the compiler, its arguments, and the names and contents of files.
    fn hash(&self, files: &[String]) -> String {
        let mut hasher = DefaultHasher::new();
        let mut add = |bytes: &[u8]| {
            hasher.write_usize(bytes.len());
            hasher.write(bytes);
        };
        add(self.version.as_bytes());
        self.args.iter().for_each(|arg| add(arg.as_bytes()));
        // An input that was added or removed is no argument, and the record of the run before does not list it.
        self.inputs.iter().for_each(|input| add(input.to_string_lossy().as_bytes()));
        for file in files {
            add(file.as_bytes());
            // A missing file hashes as an empty one, which differs from what was compiled.
            add(&std::fs::read(file).unwrap_or_default());
        }
        format!("{:016x}", hasher.finish())
    }

    fn beside(&self, extension: &str) -> PathBuf {
        let mut name = self.output.clone().into_os_string();
        name.push(".");
        name.push(extension);
        name.into()
    }
}

/// Returns whether a file may have been written at or after this moment.
fn written_since(file: &str, moment: SystemTime) -> bool {
    std::fs::metadata(file).and_then(|found| found.modified()).map_or(true, |written| written >= moment)
}

/// Returns the files after the colon of a make rule.
fn prerequisites(rule: &str) -> Vec<String> {
    let files = rule.split_once(": ").map_or("", |(_, files)| files).replace("\\\n", " ");
    // A space in a name has a backslash before it.
    let names = files.replace("\\ ", "\0");
    names.split_whitespace().map(|name| name.replace('\0', " ")).collect()
}

/// Runs all, `jobs` at a time, and returns their messages in the same order.
///
/// # Errors
/// The first that failed; the remaining ones are then not started.
pub fn run_all(compiles: &[Compile], jobs: usize) -> Result<Vec<String>, String> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(compile) = compiles.get(index) else { return done };
            let outcome = compile.run();
            if outcome.is_err() {
                next.store(compiles.len(), Ordering::Relaxed);
            }
            done.push((index, outcome));
        }
    };
    let mut outcomes: Vec<_> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(work)).collect();
        // Nothing in a worker panics; if one did, its outputs would be missing and the link would fail.
        workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
    });
    outcomes.sort_by_key(|(index, _)| *index);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_a_make_rule_are_those_after_its_colon() {
        assert_eq!(prerequisites("out.o: a.cu \\\n b\\ c.h /d/e.cuh\n"), ["a.cu", "b c.h", "/d/e.cuh"]);
        assert_eq!(prerequisites("out.o : a.cu"), ["a.cu"]);
        assert_eq!(prerequisites(""), [""; 0]);
    }
}
