//! Shapes on the wire: the peer's, and those of the Runs API.

pub mod chunks;
pub mod envelope;
pub mod graph_info;
pub mod interrupt_view;
pub mod new_run;
pub mod run_events;
pub mod run_request;
pub mod run_view;
pub mod schema;
pub mod state;
pub mod why;
