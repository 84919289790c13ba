//! `cargo xtask page-test`: tests the page of `quire serve` in a real headless Chromium.
//!
//! It builds the binary, serves the demo model on a free port, and controls the browser over WebDriver (`chromedriver`, from
//! Debian's `chromium-driver` or from Chrome's downloads). Without a browser it reports that it did not run. It waits for what it
//! expects up to a time limit; no check depends on how long something took.
//!
//! | file | content |
//! |---|---|
//! | `driver` | WebDriver: a session, scripts, keys, logs |
//! | `checks` | the checks |

mod checks;
mod driver;

use std::path::Path;

use testkit::capability::{self, Capability};
use testkit::not_run;

use crate::cargo;
use crate::server::Server;
use driver::Driver;

/// Arguments of the servers, with a small cache so that the grid of blocks is small.
const SMALL: [&str; 4] = ["--shutdown-timeout", "0", "--kv-cache-memory-bytes", "64M"];

/// Runs all checks. With `screenshot`, writes a PNG of the page under load, as the README shows it.
///
/// # Errors
/// The first check that failed, and what was seen.
pub fn run(root: &Path, screenshot: Option<&Path>) -> Result<(), String> {
    let Some((driver, browser)) = capability::chromium() else {
        return not_run::check(Capability::Chromium, "found no chromedriver and Chromium on PATH");
    };
    let binary = cargo::build_quire(root, "dev")?;
    let driver = Driver::start(&driver, browser)?;
    for (name, check) in checks::ALL {
        // Each check has a server of its own, so that none sees what another left in the cache.
        let server = Server::start(&binary, SMALL)?;
        check(&driver, &server).map_err(|problem| format!("{name}: {problem}"))?;
        println!("page-test: {name}: ok");
    }
    let server = Server::start(&binary, SMALL.into_iter().chain(["--api-key", checks::KEY]))?;
    checks::the_page_asks_for_a_key(&driver, &server).map_err(|problem| format!("key: {problem}"))?;
    println!("page-test: the page asks for a key and accepts it: ok");
    if let Some(path) = screenshot {
        let server = Server::start(&binary, ["--shutdown-timeout", "0", "--kv-cache-memory-bytes", "24M"])?;
        let image = checks::picture(&driver, &server)?;
        std::fs::write(path, image).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}
