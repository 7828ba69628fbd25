-- Who works, and who did what.

create table worker (
    id              uuid        not null,
    name            text        not null,
    pools           text[]      not null,
    slots           int         not null,
    -- The code versions it has; declarative ones are everybody's.
    versions        text[]      not null,
    started_at      timestamptz not null default clock_timestamp(),
    seen_at         timestamptz not null,
    constraint worker_pk primary key (id)
) with (fillfactor = 50);

-- Append-only; it stays when its thread goes.
create table audit (
    id              bigint      generated always as identity,
    at              timestamptz not null default clock_timestamp(),
    tenant          text        collate "C" not null,
    thread_key      bigint      not null,
    run_id          uuid,
    who             text        not null,
    action          text        not null,
    detail          json        not null,
    constraint audit_pk primary key (id)
);
create index audit_of_thread on audit (thread_key, id);
