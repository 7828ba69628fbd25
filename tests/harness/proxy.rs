//! A proxy between us and a server, whose connections a test freezes or resets.

use std::sync::Arc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

/// What happens to what is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Weather {
    Fair,
    /// Nothing arrives, nobody is told; new connections are the same.
    Frozen,
    /// Connections of this generation end.
    Reset(u64),
}

/// The proxy; dropping it ends its connections.
#[derive(Debug)]
pub struct Proxy {
    /// Its own port of 127.0.0.1.
    pub port: u16,
    weather: Arc<watch::Sender<Weather>>,
    _accepting: AbortOnDropHandle<()>,
}

impl Proxy {
    /// A proxy to a port of 127.0.0.1.
    ///
    /// # Panics
    /// If it cannot listen.
    pub async fn to(port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("the loopback address has a free port");
        let own = listener.local_addr().expect("a bound listener has an address").port();
        let weather = Arc::new(watch::Sender::new(Weather::Fair));
        let accepting = AbortOnDropHandle::new(tokio::spawn(accept(listener, port, Arc::clone(&weather))));
        Self { port: own, weather, _accepting: accepting }
    }

    /// From now on nothing arrives in either direction, and nobody is told.
    pub fn freeze(&self) {
        self.weather.send_replace(Weather::Frozen);
    }

    /// New connections work again; frozen ones stay dead without a word.
    pub fn thaw(&self) {
        self.weather.send_replace(Weather::Fair);
    }

    /// Ends all connections; new ones work.
    pub fn reset(&self) {
        self.weather.send_modify(|weather| {
            let generation = if let Weather::Reset(last) = *weather { last + 1 } else { 1 };
            *weather = Weather::Reset(generation);
        });
    }
}

async fn accept(listener: TcpListener, port: u16, weather: Arc<watch::Sender<Weather>>) {
    while let Ok((client, _)) = listener.accept().await {
        let weather = weather.subscribe();
        tokio::spawn(async move {
            if let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await {
                carry(client, server, weather).await;
            }
        });
    }
}

async fn carry(client: TcpStream, server: TcpStream, mut weather: watch::Receiver<Weather>) {
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let born = *weather.borrow_and_update();
    let mut frozen = born == Weather::Frozen;
    let flows = async {
        tokio::join!(flow(from_client, to_server), flow(from_server, to_client));
    };
    tokio::pin!(flows);
    loop {
        tokio::select! {
            () = &mut flows, if !frozen => return,
            changed = weather.changed() => match (changed, *weather.borrow_and_update()) {
                // The proxy is gone.
                (Err(_), _) | (_, Weather::Reset(_)) => return,
                (_, Weather::Frozen) => frozen = true,
                (_, Weather::Fair) => {}
            },
        }
    }
}

async fn flow(mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        if to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
    }
    let _ = to.shutdown().await;
}
