"""What a database holds, as one value that can be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqlalchemy import text

if TYPE_CHECKING:
    from sqlalchemy import Connection

_SCHEMAS = "n.nspname !~ '^pg_' and n.nspname <> 'information_schema'"

_QUERIES = {
    "columns": f"""
        select n.nspname, c.relname, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod),
               a.attnotnull, a.attidentity, a.attgenerated, pg_get_expr(d.adbin, d.adrelid)
          from pg_attribute a
          join pg_class c on c.oid = a.attrelid
          join pg_namespace n on n.oid = c.relnamespace
          left join pg_attrdef d on (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
         where {_SCHEMAS} and c.relkind in ('r', 'p') and a.attnum > 0 and not a.attisdropped
         order by 1, 2, 3""",
    "relations": f"""
        select n.nspname, c.relname, c.relkind, c.relpersistence, c.reloptions
          from pg_class c join pg_namespace n on n.oid = c.relnamespace
         where {_SCHEMAS} order by 1, 2""",
    "indexes": f"""
        select pg_get_indexdef(i.indexrelid), i.indisvalid, i.indisprimary
          from pg_index i join pg_class c on c.oid = i.indrelid
          join pg_namespace n on n.oid = c.relnamespace
         where {_SCHEMAS} order by 1""",
    "constraints": f"""
        select n.nspname, r.conrelid::regclass::text, r.conname, pg_get_constraintdef(r.oid)
          from pg_constraint r join pg_namespace n on n.oid = r.connamespace
         where {_SCHEMAS} order by 1, 2, 3""",
    "sequences": f"""
        select n.nspname, c.relname, s.seqtypid::regtype::text, s.seqstart, s.seqincrement,
               s.seqmin, s.seqmax, s.seqcache, s.seqcycle
          from pg_sequence s join pg_class c on c.oid = s.seqrelid
          join pg_namespace n on n.oid = c.relnamespace
         where {_SCHEMAS} order by 1, 2""",
    "triggers": f"""
        select pg_get_triggerdef(t.oid), t.tgenabled
          from pg_trigger t join pg_class c on c.oid = t.tgrelid
          join pg_namespace n on n.oid = c.relnamespace
         where {_SCHEMAS} order by 1""",
    "functions": f"""
        select pg_get_functiondef(p.oid) from pg_proc p
          join pg_namespace n on n.oid = p.pronamespace
         where {_SCHEMAS} and not exists
               (select from pg_depend d where d.objid = p.oid and d.deptype = 'e')
         order by 1""",
    "enums": f"""
        select n.nspname, t.typname, e.enumlabel from pg_enum e
          join pg_type t on t.oid = e.enumtypid join pg_namespace n on n.oid = t.typnamespace
         where {_SCHEMAS} order by 1, 2, e.enumsortorder""",
}


def catalog(connection: Connection, *, without: str = "") -> dict[str, list[tuple[Any, ...]]]:
    """Return everything that the user schemas hold, except what belongs to the table `without`."""
    found = {}
    for kind, query in _QUERIES.items():
        rows = [tuple(row) for row in connection.execute(text(query.replace("::", "\\:\\:")))]
        found[kind] = [row for row in rows if not (without and without in repr(row))]
    return found
