//! A program with the test graphs.
fn main() {}
