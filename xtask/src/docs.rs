//! `cargo xtask docs`: builds the documentation site with mdBook, as `book.toml` at the root describes it.

use std::path::Path;
use std::process::Command;

use testkit::kernels::toolkit::on_path;

/// Builds the site into the folder that `book.toml` names.
///
/// # Errors
/// One line: mdBook is missing, or the site does not build.
pub fn run(root: &Path) -> Result<(), String> {
    let mdbook = on_path("mdbook").ok_or(
        "docs: found no mdbook on PATH; install it with `cargo install --locked mdbook`, or open the pages in docs/",
    )?;
    if !root.join("book.toml").is_file() {
        return Err(
            "docs: found no book.toml at the root of the workspace, expected the settings of mdBook; add it".into()
        );
    }
    match Command::new(mdbook).arg("build").current_dir(root).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("docs: mdbook build ended with {status}; its messages are above")),
        Err(error) => Err(format!("docs: mdbook did not start: {error}")),
    }
}
