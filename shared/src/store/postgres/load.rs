//! Reading what a step starts from: one round trip for many steps, at a cost that follows what
//! changed since the version a worker still has.

use sqlx::FromRow;

use super::PgStore;
use super::error::Doing;
use super::rows::{RunRow, fields_from, parsed, run_columns};
use crate::domain::Message;
use crate::store::{LoadRequest, Loaded, StoreError};

impl PgStore {
    pub(super) async fn load_once(&self, wanted: &[LoadRequest]) -> Result<Vec<Loaded>, StoreError> {
        let run_ids: Vec<_> = wanted.iter().map(|request| request.run_id.0).collect();
        let keys: Vec<i64> = wanted.iter().map(|request| request.thread_key.0).collect();
        let since: Vec<Option<i64>> = wanted.iter().map(|request| request.since).collect();
        let mut connection = self.steps.take().await.doing(DOING)?;
        let rows: Vec<LoadedRow> =
            sqlx::query_as(LOAD).bind(run_ids).bind(keys).bind(since).fetch_all(&mut *connection).await.doing(DOING)?;
        connection.keep();
        rows.into_iter().map(LoadedRow::loaded).collect()
    }
}

const DOING: &str = "load threads";

/// $1 run ids, $2 thread keys, $3 versions the worker has (null = none).
///
/// New messages are a range of positions behind the checkpoint of that version; where it is missing,
/// everything is read. Fields are found name by name from the end of the key: two probes each,
/// however many versions there are.
const LOAD: &str = concat!(
    "select ",
    run_columns!(),
    ", t.version as thread_version, t.execution_meta::text as meta, a.positions, a.bodies, g.removed, f.names, f.values
  from unnest($1::uuid[], $2::bigint[], $3::bigint[]) with ordinality as w (run_id, thread_key, since, i)
  join run r on r.id = w.run_id
  join thread t on t.key = w.thread_key
  left join checkpoint k on k.thread_key = w.thread_key and k.version = w.since
 cross join lateral (
   select array_agg(m.position order by m.position) as positions, array_agg(m.body::text order by m.position) as bodies
     from message m
    where m.thread_key = t.key and m.position >= coalesce(k.next_position, 0) and m.removed_in is null
      and t.version > coalesce(k.version, -1)
 ) a
 cross join lateral (
   select array_agg(m.position order by m.position) as removed
     from message m
    where m.thread_key = t.key and m.removed_in > k.version and m.added_in <= k.version and t.version > k.version
 ) g
 cross join lateral (
   with recursive latest (name, version, value) as (
     (select x.name, x.version, x.value from field x
       where x.thread_key = t.key and t.version > coalesce(k.version, -1)
       order by x.name desc, x.version desc limit 1)
     union all
     select n.name, n.version, n.value from latest
      cross join lateral (
        select x.name, x.version, x.value from field x
         where x.thread_key = t.key and x.name < latest.name
         order by x.name desc, x.version desc limit 1) n
   )
   select array_agg(latest.name order by latest.name) as names,
          array_agg(latest.value::text order by latest.name) as values
     from latest where latest.version > coalesce(k.version, -1)
 ) f
 order by w.i"
);

#[derive(FromRow)]
struct LoadedRow {
    #[sqlx(flatten)]
    run: RunRow,
    thread_version: i64,
    meta: String,
    positions: Option<Vec<i64>>,
    bodies: Option<Vec<String>>,
    removed: Option<Vec<i64>>,
    names: Option<Vec<String>>,
    values: Option<Vec<String>>,
}

impl LoadedRow {
    fn loaded(self) -> Result<Loaded, StoreError> {
        let bodies = self.bodies.unwrap_or_default();
        let messages = bodies.iter().map(|body| parsed::<Message>(body, DOING)).collect::<Result<Vec<_>, _>>()?;
        Ok(Loaded {
            run: self.run.record()?,
            version: self.thread_version,
            meta: parsed(&self.meta, DOING)?,
            added: self.positions.unwrap_or_default().into_iter().zip(messages).collect(),
            removed: self.removed.unwrap_or_default(),
            fields: fields_from(self.names, self.values, DOING)?,
        })
    }
}
