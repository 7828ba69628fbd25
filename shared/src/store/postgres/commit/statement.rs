//! The text of the commit: one statement that locks, fences, and writes all parts of a step.
//!
//! A step that has no messages, fields or removals, or does not end its run, gets a statement without
//! that part: what a statement does not name costs nothing, and naming the run's table costs a tenth
//! of a step. One step alone gets a statement without arrays of steps: it is 1.3 times as fast. The
//! texts are made once; the connection keeps each prepared.

use std::fmt::Write;
use std::sync::LazyLock;

/// Which statement a commit needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shape {
    /// Arrays of steps, rows that somebody holds left out; else one step that waits for its row.
    pub(super) many: bool,
    /// Some step ends its run, or might because of a stop. Without this part a step is refused where
    /// a stop is seen: the whole statement decides then.
    pub(super) ends: bool,
    /// Messages are appended.
    pub(super) messages: bool,
    /// Fields are written.
    pub(super) fields: bool,
    /// Messages leave the context.
    pub(super) removed: bool,
    /// Questions are asked; only where runs end.
    pub(super) questions: bool,
}

impl Shape {
    /// The statement.
    pub(super) fn sql(self) -> &'static str {
        &TEXTS[self.index()]
    }

    fn index(self) -> usize {
        [self.many, self.ends, self.messages, self.fields, self.removed, self.questions]
            .into_iter()
            .fold(0, |index, part| index * 2 + usize::from(part))
    }

    fn from_index(index: usize) -> Self {
        let part = |bit: usize| index & (1 << bit) != 0;
        Self { many: part(5), ends: part(4), messages: part(3), fields: part(2), removed: part(1), questions: part(0) }
    }
}

static TEXTS: LazyLock<Vec<String>> =
    LazyLock::new(|| (0..64).map(|index| Text::of(Shape::from_index(index))).collect());

/// The parameters a statement begins with, in order: run, seq, token, base version, place, next node,
/// its pool, its attempts, new messages.
const PARAMETERS: usize = 9;

/// Where runs may end, four more: place if a stop is seen, end status (null = goes on), error,
/// removed messages.
const PARAMETERS_OF_ENDS: usize = 4;

struct Text {
    sql: String,
    parameters: usize,
}

impl Text {
    fn of(shape: Shape) -> String {
        let ends = if shape.ends { PARAMETERS_OF_ENDS } else { 0 };
        let mut text = Self { sql: String::new(), parameters: PARAMETERS + ends };
        text.sql.push_str(match (shape.many, shape.ends) {
            (false, false) => LOCK_ONE,
            (true, false) => LOCK_MANY,
            (false, true) => LOCK_ONE_ENDING,
            (true, true) => LOCK_MANY_ENDING,
        });
        text.sql.push_str(if shape.ends { MOVE_ENDING } else { MOVE });
        text.sql.push_str(ALWAYS);
        if shape.messages {
            text.messages(shape.many);
        }
        if shape.fields {
            text.fields(shape.many);
        }
        if shape.removed {
            text.removed(shape.many);
        }
        if shape.questions {
            text.questions(shape.many);
        }
        text.sql.push_str(ANSWER);
        text.sql
    }

    /// `$n::<kind>[]` for the next parameter.
    fn array(&mut self, kind: &str) -> String {
        self.parameters += 1;
        format!("${}::{kind}[]", self.parameters)
    }

    /// The step an element belongs to: in a batch the first of the arrays says it.
    fn which(&mut self, many: bool) -> (String, &'static str, &'static str) {
        if many { (self.array("int") + ", ", "i, ", "l.i = u.i") } else { (String::new(), "", "true") }
    }

    /// `offset` counts from 0 within its step. An id that only the log has keeps its first body.
    fn messages(&mut self, many: bool) {
        let (which, i, on) = self.which(many);
        let (offsets, ids, roles, bodies) =
            (self.array("int"), self.array("text"), self.array("text"), self.array("text"));
        let _ = write!(
            self.sql,
            ", m as (
  insert into message (thread_key, position, message_id, role, body, added_in, in_log)
  select l.key, l.next_position + u.place, u.id, coalesce(o.role, u.role), coalesce(o.body, u.body::json),
         l.version + 1, o.position is null
    from unnest({which}{offsets}, {ids}, {roles}, {bodies}) as u ({i}place, id, role, body)
    join l on {on}
    left join message o on o.thread_key = l.key and o.message_id = u.id and o.removed_in is not null and o.in_log
  on conflict (thread_key, message_id) where removed_in is null do nothing
)"
        );
    }

    /// Not asked where a stop is seen.
    fn questions(&mut self, many: bool) {
        let (which, i, on) = self.which(many);
        let arrays = ["text", "smallint", "text", "text", "text", "text", "text", "text", "text", "float8"];
        let arrays = arrays.map(|kind| self.array(kind)).join(", ");
        let _ = write!(
            self.sql,
            ", q as (
  insert into interrupt (id, thread_key, tenant, user_id, graph, run_id, seq, place, key, node, kind, message_id,
                         call_id, tool, question, on_expiry, created_at, expires_at)
  select u.id, l.key, l.tenant, p.user_id, p.graph, l.run_id, l.seq, u.place, u.key, l.node, u.kind, u.message_id,
         u.call_id, u.tool, u.question::json, u.on_expiry::json,
         clock_timestamp() + make_interval(secs => u.place * 1e-6), clock_timestamp() + make_interval(secs => u.seconds)
    from unnest({which}{arrays})
         as u ({i}id, place, key, kind, message_id, call_id, tool, question, on_expiry, seconds)
    join l on {on} and not l.stop
    join thread p on p.key = l.key
)"
        );
    }

    fn fields(&mut self, many: bool) {
        let (which, i, on) = self.which(many);
        let (names, values) = (self.array("text"), self.array("text"));
        let _ = write!(
            self.sql,
            ", f as (
  insert into field (thread_key, name, version, value)
  select l.key, u.name, l.version + 1, u.value::json from unnest({which}{names}, {values}) as u ({i}name, value) join l on {on}
)"
        );
    }

    /// What leaves the context leaves the log too, wherever that has it.
    fn removed(&mut self, many: bool) {
        let (which, i, on) = self.which(many);
        let positions = self.array("bigint");
        let _ = write!(
            self.sql,
            ", g as (
  update message m set removed_in = l.version + 1, in_log = false
    from unnest({which}{positions}) as u ({i}position) join l on {on}
   where m.thread_key = l.key and m.position = u.position and m.removed_in is null
  returning m.thread_key, m.message_id
), h as (
  update message m set in_log = false from g
   where m.thread_key = g.thread_key and m.message_id = g.message_id and m.removed_in is not null and m.in_log
)"
        );
    }
}

/// Fence and locks; all other parts take their rows from here.
const LOCK_ONE: &str = "
with l as materialized (
  select 1 as i, s.run_id, s.seq, s.node, s.tenant, s.class, s.graph_version, t.key, t.version, t.next_position,
         $5::text as meta, $6::text as next, $7::text as pool, $8::smallint as attempts_max, $9::int as added,
         false as stop
    from step s join thread t on t.key = s.thread_key
   where s.run_id = $1::uuid and s.seq = $2::int and s.token = $3::uuid and s.status = 'leased'
     and t.active_run = $1 and t.version = $4::bigint and t.stop_run is distinct from $1
     for no key update of t, s
)";

/// The same for arrays.
const LOCK_MANY: &str = "
with l as materialized (
  select j.i, s.run_id, s.seq, s.node, s.tenant, s.class, s.graph_version, t.key, t.version, t.next_position,
         j.meta, j.next, j.pool, j.attempts_max, j.added, false as stop
    from unnest($1::uuid[], $2::int[], $3::uuid[], $4::bigint[], $5::text[], $6::text[], $7::text[], $8::smallint[],
                $9::int[]) with ordinality
         as j (run_id, seq, token, base, meta, next, pool, attempts_max, added, i)
    join step s on s.run_id = j.run_id and s.seq = j.seq
    join thread t on t.key = s.thread_key
   where s.token = j.token and s.status = 'leased' and t.active_run = j.run_id and t.version = j.base
     and t.stop_run is distinct from j.run_id
   order by t.key for no key update of t, s skip locked
)";

/// The thread moves on.
const MOVE: &str = ", t as (
  update thread t
     set version = l.version + 1, next_position = l.next_position + l.added, execution_meta = l.meta::json,
         updated_at = clock_timestamp()
    from l where t.key = l.key
)";

/// Fence, stop and locks where runs may end. The stop counts unless the run has just completed or
/// failed.
const LOCK_ONE_ENDING: &str = "
with l as materialized (
  select 1 as i, s.run_id, s.seq, s.node, s.tenant, s.class, s.graph_version, s.started_at,
         t.key, t.version, t.next_position, $6::text as next, $7::text as pool, $8::smallint as attempts_max,
         $9::int as added, $12::text as error, $13::int as removed,
         (t.stop_run = $1 and ($11::text is null or $11 = 'interrupted')) is true as stop,
         case when t.stop_run = $1 and ($11 is null or $11 = 'interrupted') then 'stopped' else $11 end as fin,
         case when t.stop_run = $1 and ($11 is null or $11 = 'interrupted') then $10::text else $5::text end as meta
    from step s join thread t on t.key = s.thread_key
   where s.run_id = $1::uuid and s.seq = $2::int and s.token = $3::uuid and s.status = 'leased'
     and t.active_run = $1 and t.version = $4::bigint
     for no key update of t, s
)";

/// The same for arrays.
const LOCK_MANY_ENDING: &str = "
with l as materialized (
  select j.i, s.run_id, s.seq, s.node, s.tenant, s.class, s.graph_version, s.started_at,
         t.key, t.version, t.next_position, j.next, j.pool, j.attempts_max, j.added, j.error, j.removed,
         (t.stop_run = j.run_id and (j.fin is null or j.fin = 'interrupted')) is true as stop,
         case when t.stop_run = j.run_id and (j.fin is null or j.fin = 'interrupted') then 'stopped' else j.fin end as fin,
         case when t.stop_run = j.run_id and (j.fin is null or j.fin = 'interrupted') then j.stopped else j.meta end as meta
    from unnest($1::uuid[], $2::int[], $3::uuid[], $4::bigint[], $5::text[], $6::text[], $7::text[], $8::smallint[],
                $9::int[], $10::text[], $11::text[], $12::text[], $13::int[]) with ordinality
         as j (run_id, seq, token, base, meta, next, pool, attempts_max, added, stopped, fin, error, removed, i)
    join step s on s.run_id = j.run_id and s.seq = j.seq
    join thread t on t.key = s.thread_key
   where s.token = j.token and s.status = 'leased' and t.active_run = j.run_id and t.version = j.base
   order by t.key for no key update of t, s skip locked
)";

/// The thread moves on, and a run that ends is closed. The thread of a first run that ends gets the
/// number of its messages into its name, where it asks for it.
const MOVE_ENDING: &str = ", t as (
  update thread t
     set version = l.version + 1, next_position = l.next_position + l.added, execution_meta = l.meta::json,
         updated_at = clock_timestamp(),
         active_run = case when l.fin is null then t.active_run end,
         stop_run = case when l.fin is null then t.stop_run end,
         status = case when l.fin is null then t.status when l.fin = 'interrupted' then 'interrupted'
                       when l.fin = 'failed' then 'error' else 'idle' end,
         name = case when l.fin is not null and t.name like '%{messages}%'
                     then replace(t.name, '{messages}', ((select count(*) from message m
                            where m.thread_key = l.key and m.removed_in is null) + l.added - l.removed)::text)
                     else t.name end
    from l where t.key = l.key
), x as (
  update run r
     set status = l.fin::run_status, finished_at = clock_timestamp(), version = l.version + 1,
         error = case when l.fin = 'failed' then l.error::json end, started_at = coalesce(r.started_at, l.started_at)
    from l where r.id = l.run_id and l.fin is not null
)";

/// The step is done, the thread's version is kept, and the next step is there. That one is being
/// sent to the queue right now: it is looked at again in a while, and is no backlog.
const ALWAYS: &str = ", d as (
  update step s set status = 'done', due_at = null, finished_at = clock_timestamp(), version = l.version + 1
    from l where s.run_id = l.run_id and s.seq = l.seq
), c as (
  insert into checkpoint (thread_key, version, run_id, seq, node, execution_meta, next_position)
  select key, version + 1, run_id, seq, node, meta::json, next_position + added from l
), n as (
  insert into step (run_id, seq, thread_key, tenant, pool, class, graph_version, node, attempts_max, due_at)
  select run_id, seq + 1, key, tenant, pool, class, graph_version, next, attempts_max, clock_timestamp() + interval '4 s'
    from l where next is not null and not stop
)";

/// A step that is missing here was refused.
const ANSWER: &str = " select i::int as i, stop, version + 1 as version from l";

/// Removes messages ahead of the commit, which then adds one of the same id: the parts of one
/// statement do not see each other. $1 run, $2 seq, $3 token, $4 base version, $5 positions.
pub(super) const REMOVE_FIRST: &str = "
with l as materialized (
  select t.key, t.version from step s join thread t on t.key = s.thread_key
   where s.run_id = $1 and s.seq = $2 and s.token = $3 and s.status = 'leased' and t.active_run = $1 and t.version = $4
     for no key update of t, s
), g as (
  update message m set removed_in = l.version + 1, in_log = false
    from l cross join unnest($5::bigint[]) as u (position)
   where m.thread_key = l.key and m.position = u.position and m.removed_in is null
  returning m.thread_key, m.message_id
)
update message m set in_log = false from g
 where m.thread_key = g.thread_key and m.message_id = g.message_id and m.removed_in is not null and m.in_log";

/// Asked for what a commit refused: the answer may have been lost, or another statement held a row.
/// $1 run ids, $2 seqs, $3 tokens. A stop that came later left a further step, or a further version.
pub(super) const STANDING: &str = "
select j.i::int as i, s.status::text as status, s.token = j.token as mine, s.version,
       r.status = 'stopped' and r.version = s.version
         and not exists (select from step n where n.run_id = j.run_id and n.seq = j.seq + 1) as stopped
  from unnest($1::uuid[], $2::int[], $3::uuid[]) with ordinality as j (run_id, seq, token, i)
  join step s on s.run_id = j.run_id and s.seq = j.seq
  join run r on r.id = j.run_id";
