"""The wake-up trigger asks for its lock, and gives it back, in one expression.

No table is touched, and nobody is kept out: whoever inserts meanwhile runs the one or the other.
Frozen, as every revision.

Revision: 0004
Revises: 0003
"""

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

UPGRADE = """
create or replace function task_wakeup() returns trigger language plpgsql as $$
begin
  if (case
        when current_setting('pgtask.notify', true) = 'off' then false
        when pg_try_advisory_lock(1885828203, tg_relid::int)
          then not pg_advisory_unlock(1885828203, tg_relid::int)
        else true
      end) then
    perform pg_notify('pgtask_' || tg_relid, '');
  end if;
  return null;
end $$
"""

DOWNGRADE = """
create or replace function task_wakeup() returns trigger language plpgsql as $$
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


def upgrade() -> None:
    op.execute(UPGRADE)


def downgrade() -> None:
    op.execute(DOWNGRADE)
