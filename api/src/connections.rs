//! Accepts connections and serves them with HTTP/1: so many at once, each with a time to send the
//! head of its request, so that clients that hold on to theirs keep nobody else out for ever.

use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use crate::config::ApiConfig;

/// How long nothing is accepted after the system refused to give a connection, which it does when
/// files run out.
const PAUSE: Duration = Duration::from_secs(1);

/// Serves connections until `shutdown`, then returns when those that are left have ended.
pub(crate) async fn serve(listener: TcpListener, router: Router, config: &ApiConfig, shutdown: &CancellationToken) {
    let slots = Arc::new(Semaphore::new(config.connections_max));
    let graceful = GracefulShutdown::new();
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(config.header_read_timeout);
    loop {
        if slots.available_permits() == 0 {
            warn!("{} connections are open, as many as connections_max allows; new ones wait", config.connections_max);
        }
        let accepted = async {
            let slot = Arc::clone(&slots).acquire_owned().await.expect("the semaphore is never closed");
            (slot, accept(&listener).await)
        };
        let (slot, stream) = tokio::select! {
            accepted = accepted => accepted,
            () = shutdown.cancelled() => break,
        };
        let service = TowerToHyperService::new(router.clone());
        let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), service));
        tokio::spawn(async move {
            if let Err(error) = connection.await {
                debug!(%error, "A connection ended early");
            }
            drop(slot);
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

/// The next connection.
async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // Lines of a stream and short answers must not wait for more to send.
                if let Err(error) = stream.set_nodelay(true) {
                    debug!(%error, "Could not switch off the delay of small packets");
                }
                return stream;
            }
            // The client was faster: it left before it was let in.
            Err(error) if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset) => {}
            Err(error) => {
                warn!(%error, "Could not accept a connection; trying again in {PAUSE:?}. Are there files enough (ulimit -n)?");
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// A server that answers "here" at `/`.
    async fn start(config: ApiConfig) -> (std::net::SocketAddr, CancellationToken, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        let token = shutdown.clone();
        let router = Router::new().fallback(|| async { "here" });
        let served = tokio::spawn(async move { serve(listener, router, &config, &token).await });
        (address, shutdown, served)
    }

    async fn answer(stream: &mut TcpStream) -> String {
        stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        let mut read = vec![0; 4096];
        let count = tokio::time::timeout(PATIENCE, stream.read(&mut read)).await.expect("an answer in time").unwrap();
        String::from_utf8_lossy(&read[..count]).into_owned()
    }

    #[tokio::test]
    async fn whoever_does_not_finish_a_head_is_cut_off() {
        let config = ApiConfig { header_read_timeout: Duration::from_millis(50), ..ApiConfig::default() };
        let (address, _shutdown, _served) = start(config).await;
        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(b"GET / HTTP/1.1\r\nhost: ").await.unwrap();

        let mut read = Vec::new();
        let ended = tokio::time::timeout(PATIENCE, slow.read_to_end(&mut read)).await.expect("it is cut off");

        assert!(ended.is_err() || !String::from_utf8_lossy(&read).contains("200 OK"), "{read:?}");
    }

    #[tokio::test]
    async fn one_connection_more_than_the_limit_waits_for_its_turn() {
        let (address, _shutdown, _served) = start(ApiConfig { connections_max: 1, ..ApiConfig::default() }).await;
        let mut first = TcpStream::connect(address).await.unwrap();
        assert!(answer(&mut first).await.ends_with("here"));
        let mut second = TcpStream::connect(address).await.unwrap();
        second.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        assert!(answer(&mut first).await.ends_with("here"), "the first goes on");
        let mut one = [0];
        let unanswered = second.try_read(&mut one).map_err(|error| error.kind());
        assert_eq!(unanswered, Err(ErrorKind::WouldBlock));

        drop(first);

        let mut read = vec![0; 4096];
        let count = tokio::time::timeout(PATIENCE, second.read(&mut read)).await.expect("an answer in time").unwrap();
        assert!(String::from_utf8_lossy(&read[..count]).ends_with("here"));
    }

    #[tokio::test]
    async fn the_end_waits_for_connections_and_closes_idle_ones() {
        let (address, shutdown, served) = start(ApiConfig::default()).await;
        let mut idle = TcpStream::connect(address).await.unwrap();
        assert!(answer(&mut idle).await.ends_with("here"));

        shutdown.cancel();

        tokio::time::timeout(PATIENCE, served).await.expect("it ends in time").unwrap();
        assert_eq!(idle.read(&mut [0]).await.unwrap(), 0, "the connection is closed");
        assert!(TcpStream::connect(address).await.is_err());
    }
}
