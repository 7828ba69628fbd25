//! The routes, one file per topic; each says who may call it.

pub mod docs;
pub mod graph;
pub mod health;
pub mod interrupts;
pub mod observability;
pub mod pools;
pub mod run_graph;
pub mod runs;
pub mod runs_follow;
pub mod store;
pub mod thread_messages;
pub mod threads;
