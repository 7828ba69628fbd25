-- Graphs, and threads with what belongs to them: messages, state fields, checkpoints.
--
-- Bodies, values and places are json, never jsonb: nothing queries inside them, and json gives them
-- back byte for byte. Ids compare by bytes (collate "C"), which is what ids mean, and faster.

create table graph (
    version         text        collate "C" not null,
    name            text        collate "C" not null,
    manifest        json        not null,
    registered_at   timestamptz not null,
    constraint graph_pk primary key (version)
);
-- The newest version of a name is the one registered last.
create index graph_newest on graph (name, registered_at);

create type thread_status as enum ('idle', 'busy', 'interrupted', 'error');

-- One row per thread: the lock of everything that belongs to it. No index on a column that a step
-- changes, and room on the page, so that nearly all of its updates touch no index.
create table thread (
    key             bigint      generated always as identity,
    tenant          text        collate "C" not null,
    id              text        collate "C" not null,
    user_id         text        collate "C" not null,
    name            text,
    meta            json,
    graph           text        collate "C" not null,
    graph_version   text        collate "C" not null,
    status          thread_status not null default 'idle',
    version         bigint      not null default 0,
    next_position   bigint      not null default 0,
    -- Whether a run or an edit ever gave it a state; messages of the log alone do not.
    has_state       boolean     not null default false,
    active_run      uuid,
    -- The stop, tied to the run it was meant for.
    stop_run        uuid,
    last_run        uuid,
    execution_meta  json        not null,
    created_at      timestamptz not null default clock_timestamp(),
    updated_at      timestamptz not null default clock_timestamp(),
    constraint thread_pk primary key (key),
    constraint thread_id_unique unique (tenant, id)
) with (fillfactor = 50);

-- A message is keyed by its position. It is in the context at version v if added_in <= v and it was
-- not removed_in v or before; in_log says whether the log has it. A message of the log alone is
-- removed in the version that added it; one that is in both lists in different places has two rows.
create table message (
    thread_key      bigint      not null,
    position        bigint      not null,
    message_id      text        collate "C" not null,
    role            text        not null,
    body            json        not null,
    in_log          boolean     not null default true,
    added_in        bigint      not null,
    removed_in      bigint,
    constraint message_pk primary key (thread_key, position),
    constraint message_thread foreign key (thread_key) references thread (key) on delete cascade
) with (autovacuum_vacuum_insert_scale_factor = 0.05);
-- An id may return after its removal.
create unique index message_id_live on message (thread_key, message_id) where removed_in is null;
-- These two hold only what left the context, or was never in it: an append does not touch them.
create unique index message_id_log_only on message (thread_key, message_id) where removed_in is not null and in_log;
create index message_removed on message (thread_key, removed_in) where removed_in is not null;

-- The value a field got in a version; only fields that changed have a row.
create table field (
    thread_key      bigint      not null,
    name            text        collate "C" not null,
    version         bigint      not null,
    value           json        not null,
    constraint field_pk primary key (thread_key, name, version)
) with (autovacuum_vacuum_insert_scale_factor = 0.05);

-- One row per version. run_id and seq are null for an edit by a client; seq 0 is an accepted input.
create table checkpoint (
    thread_key      bigint      not null,
    version         bigint      not null,
    run_id          uuid,
    seq             int,
    node            text        not null,
    execution_meta  json        not null,
    -- The first position behind this version's messages: what came later is a range of the key.
    next_position   bigint      not null,
    at              timestamptz not null default clock_timestamp(),
    constraint checkpoint_pk primary key (thread_key, version)
);
