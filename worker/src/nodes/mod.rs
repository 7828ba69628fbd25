//! The kinds of declarative nodes that do I/O, and so live with the worker.

pub(crate) mod http;
mod surrogates;
