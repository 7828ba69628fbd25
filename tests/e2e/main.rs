//! End-to-end tests: one binary, a module per story.

mod contract;
mod events;
mod harness;
mod program;
mod queue;
mod tidy;
