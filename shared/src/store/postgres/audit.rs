//! Who did what: written in the transaction that does it.

use sqlx::{Postgres, Transaction};

use super::error::Doing;
use super::thread_lock::LockedThread;
use crate::domain::{Json, RunId, Scope};
use crate::store::StoreError;

/// One entry.
pub(super) struct Entry<'a> {
    pub(super) thread: &'a LockedThread,
    pub(super) run: Option<RunId>,
    pub(super) who: &'a str,
    pub(super) action: &'static str,
    pub(super) detail: Json,
}

impl Entry<'_> {
    pub(super) async fn write(&self, tx: &mut Transaction<'_, Postgres>) -> Result<(), StoreError> {
        sqlx::query(
            "insert into audit (tenant, thread_key, run_id, who, action, detail) values ($1, $2, $3, $4, $5, $6::json)",
        )
        .bind(&self.thread.tenant)
        .bind(self.thread.key)
        .bind(self.run.map(|run| run.0))
        .bind(self.who)
        .bind(self.action)
        .bind(self.detail.to_string())
        .execute(&mut **tx)
        .await
        .doing("write an audit entry")?;
        Ok(())
    }
}

/// Whoever acts in `scope`.
pub(super) fn who(scope: &Scope) -> &str {
    scope.owner.as_ref().map_or("anonymous", |owner| owner.as_str())
}
