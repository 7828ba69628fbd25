-- The tables of durable runs, as in migrations/postgres: enums are text with a check, uuids and json
-- are text (json exactly as it was written, never touched by a json function), times are integer
-- microseconds since 1970 by the clock of the one process that has the database.

create table graph (
    version       text    not null,
    name          text    not null,
    manifest      text    not null,
    registered_at integer not null,          -- strictly rising: the last registered of a name is its newest
    constraint graph_pk primary key (version)
) strict;
create index graph_newest on graph (name, registered_at);

-- Everything that belongs to a thread is decided on its row.
create table thread (
    key            integer not null primary key autoincrement,   -- never used twice
    tenant         text    not null,
    id             text    not null,
    user_id        text    not null,
    name           text,
    meta           text,
    graph          text    not null,
    graph_version  text    not null,
    status         text    not null default 'idle',
    version        integer not null default 0,
    next_position  integer not null default 0,
    active_run     text,
    stop_run       text,                     -- the stop, tied to its run
    last_run       text,
    has_state      integer not null default 0,
    current_node   text    not null default '__start__',
    execution_meta text    not null,
    created_at     integer not null,
    updated_at     integer not null,
    constraint thread_id_unique unique (tenant, id),
    constraint thread_status_known check (status in ('idle', 'busy', 'interrupted', 'error'))
) strict;
create index thread_owner on thread (tenant, user_id, key);
create index thread_busy on thread (key) where status = 'busy';

-- Two lists in one table: the context (rows with in_context, until removed_in) and the log (in_log).
create table message (
    thread_key integer not null,
    position   integer not null,
    message_id text    not null,
    role       text    not null,
    body       text    not null,
    in_context integer not null,
    in_log     integer not null,
    added_in   integer not null,
    removed_in integer,
    constraint message_pk primary key (thread_key, position),
    constraint message_thread foreign key (thread_key) references thread (key) on delete cascade
) strict;
create unique index message_in_context on message (thread_key, message_id) where in_context = 1 and removed_in is null;
create unique index message_in_log on message (thread_key, message_id) where in_log = 1;
create index message_removed on message (thread_key, removed_in) where removed_in is not null;

create table field (
    thread_key integer not null,
    name       text    not null,
    version    integer not null,
    value      text    not null,
    constraint field_pk primary key (thread_key, name, version)
) strict;

create table checkpoint (
    thread_key     integer not null,
    version        integer not null,
    run_id         text,                     -- null: an edit by a client
    seq            integer,                  -- the step it ended; 0: the accepted input
    node           text    not null,
    execution_meta text    not null,
    next_position  integer not null,         -- where the messages of the next version begin
    at             integer not null,
    constraint checkpoint_pk primary key (thread_key, version)
) strict;

create table run (
    place         integer not null primary key autoincrement,
    id            text    not null,
    client_run_id text,
    root_id       text    not null,
    resumes       text,
    thread_key    integer not null,
    tenant        text    not null,
    graph         text    not null,
    graph_version text    not null,
    class         integer not null,
    status        text    not null,
    run_at        integer not null,
    input         text    not null,
    config        text    not null,
    step_limit    integer not null,
    node_timeout  integer,                   -- microseconds
    error         text,
    trace         text,
    observability integer not null default 1,
    accepted_in   integer not null,          -- the thread's version that its input made
    version       integer,                   -- the thread's at the run's end
    created_at    integer not null,
    started_at    integer,
    finished_at   integer,
    constraint run_id_unique unique (id),
    constraint run_resumes_once unique (resumes),
    constraint run_thread foreign key (thread_key) references thread (key) on delete cascade,
    constraint run_status_known
        check (status in ('waiting', 'queued', 'running', 'completed', 'failed', 'stopped', 'interrupted')),
    constraint run_finished_at_iff_closed
        check ((finished_at is not null) = (status in ('completed', 'failed', 'stopped', 'interrupted')))
) strict;
create unique index run_one_active on run (thread_key) where status in ('queued', 'running');
create index run_of_thread on run (thread_key, place);
create index run_chain on run (root_id, place);
create index run_of_tenant on run (tenant, id);
create index run_by_status on run (status);     -- counts read this, not the rows with their inputs

-- The outbox: a ready step without a job in the queue is found by its due_at and sent again.
create table step (
    run_id        text    not null,
    seq           integer not null,
    thread_key    integer not null,
    tenant        text    not null,
    pool          text    not null,
    class         integer not null,
    graph_version text    not null,
    node          text    not null,
    status        text    not null default 'ready',
    attempt       integer not null default 0,
    attempts_max  integer not null,
    run_at        integer not null,
    due_at        integer,                   -- ready: send again; leased: the lease ends; delayed: becomes ready; null: backlog or over
    token         text,
    worker        text,
    started_at    integer,
    finished_at   integer,
    version       integer,                   -- the thread's that its commit made
    constraint step_pk primary key (run_id, seq),
    constraint step_status_known check (status in ('delayed', 'ready', 'leased', 'done', 'failed', 'cancelled')),
    constraint step_leased_has_lease check (status <> 'leased' or (token is not null and due_at is not null))
) strict;
create index step_backlog on step (pool, class, tenant, run_at) where status = 'ready' and due_at is null;
create index step_watch on step (due_at) where due_at is not null;

-- Attempts that ended otherwise than by a commit.
create table step_attempt (
    run_id     text    not null,
    seq        integer not null,
    attempt    integer not null,
    worker     text,
    started_at integer,
    ended_at   integer not null,
    outcome    text    not null,
    error      text,
    constraint step_attempt_pk primary key (run_id, seq, attempt)
) strict;

create table idempotency (
    tenant     text    not null,
    user_id    text    not null,
    key        text    not null,
    body_hash  text    not null,
    run_id     text    not null,
    expires_at integer not null,
    constraint idempotency_pk primary key (tenant, user_id, key)
) strict;
create index idempotency_expiry on idempotency (expires_at);

create table worker (
    id       text    not null,
    name     text    not null,
    pools    text    not null,
    slots    integer not null,
    versions text    not null,
    seen_at  integer not null,
    constraint worker_pk primary key (id)
) strict;

-- Append-only; outlives the thread it is about.
create table audit (
    id         integer not null primary key autoincrement,
    at         integer not null,
    tenant     text    not null,
    thread_key integer,
    thread_id  text,
    who        text    not null,
    action     text    not null,
    detail     text    not null
) strict;
create index audit_of_thread on audit (thread_key, id);
