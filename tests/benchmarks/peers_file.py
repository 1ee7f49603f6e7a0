"""Lines of the table that compare with other task queues, from a file of their benchmark's results.

See `pgtask_peer` for how this library takes part in it. Several runs may be in one file: what was
measured more than once makes rounds.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from figures import Figure

OURS, LIMIT, LIMIT_ONE = "pgtask", "limit", "limit_one"
LIMITS = {
    LIMIT: "bare psycopg, batches of 200",
    LIMIT_ONE: "bare psycopg, one by one",
    "limit_random": "bare psycopg, order by random()",
}
# the same program in measures in which there are no batches
PLAIN_LIMIT = {
    "as": "SQLAlchemy alone, text of an INSERT",
    "b": "bare psycopg, COPY, no index of a queue",
    "e": "bare psycopg, LISTEN and one claim",
    "f": "bare psycopg, LISTEN alone",
}
RATES = {
    "as": "enqueue in a session, a commit each",
    "b": "bulk enqueue",
    "c1": "drain of no-ops, 1 process",
    "c2": "drain of no-ops, 2 processes",
    "d": "drain of no-ops, a million waiting",
    "g": "drain, one row each",
}
IN_BATCHES = ("c1", "c2", "d", "g")
# of what ours is to be at least so much: in its best batches, and one by one
ASKED = {
    ("as", LIMIT): 0.9,
    ("b", "pgqueuer"): 2.0,
    ("b", "awa"): 1.0,
    ("c1", "pgqueuer"): 1.6,
    ("c2", "pgqueuer"): 1.6,
    ("g", LIMIT): 0.4,
    ("c1", LIMIT_ONE): 0.7,
    ("g", LIMIT_ONE): 0.7,
}
BEST_OF_OTHERS = 4.0  # times, with a row each
ABSOLUTE = (("e", "p50", "pickup by an idle worker, p50", "ms", 1.0),)
ABSOLUTE += (("e", "p99", "pickup by an idle worker, p99", "ms", 2.0),)
ABSOLUTE += (("f", "stmt_s", "idle worker, statements", "statements/s", 0.5),)


@dataclass
class Found:
    """What a peer came to in one measure."""

    rates: list[float] = field(default_factory=list)
    details: list[dict[str, Any]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def of(self, key: str) -> list[float]:
        """Return a detail of every run."""
        return [float(each[key]) for each in self.details if each.get(key) is not None]


class Results:
    """What is in a file: by peer, measure and, for this library, batch."""

    def __init__(self, path: Path) -> None:
        self.found: dict[tuple[str, str, int], Found] = defaultdict(Found)
        self.at, self.load, self.seconds = "", 0.0, 0.0
        for line in path.read_text().splitlines():
            self._take(json.loads(line))
        self.peers = sorted({peer for peer, _, _ in self.found if peer != OURS})

    def _take(self, result: dict[str, Any]) -> None:
        if result.get("error") or result["value"] is None:
            return
        if (result.get("detail") or {}).get("verified") is False:
            return  # not everything was run, or something twice
        peer, config = result["peer"], str(result["config"].get("peer"))
        batch = re.search(r"batch_size (\d+)", config) if peer == OURS else None
        found = self.found[peer, result["measure"], int(batch[1]) if batch else 0]
        found.rates += result.get("repeats") or [result["value"]]
        found.details.append(result.get("detail") or {})
        found.versions = result.get("versions") or {}
        self.at = max(self.at, str(result.get("at", "")).replace("T", " ")[:16])
        self.load = max(self.load, float(result.get("loadavg_1m_before") or 0))
        self.seconds += float(result.get("took_s") or 0)

    def rates(self, peer: str, measure: str) -> list[float]:
        """Return the rates of one peer."""
        key = (peer, measure, 0)
        return self.found[key].rates if key in self.found else []

    def ours(self, measure: str) -> dict[int, Found]:
        """Return ours by batch."""
        return {
            batch: found
            for (peer, what, batch), found in self.found.items()
            if (peer, what) == (OURS, measure)
        }

    def others(self, measure: str) -> list[str]:
        """Return who took part in a measure; the variants of the limit only where they differ."""
        peers = [peer for peer in self.peers if self.rates(peer, measure)]
        if measure in IN_BATCHES:
            return [peer for peer in peers if peer != LIMIT_ONE]
        return [peer for peer in peers if peer == LIMIT or peer not in LIMITS]

    def name(self, peer: str, measure: str) -> str:
        """Name a peer with its version."""
        if peer in LIMITS:
            return PLAIN_LIMIT.get(measure, LIMITS[peer])
        versions = next(f.versions for (who, _, _), f in self.found.items() if who == peer)
        version = next((value for key, value in versions.items() if key.startswith(peer)), None)
        return f"{peer} {version}" if version else peer


def read(path: Path) -> tuple[list[Figure], dict[str, Any]]:
    """Make lines of a file; return also when that was measured, and with what.

    Raises:
        SystemExit: this library is not among the peers.
    """
    results = Results(path)
    if not any(peer == OURS for peer, _, _ in results.found):
        raise SystemExit(f"{path} has no results of the peer {OURS!r}")
    lines = [line for measure in RATES for line in _rates(results, measure)]
    pythons = {found.versions.get("python") for found in results.found.values()}
    about = {"at": results.at, "load": results.load, "seconds": results.seconds}
    about["with"] = "Python " + ", ".join(sorted(filter(None, pythons)))
    return [*lines, *_absolute(results)], about


def _rates(results: Results, measure: str) -> list[Figure]:
    ours = results.ours(measure)
    if not ours:
        return []
    best = max(ours, key=lambda batch: median(ours[batch].rates))
    line = partial(_line, results, measure)
    lines = [line(ours[best].rates, best, peer) for peer in results.others(measure)]
    if measure == "g":
        lines += _best_of_others(results, ours[best].rates, best)
    if measure in IN_BATCHES and 1 in ours and results.rates(LIMIT_ONE, measure):
        lines.append(line(ours[1].rates, 1, LIMIT_ONE))
    return lines


def _line(results: Results, measure: str, own: list[float], batch: int, peer: str) -> Figure:
    what = RATES[measure] + (f", batch {batch}" if measure in IN_BATCHES else "")
    limit = ASKED.get((measure, peer))
    name, other = results.name(peer, measure), results.rates(peer, measure)
    return Figure(what, "tasks/s", own, name, other, limit)


def _best_of_others(results: Results, own: list[float], batch: int) -> list[Figure]:
    others = {p: results.rates(p, "g") for p in results.peers if p not in LIMITS}
    others = {peer: rates for peer, rates in others.items() if rates}
    if not others:
        return []
    best = max(others, key=lambda peer: median(others[peer]))
    what = f"{RATES['g']}, batch {batch}, beside the best of the others"
    return [Figure(what, "tasks/s", own, results.name(best, "g"), others[best], BEST_OF_OTHERS)]


def _absolute(results: Results) -> list[Figure]:
    lines = []
    for measure, key, what, unit, limit in ABSOLUTE:
        ours = results.ours(measure)
        if not ours:
            continue
        own = ours[min(ours)].of(key)
        for peer in results.others(measure):
            name, other = results.name(peer, measure), results.found[peer, measure, 0].of(key)
            lines.append(Figure(what, unit, own, name, other, limit, absolute=True, most=True))
    return lines
