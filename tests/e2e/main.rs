//! End-to-end tests: one binary, a module per story.

#![expect(clippy::unwrap_used, reason = "a test that unwraps says where it broke")]

mod approvals;
mod cases;
mod chaos;
mod contract;
mod events;
mod golden;
mod growth;
mod harness;
mod program;
mod queue;
mod simulation;
mod tidy;
