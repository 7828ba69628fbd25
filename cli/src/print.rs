//! What goes to standard output: text for people with colour on a terminal, or JSON for machines.

use std::fmt::Display;
use std::io::{IsTerminal, Write};

use threadgate_shared::telemetry::colour_wanted;

/// Writes a line; whoever reads may have gone, and that is no failure.
pub fn line(text: impl Display) {
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

/// Writes a piece of a line at once.
pub fn piece(text: impl Display) {
    let mut out = std::io::stdout().lock();
    let _ = write!(out, "{text}");
    let _ = out.flush();
}

/// Colours, where somebody sees them.
#[derive(Debug, Clone, Copy)]
pub struct Paint(bool);

impl Paint {
    /// Colours if standard output is a terminal and `NO_COLOR` is not set.
    #[must_use]
    pub fn for_stdout() -> Self {
        Self(std::io::stdout().is_terminal() && colour_wanted())
    }

    /// What matters most in a line.
    #[must_use]
    pub fn bold(self, text: impl Display) -> String {
        self.with("1", text)
    }

    /// What matters least.
    #[must_use]
    pub fn dim(self, text: impl Display) -> String {
        self.with("2", text)
    }

    /// A run's status in its colour, padded to `width`.
    #[must_use]
    pub fn status(self, status: &str, width: usize) -> String {
        let code = match status {
            "completed" => "32",
            "failed" => "31",
            "interrupted" | "stopped" => "33",
            "running" => "36",
            _ => "0",
        };
        self.with(code, format!("{status:width$}"))
    }

    fn with(self, code: &str, text: impl Display) -> String {
        if self.0 { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_string() }
    }
}

/// Rows under headings, each column as wide as its widest cell.
#[must_use]
pub fn table(headings: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count());
        cells.chain([headings[column].len()]).max().unwrap_or_default()
    };
    let widths: Vec<usize> = (0..headings.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<String> = cells.zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        padded.join("  ").trim_end().to_owned()
    };
    let mut lines = vec![line(&mut headings.iter().copied())];
    lines.extend(rows.iter().map(|row| line(&mut row.iter().map(String::as_str))));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [vec!["1".to_owned(), "completed".to_owned()], vec!["23".to_owned(), "ok".to_owned()]];

        assert_eq!(table(&["ID", "STATUS"], &rows), "ID  STATUS\n1   completed\n23  ok");
    }

    #[test]
    fn without_a_terminal_nothing_is_coloured() {
        assert_eq!(Paint(false).status("failed", 8), "failed  ");
        assert_eq!(Paint(true).status("failed", 6), "\x1b[31mfailed\x1b[0m");
    }
}
