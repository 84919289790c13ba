//! Progress bars.

use indicatif::{ProgressBar, ProgressStyle};

/// A progress bar on standard error, hidden unless that is a terminal.
pub fn progress_bar(length: u64, template: &'static str) -> ProgressBar {
    // Templates are literals of this crate; an invalid one falls back to the default bar.
    let style = ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(length).with_style(style)
}
