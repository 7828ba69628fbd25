//! The graphs this worker can run: the program's own, and the declarative ones of the store, which
//! are loaded when a step of theirs comes.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, PoisonError};

use lru::LruCache;
use threadgate_shared::domain::GraphVersion;
use threadgate_shared::graph::{Graph, GraphError, Manifest};
use threadgate_shared::store::{Store, StoreError};

/// Declarative versions kept at once; the next one takes the place of the one that rested longest.
const LOADED_MAX: NonZeroUsize = NonZeroUsize::new(256).unwrap();

/// Builds a declarative graph from its manifest.
pub(crate) type Build = Arc<dyn Fn(&Manifest) -> Result<Graph, GraphError> + Send + Sync>;

/// The graphs at hand.
pub(crate) struct Graphs {
    code: HashMap<GraphVersion, Arc<Graph>>,
    loaded: Mutex<LruCache<GraphVersion, Arc<Graph>>>,
    store: Arc<dyn Store>,
    build: Build,
}

/// Why a graph is not at hand.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GraphMissing {
    /// The store could not be asked.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// It cannot be built; no attempt will mend that.
    #[error(transparent)]
    Broken(#[from] GraphError),
}

impl Graphs {
    /// `registered` are the program's own graphs.
    pub(crate) fn new(registered: impl IntoIterator<Item = Arc<Graph>>, store: Arc<dyn Store>, build: Build) -> Self {
        let code = registered.into_iter().map(|graph| (graph.version.clone(), graph)).collect();
        Self { code, loaded: Mutex::new(LruCache::new(LOADED_MAX)), store, build }
    }

    /// The versions only this program can run.
    pub(crate) fn code_versions(&self) -> Vec<GraphVersion> {
        let mut versions: Vec<_> = self.code.keys().filter(|version| version.is_code()).cloned().collect();
        versions.sort();
        versions
    }

    /// The graph of that version.
    ///
    /// # Errors
    /// [`GraphMissing`] says whether another attempt could succeed.
    pub(crate) async fn get(&self, version: &GraphVersion) -> Result<Arc<Graph>, GraphMissing> {
        if let Some(graph) = self.code.get(version).cloned().or_else(|| self.loaded().get(version).cloned()) {
            return Ok(graph);
        }
        let record = match self.store.graph_version(version).await {
            Err(StoreError::Corrupt { message, .. }) => {
                let message = format!("graph version {version} cannot be read ({message}); push it again");
                return Err(GraphError { code: "GRAPH_000", message }.into());
            }
            record => record?,
        };
        let record = record.ok_or_else(|| GraphError {
            code: "GRAPH_000",
            message: format!("graph version {version} is not registered any more; start the run anew on a newer one"),
        })?;
        let graph = Arc::new((self.build)(&record.manifest)?);
        self.loaded().put(version.clone(), Arc::clone(&graph));
        Ok(graph)
    }

    fn loaded(&self) -> std::sync::MutexGuard<'_, LruCache<GraphVersion, Arc<Graph>>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
