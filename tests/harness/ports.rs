//! Free ports on the loopback address.

use std::net::{Ipv4Addr, TcpListener};

/// A port of 127.0.0.1 that nobody listened on a moment ago.
///
/// Another process may take it before its user does; whoever starts a server with it looks whether
/// that server lives, and tries another port.
#[must_use]
pub fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("the loopback address has a free port");
    listener.local_addr().expect("a bound listener has an address").port()
}
