//! What is wrong with a document: where, what, and what to do.

use std::fmt;

/// A place in a file, both from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The line.
    pub line: usize,
    /// The column, in characters.
    pub column: usize,
}

impl Place {
    /// The first character.
    pub const START: Self = Self { line: 1, column: 1 };
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The graph cannot be built.
    Error,
    /// It can, but probably not as meant.
    Warning,
}

/// One thing that is wrong with a document.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Finding {
    /// The file's name as it was given.
    pub file: String,
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    /// How bad it is.
    pub severity: Severity,
    /// What is wrong.
    pub message: String,
    /// What to do.
    pub fix: String,
}

impl Finding {
    pub(super) fn error(place: Place, message: impl Into<String>, fix: impl Into<String>) -> Self {
        Self {
            file: String::new(),
            line: place.line,
            column: place.column,
            severity: Severity::Error,
            message: message.into(),
            fix: fix.into(),
        }
    }

    pub(super) fn warning(place: Place, message: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { severity: Severity::Warning, ..Self::error(place, message, fix) }
    }

    /// Whether the graph cannot be built.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = if self.is_error() { "error" } else { "warning" };
        write!(f, "{}:{}:{}: {word}: {}; {}", self.file, self.line, self.column, self.message, self.fix)
    }
}
