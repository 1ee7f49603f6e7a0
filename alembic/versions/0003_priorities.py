"""The priority of a task, and indexes in which it comes first.

Frozen, as every revision. On a table with many rows `pgtask_sa.migrations.upgrade` has built the
new indexes before, beside the old ones and without keeping anybody out; then nothing here takes
long. The `alembic` command alone builds them here, and writes to the table wait for that.

Revision: 0003
Revises: 0002
"""

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

UPGRADE = (
    # a constant default: no row is touched, the lock is held for an instant
    "alter table task add column if not exists priority smallint not null default 0",
    "alter table dead_task add column priority smallint not null default 0",
    (
        "create index if not exists task_ready_0003_idx on task (priority, task_type, ticket)"
        " where run_at is null"
    ),
    (
        "create index if not exists task_due_0003_idx on task (priority, task_type, run_at)"
        " where run_at is not null"
    ),
    "drop index task_ready_idx",
    "drop index task_due_idx",
    "alter index task_ready_0003_idx rename to task_ready_idx",
    "alter index task_due_0003_idx rename to task_due_idx",
)

DOWNGRADE = (
    "drop index task_ready_idx",
    "drop index task_due_idx",
    "create index task_ready_idx on task (task_type, ticket) where run_at is null",
    "create index task_due_idx on task (task_type, run_at) where run_at is not null",
    "alter table dead_task drop column priority",
    "alter table task drop column priority",
)


def upgrade() -> None:
    for statement in UPGRADE:
        op.execute(statement)


def downgrade() -> None:
    for statement in DOWNGRADE:
        op.execute(statement)
