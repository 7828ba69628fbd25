//! The HTTP client of the tests.

use std::time::Duration;

/// A client that gives up after a while, long because the machine may be busy.
///
/// # Panics
/// If the system refuses one.
#[must_use]
pub fn http() -> reqwest::Client {
    // Installed by whoever comes first, which may be the program under test in the same process.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder().timeout(Duration::from_secs(90)).build().expect("a client")
}
