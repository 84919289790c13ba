//! Tables of Markdown pages.

/// One row of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row<'a> {
    /// Index of its line, from 0.
    pub index: usize,
    /// Cells without the blanks around them.
    pub cells: Vec<&'a str>,
}

impl<'a> Row<'a> {
    /// A cell, empty where the row has none.
    pub fn cell(&self, column: usize) -> &'a str {
        self.cells.get(column).copied().unwrap_or_default()
    }

    /// What stands between backticks in a cell, in order.
    pub fn code(&self, column: usize) -> impl Iterator<Item = &'a str> {
        self.cell(column).split('`').skip(1).step_by(2)
    }
}

/// All rows of all tables outside of fenced blocks, heads and separators too.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_its_cells() {
        let found = rows("text\n| `a`, `b` | c |\n|---|---|\n```\n| no |\n```\n");
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].index, found[0].cell(1), found[0].cell(2)), (1, "c", ""));
        assert_eq!(found[0].code(0).collect::<Vec<_>>(), ["a", "b"]);
    }
}
