-- The inbox holds what still takes an answer. Whatever has expired without a default stays 'open', at
-- its head, until somebody stops the run; with its end in the index, such rows are passed by without
-- a visit to the table.

drop index interrupt_inbox;
create index interrupt_inbox
    on interrupt (tenant, created_at, id, (coalesce(expires_at, 'infinity'::timestamptz))) where status = 'open';
-- The same for one person's own threads.
create index interrupt_inbox_of_user
    on interrupt (tenant, user_id, created_at, id, (coalesce(expires_at, 'infinity'::timestamptz)))
    where status = 'open';
create index interrupt_history_of_user on interrupt (tenant, user_id, created_at, id);
