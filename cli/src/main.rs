//! The program `threadgate` with no graphs of its own.

use std::process::ExitCode;

use threadgate_shared::graph::registry::Registry;

#[cfg(feature = "mimalloc")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    threadgate::main(Registry::new())
}
