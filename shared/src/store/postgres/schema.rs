//! The schema: migrations are embedded in the program and applied once.

use async_trait::async_trait;
use sqlx::migrate::{MigrateError, Migrator};
use sqlx::postgres::PgPoolOptions;

use super::PgStore;
use super::error::{Doing, repeated};
use crate::store::{Schema, StoreError};

static MIGRATOR: Migrator = sqlx::migrate!("../migrations/postgres");

#[async_trait]
impl Schema for PgStore {
    /// On a connection of its own: a migration may wait for a lock longer than a session of the pool
    /// does, and so may whoever waits for the one that migrates.
    async fn migrate(&self) -> Result<(), StoreError> {
        let doing = "migrate the database";
        let alone = PgPoolOptions::new().max_connections(1).connect_with(self.connect.clone()).await.doing(doing)?;
        let done = MIGRATOR.run(&alone).await;
        alone.close().await;
        done.map_err(|error| match error {
            MigrateError::Execute(source) => StoreError::Database { doing, source },
            error => StoreError::Schema(format!("could not {doing}: {error}")),
        })
    }

    async fn check_schema(&self) -> Result<(), StoreError> {
        judge(&repeated!(self.applied_migrations())?)
    }

    async fn ping(&self) -> Result<(), StoreError> {
        repeated!(async { sqlx::query("select 1").execute(&self.pool).await.doing("reach Postgres") })?;
        Ok(())
    }
}

impl PgStore {
    /// Version, whether it finished, and checksum of each; none in an empty database.
    async fn applied_migrations(&self) -> Result<Vec<(i64, bool, Vec<u8>)>, StoreError> {
        let applied = "select version, success, checksum from _sqlx_migrations";
        match sqlx::query_as(applied).fetch_all(&self.pool).await {
            Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(UNDEFINED_TABLE) => Ok(Vec::new()),
            answer => answer.doing("read the schema's version"),
        }
    }
}

const UNDEFINED_TABLE: &str = "42P01";

/// A newer schema is fine: a release only adds, and what it leaves behind is removed by a later one.
fn judge(applied: &[(i64, bool, Vec<u8>)]) -> Result<(), StoreError> {
    for migration in MIGRATOR.iter() {
        let version = migration.version;
        match applied.iter().find(|(applied, ..)| *applied == version) {
            None => {
                return Err(StoreError::Schema(format!(
                    "the database's schema is older than this program: run `threadgate migrate` (migration {version} is missing)"
                )));
            }
            Some((_, false, _)) => {
                return Err(StoreError::Schema(format!(
                    "migration {version} began and did not finish: run `threadgate migrate` and read its error"
                )));
            }
            Some((_, _, checksum)) if checksum[..] != migration.checksum[..] => {
                return Err(StoreError::Schema(format!(
                    "migration {version} in the database is not the one this program knows: use the program that made the database, or a newer release"
                )));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<(i64, bool, Vec<u8>)> {
        MIGRATOR.iter().map(|m| (m.version, true, m.checksum.to_vec())).collect()
    }

    #[test]
    fn a_schema_with_more_migrations_is_fine() {
        let mut applied = all();
        applied.push((i64::MAX, true, vec![1]));

        assert!(judge(&applied).is_ok());
    }

    #[test]
    fn an_older_schema_says_what_to_run() {
        let mut applied = all();
        applied.pop();

        let error = judge(&applied).unwrap_err().to_string();

        assert!(error.contains("run `threadgate migrate`"), "{error}");
    }

    #[test]
    fn an_unfinished_or_foreign_migration_is_named() {
        let mut unfinished = all();
        unfinished[0].1 = false;
        let mut foreign = all();
        foreign[0].2 = vec![0];

        assert!(judge(&unfinished).unwrap_err().to_string().contains("did not finish"));
        assert!(judge(&foreign).unwrap_err().to_string().contains("not the one this program knows"));
    }
}
