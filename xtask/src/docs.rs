//! `cargo xtask docs`: draws the diagrams with Graphviz, where it is present, and builds the documentation site with mdBook, as
//! `book.toml` at the root describes it.

use std::path::Path;
use std::process::Command;

use testkit::kernels::toolkit::on_path;

/// Builds the site into the folder that `book.toml` names.
///
/// # Errors
/// One line: mdBook is missing, or the site does not build.
pub fn run(root: &Path) -> Result<(), String> {
    if let Some(dot) = on_path("dot") {
        for diagram in ["crates", "step"] {
            let path = format!("docs/diagrams/{diagram}");
            finish(Command::new(&dot).args(["-Tsvg", &format!("{path}.dot"), "-o", &format!("{path}.svg")]), root)?;
        }
    }
    let mdbook = on_path("mdbook").ok_or(
        "docs: found no mdbook on PATH; install it with `cargo install --locked mdbook`, or open the pages in docs/",
    )?;
    if !root.join("book.toml").is_file() {
        return Err(
            "docs: found no book.toml at the root of the workspace, expected the settings of mdBook; add it".into()
        );
    }
    finish(Command::new(mdbook).arg("build"), root)
}

fn finish(command: &mut Command, root: &Path) -> Result<(), String> {
    match command.current_dir(root).status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("docs: {command:?} ended with {status}; its messages are above")),
        Err(error) => Err(format!("docs: {command:?} did not start: {error}")),
    }
}
