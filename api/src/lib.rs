//! The stateless HTTP API.
