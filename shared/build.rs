//! The migrations are embedded: a changed file is a changed program.

fn main() {
    println!("cargo:rerun-if-changed=../migrations");
}
