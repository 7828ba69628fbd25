//! Passes that find what is due, dead or stuck. Each is bounded and may run twice, so any number of
//! schedulers may run at once and none leads.

pub mod config;
pub mod dispatch;
mod ended;
mod every;
pub mod health;
pub mod interrupts;
pub mod leases;
pub mod observe;
pub mod repair;

pub use config::{ConfigError, SchedulerConfig};
pub use every::{Pass, every};
pub use health::SchedulerHealth;

#[cfg(test)]
mod tests;

use threadgate_shared::parts::Parts;
use tokio_util::sync::CancellationToken;

use dispatch::Dispatch;
use interrupts::Interrupts;
use leases::Leases;
use observe::Observe;
use repair::Repair;

/// Runs all passes until `shutdown`; the pass that runs then ends first.
///
/// # Errors
/// [`ConfigError`] for settings that do not fit together; nothing has run then. A pass that fails is
/// logged and tried again.
pub async fn run(
    config: SchedulerConfig,
    parts: Parts,
    health: SchedulerHealth,
    shutdown: CancellationToken,
) -> Result<(), ConfigError> {
    config.validate()?;
    tracing::info!(lease_ttl_ms = config.lease_ttl.as_millis(), "The scheduler looks for due work");
    let observe = async {
        if config.observes {
            every(Observe::new(parts.clone(), config.metrics_interval), &shutdown).await;
        }
    };
    tokio::join!(
        every(Leases::new(parts.clone(), &config, health.clone()), &shutdown),
        every(Dispatch::new(parts.clone(), &config), &shutdown),
        every(Interrupts::new(parts.clone(), &config), &shutdown),
        every(Repair::new(parts.clone(), &config), &shutdown),
        observe,
    );
    tracing::info!("The scheduler has ended");
    Ok(())
}
