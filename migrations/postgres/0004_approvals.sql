-- Questions and their answers, and the ledger of tool calls.

create type interrupt_status as enum ('open', 'answered', 'cancelled', 'expired');

-- One row per question: written by the commit that pauses, answered once under the thread's lock. An
-- open one whose expires_at has passed takes no answer any more.
create table interrupt (
    id              text        collate "C" not null,
    thread_key      bigint      not null,
    tenant          text        collate "C" not null,
    user_id         text        collate "C" not null,
    graph           text        collate "C" not null,
    -- The step that asked; its run is the paused one.
    run_id          uuid        not null,
    seq             int         not null,
    -- Its place among the questions of its pause, from 1: the order of the calls.
    place           smallint    not null,
    -- The position inside the node, which the answer is found by.
    key             text        not null,
    node            text        not null,
    kind            text        not null,
    -- The call it is about.
    message_id      text        collate "C",
    call_id         text        collate "C",
    tool            text        collate "C",
    -- The question with the call's arguments, as it was asked.
    question        json        not null,
    -- The default answer when its time is over.
    on_expiry       json,
    status          interrupt_status not null default 'open',
    answer          json,
    -- Hash of exactly the arguments that were approved: what the ledger starts a gated tool by.
    approved_hash   text,
    answered_by     text,
    comment         text,
    created_at      timestamptz not null default clock_timestamp(),
    expires_at      timestamptz,
    answered_at     timestamptz,
    constraint interrupt_pk primary key (id),
    constraint interrupt_key unique (run_id, seq, key),
    constraint interrupt_answered_iff_closed check ((answered_at is null) = (status = 'open')),
    constraint interrupt_approval check (approved_hash is null or (kind = 'gate' and status in ('answered', 'expired')))
) with (fillfactor = 85);
-- The inbox, by keyset.
create index interrupt_inbox on interrupt (tenant, created_at, id) where status = 'open';
create index interrupt_history on interrupt (tenant, created_at, id);
create index interrupt_expiry on interrupt (expires_at) where status = 'open' and on_expiry is not null;
create index interrupt_of_thread on interrupt (thread_key, created_at, id);
create index interrupt_of_call on interrupt (thread_key, message_id, call_id) where kind in ('gate', 'outcome');

create type call_status as enum ('intended', 'done', 'failed', 'denied', 'unknown');

-- One row per tool call: what was intended, and the one result it has.
create table tool_execution (
    thread_key      bigint      not null,
    message_id      text        collate "C" not null,
    call_id         text        collate "C" not null,
    id_is_int       boolean     not null,
    -- The order of the first starts.
    place           bigint      generated always as identity,
    tool            text        not null,
    arguments_hash  text        not null,
    effect          text        not null,
    status          call_status not null,
    -- The intent's own: a result is taken by it, also after the lease is lost.
    token           uuid        not null,
    -- The lease under which it was started last, so that a repeated question gets the same answer.
    lease           uuid        not null,
    run_id          uuid        not null,
    seq             int         not null,
    attempt         smallint    not null,
    -- The approval it ran under.
    approval        text,
    result          json,
    -- When its last start will certainly have ended.
    deadline        timestamptz,
    started_at      timestamptz,
    created_at      timestamptz not null default clock_timestamp(),
    finished_at     timestamptz,
    constraint tool_execution_pk primary key (thread_key, message_id, call_id),
    constraint tool_execution_result_iff_ended
        check ((result is not null) = (status in ('done', 'failed', 'denied')))
) with (fillfactor = 70);
