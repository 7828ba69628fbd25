//! End-to-end tests: one binary, a module per story.

mod cases;
mod chaos;
mod contract;
mod events;
mod golden;
mod growth;
mod harness;
mod program;
mod queue;
mod tidy;
