//! The store's contract, kept by every store: one story, one fresh database.

/// The store of the simulation.
mod memory {
    use std::sync::Arc;

    use threadgate_shared::store::Store;
    use threadgate_shared::store::memory::MemoryStore;

    async fn fresh() -> (Arc<dyn Store>, ()) {
        (Arc::new(MemoryStore::new()), ())
    }

    threadgate_shared::store_contract!(fresh);
}

/// The embedded default.
mod sqlite {
    use std::sync::Arc;

    use tempfile::TempDir;
    use threadgate_shared::store::{Schema, SqliteStore, Store};

    async fn fresh() -> (Arc<dyn Store>, TempDir) {
        let folder = TempDir::new().unwrap();
        let store = SqliteStore::open(folder.path().join("store.db")).await.unwrap();
        store.migrate().await.unwrap();
        (Arc::new(store), folder)
    }

    threadgate_shared::store_contract!(fresh);
}

/// Production.
mod postgres {
    use std::sync::Arc;

    use threadgate_shared::store::Store;
    use threadgate_shared::store::postgres::{PgOptions, PgStore};
    use threadgate_tests::{Database, Postgres};

    async fn fresh() -> (Arc<dyn Store>, Database) {
        let database = Postgres::shared().await.database().await;
        let store = PgStore::connect(&database.url, &PgOptions::default()).await.unwrap();
        (Arc::new(store), database)
    }

    threadgate_shared::store_contract!(fresh);
}
