//! The program `threadgate` with the test graphs built in.

use std::process::ExitCode;

use threadgate_shared::graph::registry::Registry;
use threadgate_tests::graphs;

fn main() -> ExitCode {
    let graphs = graphs::all().expect("the test graphs are complete");
    threadgate::main(graphs.into_iter().fold(Registry::new(), Registry::graph))
}
