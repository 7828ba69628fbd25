//! What every handler can reach.

use std::sync::Arc;

use threadgate_shared::domain::Limits;
use threadgate_shared::parts::Parts;
use tokio_util::sync::CancellationToken;

use crate::config::ApiConfig;
use crate::graphs::Graphs;
use crate::readiness::Readiness;
use crate::waiters::Waiters;

/// One API process.
#[derive(Clone)]
pub struct App(Arc<Inner>);

/// What an [`App`] is made of.
pub struct Inner {
    /// The settings.
    pub config: ApiConfig,
    /// Store, queue and events.
    pub parts: Parts,
    /// Limits on what clients send.
    pub limits: Limits,
    /// Manifests.
    pub graphs: Graphs,
    /// Who waits for the end of a run.
    pub waiters: Arc<Waiters>,
    /// What the readiness check found last.
    pub readiness: Readiness,
    /// Cancelled when the process was asked to stop: event streams end, so that clients come back
    /// elsewhere, and nobody is told to wait any more.
    pub draining: CancellationToken,
    /// Cancelled when the time for that is over: requests that still wait are answered.
    pub closing: CancellationToken,
}

impl App {
    /// An app over `parts`.
    #[must_use]
    pub fn new(config: ApiConfig, parts: Parts, draining: CancellationToken) -> Self {
        let limits = config.limits();
        let graphs = Graphs::new(Arc::clone(&parts.store), config.graph.clone());
        let waiters = Waiters::new(Arc::clone(&parts.store), Arc::clone(&parts.events));
        let readiness = Readiness::default();
        let closing = CancellationToken::new();
        Self(Arc::new(Inner { config, parts, limits, graphs, waiters, readiness, draining, closing }))
    }
}

impl std::ops::Deref for App {
    type Target = Inner;

    fn deref(&self) -> &Inner {
        &self.0
    }
}
