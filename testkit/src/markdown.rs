//! Tables of Markdown pages, for tests that compare a page with the code.
//!
//! ```
//! let rows = testkit::markdown::rows("text\n| `a`, `b` | c |\n|---|---|\n```\n| no |\n```\n");
//! assert_eq!((rows.len(), rows[0].index, rows[0].cell(1), rows[0].cell(2)), (2, 1, "c", ""));
//! assert_eq!(rows[0].code(0).collect::<Vec<_>>(), ["a", "b"]);
//! ```

/// One row of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row<'a> {
    /// Index of its line, from 0.
    pub index: usize,
    /// Cells without surrounding blanks.
    pub cells: Vec<&'a str>,
}

impl<'a> Row<'a> {
    /// Returns a cell, or an empty text if the row is shorter.
    pub fn cell(&self, column: usize) -> &'a str {
        self.cells.get(column).copied().unwrap_or_default()
    }

    /// Returns the texts between backticks in a cell.
    pub fn code(&self, column: usize) -> impl Iterator<Item = &'a str> {
        self.cell(column).split('`').skip(1).step_by(2)
    }
}

/// Returns the rows of all tables outside of fenced blocks, including heads and separators.
pub fn rows(text: &str) -> Vec<Row<'_>> {
    let mut fenced = false;
    let mut rows = Vec::new();
    for (index, line) in text.lines().enumerate() {
        fenced ^= line.trim_start().starts_with("```");
        if let Some(row) = line.trim().strip_prefix('|').filter(|_| !fenced) {
            rows.push(Row { index, cells: row.trim_end_matches('|').split('|').map(str::trim).collect() });
        }
    }
    rows
}
