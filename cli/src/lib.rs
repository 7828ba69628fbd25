//! The program `threadgate`: all roles, and the commands a person types.
//!
//! A program with graphs of its own is one line: [`main`] with a [`Registry`].
//!
//! ```no_run
//! use threadgate::prelude::*;
//!
//! async fn greet(ctx: NodeContext) -> String {
//!     format!("Hello, {}!", ctx.caller.user)
//! }
//!
//! fn main() -> std::process::ExitCode {
//!     let graph = Graph::builder("greeter").node("greet", greet).entry("greet").build();
//!     threadgate::main(Registry::new().graph(graph.expect("the graph is complete")))
//! }
//! ```

mod args;
pub mod bench;
mod client;
mod dev;
mod exit;
mod file;
mod graphs;
mod monitor;
mod print;
mod roles;
#[cfg(test)]
mod settings;
mod storage;

use std::process::ExitCode;

use threadgate_shared::graph::registry::Registry;

use crate::args::{Command, Program};
use crate::exit::Failure;

/// The README's programs are compiled with the documentation tests.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

/// What the author of a graph needs.
pub mod prelude {
    pub use serde_json::json;
    pub use threadgate_shared::domain::{Effect, Guard, Json, JsonMap, Message, Role, ThreadState, ToolSpec};
    pub use threadgate_shared::graph::registry::Registry;
    pub use threadgate_shared::graph::{
        Command, FieldSpec, Graph, GraphError, IdKind, Interrupt, Node, NodeContext, NodeError, NodePolicy, Outcome,
        Patch, Reducer, RetryPolicy, Tool, ToolContext, ToolError, ToolSet,
    };
}

/// Runs the program with the graphs of `registry`: reads the command line, does what it says, and
/// returns what the shell is told.
pub fn main(registry: Registry) -> ExitCode {
    use_ring();
    let done = args::parse(std::env::args_os().collect()).map_err(Failure::from).and_then(|program| {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(run(program, registry))
    });
    let Err(failure) = done else { return ExitCode::SUCCESS };
    if let Some(error) = failure.error {
        eprintln!("threadgate: {error:#}");
    }
    failure.exit.into()
}

async fn run(program: Program, registry: Registry) -> Result<(), Failure> {
    match program.command {
        Command::Dev(args) => dev::run(*args, registry).await,
        Command::Api(args) => Ok(roles::api(*args).await?),
        Command::Worker(args) => Ok(roles::worker(*args, registry).await?),
        Command::Scheduler(args) => Ok(roles::scheduler(*args).await?),
        Command::Migrate(args) => Ok(roles::migrate(args).await?),
        Command::Graph(args) => graphs::graph(args).await,
        Command::Run(args) => client::run::run(args).await,
        Command::Runs(args) => client::runs::runs(args).await,
        Command::Threads(args) => client::threads::threads(args).await,
        Command::Interrupts(args) => client::interrupts::interrupts(args).await,
        Command::Approve(args) => client::interrupts::approve(args).await,
        Command::Deny(args) => client::interrupts::deny(args).await,
        Command::Answer(args) => client::interrupts::answer(args).await,
        Command::Stop(args) => client::runs::stop(args).await,
        Command::Fix(args) => client::threads::fix(args).await,
        Command::Bench(args) => Ok(bench::run(&args).await?),
    }
}

/// TLS by ring: one provider for everything in the process.
pub(crate) fn use_ring() {
    // A second call finds the same provider in place.
    let _ = rustls::crypto::ring::default_provider().install_default();
}
