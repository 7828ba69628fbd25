//! What handlers take from a request: bodies, queries and paths, checked before anything is done.

mod body;
mod path;
mod query;

pub use body::{ApiJson, Fields, FromFields};
pub use path::{InterruptPath, MessagePath, RunPath, ThreadPath, unknown_interrupt, unknown_run};
pub use query::{ApiQuery, LIST_MAX, WAIT_MAX_S};
