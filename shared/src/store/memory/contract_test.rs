//! The store's promises, kept in memory.

use std::sync::Arc;

use super::MemoryStore;
use crate::store::Store;

async fn fresh() -> (Arc<dyn Store>, ()) {
    (Arc::new(MemoryStore::new()), ())
}

crate::store_contract!(fresh);
