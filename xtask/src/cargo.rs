//! Runs cargo, and finds what it has built.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;
use testkit::kernels;

/// Returns a command for the cargo that started this program, in the folder `root`.
pub(crate) fn command(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    command
}

/// Runs cargo and returns its standard output.
///
/// # Errors
/// Cargo does not start, or fails; its messages go to standard error.
pub fn run(root: &Path, args: &[&str]) -> Result<String, String> {
    output(command(root).args(args))
}

/// Does what [`run`] does for a command of [`command`].
pub(crate) fn output(command: &mut Command) -> Result<String, String> {
    let output = command.stderr(Stdio::inherit()).output().map_err(|error| format!("cargo did not start: {error}"))?;
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => {
            let args: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy()).collect();
            Err(format!("cargo {} ended with {}; its messages are above", args.join(" "), output.status))
        }
    }
}

/// Builds the program `quire` and returns its path.
///
/// # Errors
/// The errors of [`run`].
pub fn build_quire(root: &Path, profile: &str) -> Result<PathBuf, String> {
    run(root, &["build", "--package", "cli", "--bin", "quire", "--locked", "--profile", profile])?;
    let folder = if profile == "dev" { "debug" } else { profile };
    Ok(kernels::target(root).join(folder).join("quire"))
}

/// A program of tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TestProgram {
    /// Name of the package.
    pub package: String,
    /// Its target: a library, a binary, or the name of an integration test.
    pub target: String,
    /// The executable.
    pub file: PathBuf,
    /// Folder of the package.
    pub folder: PathBuf,
}

/// Builds the test programs that further arguments of `cargo test` select.
///
/// # Errors
/// The errors of [`run`].
pub fn test_programs(root: &Path, args: &[&str]) -> Result<Vec<TestProgram>, String> {
    let build = ["test", "--no-run", "--locked", "--message-format=json-render-diagnostics"];
    Ok(programs(&run(root, &[&build, args].concat())?))
}

/// Returns the test programs in cargo's messages.
pub fn programs(messages: &str) -> Vec<TestProgram> {
    let tests = executables(messages).filter(|(message, _)| message["profile"]["test"] == true);
    let program = |(message, file): (Value, PathBuf)| {
        let folder = Path::new(message["manifest_path"].as_str()?).parent()?.to_owned();
        let target = message["target"]["name"].as_str()?.to_owned();
        Some(TestProgram { package: folder.file_name()?.to_string_lossy().into_owned(), target, file, folder })
    };
    tests.filter_map(program).collect()
}

/// Returns what cargo's messages say about each executable that it has built, and its file.
pub(crate) fn executables(messages: &str) -> impl Iterator<Item = (Value, PathBuf)> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let built = messages.filter(|message| message["reason"] == "compiler-artifact");
    built.filter_map(|message| message["executable"].as_str().map(PathBuf::from).map(|file| (message, file)))
}
