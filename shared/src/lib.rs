//! What all Threadgate programs share: the rules (`domain`, `graph`), where the truth lives
//! (`store`), how work is announced (`queue`, `dispatcher`) and what a client may follow (`events`).
//!
//! Arrows point down only: `domain` ← `graph` ← `store`, `queue` ← `dispatcher`.

pub mod config;
pub mod dispatcher;
pub mod domain;
pub mod events;
pub mod graph;
mod link;
pub mod parts;
pub mod queue;
pub mod shutdown;
pub mod store;
pub mod telemetry;
