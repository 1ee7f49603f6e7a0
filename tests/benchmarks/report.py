"""From the figures to files: everything as JSON, the table, the plots."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import plots
from figures import Figure, figure_from
from plots import Words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HEAD = ("measure", "what", "asked", "ours", "beside", "its figure", "ratio", "spread", "met")
INTRODUCTION = """\
# Benchmarks

Made by `make bench{args}`, not written by hand; `benchmarks.json` beside this file has every round.

{facts}

Ours and what it is compared with take turns, {rounds} each; figures are medians. *Ratio* is ours
to the other one's, *spread* is half of the distance between the best and the worst round, in per
cent of the median, of whichever side has more. *Bare psycopg* is the same work without a library:
one thread, prepared statements, pipelined, on a table without a queue's indexes. The server has its
data on disk and fsync on; before each drain there is a `vacuum analyze` and a `checkpoint`.
Workers, clients and the server share the machine.
"""
PLOTS = {
    "claim_by_depth": Words(
        "One claim, by depth of the queue", "tasks waiting", "ms, median", "log", "log"
    ),
    "pickup_under_load": Words(
        "Pickup under load, batch 1", "other tasks per second", "ms", "linear", "log"
    ),
    "memory_of_a_worker": Words(
        "Memory of a worker process", "tasks run", "MB", "linear", "linear"
    ),
}


class Report:
    """Everything that is known, in a directory; measures come one by one.

    What was measured before stays, unless the machine, a version or a setting is another one.
    """

    def __init__(self, directory: Path, facts: dict[str, Any], *, quick: bool) -> None:
        self.directory = directory
        self.path = directory / "benchmarks.json"
        head = {"machine": facts, "quick": quick}
        known = json.loads(self.path.read_text()) if self.path.exists() else {}
        same = {name: known.get(name) for name in head} == head
        self.content = known if same else {**head, "measures": {}}

    def add(self, name: str, measure: dict[str, Any]) -> None:
        """Add what a measure found, and write it down."""
        self.content["measures"][name] = measure
        self.directory.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")

    def write(self, order: list[str]) -> list[Path]:
        """Write the table and the plots; return what was written."""
        found = self.content["measures"]
        measures = {name: found[name] for name in order if name in found}
        page = self.directory / "benchmarks.md"
        curves = [curve for each in measures.values() for curve in each["curves"]]
        drawn = [
            path
            for plot, words in PLOTS.items()
            if (lines := [curve for curve in curves if curve["plot"] == plot])
            and (path := plots.draw(self.directory / "plots" / f"{plot}.svg", lines, words))
        ]
        page.write_text("\n".join(self._page(measures, drawn)))
        return [self.path, page, *drawn]

    def _page(self, measures: dict[str, Any], drawn: list[Path]) -> Iterator[str]:
        yield INTRODUCTION.format(
            args=' ARGS="--quick"' if self.content["quick"] else "",
            facts=_facts(self.content["machine"]),
            rounds=_rounds(measures),
        )
        yield "| " + " | ".join(HEAD) + " |"
        yield "| " + " | ".join("---" for _ in HEAD) + " |"
        figures = [(n, figure_from(each)) for n, m in measures.items() for each in m["figures"]]
        for name, figure in figures:
            yield "| " + " | ".join([name, *cells(figure)]) + " |"
        yield ""
        yield from dict.fromkeys(
            f"* {figure.what}. {figure.note}." for _, figure in figures if figure.note
        )
        for path in drawn:
            yield f"\n![{PLOTS[path.stem].title}](plots/{path.name})"
        yield "\n## When\n"
        for name, each in measures.items():
            extra = f", {each['with']}" if each.get("with") else ""
            took = f"{each['seconds']:.0f} s, load before {each['load']}"
            yield f"* {name}: {each['at']}, {took}{extra}"
        yield ""


def cells(figure: Figure) -> list[str]:
    """Return the cells of a line of the table."""
    unit = "" if figure.unit == "ms" else f" {figure.unit}"
    base, ratio, spread, met = figure.base, figure.ratio, figure.spread, figure.met
    return [
        figure.what,
        figure.target,
        f"{number(figure.value)}{unit or ' ms'}",
        figure.beside,
        "" if base is None else number(base),
        "" if ratio is None else f"{ratio:.2f}",
        "" if spread is None else f"± {spread:.0%}",
        {True: "yes", False: "**no**", None: ""}[met],
    ]


def number(value: float) -> str:
    """Write a number with about three digits."""
    if value == 0 or abs(value) >= 100:  # noqa: PLR2004
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"  # noqa: PLR2004


def _rounds(measures: dict[str, Any]) -> str:
    counts = {len(figure["ours"]) for each in measures.values() for figure in each["figures"]}
    most = max(counts, default=0)
    return f"up to {most} rounds" if most != 1 else "1 round"


def _facts(machine: dict[str, Any]) -> str:
    m = machine
    settings = ", ".join(f"`{name} = {value}`" for name, value in m["settings"].items())
    lanes = ", ".join(f"{batch}: {count}" for batch, count in m["lanes"].items())
    return (
        f"{m['cpu']}, {m['cores']} cores, {m['memory_gb']} GB, {m['system']}. "
        f"Python {m['python']}, SQLAlchemy {m['sqlalchemy']}, psycopg {m['psycopg']}, "
        f"PostgreSQL {m['postgresql']}, pgtask_sa {m['pgtask_sa']}.\n"
        f"Server: {settings}. Lanes of a worker process: {lanes}."
    )
