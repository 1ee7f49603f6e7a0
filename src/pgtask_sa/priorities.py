"""What a worker is told about turns: ranks of types, a CASE or another expression, a key."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from sqlalchemy import (
    BindParameter,
    Case,
    Column,
    ColumnElement,
    Index,
    Table,
    literal_column,
)
from sqlalchemy.exc import CompileError
from sqlalchemy.sql import operators, visitors
from sqlalchemy.sql.elements import BinaryExpression, Grouping, Null
from sqlalchemy.sql.selectable import SelectBase

from pgtask_sa.errors import ConfigurationError
from pgtask_sa.events import Events
from pgtask_sa.labels import task_label
from pgtask_sa.mapping import task_table
from pgtask_sa.rows import POSTGRES

LAST = 2**31 - 1  # where a CASE has no else: null, which is sorted last


def ranks_of_case(task_class: type[Any], expression: Any) -> tuple[dict[str, int], int] | None:
    """Read a CASE over task_type with constants as ranks; None if it is something else.

    Returns:
        The rank of each type that is named, and that of all others.

    Example:
        >>> from sqlalchemy import case
        >>> from pgtask_sa import Task
        >>> ranks_of_case(Task, case({"EMAIL": 0, "REPORT": 5}, value=Task.task_type, else_=1))
        ({'EMAIL': 0, 'REPORT': 5}, 1)
    """
    if not isinstance(expression, Case):
        return None
    ranks: dict[str, int] = {}
    for condition, result in expression.whens:
        named, rank = _constant(_named_type(expression, condition)), _constant(result)
        if named is None or isinstance(rank, bool) or not isinstance(rank, int):
            return None
        ranks.setdefault(task_label(task_class, named), rank)  # the first one that is true counts
    if expression.else_ is None or isinstance(expression.else_, Null):
        return ranks, LAST
    rank_else = _constant(expression.else_)
    return (ranks, rank_else) if type(rank_else) is int else None


def _named_type(expression: Any, condition: Any) -> Any:
    if expression.value is not None:
        return condition if _is_type(expression.value) else None
    if isinstance(condition, Grouping):
        condition = condition.element
    if isinstance(condition, BinaryExpression) and condition.operator is operators.eq:
        return condition.right if _is_type(condition.left) else None
    return None


def _is_type(element: Any) -> bool:
    return isinstance(element, Column) and element.name == "task_type"


def _constant(element: Any) -> Any:
    return element.value if isinstance(element, BindParameter) and not element.callable else None


def plain(task_class: type[Any], expression: Any) -> ColumnElement[Any]:
    """Return an expression over the task table in which all constants stand as literals.

    With parameters the planner could not see that an index is on the same expression.

    Raises:
        ConfigurationError: it is no expression, or looks at more than the columns of the task.

    Example:
        >>> from pgtask_sa import Task
        >>> print(plain(Task, Task.attempts * 2))
        task.attempts * 2
    """
    table = task_table(task_class)
    element = expression
    if hasattr(expression, "__clause_element__"):
        element = expression.__clause_element__()
    if not isinstance(element, ColumnElement):
        raise ConfigurationError(
            f"priority must be a mapping of task types to ranks or an SQL expression: {element!r}"
        )

    def replace(part: Any, **_: Any) -> Any:
        return _replaced(part, table)

    rewritten: Any = visitors.replacement_traverse(element, {}, replace)  # type: ignore[call-overload]
    return cast("ColumnElement[Any]", rewritten)


def _replaced(part: Any, table: Table) -> ColumnElement[Any] | None:
    if isinstance(part, BindParameter):
        return _literal(part)
    if isinstance(part, Column):
        if part.table is None or part.table.name != table.name or part.name not in table.c:
            raise ConfigurationError(f"priority: {part} is no column of {table.name}")
        return table.c[part.name]
    if isinstance(part, SelectBase):
        raise ConfigurationError("priority: an expression over the columns of the task is wanted")
    return None


def _literal(parameter: BindParameter[Any]) -> ColumnElement[Any]:
    try:
        text = str(parameter.compile(dialect=POSTGRES, compile_kwargs={"literal_binds": True}))
    except CompileError as error:
        raise ConfigurationError(f"priority: {parameter.value!r} has no literal form") from error
    return literal_column(text, parameter.type)


def read(task_class: type[Any], priority: Any) -> dict[str, Any]:
    """Return the options of a claim that a worker's ``priority`` stands for.

    Example:
        >>> from pgtask_sa import Task
        >>> read(Task, {"EMAIL": -1})
        {'ranks': {'EMAIL': -1}}
    """
    if priority is None or isinstance(priority, Mapping):
        return {"ranks": dict(priority or {})}
    ranks = ranks_of_case(task_class, priority)
    if ranks is not None:
        return {"ranks": ranks[0], "rank_else": ranks[1]}
    return {"expression": plain(task_class, priority)}


def fair_key(task_class: type[Any], fair_by: Any) -> str:
    """Return the name of the column whose values take turns, given by name or as an attribute.

    Raises:
        ConfigurationError: it is no column of the task, or no index serves such turns.

    Example:
        >>> from pgtask_sa import Task
        >>> fair_key(Task, "tenant_id")
        Traceback (most recent call last):
        pgtask_sa.errors.ConfigurationError: fair_by: 'tenant_id' is no column of Task
    """
    table, columns = task_table(task_class), task_class.__mapper__.columns
    is_own = getattr(fair_by, "class_", None) is task_class
    name = fair_by.key if is_own else fair_by
    if not isinstance(name, str) or name not in columns:
        given = str(fair_by) if hasattr(fair_by, "__clause_element__") else repr(fair_by)
        raise ConfigurationError(f"fair_by: {given} is no column of {task_class.__name__}")
    column = str(columns[name].name)
    if not any(_serves_turns(index, column) for index in table.indexes):
        raise ConfigurationError(
            f"fair_by: {table.name} has no index for turns by {name}; put "
            f"`__fair_by__ = {name!r}` on {task_class.__name__}, and migrate"
        )
    return column


def _serves_turns(index: Index, column: str) -> bool:
    names = [getattr(part, "name", None) for part in index.expressions]
    where = index.dialect_options["postgresql"]["where"]
    is_whole = where is None or str(where).lower().endswith("run_at is null")
    return names == ["priority", column, "ticket"] and is_whole


def warn_of_strangers(events: Events, handled: Collection[str], **named: Iterable[Any]) -> None:
    """Tell of types without effect; no error, as a program may name those of several workers.

    Example:
        >>> told = []
        >>> warn_of_strangers(Events([told.append]), ["A"], priority={"A": 1}, weights={"B": 2})
        >>> told[0].message
        "weights: there is no handler here for 'B' (there are: A)"
    """
    for option, types in named.items():
        strangers = [each for each in types if each not in handled]
        if strangers:
            names = ", ".join(map(ascii, strangers))
            known = ", ".join(handled)
            message = f"{option}: there is no handler here for {names} (there are: {known})"
            fields = {"option": option, "task_types": list(map(str, strangers))}
            events.emit("worker.no_handler", message, level=logging.WARNING, **fields)
