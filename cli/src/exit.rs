//! How the program ends: one number per kind of outcome, the same for every command.

use std::fmt;
use std::process::ExitCode;

/// What every `--help` says about exit codes.
pub const HELP: &str = "\
Exit codes:
  0  done; for `run`: the run completed
  1  the run failed or was stopped
  2  the command line is wrong
  3  the server refused, what was named does not exist, or a graph has mistakes
  4  the server cannot be reached, or cannot do its work now
  5  the run is paused and waits for an answer
  6  the command could not be done; the text on standard error says why";

/// An outcome other than done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// The run failed or was stopped.
    RunFailed = 1,
    /// The command line is wrong.
    Usage = 2,
    /// The server refused, what was named does not exist, or a graph has mistakes.
    Refused = 3,
    /// The server cannot be reached, or cannot do its work now.
    Unreachable = 4,
    /// The run is paused.
    Paused = 5,
    /// Everything else.
    Program = 6,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Why a command was not done.
#[derive(Debug)]
pub struct Failure {
    /// What the shell is told.
    pub exit: Exit,
    /// What the person is told; `None` where the command has said it all.
    pub error: Option<anyhow::Error>,
}

impl Failure {
    /// A failure that says `message`.
    pub fn new(exit: Exit, message: impl fmt::Display) -> Self {
        Self { exit, error: Some(anyhow::anyhow!("{message}")) }
    }

    /// The command has printed the outcome.
    #[must_use]
    pub fn told(exit: Exit) -> Self {
        Self { exit, error: None }
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self { exit: Exit::Program, error: Some(error.into()) }
    }
}
