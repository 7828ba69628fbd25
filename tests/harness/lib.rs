//! The harness of the end-to-end tests: private Postgres and Redis, child processes with faults,
//! and waits with a limit. A test owns what it starts; dropping it stops it.

pub mod client;
pub mod cluster;
pub mod faulty;
pub mod folder;
pub mod golden;
pub mod graphs;
pub mod ports;
pub mod postgres;
pub mod process;
pub mod proxy;
pub mod redis;
pub mod server;
pub mod stack;
pub mod wait;

pub use postgres::{Database, Postgres};
pub use process::Process;
pub use proxy::Proxy;
pub use redis::Redis;
pub use wait::{LIMIT, eventually};
