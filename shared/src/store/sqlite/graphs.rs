//! Graph versions.

use async_trait::async_trait;
use sqlx::sqlite::SqliteRow;

use super::row::{Answer, Columns, Doing, json_text, micros, now};
use super::{Promise, SqliteStore};
use crate::domain::GraphVersion;
use crate::store::{GraphRecord, Graphs, StoreError};

#[async_trait]
impl Graphs for SqliteStore {
    async fn register_graphs(&self, graphs: &[GraphRecord]) -> Result<(), StoreError> {
        const DOING: &str = "register graphs";
        let mut tx = self.begin(Promise::Durable, DOING).await?;
        for graph in graphs {
            // Strictly rising times, so that "newest" has one answer.
            sqlx::query(
                "insert into graph (version, name, manifest, registered_at)
                 values (?1, ?2, ?3, max(?4, coalesce((select max(registered_at) + 1 from graph where name = ?2), 0)))
                     on conflict (version) do update set registered_at = excluded.registered_at",
            )
            .bind(graph.version.as_str())
            .bind(&graph.name)
            .bind(json_text(&graph.manifest))
            .bind(micros(now()))
            .execute(&mut *tx)
            .await
            .doing(DOING)?;
        }
        tx.commit().await.doing(DOING)
    }

    async fn graphs(&self) -> Result<Vec<GraphRecord>, StoreError> {
        const DOING: &str = "list graphs";
        let rows = sqlx::query(
            "select name, version, manifest, registered_at from graph g
              where registered_at = (select max(registered_at) from graph n where n.name = g.name) order by name",
        )
        .fetch_all(&self.readers)
        .await
        .doing(DOING)?;
        rows.iter().map(record).collect::<Answer<_>>().doing(DOING)
    }

    async fn graph_version(&self, version: &GraphVersion) -> Result<Option<GraphRecord>, StoreError> {
        const DOING: &str = "read a graph";
        let row = sqlx::query("select name, version, manifest, registered_at from graph where version = ?1")
            .bind(version.as_str())
            .fetch_optional(&self.readers)
            .await
            .doing(DOING)?;
        row.as_ref().map(record).transpose().doing(DOING)
    }
}

fn record(row: &SqliteRow) -> Answer<GraphRecord> {
    Ok(GraphRecord {
        name: row.text("name")?,
        version: GraphVersion(row.text("version")?),
        manifest: row.json("manifest")?,
        registered_at: row.time("registered_at")?,
    })
}
