"""Priorities of tasks: a column, and indexes in which it comes first.

The indexes are built without keeping enqueues waiting, and outside of a transaction therefore.

Revision: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

READY, DUE = sa.text("run_at IS NULL"), sa.text("run_at IS NOT NULL")


def upgrade() -> None:
    for table in ("task", "dead_task"):
        priority = sa.Column("priority", sa.SmallInteger(), server_default="0", nullable=False)
        op.add_column(table, priority)
    _replace_indexes(["priority", "task_type"])


def downgrade() -> None:
    _replace_indexes(["task_type"])
    op.drop_column("dead_task", "priority")
    op.drop_column("task", "priority")


def _replace_indexes(first: list[str]) -> None:
    for name, last, where in (("task_ready_idx", "ticket", READY), ("task_due_idx", "run_at", DUE)):
        op.execute(f"alter index {name} rename to old_{name}")
        with op.get_context().autocommit_block():
            op.create_index(
                name, "task", [*first, last], postgresql_where=where, postgresql_concurrently=True
            )
            op.drop_index(f"old_{name}", table_name="task", postgresql_concurrently=True)
