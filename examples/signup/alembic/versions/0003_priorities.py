"""Priorities of tasks: a column, and indexes in which it comes first.

Revision: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

PARTS = {
    "task_ready_idx": ("ticket", "run_at IS NULL"),
    "task_due_idx": ("run_at", "run_at IS NOT NULL"),
}


def upgrade() -> None:
    for table in ("task", "dead_task"):
        priority = sa.Column(
            "priority", sa.SmallInteger(), server_default=sa.text("0"), nullable=False
        )
        op.add_column(table, priority)
    _replace_indexes("priority", "task_type")


def downgrade() -> None:
    _replace_indexes("task_type")
    op.drop_column("dead_task", "priority")
    op.drop_column("task", "priority")


def _replace_indexes(*first: str) -> None:
    # with many tasks waiting: concurrently, in an `autocommit_block()`
    for name, (last, where) in PARTS.items():
        op.drop_index(name, table_name="task")
        op.create_index(name, "task", [*first, last], postgresql_where=sa.text(where))
