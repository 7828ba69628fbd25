//! The graphs that can be run, as their manifests say; read from the store only when somebody asks.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use lru::LruCache;
use threadgate_shared::domain::GraphVersion;
use threadgate_shared::graph::Manifest;
use threadgate_shared::store::Store;
use tokio::time::Instant;

use crate::error::ApiError;

/// How old the list of newest versions may be when it is used.
const FRESH: Duration = Duration::from_secs(1);

/// Manifests kept at once, old versions too; the next one takes the place of the one that rested longest.
const MANIFESTS_MAX: NonZeroUsize = NonZeroUsize::new(1_024).unwrap();

/// One version of a graph.
#[derive(Debug, Clone)]
pub struct KnownGraph {
    /// The content hash.
    pub version: GraphVersion,
    /// The manifest.
    pub manifest: Arc<Manifest>,
}

/// A cache of manifests; versions never change, the newest of a name may.
pub struct Graphs {
    store: Arc<dyn Store>,
    served: Option<String>,
    cache: Mutex<Cache>,
}

struct Cache {
    read_at: Option<Instant>,
    newest: Arc<Newest>,
    versions: LruCache<GraphVersion, Arc<Manifest>>,
}

impl Cache {
    fn empty() -> Self {
        Self { read_at: None, newest: Arc::default(), versions: LruCache::new(MANIFESTS_MAX) }
    }
}

/// The newest version of each name, by name.
#[derive(Debug, Default)]
struct Newest {
    graphs: Vec<KnownGraph>,
    /// The name that was registered first.
    first: Option<String>,
}

impl Graphs {
    /// A cache over `store`; `served` is the graph behind `/v1/graph/*` where the configuration
    /// names one.
    #[must_use]
    pub fn new(store: Arc<dyn Store>, served: Option<String>) -> Self {
        Self { store, served, cache: Mutex::new(Cache::empty()) }
    }

    /// The graph behind `/v1/graph/*`.
    ///
    /// # Errors
    /// 503 while nothing is registered, or not the configured one.
    pub async fn served(&self) -> Result<KnownGraph, ApiError> {
        let newest = self.newest().await?;
        let name = self.served.as_ref().or(newest.first.as_ref());
        newest.graphs.iter().find(|graph| Some(&graph.manifest.name) == name).cloned().ok_or_else(|| {
            let message = match name {
                Some(name) => format!("graph '{name}' is not registered; start a worker that has it, or push it"),
                None => "no graph is registered; start a worker that has one, or push one".to_owned(),
            };
            ApiError::plain(http::StatusCode::SERVICE_UNAVAILABLE, message)
        })
    }

    /// The newest version of a graph.
    ///
    /// # Errors
    /// 422 with the names there are.
    pub async fn named(&self, name: &str) -> Result<KnownGraph, ApiError> {
        let newest = self.newest().await?;
        newest.graphs.iter().find(|graph| graph.manifest.name == name).cloned().ok_or_else(|| {
            let names: Vec<&str> = newest.graphs.iter().map(|graph| graph.manifest.name.as_str()).collect();
            let there = if names.is_empty() { "none is registered yet".to_owned() } else { names.join(", ") };
            let msg = format!("Value error, graph '{name}' is not registered; choose one of: {there}");
            ApiError::field(vec!["body".into(), "graph".into()], "value_error", msg)
        })
    }

    /// One version, old ones too.
    ///
    /// # Errors
    /// 503 if the store cannot be asked, 500 for a version it does not have.
    pub async fn version(&self, version: &GraphVersion) -> Result<Arc<Manifest>, ApiError> {
        if let Some(manifest) = self.lock().versions.get(version) {
            return Ok(Arc::clone(manifest));
        }
        let Some(record) = self.store.graph_version(version).await? else {
            tracing::error!(graph.version = %version, "The store has no graph of version {version}");
            return Err(ApiError::internal());
        };
        let manifest = Arc::new(record.manifest);
        self.lock().versions.put(version.clone(), Arc::clone(&manifest));
        Ok(manifest)
    }

    async fn newest(&self) -> Result<Arc<Newest>, ApiError> {
        {
            let cache = self.lock();
            if cache.read_at.is_some_and(|at| at.elapsed() < FRESH) && !cache.newest.graphs.is_empty() {
                return Ok(Arc::clone(&cache.newest));
            }
        }
        let records = self.store.graphs().await?;
        let first = records.iter().min_by_key(|record| record.registered_at).map(|record| record.name.clone());
        let mut cache = self.lock();
        let mut graphs = Vec::with_capacity(records.len());
        for record in records {
            // A manifest that is known is kept, so that runs share it.
            let known = cache.versions.get_or_insert(record.version.clone(), || Arc::new(record.manifest));
            graphs.push(KnownGraph { version: record.version, manifest: Arc::clone(known) });
        }
        // Who serves "the first" goes on with it: names that are registered again do not change it.
        let first = cache.newest.first.clone().filter(|name| graphs.iter().any(|g| g.manifest.name == *name)).or(first);
        cache.newest = Arc::new(Newest { graphs, first });
        cache.read_at = Some(Instant::now());
        Ok(Arc::clone(&cache.newest))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
