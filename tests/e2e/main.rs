//! End-to-end tests: one binary, a module per story.

mod contract;
mod harness;
mod tidy;
