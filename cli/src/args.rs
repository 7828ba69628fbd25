//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use anyhow::Result;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::bench::BenchArgs;
use crate::client::interrupts::{AnswerArgs, ApproveArgs, DenyArgs, InterruptsArgs};
use crate::client::run::RunArgs;
use crate::client::runs::{RunsArgs, StopArgs};
use crate::client::threads::{FixArgs, ThreadsArgs};
use crate::dev::DevArgs;
use crate::graphs::GraphArgs;
use crate::roles::{ApiArgs, MigrateArgs, SchedulerArgs, WorkerArgs};
use crate::{exit, file};

/// Durable background runs of AI-agent graphs.
///
/// Every flag of a role can also be set in the environment, and in threadgate.yaml under its name
/// with `_` for `-`; flags win over the environment, and both over the file.
#[derive(Debug, Parser)]
#[command(name = "threadgate", version, after_help = exit::HELP, arg_required_else_help = true)]
pub struct Program {
    /// The file with settings; without it threadgate.yaml, if it is there.
    #[arg(long, global = true, env = "THREADGATE_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// All roles in one process: with no services, or on Postgres and Redis.
    Dev(Box<DevArgs>),
    /// Serves HTTP.
    Api(Box<ApiArgs>),
    /// Runs the nodes of graphs.
    Worker(Box<WorkerArgs>),
    /// Finds what is due, dead or stuck; one or more.
    Scheduler(Box<SchedulerArgs>),
    /// Brings the database's schema up to date.
    Migrate(MigrateArgs),
    /// Checks, registers and lists graphs.
    Graph(GraphArgs),
    /// Creates a run and waits for what becomes of it.
    #[command(after_help = exit::HELP)]
    Run(RunArgs),
    /// Lists runs, shows one, or says why it does not move.
    Runs(RunsArgs),
    /// Lists threads, shows one, or deletes it.
    Threads(ThreadsArgs),
    /// Lists what waits for a person, across all threads.
    Interrupts(InterruptsArgs),
    /// Lets a gated tool run, once, with the arguments that were shown.
    Approve(ApproveArgs),
    /// Keeps a gated tool from running; the model reads so.
    Deny(DenyArgs),
    /// Answers a question of a node, or about a call whose outcome is unknown.
    Answer(AnswerArgs),
    /// Stops a run after the node that runs now.
    Stop(StopArgs),
    /// Repairs a thread whose context holds unanswered calls.
    Fix(FixArgs),
    /// Measures durable steps per second beside pgbench.
    Bench(BenchArgs),
}

/// Reads the command line, over the environment, over the settings file. Ends the process for
/// `--help`, `--version` and mistakes.
///
/// # Errors
/// If the settings file cannot be used.
pub fn parse(arguments: Vec<OsString>) -> Result<Program> {
    let mut command = file::with_defaults(Program::command(), &arguments)?;
    let parsed = command.try_get_matches_from_mut(arguments);
    let program = parsed.and_then(|matches| Program::from_arg_matches(&matches));
    Ok(program.unwrap_or_else(|error| error.format(&mut command).exit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Program::command().debug_assert();
    }

    #[test]
    fn every_command_says_what_it_is_for() {
        for command in Program::command().get_subcommands() {
            assert!(command.get_about().is_some(), "{}", command.get_name());
        }
    }
}
