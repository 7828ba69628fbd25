//! Passes that find what is due, dead or stuck.
