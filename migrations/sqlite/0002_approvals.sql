-- Questions and their answers, and the ledger of tool calls, as in migrations/postgres.

-- One row per question: written by the commit that pauses, answered once.
create table interrupt (
    id            text    not null,
    thread_key    integer not null,
    tenant        text    not null,
    user_id       text    not null,
    graph         text    not null,
    run_id        text    not null,
    seq           integer not null,          -- the step that asked
    place         integer not null,          -- among the questions of its pause, from 1
    key           text    not null,
    node          text    not null,
    kind          text    not null,
    message_id    text,                      -- the call it is about
    call_id       text,
    tool          text,
    question      text    not null,
    on_expiry     text,
    status        text    not null default 'open',
    answer        text,
    approved_hash text,                      -- of exactly the arguments that were approved
    answered_by   text,
    comment       text,
    created_at    integer not null,
    expires_at    integer,
    answered_at   integer,
    constraint interrupt_pk primary key (id),
    constraint interrupt_key unique (run_id, seq, key),
    constraint interrupt_thread foreign key (thread_key) references thread (key) on delete cascade,
    constraint interrupt_status_known check (status in ('open', 'answered', 'cancelled', 'expired')),
    constraint interrupt_answered_iff_closed check ((answered_at is null) = (status = 'open')),
    constraint interrupt_approval check (approved_hash is null or (kind = 'gate' and status in ('answered', 'expired')))
) strict;
create index interrupt_inbox on interrupt (tenant, created_at, id) where status = 'open';
create index interrupt_history on interrupt (tenant, created_at, id);
create index interrupt_expiry on interrupt (expires_at) where status = 'open' and on_expiry is not null;
create index interrupt_of_thread on interrupt (thread_key, created_at, id);
create index interrupt_of_call on interrupt (thread_key, message_id, call_id) where kind in ('gate', 'outcome');

-- One row per tool call: what was intended, and the one result it has; in the order of the first starts.
create table tool_execution (
    thread_key     integer not null,
    message_id     text    not null,
    call_id        text    not null,
    id_is_int      integer not null,
    tool           text    not null,
    arguments_hash text    not null,
    effect         text    not null,
    status         text    not null,
    token          text    not null,         -- the intent's own
    lease          text    not null,         -- under which it was started last
    run_id         text    not null,
    seq            integer not null,
    attempt        integer not null,
    approval       text,
    result         text,
    deadline       integer,
    started_at     integer,
    created_at     integer not null,
    finished_at    integer,
    constraint tool_execution_pk primary key (thread_key, message_id, call_id),
    constraint tool_execution_thread foreign key (thread_key) references thread (key) on delete cascade,
    constraint tool_execution_status_known check (status in ('intended', 'done', 'failed', 'denied', 'unknown')),
    constraint tool_execution_result_iff_ended
        check ((result is not null) = (status in ('done', 'failed', 'denied')))
) strict;
