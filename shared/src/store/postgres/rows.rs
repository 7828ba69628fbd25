//! Rows and their parts as domain types.

use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use sqlx::FromRow;
use uuid::Uuid;

use super::error::{Doing, corrupt};
use crate::domain::{GraphVersion, Json, Message, RunId, RunStatus, StepId, Tenant, ThreadId, ThreadKey, UserId};
use crate::graph::engine::RunError;
use crate::queue::{Job, Lane};
use crate::store::{Fields, RunRecord, StoreError, Time};

/// A `json` column read as text.
pub(super) fn parsed<T: DeserializeOwned>(text: &str, doing: &'static str) -> Result<T, StoreError> {
    serde_json::from_str(text).doing(doing)
}

/// A value for a `json` column.
pub(super) fn text_of<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).expect("our own types have string keys and finite numbers")
}

/// The `n` of an array of that length.
pub(super) fn count(length: usize) -> i32 {
    i32::try_from(length).expect("no request or step is that large")
}

/// For `make_interval(secs => …)`: a `float8`, exact to the microsecond for any span we use.
pub(super) fn seconds(span: Duration) -> f64 {
    span.as_secs_f64()
}

/// Messages as the columns of `message`.
#[derive(Default)]
pub(super) struct MessageColumns {
    pub(super) ids: Vec<String>,
    pub(super) roles: Vec<&'static str>,
    pub(super) bodies: Vec<String>,
}

impl MessageColumns {
    pub(super) fn of(messages: &[Message]) -> Self {
        let mut columns = Self::default();
        for message in messages {
            columns.push(message);
        }
        columns
    }

    pub(super) fn push(&mut self, message: &Message) {
        self.ids.push(message.message_id.text.clone());
        self.roles.push(message.role.as_str());
        self.bodies.push(text_of(message));
    }
}

/// Fields as the columns of `field`.
#[derive(Default)]
pub(super) struct FieldColumns {
    pub(super) names: Vec<String>,
    pub(super) values: Vec<String>,
}

impl FieldColumns {
    pub(super) fn of(fields: &Fields) -> Self {
        let mut columns = Self::default();
        columns.extend(fields);
        columns
    }

    pub(super) fn extend(&mut self, fields: &Fields) {
        self.names.extend(fields.keys().cloned());
        self.values.extend(fields.values().map(Json::to_string));
    }
}

/// Names and values of two arrays of equal length; none where the query found none.
pub(super) fn fields_from(
    names: Option<Vec<String>>,
    values: Option<Vec<String>>,
    doing: &'static str,
) -> Result<Fields, StoreError> {
    let pairs = names.unwrap_or_default().into_iter().zip(values.unwrap_or_default());
    pairs.map(|(name, value)| Ok((name, parsed(&value, doing)?))).collect()
}

/// `select` of a [`RunRow`], followed by `$tail` (`where …`); `r` is the run, `t` its thread.
macro_rules! select_run {
    ($tail:literal) => {
        concat!(
            "select ",
            $crate::store::postgres::rows::run_columns!(),
            " from run r join thread t on t.key = r.thread_key ",
            $tail
        )
    };
}
macro_rules! run_columns {
    () => {
        "r.id, r.client_run_id, r.root_id, r.resumes, t.id as thread_id, r.thread_key, r.tenant, t.user_id, r.graph,
         r.graph_version, r.class, r.status::text as status, r.input::text as input, r.config::text as config,
         r.step_limit, r.node_timeout_ms, r.error::text as error, r.trace, r.observability,
         coalesce(r.version, t.version) as version, r.created_at, r.started_at, r.finished_at"
    };
}
pub(super) use {run_columns, select_run};

#[derive(FromRow)]
pub(super) struct RunRow {
    id: Uuid,
    client_run_id: Option<String>,
    root_id: Uuid,
    resumes: Option<Uuid>,
    thread_id: String,
    thread_key: i64,
    tenant: String,
    user_id: String,
    graph: String,
    graph_version: String,
    class: i16,
    status: String,
    input: String,
    config: String,
    step_limit: i32,
    node_timeout_ms: Option<i64>,
    error: Option<String>,
    trace: Option<String>,
    observability: bool,
    version: i64,
    created_at: Time,
    started_at: Option<Time>,
    finished_at: Option<Time>,
}

impl RunRow {
    pub(super) fn record(self) -> Result<RunRecord, StoreError> {
        let doing = "read a run";
        Ok(RunRecord {
            id: RunId(self.id),
            client_run_id: self.client_run_id,
            root: RunId(self.root_id),
            resumes: self.resumes.map(RunId),
            thread_id: ThreadId(self.thread_id),
            thread_key: ThreadKey(self.thread_key),
            tenant: Tenant(self.tenant),
            user: UserId(self.user_id),
            graph: self.graph,
            graph_version: GraphVersion(self.graph_version),
            class: self.class,
            status: run_status(&self.status)?,
            input: parsed(&self.input, doing)?,
            config: parsed(&self.config, doing)?,
            step_limit: self.step_limit,
            node_timeout: self.node_timeout_ms.map(|ms| Duration::from_millis(ms.unsigned_abs())),
            error: self.error.map(|error| parsed::<RunError>(&error, doing)).transpose()?,
            trace: self.trace,
            observability: self.observability,
            version: self.version,
            created_at: self.created_at,
            started_at: self.started_at,
            finished_at: self.finished_at,
        })
    }
}

/// The status a row names.
pub(super) fn run_status(text: &str) -> Result<RunStatus, StoreError> {
    RunStatus::parse(text).ok_or_else(|| corrupt("read a run", format!("'{text}' is not a status of runs")))
}

/// A step that is to be sent.
#[derive(FromRow)]
pub(super) struct JobRow {
    pub(super) run_id: Uuid,
    pub(super) seq: i32,
    pub(super) tenant: String,
    pub(super) pool: String,
    pub(super) class: i16,
    pub(super) graph_version: String,
    pub(super) attempt: i16,
    pub(super) trace: Option<String>,
}

impl JobRow {
    pub(super) fn job(self) -> (Job, Tenant) {
        let version = GraphVersion(self.graph_version);
        let lane = Lane { pool: self.pool.into(), class: self.class, graph: version.is_code().then_some(version) };
        let step = StepId { run_id: RunId(self.run_id), seq: self.seq };
        (Job { step, lane, attempt: self.attempt, trace: self.trace }, Tenant(self.tenant))
    }
}
