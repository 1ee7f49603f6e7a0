"""The plugin that teaches Alembic's autogenerate about task tables on your own Base.

Put `TaskMixin` and `DeadTaskMixin` on your Base and type ``alembic revision --autogenerate``:
Alembic finds the `plugin` below through its entry point, with nothing to configure, and the new
migration is complete and self-contained. Alembic itself writes tables and indexes; this adds the
wake-up trigger with its function and the storage parameters, and notices when one of the three is
missing or changed later. Storage parameters that neither the library nor your mapping names are
your database administrator's and are left alone, and so is a trigger that somebody disabled.

Nothing here imports Alembic at module level: Alembic imports this module while it is itself still
being imported.
"""

from __future__ import annotations

import functools
import re
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlalchemy import Connection, Table, text

from pgtask_sa.mapping import STORAGE, TaskBase, is_partitioned
from pgtask_sa.presence_table import WORKER_STORAGE
from pgtask_sa.rows import POSTGRES, full_name
from pgtask_sa.triggers import create_wakeup_sql, drop_wakeup_sql, wakeup_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from alembic.autogenerate.api import AutogenContext
    from alembic.operations.ops import (
        ExecuteSQLOp,
        MigrateOperation,
        ModifyTableOps,
        UpgradeOps,
    )
    from alembic.runtime.plugins import Plugin
    from alembic.util import PriorityDispatchResult

# The version table of our own migrations. Yours may run in the same database.
VERSION_TABLE = "pgtask_version"


def setup(plugin: Plugin) -> None:
    """Tell Alembic's autogenerate about task tables; Alembic calls it when it is imported.

    Args:
        plugin: what Alembic 1.18 or newer hands to plugins.

    Example:
        >>> from alembic.runtime.plugins import Plugin
        >>> plugin = Plugin("my_application.task_tables")
        >>> setup(plugin)
        >>> plugin.remove()
    """
    from alembic.util import DispatchPriority  # noqa: PLC0415 - see the top

    plugin.add_autogenerate_comparator(
        _compare_task_table,
        "table",
        "pgtask_sa",
        qualifier="postgresql",
        priority=DispatchPriority.LAST,  # after the indexes
    )
    plugin.add_autogenerate_comparator(
        _leave_standalone_tables,
        "schema",
        "pgtask_sa",
        qualifier="postgresql",
        priority=DispatchPriority.LAST,  # after the tables
    )


class _PluginModule(ModuleType):
    """What the entry point names.

    Alembic 1.20.1 and newer want a module there, with a function ``setup``; 1.18 to 1.20.0 iterate
    over what they find. Anything that is not both makes ``import alembic`` fail on one of them.
    """

    setup = staticmethod(setup)

    def __iter__(self) -> Iterator[ModuleType]:
        yield self


plugin = _PluginModule(__name__)


# -- comparing: the model of a table against what the database has ---------------------------------


class _Change(NamedTuple):
    """A statement of a migration, and the one that takes it back, if that is needed."""

    do: str
    undo: str | None = None


class _Trigger(NamedTuple):
    """A wake-up trigger that was found on a table in the database."""

    name: str
    # calls a function of its own name in the table's schema, once per insert statement
    is_sound: bool
    body: str
    create: str
    drop: str
    create_function: str
    drop_function: str


def _compare_task_table(  # noqa: PLR0917 - Alembic's signature
    autogen_context: AutogenContext,
    modify_table_ops: ModifyTableOps,
    schema: str | None,
    name: str,
    conn_table: Table | None,
    metadata_table: Table | None,
) -> PriorityDispatchResult:
    from alembic.util import PriorityDispatchResult  # noqa: PLC0415 - see the top

    connection = autogen_context.connection
    is_ours = metadata_table is None or metadata_table.info.get("pgtask") in ("task", "worker")
    if connection is not None and is_ours:
        triggers, storage = [], {}
        if conn_table is not None:
            triggers = _triggers(connection, schema, name)
            storage = _storage(connection, schema, name)
        changes = _changes(conn_table, metadata_table, triggers, storage)
        modify_table_ops.ops.extend(_statement_class()(change) for change in changes)
    return PriorityDispatchResult.CONTINUE


def _changes(
    found: Table | None, wanted: Table | None, triggers: list[_Trigger], storage: dict[str, str]
) -> list[_Change]:
    if wanted is None:
        return _dropped_table(found, triggers, storage) if found is not None and triggers else []
    if found is None:
        return _new_storage(wanted) + _new_wakeup(wanted)
    return _wakeup_changes(wanted, triggers) + _storage_changes(wanted, storage)


def _is_task(table: Table) -> bool:
    return table.info.get("pgtask") == "task"


def _new_storage(table: Table) -> list[_Change]:
    # what the mapping names itself is part of Alembic's own create_table
    rest = {k: v for k, v in _wanted_storage(table).items() if k not in _mapped_storage(table)}
    return [_Change(_set(table, rest))] if rest else []


def _new_wakeup(table: Table) -> list[_Change]:
    if not _is_task(table):
        return []
    create_function, create_trigger = create_wakeup_sql(POSTGRES, table.name, table.schema)
    (drop_function,) = drop_wakeup_sql(POSTGRES, table.name, table.schema)
    return [_Change(create_function, drop_function), _Change(create_trigger)]


def _dropped_table(
    table: Table, triggers: list[_Trigger], storage: dict[str, str]
) -> list[_Change]:
    # the downgrade creates the table from its reflection, which knows no storage parameters
    changes = [_Change(_reset(table, storage), _set(table, storage))] if storage else []
    return changes + [change for trigger in triggers for change in _drop(trigger)]


def _drop(trigger: _Trigger) -> list[_Change]:
    return [
        _Change(trigger.drop, trigger.create),
        _Change(trigger.drop_function, trigger.create_function),
    ]


def _wakeup_changes(table: Table, found: list[_Trigger]) -> list[_Change]:
    if not _is_task(table):
        return []
    create_function, create_trigger = create_wakeup_sql(POSTGRES, table.name, table.schema)
    (drop_function,) = drop_wakeup_sql(POSTGRES, table.name, table.schema)
    kept = [t for t in found if t.name == wakeup_name(table.name) and t.is_sound]
    # of a table that was renamed, for instance: two triggers would notify twice
    stale = [trigger for trigger in found if trigger not in kept]
    changes = [change for trigger in stale for change in _drop(trigger)]
    if not kept:
        changes += [_Change(create_function, drop_function), _Change(create_trigger)]
    elif kept[0].body != create_function.split("$$")[1]:
        changes += [_Change(create_function, kept[0].create_function)]
    return changes


def _storage_changes(table: Table, found: Mapping[str, str]) -> list[_Change]:
    wanted = _wanted_storage(table)
    missing = {key: value for key, value in wanted.items() if key not in found}
    wrong = {k: v for k, v in wanted.items() if k in found and not _equal(found[k], v)}
    changes = []
    if missing:
        changes.append(_Change(_set(table, missing), _reset(table, missing)))
    if wrong:
        old = {key: found[key] for key in wrong}
        changes.append(_Change(_set(table, wrong), _set(table, old)))
    return changes


def _wanted_storage(table: Table) -> Mapping[str, Any]:
    ours = STORAGE if _is_task(table) else WORKER_STORAGE
    return {} if is_partitioned(table) else {**ours, **_mapped_storage(table)}


def _mapped_storage(table: Table) -> Mapping[str, Any]:
    # SQLAlchemy 2.0 does not know this option
    return table.dialect_options["postgresql"].get("with") or {}


def _set(table: Table, storage: Mapping[str, Any]) -> str:
    assignments = ",\n".join(f"    {key} = {value}" for key, value in storage.items())
    return f"alter table {full_name(table)} set (\n{assignments}\n)"


def _reset(table: Table, storage: Mapping[str, Any]) -> str:
    keys = ", ".join(storage)
    return f"alter table {full_name(table)} reset ({keys})"


def _equal(found: str, wanted: Any) -> bool:
    try:
        return float(found) == float(wanted)
    except ValueError:
        return found.lower() == str(wanted).lower()


def _leave_standalone_tables(
    _autogen_context: AutogenContext, upgrade_ops: UpgradeOps, _schemas: set[str | None]
) -> PriorityDispatchResult:
    """Take back what Alembic proposes about the tables of our own migrations: to drop them."""
    from alembic.operations.ops import DropTableOp, ModifyTableOps  # noqa: PLC0415 - see the top
    from alembic.util import PriorityDispatchResult  # noqa: PLC0415

    dropped = {(o.schema, o.table_name) for o in upgrade_ops.ops if isinstance(o, DropTableOp)}
    ours = {
        (schema, name)
        for schema, name in dropped
        if (schema, VERSION_TABLE) in dropped and name in {VERSION_TABLE, *TaskBase.metadata.tables}
    }
    upgrade_ops.ops[:] = [
        operation
        for operation in upgrade_ops.ops
        if not isinstance(operation, (DropTableOp, ModifyTableOps))
        or (operation.schema, operation.table_name) not in ours
    ]
    _forget_our_marks(upgrade_ops)
    return PriorityDispatchResult.CONTINUE


def _forget_our_marks(upgrade_ops: UpgradeOps) -> None:
    """Keep out of migrations by which our mapping knows its tables."""
    from alembic.operations.ops import CreateTableOp  # noqa: PLC0415 - see the top

    for operation in upgrade_ops.ops:
        if isinstance(operation, CreateTableOp):
            marks = ("pgtask", "pgtask_worker")
            operation.info = {k: v for k, v in operation.info.items() if k not in marks}


# -- looking at the database -----------------------------------------------------------------------

_TRIGGERS = text(
    """
    select t.tgname,
           t.tgtype = 4 and p.proname = t.tgname and p.pronamespace = c.relnamespace,
           p.prosrc,
           pg_get_triggerdef(t.oid),
           format('drop trigger %I on %s', t.tgname, cast(c.oid as regclass)),
           pg_get_functiondef(p.oid),
           format('drop function if exists %s cascade', cast(p.oid as regprocedure))
      from pg_trigger t
      join pg_class c on c.oid = t.tgrelid
      join pg_namespace n on n.oid = c.relnamespace
      join pg_proc p on p.oid = t.tgfoid
     where n.nspname = :schema
       and c.relname = :name
       and not t.tgisinternal
       and (t.tgname = :trigger or position('pg_notify(''pgtask_''' in p.prosrc) > 0)
     order by t.tgname
    """
)

_STORAGE = text(
    """
    select case o.oid when c.oid then '' else 'toast.' end || unnest(o.reloptions)
      from pg_class c
      join pg_namespace n on n.oid = c.relnamespace
      join pg_class o on o.oid in (c.oid, c.reltoastrelid)
     where n.nspname = :schema
       and c.relname = :name
    """
)


def _triggers(connection: Connection, schema: str | None, name: str) -> list[_Trigger]:
    schema = schema or connection.dialect.default_schema_name
    values = {"schema": schema, "name": name, "trigger": wakeup_name(name)}
    return [_Trigger(*row) for row in connection.execute(_TRIGGERS, values)]


def _storage(connection: Connection, schema: str | None, name: str) -> dict[str, str]:
    schema = schema or connection.dialect.default_schema_name
    options = connection.scalars(_STORAGE, {"schema": schema, "name": name})
    return {key: value for key, _, value in (option.partition("=") for option in options)}


# -- writing the migration -------------------------------------------------------------------------


def escape(sql: str) -> str:
    r"""Escape the colons that ``op.execute`` would take for the start of a parameter.

    Example:
        >>> print(escape("select 1::int, 'at :noon'"))
        select 1::int, 'at \:noon'
    """
    return re.sub(r"(?<![:\w\\]):(?=\w)", r"\\:", sql)


@functools.cache
def _statement_class() -> Callable[[_Change], ExecuteSQLOp]:
    """Return the operation that writes ``op.execute(..)`` into a migration, and its reverse."""
    from alembic.autogenerate.render import renderers  # noqa: PLC0415 - see the top
    from alembic.operations.ops import ExecuteSQLOp, ModifyTableOps  # noqa: PLC0415

    class Statement(ExecuteSQLOp):
        def __init__(self, change: _Change) -> None:
            super().__init__(escape(change.do))
            self.change = change

        def reverse(self) -> MigrateOperation:
            if self.change.undo is None:
                return ModifyTableOps("", [])  # Alembic's way to write nothing
            return Statement(_Change(self.change.undo, self.change.do))

        def to_diff_tuple(self) -> tuple[str, str]:
            return ("execute", self.change.do)

    renderers.dispatch_for(Statement)(_render)
    return Statement


def _render(autogen_context: AutogenContext, operation: ExecuteSQLOp) -> str:
    """Write a statement as Python, each line of SQL on a line of its own."""
    prefix = autogen_context.opts["alembic_module_prefix"] or ""
    lines = [repr(line) for line in str(operation.sqltext).splitlines(keepends=True)]
    if len(lines) == 1:
        return f"{prefix}execute({lines[0]})"
    return "\n".join([f"{prefix}execute(", *(f"    {line}" for line in lines), ")"])
