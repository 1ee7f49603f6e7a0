"""The task table, the error queue and the wake-up trigger.

Frozen: literal SQL, so that it means the same for ever. What the mapping gains later is a later
revision; a test holds the newest revision against the mapping.

Revision: 0001
Revises:
"""

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TASK = """
create table task (
    task_id      bigint generated always as identity,
    task_type    text not null,
    params       jsonb not null default '{}',
    created_at   timestamptz not null default now(),
    run_at       timestamptz,
    attempts     integer not null default 0,
    last_error   text,
    ticket       real not null default random(),
    coalesce_key bigint,
    primary key (task_id)
) with (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0
)
"""

READY = "create index task_ready_idx on task (task_type, ticket) where run_at is null"
DUE = "create index task_due_idx on task (task_type, run_at) where run_at is not null"
COALESCE = (
    "create index task_coalesce_idx on task (task_type, coalesce_key)"
    " where coalesce_key is not null"
)

# 1885828203 is "pgtk", the class of all our advisory locks
WAKEUP_FUNCTION = """
create function task_wakeup() returns trigger language plpgsql as $$
begin
  if coalesce(current_setting('pgtask.notify', true), '') = 'off' then
    return null;
  end if;
  if pg_try_advisory_lock(1885828203, tg_relid::int) then
    perform pg_advisory_unlock(1885828203, tg_relid::int);
  else
    perform pg_notify('pgtask_' || tg_relid, '');
  end if;
  return null;
end $$
"""

WAKEUP_TRIGGER = """
create trigger task_wakeup after insert on task
for each statement execute function task_wakeup()
"""

DEAD_TASK = """
create table dead_task (
    task_id      bigint not null,
    task_type    text not null,
    params       jsonb not null,
    created_at   timestamptz not null,
    attempts     integer not null,
    last_error   text,
    coalesce_key bigint,
    reason       text not null,
    buried_at    timestamptz not null default now(),
    primary key (task_id)
)
"""


def upgrade() -> None:
    for statement in (TASK, READY, DUE, COALESCE, WAKEUP_FUNCTION, WAKEUP_TRIGGER, DEAD_TASK):
        op.execute(statement)


def downgrade() -> None:
    op.execute("drop table dead_task")
    op.execute("drop table task")
    op.execute("drop function task_wakeup()")
