"""The table in which workers note who they are and what they are running.

It comes with every task table, by itself: ``task_worker`` beside ``task``, in the same metadata and
schema. It is written apart from the transactions of the tasks, so that it still says what a process
was running when that process is dead. There is one row for each lane of each process:

* ``task_ids``      what the lane claimed last, and ``row_versions`` the ``xmin`` of those rows. A
  row that is still of that version was claimed and never settled. A version below 0 is of one that
  was claimed, and not to be run in that transaction: its death is counted, or a lease begins.
* ``backend_pid``   the server process that runs the transaction of the claim, and ``begun_at`` its
  beginning: the two together name that transaction and no other. Of a task that the lane has noted
  by itself (noted_claims) it is null, since that runs in a later transaction.
* ``is_direct``     the process holds an advisory lock on its ``worker_id`` as long as it lives. Not
  so through a pooler, where nobody can hold one; there ``seen_at`` must do, and nothing is noted.
* ``lane``          the number of the lane, and now and then `NUMBERS` more, see there.
* ``server_started_at``  when the server was started that it is connected to. Claims do not survive
  a restart of the server, and nobody is to blame for that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    DateTime,
    Integer,
    Table,
    Text,
    event,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY

from pgtask_sa import triggers

# The first half of the two-integer advisory lock keys of workers; the second is their number.
LOCK_CLASS = triggers.LOCK_CLASS + 1

# While somebody holds a snapshot, each version of a row that finds no room on its page makes an
# entry in the index of the key, and is compared with all dead ones of the same key: more with every
# note. So a lane's row takes another number now and then, which says the same.
NUMBERS = 2**16
NOTES_PER_NUMBER = 100

WORKER_STORAGE: Mapping[str, Any] = {
    "fillfactor": 20,  # room for the next versions of a row on its own page
    "autovacuum_vacuum_scale_factor": 0,
    "autovacuum_vacuum_threshold": 1000,
    "autovacuum_vacuum_cost_delay": 0,
}


def add_worker_table(task: Table) -> None:
    """Put the table of the workers beside a task table: same metadata, same schema."""
    none, clock = text("'{}'"), DateTime(timezone=True)
    table = Table(
        triggers.worker_table_name(task.name),
        task.metadata,
        Column("worker_id", Integer, primary_key=True, autoincrement=False),
        Column("lane", Integer, primary_key=True, autoincrement=False),
        Column("host", Text, nullable=False),
        Column("pid", Integer, nullable=False),
        Column("started_at", clock, nullable=False, server_default=func.now()),
        Column("server_started_at", clock, nullable=False),
        Column("seen_at", clock, nullable=False, server_default=func.now()),
        Column("is_direct", Boolean, nullable=False),
        Column("backend_pid", Integer),
        Column("begun_at", clock),
        Column("task_ids", ARRAY(BigInteger), nullable=False, server_default=none),
        Column("row_versions", ARRAY(BigInteger), nullable=False, server_default=none),
        schema=task.schema,
        info={"pgtask": "worker"},
    )
    event.listen(table, "after_create", _set_storage)
    task.info["pgtask_worker"] = table


def worker_table(task: Table) -> Table:
    """Return the table in which the workers of a task table note what they are running.

    Example:
        >>> from pgtask_sa import Task
        >>> worker_table(Task.__table__).name
        'task_worker'
    """
    found: Table = task.info["pgtask_worker"]
    return found


def _set_storage(table: Table, connection: Connection, **_: Any) -> None:
    schema = connection.schema_for_object(table)
    name = triggers.Quoted(connection, table.name, schema).table
    options = ", ".join(f"{key} = {value}" for key, value in WORKER_STORAGE.items())
    connection.exec_driver_sql(f"alter table {name} set ({options})")
