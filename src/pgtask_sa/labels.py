"""Task types as the database knows them."""

from __future__ import annotations

import enum
from typing import Any

from sqlalchemy import Enum

from pgtask_sa.errors import EnqueueError
from pgtask_sa.mapping import task_table

# Every index holds the type, and an entry of an index takes 2704 bytes at most.
MAX_LABEL_BYTES = 500


def task_label(task_class: type[Any], task_type: Any) -> str:
    """Return the text by which the database knows a task type, given as text or as Enum member.

    Raises:
        EnqueueError: it is no text, empty, longer than 500 bytes, not a label of the column's
            enum, or holds what Postgres cannot keep.

    Example:
        >>> from pgtask_sa import Task
        >>> task_label(Task, "SEND_EMAIL_WELCOME")
        'SEND_EMAIL_WELCOME'
    """
    column_type = task_table(task_class).c.task_type.type
    if isinstance(task_type, enum.Enum):
        return _sound(_enum_label(column_type, task_type))
    if not isinstance(task_type, str) or not task_type:
        raise EnqueueError(f"task_type must be a non-empty string, got {task_type!r}")
    if isinstance(column_type, Enum) and task_type not in column_type.enums:
        raise EnqueueError(f"task_type {_short(task_type)} is not a label of {column_type.name}")
    return _sound(task_type)


def _sound(label: str) -> str:
    """Refuse here what would fail at the flush, and take the caller's rows along."""
    if "\0" in label:
        raise EnqueueError(f"task_type {_short(label)} holds a NUL, which Postgres cannot keep")
    try:
        size = len(label.encode())
    except UnicodeEncodeError:
        problem = "holds half of a surrogate pair, which is no text"
        raise EnqueueError(f"task_type {_short(label)} {problem}") from None
    if size > MAX_LABEL_BYTES:
        problem = f"has {size:,} bytes, the limit is {MAX_LABEL_BYTES}"
        raise EnqueueError(f"task_type {_short(label)} {problem}")
    return label


def _short(label: str) -> str:
    # ascii(): the message must be printable itself
    return ascii(label if len(label) <= 80 else f"{label[:80]}..")  # noqa: PLR2004


def _enum_label(column_type: Any, member: enum.Enum) -> str:
    if isinstance(column_type, Enum) and column_type.enum_class is type(member):
        labels = dict(zip(type(member), column_type.enums, strict=False))
        return str(labels[member])
    if isinstance(member.value, str) and member.value:
        return member.value
    raise EnqueueError(f"task_type {member!r} has no text value")
