"""The SQL of leases: a task that runs outside of a transaction, for as long as somebody renews it.

A leased task is a row with a ``lease_token``, and with ``run_at`` at the end of the lease: so it
falls due by itself, for anybody's claim, if nobody renews it.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Executable,
    Interval,
    Select,
    Table,
    Update,
    Uuid,
    bindparam,
    delete,
    func,
    literal_column,
    null,
    select,
    update,
)

from pgtask_sa.claim import claim_columns

Now = ColumnElement[Any]


def _now(now: Now | None) -> Now:
    return func.statement_timestamp() if now is None else now


# Not called as the column: of an UPDATE that would be a value to set.
LEASED_ID = bindparam("leased_id", type_=BigInteger)


def _mine(table: Table) -> tuple[ColumnElement[bool], ...]:
    return (
        table.c.task_id == LEASED_ID,
        table.c.lease_token == bindparam("token", type_=Uuid),
    )


def renew_lease(table: Table, now: Now | None = None) -> Executable:
    """Prolong a lease, to ``:lease`` from now; no row comes back when it was lost."""
    until = _now(now) + bindparam("lease", type_=Interval)
    return update(table).where(*_mine(table)).values(run_at=until).returning(table.c.task_id)


def hold_lease(table: Table) -> Select[Any]:
    """Keep a lease from being lost until the end of the transaction; no row if it was before.

    That lock lets renewals pass, but no claim.
    """
    return (
        select(literal_column("1"))
        .select_from(table)
        .where(*_mine(table))
        .with_for_update(key_share=True, read=True)
    )


def finish_lease(table: Table) -> Executable:
    """Delete a leased task that is done; no row comes back when the lease was lost."""
    return delete(table).where(*_mine(table)).returning(table.c.task_id)


def take_leased(table: Table) -> Executable:
    """Claim a leased task from who runs it, to settle it; as any claim it returns the row."""
    return delete(table).where(*_mine(table)).returning(*claim_columns(table))


def release_lease(table: Table, now: Now | None = None) -> Update:
    """Give a leased task back uncounted: its worker is being stopped."""
    free = {"lease_token": null(), "run_at": _now(now), "attempts": table.c.attempts - 1}
    return update(table).where(*_mine(table)).values(free)
