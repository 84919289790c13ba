//! One run of a compiler, left out when nothing that its output was made of has changed.
//!
//! Beside every output stand two files: `.log`, what the compiler said, and `.record`, a hash of the compiler's version,
//! its arguments and the contents of every file that it read (its own dependency file names them), then those files.
//! Time stamps do not count: a checkout that is new, or copied, or on another branch and back, builds nothing twice. The
//! one exception is a file that was written while the compiler ran: nobody knows which of its contents was read, so
//! that output gets no record, and the next run makes it again.

use std::hash::Hasher;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::SystemTime;

use siphasher::sip128::{Hasher128, SipHasher13};

/// One source to compile to one output.
#[derive(Clone, Debug)]
pub struct Compile {
    /// The compiler.
    pub program: PathBuf,
    /// What tells it from another: the text of `--version`.
    pub version: String,
    /// Everything but the source, the output, and where dependencies go.
    pub args: Vec<String>,
    /// The file to compile.
    pub source: PathBuf,
    /// The file to write.
    pub output: PathBuf,
}

impl Compile {
    /// Compiles if anything changed, and returns what the compiler said then or now.
    ///
    /// # Errors
    /// What the compiler said, after one line that says which source it was about.
    pub fn run(&self) -> Result<String, String> {
        if let Some(log) = self.is_current() {
            return Ok(log);
        }
        let failed = |what: &Path, error: std::io::Error| format!("{}: {error}", what.display());
        if let Some(folder) = self.output.parent() {
            std::fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
        }
        let (record, dependencies) = (self.beside("record"), self.beside("d"));
        // Gone until the new output is there, so that an interrupted run is never taken for a finished one.
        let _ = std::fs::remove_file(&record);
        let mut command = Command::new(&self.program);
        command
            .args(&self.args)
            .arg("-MMD")
            .arg("-MF")
            .arg(&dependencies)
            .arg("-o")
            .arg(&self.output)
            .arg(&self.source);
        let began = SystemTime::now();
        let output = command.output().map_err(|error| failed(&self.program, error))?;
        let log = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
        if !output.status.success() {
            return Err(format!("{} did not compile {}:\n{log}", self.program.display(), self.source.display()));
        }
        let named = std::fs::read_to_string(&dependencies).map_err(|error| failed(&dependencies, error))?;
        let files = prerequisites(&named);
        let lines = [vec![self.hash(&files)], files].concat();
        std::fs::write(self.beside("log"), &log).map_err(|error| failed(&self.output, error))?;
        if !lines[1..].iter().any(|file| written_since(file, began)) {
            std::fs::write(&record, lines.join("\n")).map_err(|error| failed(&record, error))?;
        }
        Ok(log)
    }

    /// The log of the run that made the output, if it would come out the same now.
    fn is_current(&self) -> Option<String> {
        let record = std::fs::read_to_string(self.beside("record")).ok()?;
        let mut lines = record.lines().map(str::to_owned);
        let (hash, files) = (lines.next()?, lines.collect::<Vec<_>>());
        (self.output.is_file() && hash == self.hash(&files)).then_some(())?;
        std::fs::read_to_string(self.beside("log")).ok()
    }

    fn hash(&self, files: &[String]) -> String {
        fingerprint(&self.version, &self.args, files.iter().map(Path::new))
    }

    fn beside(&self, extension: &str) -> PathBuf {
        let mut name = self.output.clone().into_os_string();
        name.push(".");
        name.push(extension);
        name.into()
    }
}

/// A hash of a compiler, its arguments, and the names and contents of files.
pub(super) fn fingerprint<'a>(version: &str, args: &[String], files: impl Iterator<Item = &'a Path>) -> String {
    let mut hasher = SipHasher13::new();
    let mut add = |bytes: &[u8]| {
        hasher.write_usize(bytes.len());
        hasher.write(bytes);
    };
    add(version.as_bytes());
    args.iter().for_each(|arg| add(arg.as_bytes()));
    for file in files {
        add(file.as_os_str().as_encoded_bytes());
        // A file that is gone hashes as an empty one, which differs from what was compiled.
        add(&std::fs::read(file).unwrap_or_default());
    }
    let hash = hasher.finish128();
    format!("{:016x}{:016x}", hash.h1, hash.h2)
}

/// Whether a file is not known to be older than that.
fn written_since(file: &str, moment: SystemTime) -> bool {
    std::fs::metadata(file).and_then(|found| found.modified()).map_or(true, |written| written >= moment)
}

/// The files behind the colon of a make rule.
fn prerequisites(rule: &str) -> Vec<String> {
    let mut files = Vec::new();
    let mut word = String::new();
    let mut chars = rule.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\\' if chars.peek() == Some(&'\n') => {}
            '\\' if chars.peek() == Some(&' ') => word.extend(chars.next()),
            c if c.is_whitespace() => {
                if !word.is_empty() {
                    files.push(std::mem::take(&mut word));
                }
            }
            c => word.push(c),
        }
    }
    if !word.is_empty() {
        files.push(word);
    }
    // The target, with its colon, may be cut off by a blank.
    let colon = files.iter().position(|file| file.ends_with(':')).unwrap_or_default();
    files.split_off((colon + 1).min(files.len()))
}

/// Runs all, `jobs` at a time, and returns their logs in the same order.
///
/// # Errors
/// The first that failed; those that have not begun then are left out.
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
        // A worker has nothing that could panic; if it did, its outputs would be missing and the link would say so.
        workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
    });
    outcomes.sort_by_key(|(index, _)| *index);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// A compiler that copies its source, and counts its runs in `runs`. `behind` is done behind the copy.
    #[cfg(unix)]
    fn copying_compiler(folder: &Path, behind: &str) -> Compile {
        use std::os::unix::fs::PermissionsExt;
        let at = |name: &str| folder.join(name);
        let script = format!(
            "#!/bin/sh\ncp \"$6\" \"$5\" && echo \"out: $6\" > \"$3\" && echo run >> '{}'\n{behind}\n",
            at("runs").display()
        );
        std::fs::write(at("compiler"), script).unwrap();
        std::fs::set_permissions(at("compiler"), std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::write(at("a.cu"), "first").unwrap();
        Compile {
            program: at("compiler"),
            version: "1".into(),
            args: Vec::new(),
            source: at("a.cu"),
            output: at("a.o"),
        }
    }

    #[test]
    #[cfg(unix)]
    fn what_has_not_changed_is_not_compiled_again() {
        let folder = tempfile::tempdir().unwrap();
        let compile = copying_compiler(folder.path(), "");
        // The file system's clock is coarser than the system's.
        std::thread::sleep(std::time::Duration::from_millis(30));
        let runs = || std::fs::read_to_string(folder.path().join("runs")).unwrap().lines().count();
        compile.run().unwrap();
        compile.run().unwrap();
        assert_eq!(runs(), 1);
        std::fs::write(&compile.source, "second").unwrap();
        std::thread::sleep(std::time::Duration::from_millis(30));
        compile.run().unwrap();
        assert_eq!((runs(), std::fs::read_to_string(&compile.output).unwrap()), (2, "second".into()));
    }

    #[test]
    #[cfg(unix)]
    fn a_source_written_while_it_is_compiled_is_compiled_again() {
        let folder = tempfile::tempdir().unwrap();
        let compile = copying_compiler(folder.path(), "sleep 0.05; printf second > \"$6\"");
        compile.run().unwrap();
        assert_eq!(std::fs::read_to_string(&compile.output).unwrap(), "first", "an edit comes too late");
        compile.run().unwrap();
        assert_eq!(std::fs::read_to_string(&compile.output).unwrap(), "second");
    }

    #[test]
    fn the_files_of_a_make_rule_are_those_behind_its_colon() {
        assert_eq!(prerequisites("out.o: a.cu \\\n b\\ c.h /d/e.cuh\n"), ["a.cu", "b c.h", "/d/e.cuh"]);
        assert_eq!(prerequisites("out.o : a.cu"), ["a.cu"]);
        assert_eq!(prerequisites(""), [""; 0]);
    }
}
