//! The program `threadgate`.
