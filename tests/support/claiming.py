"""Rows to claim, and claims as a lane makes them."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, text

from pgtask_sa import Task
from pgtask_sa.claim import fair_claim, random_claim, sampled_claim
from pgtask_sa.claim_orders import ClaimOptions
from pgtask_sa.turns import Claimer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sqlalchemy import Connection, Engine, Executable, Table

TASK: Table = Task.__table__

# The claim of each order, as a function of table and limit.
CLAIMS: dict[str, Callable[[Table, int], Executable]] = {
    "fair": partial(fair_claim, due_first=False),
    "fair, due first": partial(fair_claim, due_first=True),
    "random": random_claim,
    "tablesample": lambda table, limit: sampled_claim(table, limit, func.system(100)),
}


def fill(
    database: Engine | Connection,
    count: int,
    task_type: str = "A",
    *,
    run_at: str = "null",
    table: str = "task",
) -> None:
    """Add waiting tasks; ``run_at`` is an SQL expression."""
    statement = text(
        f"insert into {table} (task_type, run_at)"
        f" select '{task_type}', {run_at} from generate_series(1, {count}) as g"
    )
    if hasattr(database, "begin") and hasattr(database, "connect"):
        with database.begin() as connection:
            connection.execute(statement)
    else:
        database.execute(statement)


def analyze(engine: Engine, table: str = "task") -> None:
    """Take statistics of what is in the table now."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"vacuum analyze {table}"))


def take(
    connection: Connection,
    claim: Executable,
    types: Sequence[str] = ("A",),
    pivot: float = 0.5,
    **more: Any,
) -> list[Any]:
    """Execute a claim, and return its rows; the transaction stays open."""
    turns = {"levels": [0] * len(types), "types": list(types)}
    parameters = {**turns, "pivot": pivot, **more}
    return list(connection.execute(claim, parameters))


def ids(rows: Sequence[Any]) -> list[int]:
    """Return the task numbers of claimed rows."""
    return [row.task_id for row in rows]


def claimer(types: Sequence[str] = ("A",), table: Table = TASK, **options: Any) -> Claimer:
    """Make what a lane chooses its claims by."""
    return Claimer(table, types, ClaimOptions(**options))


def sweep(connection: Connection, chooser: Claimer) -> list[Any]:
    """Claim once as a lane does; the transaction stays open."""
    for statement, parameters in chooser.statements():
        result = connection.execute(statement, parameters)
        if rows := chooser.learn(result.mappings().all()):
            return [SimpleNamespace(**row) for row in rows]
    return []


def sweep_all(engine: Engine, chooser: Claimer) -> list[list[Any]]:
    """Claim and commit until nothing is left; return what each claim took."""
    claims = []
    with engine.connect() as connection:
        while rows := sweep(connection, chooser):
            connection.commit()
            claims.append(rows)
    return claims


def left(engine: Engine, table: str = "task") -> int:
    """Count the rows in the table."""
    with engine.connect() as connection:
        return int(connection.scalar(text(f"select count(*) from {table}")) or 0)
