//! The program `threadgate`.
fn main() {}
