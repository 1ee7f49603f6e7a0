"""Every statement has the text that its golden file holds."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest
from golden_sql import GOLDEN, expected_text, normalised, sql_text
from own_models import DigestJob, EnumJob, HstoreJob, PlainJob, UniqueJob
from sqlalchemy import Executable, column, func

from pgtask_sa import (
    DeadTask,
    Task,
    claim,
    custom_claims,
    lease_statements,
    noted_claims,
    presence_statements,
    reports,
    since_survey,
    statements,
    tail_claims,
)
from pgtask_sa.presence_table import worker_table
from pgtask_sa.statements import mapped_names

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from sqlalchemy import Table

TASK: Table = Task.__table__
DEAD: Table = DeadTask.__table__
ENUM: Table = EnumJob.__table__
UNIQUE: Table = UniqueJob.__table__
TENANT: Table = PlainJob.__table__
RANKS = {"EMAIL": -1, "REPORT": 5}

# By name: the function's, then what is special about this case.
HSTORE_JOB = HstoreJob.__table__
CASES: dict[str, Callable[[], Executable]] = {
    "fair_claim": lambda: claim.fair_claim(TASK, 1, due_first=False),
    "fair_claim.batch_due_first": lambda: claim.fair_claim(TASK, 100, due_first=True),
    "fair_claim.enum": lambda: claim.fair_claim(ENUM, 1, due_first=False),
    "fair_claim.own_columns": lambda: claim.fair_claim(PlainJob.__table__, 1, due_first=False),
    "fair_claim.bounded": lambda: claim.fair_claim(TASK, 1, due_first=True, bounded=True),
    "random_claim": lambda: claim.random_claim(TASK, 1),
    "random_claim.ranks": lambda: claim.random_claim(TASK, 10, ranks=RANKS),
    "random_claim.own_clock": lambda: claim.random_claim(TASK, 1, now=func.my_clock()),
    "sampled_claim": lambda: claim.sampled_claim(TASK, 1, func.system(1)),
    "sampled_claim.ranks": lambda: claim.sampled_claim(ENUM, 5, func.system(2.5), ranks=RANKS),
    "random_claim.rank_else": lambda: claim.random_claim(TASK, 1, ranks=RANKS, rank_else=7),
    "keyed_claim": lambda: custom_claims.keyed_claim(TENANT, 1, "tenant", due_first=False),
    "keyed_claim.batch_due_first": lambda: custom_claims.keyed_claim(
        TENANT, 10, "tenant", due_first=True
    ),
    "expression_claim": lambda: custom_claims.expression_claim(TASK, 1, TASK.c.attempts),
    "expression_claim.shuffled": lambda: custom_claims.expression_claim(
        TASK, 10, TASK.c.attempts, shuffled=True
    ),
    "tail_claim": lambda: tail_claims.tail_claim(TASK, 1),
    "tail_claim.enum_batch": lambda: tail_claims.tail_claim(ENUM, 10),
    "tail_look": lambda: tail_claims.tail_look(TASK),
    "tail_look.next_due": lambda: tail_claims.tail_look(ENUM, next_due=True),
    "claim_by_id": lambda: claim.claim_by_id(TASK),
    "claim_by_force": lambda: claim.claim_by_force(TASK),
    "retry": lambda: statements.retry(TASK, mapped_names(TASK)),
    "retry.enum": lambda: statements.retry(ENUM, mapped_names(ENUM)),
    "retry.hstore": lambda: statements.retry(
        HstoreJob.__table__, mapped_names(HstoreJob.__table__)
    ),
    "retry.unique": lambda: statements.retry(UNIQUE, mapped_names(UNIQUE), ("task_type", "params")),
    "retry.unique_digest": lambda: statements.retry(
        DigestJob.__table__, mapped_names(DigestJob.__table__), ("task_type",)
    ),
    "stored_names": lambda: statements.stored_names(TASK),
    "equal_waiting": lambda: statements.equal_waiting(TASK),
    "bury": lambda: statements.bury(TASK, DEAD),
    "bury.enum": lambda: statements.bury(ENUM, DEAD),
    "requeue": lambda: statements.requeue(TASK, DEAD, DEAD.c.task_id == 7),
    "requeue.enum": lambda: statements.requeue(ENUM, DEAD, DEAD.c.task_id == 7),
    "task_exists": lambda: statements.task_exists(TASK),
    "peek": lambda: statements.peek(TASK),
    "peek.enum": lambda: statements.peek(ENUM),
    "survey": lambda: statements.survey(TASK),
    "survey.enum": lambda: statements.survey(ENUM),
    "survey_since": lambda: since_survey.survey_since(TASK),
    "survey_since.enum": lambda: since_survey.survey_since(ENUM),
    "waiting_kinds": lambda: statements.waiting_kinds(TASK),
    "count_waiting": lambda: statements.count_waiting(TASK, 100),
    "count_claimable": lambda: reports.count_claimable(TASK),
    "statistics": lambda: reports.statistics(TASK, DEAD),
    "listing": lambda: reports.listing(TASK, task_type=None, limit=20),
    "listing.dead": lambda: reports.listing(DEAD, task_type="EMAIL", limit=20),
    "enum_labels": lambda: statements.enum_labels(ENUM),
    "table_oid": lambda: statements.table_oid(TASK),
    "table_oid.schema": lambda: statements.table_oid(ENUM),
    "announce_sleep": statements.announce_sleep,
    "withdraw_sleep": statements.withdraw_sleep,
    "end_transaction": statements.end_transaction,
    "hold_presence": presence_statements.hold_presence,
    "try_presence": presence_statements.try_presence,
    "note_next": lambda: _note_next(TASK, due_first=False),
    "note_next.enum": lambda: _note_next(ENUM, due_first=True, bounded=True),
    "claim_noted": lambda: noted_claims.claim_noted(TASK),
    "claim_noted.own_columns": lambda: noted_claims.claim_noted(PlainJob.__table__),
    "try_solitude": presence_statements.try_solitude,
    "end_predecessor": presence_statements.end_predecessor,
    "enlist": lambda: presence_statements.enlist(TASK),
    "note_claim": lambda: presence_statements.note_claim(TASK),
    "renumber": lambda: presence_statements.renumber(TASK),
    "note_in_place": lambda: presence_statements.note_in_place(TASK),
    "disown": lambda: presence_statements.disown(TASK),
    "is_disowned": lambda: presence_statements.is_disowned(TASK),
    "forget_taken": lambda: presence_statements.forget_taken(TASK),
    "deaths": lambda: presence_statements.deaths(TASK),
    "deaths.schema": lambda: presence_statements.deaths(ENUM),
    "note_alive": lambda: presence_statements.note_alive(TASK),
    "count_others": lambda: presence_statements.count_others(TASK),
    "named_by_dead": lambda: presence_statements.named_by_dead(TASK),
    "dismiss": lambda: presence_statements.dismiss(TASK),
    "dismiss_dead": lambda: presence_statements.dismiss_dead(TASK),
    "renew_lease": lambda: lease_statements.renew_lease(TASK),
    "hold_lease": lambda: lease_statements.hold_lease(TASK),
    "finish_lease": lambda: lease_statements.finish_lease(TASK),
    "take_leased": lambda: lease_statements.take_leased(TASK),
    "release_lease": lambda: lease_statements.release_lease(TASK),
    "announce_cancel": lambda: statements.announce_cancel(TASK),
    "announce_cancel.schema": lambda: statements.announce_cancel(ENUM),
    "next_in_line": lambda: reports.next_in_line(TASK),
    "all_waiting": lambda: reports.all_waiting(TASK),
    "summarize_waiting": lambda: reports.summarize_waiting(TASK, 100),
    "rows_by_ids": lambda: reports.rows_by_ids(TASK),
    "hold_dead": lambda: reports.hold_dead(DEAD, task_type="EMAIL", limit=20),
    "hold_dead_by_ids": lambda: reports.hold_dead_by_ids(DEAD),
    "clock": reports.clock,
    "lanes": lambda: reports.lanes(worker_table(TASK)),
    "versions_by_ids": lambda: reports.versions_by_ids(TASK),
    "holder": lambda: reports.holder(TASK),
}

MODULES = (
    claim,
    custom_claims,
    tail_claims,
    statements,
    since_survey,
    reports,
    presence_statements,
    noted_claims,
    lease_statements,
)
# Public functions of these modules that return parts of statements, or no SQL.
PARTS = {
    "fair_choice",
    "in_place",
    "place_of",
    "own_lane",
    "lock_holders",
    "server_now",
    "some_of_kind",
    "kinds_of",
    "claim_columns",
    "mapped_names",
    "is_json",
    "by_ids",
    "integer",
    "own_types",
    "due",
    "since",
    "unseen",
    "dead_rows",
    "regclass",
    "epoch",
    "distinct_pairs",
    "listed",
    "asked_for",
    "next_planned",
    "claimable",
    "take",
    "take_untouched",
    "to_be_noted",
    "key_columns",
}


def _note_next(table: Any, **order: bool) -> Any:
    more = noted_claims.to_be_noted(table)
    return noted_claims.note_next(table, claim.fair_choice(table, 1, more=more, **order))


def functions_of(module: ModuleType) -> set[str]:
    found = inspect.getmembers(module, inspect.isfunction)
    return {
        name
        for name, function in found
        if function.__module__ == module.__name__ and not name.startswith("_")
    }


@pytest.mark.parametrize("name", CASES)
def test_golden_text(name: str) -> None:
    """The statement has the text in its file, whatever the version of SQLAlchemy."""
    actual = sql_text(CASES[name]())
    assert normalised(expected_text(name, actual)) == normalised(actual)


def test_each_statement_has_a_golden_text() -> None:
    """A statement that is added must come with a case here; PARTS names the other functions."""
    covered = {name.partition(".")[0] for name in CASES}
    assert covered | PARTS == set().union(*map(functions_of, MODULES))


def test_each_golden_text_has_a_statement() -> None:
    """There is no file without a case."""
    assert set(CASES) == {path.stem for path in GOLDEN.glob("*.sql")}


@pytest.mark.parametrize("limit", [None, "all", ""])
def test_a_limit_is_never_no_limit(limit: Any) -> None:
    """A claim cannot be built with a limit that is no number."""
    with pytest.raises((TypeError, ValueError)):
        claim.fair_claim(TASK, limit, due_first=False)


def test_a_limit_is_part_of_the_text() -> None:
    """The limit is a literal, so that the planner knows how few rows are wanted."""
    assert "LIMIT 17" in sql_text(claim.random_claim(TASK, 17))


def test_returned_columns_are_named() -> None:
    """A claim names what it returns: a column added later cannot break prepared statements."""
    returned = sql_text(claim.claim_by_id(TASK)).partition("RETURNING")[2]
    assert "*" not in returned.replace("CAST(task.* AS TEXT)", "")
    assert "ticket" not in returned
    assert column("params").name in returned
