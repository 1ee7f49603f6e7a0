"""The doctor's whole examination, for people: every check there is, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from sqlalchemy.exc import DBAPIError

from pgtask_sa import checkup_server as server
from pgtask_sa import checkup_tables as tables
from pgtask_sa.checkup_trial import check_trial
from pgtask_sa.doctor import Finding, Level
from pgtask_sa.failures import headline
from pgtask_sa.patient import Patient, warning

Check: TypeAlias = Callable[[Patient], Iterable[Finding]]

OF_SERVER: Sequence[Check] = (
    server.check_version,
    server.check_pooler,
    server.check_writable,
    server.check_durability,
    server.check_isolation,
    server.check_timeouts,
    server.check_connections,
    server.check_clock,
    server.check_autovacuum,
    server.check_prepared,
    server.check_snapshots,
    server.check_slots,
    tables.check_schema,
)
# These need the tables to be there.
OF_TABLES: Sequence[Check] = (
    tables.check_dangers,
    tables.check_foreign_keys,
    tables.check_triggers,
    tables.check_rights,
    check_trial,
    tables.check_own_columns,
    tables.check_indexes,
    tables.check_wakeup,
    tables.check_storage,
    tables.check_dead_rows,
    tables.check_workers,
)


def examine(patient: Patient) -> list[Finding]:
    """Make every check; one that fails is a finding, too, and stops no other.

    Args:
        patient: whom to examine.

    Raises:
        sqlalchemy.exc.DBAPIError: the connection was lost.
    """
    findings = [finding for check in OF_SERVER for finding in _made(check, patient)]
    if patient.has_tables:
        findings += [finding for check in OF_TABLES for finding in _made(check, patient)]
    return findings


def worst(findings: Iterable[Finding]) -> Level:
    """Return the highest level of all.

    Example:
        >>> worst([Finding("a", "ok", ""), Finding("b", "warning", "")])
        'warning'
    """
    levels = {finding.level for finding in findings}
    ordered: tuple[Level, ...] = ("error", "warning")
    return next((level for level in ordered if level in levels), "ok")


def _made(check: Check, patient: Patient) -> list[Finding]:
    """Make one check in a transaction that leaves nothing behind."""
    transaction = patient.connection.begin()
    found: list[Finding] = []
    try:
        found.extend(check(patient))  # also, if it fails, what it had found before
    except DBAPIError as error:
        if error.connection_invalidated:
            raise
        name = check.__name__.removeprefix("check_").replace("_", " ")
        problem = f"cannot be looked at: {headline(error)}"
        found.append(warning(name, problem, "give this role the right to"))
    finally:
        transaction.rollback()
    return found
