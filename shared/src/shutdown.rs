//! Ending politely: one token for the whole program, cancelled by the first signal.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;

/// A token that SIGTERM or SIGINT (Ctrl-C) cancels; then whoever holds it takes nothing new, ends
/// what it can within its grace and returns. A second signal ends the process at once, with 128 and
/// the signal's number; what it held is found by its leases.
///
/// # Errors
/// If the system refuses the signal handlers.
pub fn on_signal() -> std::io::Result<CancellationToken> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let token = CancellationToken::new();
    let shutdown = token.clone();
    tokio::spawn(async move {
        let first = either(&mut terminate, &mut interrupt).await;
        tracing::info!(signal = first, "Ending: nothing new is taken; a second signal ends at once");
        shutdown.cancel();
        let second = either(&mut terminate, &mut interrupt).await;
        tracing::warn!(signal = second, "Ending at once");
        std::process::exit(128 + second);
    });
    Ok(token)
}

async fn either(terminate: &mut Signal, interrupt: &mut Signal) -> i32 {
    tokio::select! {
        _ = terminate.recv() => SignalKind::terminate().as_raw_value(),
        _ = interrupt.recv() => SignalKind::interrupt().as_raw_value(),
    }
}
