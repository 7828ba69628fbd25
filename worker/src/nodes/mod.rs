//! The kinds of nodes that do I/O of their own, and so live with the worker.

pub(crate) mod http;
mod surrogates;
pub(crate) mod tools;
