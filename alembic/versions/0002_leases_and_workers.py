"""Leases, and the table in which workers note what they are running.

Frozen, as every revision.

Revision: 0002
Revises: 0001
"""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

# nullable and without a default: no row is touched, the lock is held for an instant
LEASE = "alter table task add column lease_token uuid"

WORKER = """
create table task_worker (
    worker_id         integer not null,
    lane              integer not null,
    host              text not null,
    pid               integer not null,
    started_at        timestamptz not null default now(),
    server_started_at timestamptz not null,
    seen_at           timestamptz not null default now(),
    is_direct         boolean not null,
    backend_pid       integer,
    begun_at          timestamptz,
    task_ids          bigint[] not null default '{}',
    row_versions      bigint[] not null default '{}',
    primary key (worker_id, lane)
) with (
    fillfactor = 20,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 1000,
    autovacuum_vacuum_cost_delay = 0
)
"""


def upgrade() -> None:
    op.execute(LEASE)
    op.execute(WORKER)


def downgrade() -> None:
    op.execute("drop table task_worker")
    op.execute("alter table task drop column lease_token")
