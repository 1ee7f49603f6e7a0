"""What a plan really did: EXPLAIN ANALYZE as a value that tests can ask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy import Connection, Executable


@dataclass(frozen=True)
class Plan:
    """The executed nodes of a plan, the top one first."""

    nodes: list[dict[str, Any]]

    @property
    def indexes(self) -> set[str]:
        """Name the indexes that were read."""
        return {node["Index Name"] for node in self.nodes if "Index Name" in node}

    @property
    def whole_table_scans(self) -> int:
        """Count the scans that read a table from end to end."""
        return sum(node["Node Type"] == "Seq Scan" for node in self.nodes)

    @property
    def rows_touched(self) -> int:
        """Count the rows that the busiest node read, those it threw away included."""
        return max(_rows(node) for node in self.nodes)

    @property
    def locked(self) -> int:
        """Count the rows that were locked before they were taken."""
        return sum(_rows(node) for node in self.nodes if node["Node Type"] == "LockRows")

    @property
    def lock_loops(self) -> int:
        """Count how often the busiest locking node was started."""
        return max(node["Actual Loops"] for node in self.nodes if node["Node Type"] == "LockRows")

    @property
    def buffers(self) -> int:
        """Count the pages that were looked at."""
        top = self.nodes[0]
        return int(top["Shared Hit Blocks"] + top["Shared Read Blocks"])


def explain(connection: Connection, statement: Executable, **parameters: Any) -> Plan:
    """Execute a statement under EXPLAIN, in the open transaction."""
    compiled = statement.compile(connection)
    options = "analyze, buffers, timing off, format json"
    result = connection.exec_driver_sql(
        f"explain ({options}) {compiled}", compiled.construct_params(parameters)
    )
    return Plan(list(_executed(result.scalar_one()[0]["Plan"])))


def _executed(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if node["Actual Loops"]:
        yield node
        for child in node.get("Plans", []):
            yield from _executed(child)


def _rows(node: dict[str, Any]) -> int:
    each = node["Actual Rows"] + node.get("Rows Removed by Filter", 0)
    return round(each * node["Actual Loops"])
