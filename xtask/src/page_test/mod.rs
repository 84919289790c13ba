//! `cargo xtask page-test`: the page of `quire serve` in a real headless Chromium.
//!
//! It builds the binary, serves the demo model on a free port, and drives the browser over WebDriver (`chromedriver`, from
//! Debian's `chromium-driver` or beside Chrome). Where there is no browser it is reported as not run. It waits for what it
//! expects with a limit; nothing is judged by how long it took.
//!
//! | file | what it owns |
//! |---|---|
//! | `driver` | WebDriver: a session, scripts, keys, logs |
//! | `serve` | the server under test |
//! | `checks` | what must hold |

mod checks;
mod driver;
mod serve;

use std::path::Path;
use std::process::Command;

use driver::Driver;
use serve::Server;
use testkit::capability::{self, Capability};
use testkit::{kernels, not_run};

/// Runs all checks; with `screenshot` the engine under load, as the README shows it, is written there as PNG.
///
/// # Errors
/// The first check that failed, and what was seen.
pub fn run(root: &Path, screenshot: Option<&Path>) -> Result<(), String> {
    let Some((driver, browser)) = capability::chromium() else {
        return not_run::check(Capability::Chromium, "found no chromedriver and Chromium on PATH");
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo).args(["build", "-p", "cli", "--locked"]).current_dir(root).status();
    if !built.map_err(|error| format!("cargo: {error}"))?.success() {
        return Err("the server does not build".to_owned());
    }
    let binary = kernels::target(root).join("debug/quire");
    let driver = Driver::start(&driver, browser)?;
    for (name, check) in checks::ALL {
        // A server of its own for each: what one leaves in the cache is nothing to the next.
        let server = Server::start(&binary, &[])?;
        check(&driver, &server).map_err(|problem| format!("{name}: {problem}"))?;
        println!("page-test: {name}: ok");
    }
    let server = Server::start(&binary, &["--api-key", checks::KEY])?;
    checks::a_key_is_asked_for_and_taken(&driver, &server).map_err(|problem| format!("key: {problem}"))?;
    println!("page-test: a key is asked for and taken: ok");
    if let Some(path) = screenshot {
        let image = checks::picture(&driver, &Server::start(&binary, &["--kv-cache-memory-bytes", "24M"])?)?;
        std::fs::write(path, image).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}
