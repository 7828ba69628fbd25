-- Runs and their steps.

create type run_status as enum ('waiting', 'queued', 'running', 'completed', 'failed', 'stopped', 'interrupted');

-- One row per run: the truth about its status. Written twice or three times in its life, so it may
-- carry the checks that thread and step go without.
create table run (
    id              uuid        not null,
    client_run_id   text,
    root_id         uuid        not null,
    -- The paused run it goes on from.
    resumes         uuid,
    thread_key      bigint      not null,
    tenant          text        collate "C" not null,
    user_id         text        collate "C" not null,
    graph           text        collate "C" not null,
    graph_version   text        collate "C" not null,
    class           smallint    not null,
    status          run_status  not null,
    -- The order of creation by the database's clock, which ids made elsewhere do not promise.
    place           bigint      generated always as identity,
    run_at          timestamptz not null default clock_timestamp(),
    input           json        not null,
    config          json        not null,
    step_limit      int         not null,
    node_timeout_ms bigint,
    error           json,
    trace           text,
    observability   boolean     not null,
    -- The thread's versions: with its input, and when it was closed.
    first_version   bigint      not null,
    version         bigint,
    created_at      timestamptz not null default clock_timestamp(),
    started_at      timestamptz,
    finished_at     timestamptz,
    constraint run_pk primary key (id),
    constraint run_thread foreign key (thread_key) references thread (key) on delete cascade,
    constraint run_finished_at_iff_closed
        check ((finished_at is not null) = (status in ('completed', 'failed', 'stopped', 'interrupted')))
) with (fillfactor = 80);
-- At most one active run per thread; a waiting one is not active.
create unique index run_one_active on run (thread_key) where status in ('queued', 'running');
-- A paused run is resumed once.
create unique index run_resumes_once on run (resumes) where resumes is not null;
create index run_line on run (thread_key, place) where status = 'waiting';
create index run_due on run (run_at) where status = 'waiting' and run_at > created_at;
create index run_chain on run (root_id, place) where root_id <> id;
-- The status rides along so that counting runs reads no rows.
create index run_of_thread on run (thread_key, id) include (status);
create index run_of_user on run (tenant, user_id, id);

create type step_status as enum ('delayed', 'ready', 'leased', 'done', 'failed', 'cancelled');

-- One row per step. It is the outbox too: a ready step that no queue has is sent again. What the
-- claim and the dispatch need is copied here, so that they join nothing.
create table step (
    run_id          uuid        not null,
    seq             int         not null,
    thread_key      bigint      not null,
    tenant          text        collate "C" not null,
    pool            text        collate "C" not null,
    class           smallint    not null,
    graph_version   text        collate "C" not null,
    node            text        not null,
    status          step_status not null default 'ready',
    attempt         smallint    not null default 0,
    attempts_max    smallint    not null,
    run_at          timestamptz not null default clock_timestamp(),
    -- When somebody must look again: ready = send again, leased = the lease ends, delayed = becomes
    -- ready; null = backlog or done.
    due_at          timestamptz,
    token           uuid,
    worker          uuid,
    -- Its run went back to queued when its lease ended without a commit.
    requeued        boolean     not null default false,
    -- The thread's version its commit made.
    version         bigint,
    started_at      timestamptz,
    finished_at     timestamptz,
    error           json,
    constraint step_pk primary key (run_id, seq),
    constraint step_leased_has_lease check (status <> 'leased' or (token is not null and due_at is not null))
) with (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_cost_delay = 0);
create index step_backlog on step (pool, class, tenant, graph_version, run_at) where status = 'ready' and due_at is null;
create index step_watch on step (due_at) where due_at is not null;

-- An attempt that ended otherwise than by its commit.
create table step_attempt (
    run_id          uuid        not null,
    seq             int         not null,
    attempt         smallint    not null,
    worker          uuid,
    started_at      timestamptz,
    ended_at        timestamptz not null default clock_timestamp(),
    "end"           text        not null,
    error           json,
    constraint step_attempt_pk primary key (run_id, seq, attempt)
);

-- A client's key and the run it made; it outlives the run.
create table idempotency (
    tenant          text        collate "C" not null,
    user_id         text        collate "C" not null,
    key             text        collate "C" not null,
    body_hash       text        not null,
    run_id          uuid        not null,
    expires_at      timestamptz not null,
    constraint idempotency_pk primary key (tenant, user_id, key)
);
create index idempotency_expiry on idempotency (expires_at);

-- Concurrency limits: one row per place, taken by the run that has it.
create table slot (
    key             text        collate "C" not null,
    n               int         not null,
    run_id          uuid,
    constraint slot_pk primary key (key, n),
    constraint slot_run_unique unique (run_id)
);
