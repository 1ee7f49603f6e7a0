"""Enqueue with Core: ``insert_task()``, an insert that composes with other statements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pgtask_sa import intake
from pgtask_sa.insert_statements import has_sql, insert_one
from pgtask_sa.mapping import Task

if TYPE_CHECKING:
    from sqlalchemy.dialects.postgresql import Insert

    from pgtask_sa.retry import Seconds


def insert_task(
    task: Any,
    params: Any = None,
    *,
    run_at: Any = None,
    delay: Seconds | None = None,
    priority: Any = 0,
    task_class: type[Any] | None = None,
    **columns: Any,
) -> Insert:
    """Return the insert of a task, for Core: to execute, or to compose with other statements.

    Params may hold SQL expressions at any depth, and so may ``run_at`` and the columns: with the
    new row of another CTE, row and task are written by one statement. Nothing is returned unless
    you add ``.returning(..)``, so a role that may only INSERT can use it; on a table with a unique
    constraint you may add ``.on_conflict_do_nothing()``. Use it also in mapper events, on the
    connection that they are given, where ``session.add`` would come too late.

    Args:
        task: a task type as text or enum member, or a handler function.
        params: a dict, which may hold SQL expressions, or one JSONB expression. For a handler,
            params without expressions may be what it is annotated with.
        run_at: not before this moment; a timezone-aware datetime or an SQL expression.
        delay: not before so many seconds (or a timedelta) from now, by the server's clock.
        priority: lower goes first; an integer from -32768 to 32767, or an SQL expression.
        task_class: mapped task class; by default the handler's, else `Task`.
        **columns: values or SQL expressions for the columns that your task class adds.

    Raises:
        ParamsError: a plain value in the params cannot be kept.
        EnqueueError: any other argument is wrong.

    Example:
        >>> from sqlalchemy import column, insert, select, table
        >>> usr = insert(table("usr", column("usr_id"), column("name")))
        >>> usr = usr.values(name="Ann").returning(column("usr_id")).cte("usr")
        >>> task = insert_task("SEND_EMAIL_WELCOME", {"usr_id": usr.c.usr_id}).cte("task")
        >>> statement = select(usr.c.usr_id).add_cte(task)
    """
    target = intake.resolve(task, task_class, Task)
    new = intake.new_task(
        target,
        _composable(params, target),
        run_at=run_at,
        delay=delay,
        priority=priority,
        columns=columns,
    )
    return insert_one(new)


def _composable(params: Any, target: intake.Target) -> Any:
    if not has_sql(params):
        return target.dump(params)
    return params
