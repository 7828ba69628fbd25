//! Graph versions.

use std::collections::BTreeMap;

use async_trait::async_trait;
use sqlx::FromRow;

use super::PgStore;
use super::error::{Doing, repeated};
use crate::domain::GraphVersion;
use crate::store::{GraphRecord, Graphs, StoreError, Time};

#[async_trait]
impl Graphs for PgStore {
    async fn register_graphs(&self, graphs: &[GraphRecord]) -> Result<(), StoreError> {
        repeated!(self.register_once(graphs))
    }

    async fn graphs(&self) -> Result<Vec<GraphRecord>, StoreError> {
        let newest = "select distinct on (name) name, version, manifest::text as manifest, registered_at
                        from graph order by name, registered_at desc, version desc";
        let rows: Vec<GraphRow> =
            repeated!(async { sqlx::query_as(newest).fetch_all(&self.pool).await.doing("read the graphs") })?;
        rows.into_iter().map(GraphRow::record).collect()
    }

    async fn graph_version(&self, version: &GraphVersion) -> Result<Option<GraphRecord>, StoreError> {
        let one = "select name, version, manifest::text as manifest, registered_at from graph where version = $1";
        let row: Option<GraphRow> = repeated!(async {
            sqlx::query_as(one).bind(version.as_str()).fetch_optional(&self.pool).await.doing("read a graph")
        })?;
        row.map(GraphRow::record).transpose()
    }
}

impl PgStore {
    async fn register_once(&self, graphs: &[GraphRecord]) -> Result<(), StoreError> {
        let doing = "register graphs";
        // By version: one order for all who register at once, so that none waits for another crosswise.
        let sorted: BTreeMap<&str, (i32, &GraphRecord)> =
            (0..).zip(graphs).map(|(place, graph)| (graph.version.as_str(), (place, graph))).collect();
        let versions: Vec<&str> = sorted.keys().copied().collect();
        let names: Vec<&str> = sorted.values().map(|(_, graph)| graph.name.as_str()).collect();
        let places: Vec<i32> = sorted.values().map(|(place, _)| *place).collect();
        let manifests = sorted.values().map(|(_, graph)| serde_json::to_string(&graph.manifest));
        let manifests = manifests.collect::<Result<Vec<_>, _>>().doing(doing)?;
        sqlx::query(
            "insert into graph (version, name, manifest, registered_at)
             select version, name, manifest::json, statement_timestamp() + place * interval '1 microsecond'
               from unnest($1::text[], $2::text[], $3::text[], $4::int[]) as g (version, name, manifest, place)
             on conflict (version) do update set registered_at = excluded.registered_at",
        )
        .bind(&versions)
        .bind(&names)
        .bind(&manifests)
        .bind(&places)
        .execute(&self.pool)
        .await
        .doing(doing)?;
        Ok(())
    }
}

#[derive(FromRow)]
struct GraphRow {
    name: String,
    version: String,
    manifest: String,
    registered_at: Time,
}

impl GraphRow {
    fn record(self) -> Result<GraphRecord, StoreError> {
        Ok(GraphRecord {
            name: self.name,
            version: GraphVersion(self.version),
            manifest: serde_json::from_str(&self.manifest).doing("read a graph's manifest")?,
            registered_at: self.registered_at,
        })
    }
}
