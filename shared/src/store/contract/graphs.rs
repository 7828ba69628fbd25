//! Graph versions, and the schema itself.

use std::sync::Arc;

use super::fixture::{graph, manifest, record};
use crate::domain::GraphVersion;
use crate::store::Store;

/// Migrating is safe to repeat, also at once.
pub async fn the_schema_may_be_migrated_again(store: Arc<dyn Store>) {
    let migrations = (0..3).map(|_| store.migrate());

    for migrated in futures::future::join_all(migrations).await {
        migrated.unwrap();
    }

    store.check_schema().await.unwrap();
    store.ping().await.unwrap();
    let clock = store.clock().await.unwrap();
    assert!(clock.now >= clock.started);
}

/// Old versions stay readable; the last one registered is the newest, also an older one again.
pub async fn the_last_registered_version_is_the_newest(store: Arc<dyn Store>) {
    let old = record(&graph(manifest()));
    let mut changed = manifest();
    changed.nodes.pop();
    let new = record(&graph(changed));
    let mut other = manifest();
    other.name = "another".to_owned();
    let other = record(&graph(other));
    let names = async || {
        let graphs = store.graphs().await.unwrap();
        graphs.into_iter().map(|graph| (graph.name, graph.version)).collect::<Vec<_>>()
    };

    store.register_graphs(std::slice::from_ref(&old)).await.unwrap();
    store.register_graphs(&[new.clone(), other.clone()]).await.unwrap();
    assert_eq!(names().await, [("another".to_owned(), other.version), ("story".to_owned(), new.version.clone())]);

    store.register_graphs(std::slice::from_ref(&old)).await.unwrap();
    assert_eq!(names().await[1].1, old.version);
    let read = store.graph_version(&new.version).await.unwrap().unwrap();
    assert_eq!((read.name, read.manifest), (new.name, new.manifest));
    assert_eq!(store.graph_version(&GraphVersion::from("c-none")).await.unwrap(), None);
}
