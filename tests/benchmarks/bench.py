"""Our own measures, each beside what it is to be compared with, in the same run: `make bench`.

Starts a PostgreSQL server of its own, on disk, with fsync, and lets ours and the other take turns;
medians count. Writes `docs/benchmarks.json`, the table `docs/benchmarks.md` and plots; a `--quick`
run writes to a folder for temporary files.
"""

from __future__ import annotations

import argparse
import fcntl
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parent))

import depths
import draining
import enqueueing
import loading
import peers_file
import planning
import plots
import records
import remembering
import turns_taken
import waking
from figures import Curve, Figure
from report import Report, cells
from stage import FULL, LOCK, QUICK, SETTINGS, PostgresServer, Sizes, Stage, about, load_now

Measure: TypeAlias = Callable[[Stage], Iterator[Figure | Curve]]

MEASURES: dict[str, Measure] = {
    "drains": draining.drains,
    "deep": draining.deep,
    "deepest": draining.deepest,
    "enqueue": enqueueing.one_by_one,
    "bulk": enqueueing.in_bulk,
    "rivals": enqueueing.rivals,
    "asleep": waking.around_sleep,
    "pickups": waking.pickups,
    "load": loading.under_load,
    "idle": waking.idle,
    "herd": waking.herd,
    "memory": remembering.memory,
    "types": turns_taken.kinds,
    "fair": turns_taken.fair,
    "weights": turns_taken.weighted,
    "tenants": turns_taken.tenants,
    "planned": planning.planned,
    "due": planning.due,
    "failing": planning.failing,
    "depth": depths.by_depth,
    "notes": records.notes,
}
PEERS = "others"
ROOT = Path(__file__).resolve().parents[2]
QUICK_DIRECTORY = Path(tempfile.gettempdir()) / "pgtask-bench"


def run_all(stage: Stage, names: Iterable[str], report: Report) -> list[str]:
    """Run measures, show and note what each finds; return those that failed."""
    failed = []
    for name in names:
        print(f"\n{name}: {MEASURES[name].__doc__}", flush=True)
        load, start = load_now(), time.monotonic()
        try:
            found = list(shown(MEASURES[name](stage)))
        except (Exception, SystemExit):
            # the others are worth having, after a quarter of an hour
            traceback.print_exc()
            failed.append(name)
        else:
            report.add(name, noted(found, time.monotonic() - start, load))
    return failed


def shown(found: Iterable[Figure | Curve]) -> Iterator[Figure | Curve]:
    """Print figures as they come."""
    for each in found:
        if isinstance(each, Figure):
            what, target, own, beside, base, ratio, spread, met = cells(each)
            share = f"  ratio {ratio}" if ratio else ""
            verdict = f"  [{target}: {met.strip('*')}]" if met else ""
            print(f"  {what}: {own} {spread}\n      {beside} {base}{share}{verdict}", flush=True)
        yield each


def noted(found: list[Figure | Curve], seconds: float, load: float) -> dict[str, Any]:
    """Return what a measure found, as it is written down."""
    return {
        "at": time.strftime("%Y-%m-%d %H:%M"),
        "seconds": round(seconds, 1),
        "load": load,
        "figures": [each.as_dict() for each in found if isinstance(each, Figure)],
        "curves": [each.as_dict() for each in found if isinstance(each, Curve)],
    }


def sizes_of(arguments: argparse.Namespace) -> Sizes:
    """Return how much of everything: full or quick, and what was named."""
    sizes = dict(QUICK if arguments.quick else FULL)
    for given in arguments.size:
        name, _, value = given.partition("=")
        if name not in sizes or isinstance(sizes[name], tuple):
            raise SystemExit(f"--size {given}: there is no such size; there are {', '.join(sizes)}")
        sizes[name] = type(sizes[name])(value)
    return sizes


def chosen(only: str | None) -> list[str]:
    """Return the names of the measures to run, in their order."""
    names = list(MEASURES) if only is None else [name for name in only.split(",") if name]
    unknown = [name for name in names if name not in MEASURES]
    if unknown:
        raise SystemExit(f"no measure {', '.join(unknown)}; there are {', '.join(MEASURES)}")
    return names


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="all in miniature: about two minutes")
    parser.add_argument("--only", metavar="NAME,..", help=f"some of: {', '.join(MEASURES)}")
    parser.add_argument(
        "--size", metavar="NAME=N", action="append", default=[], help=f"one of: {', '.join(FULL)}"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="write to this directory")
    parser.add_argument(
        "--lock", metavar="FILE", type=Path, default=LOCK, help="held while anything is timed"
    )
    parser.add_argument(
        "--peers",
        metavar="FILE",
        type=Path,
        help="results of the benchmark of other queues (see pgtask_peer.py)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measure, print, and write everything down."""
    arguments = parse(argv)
    names, sizes = chosen(arguments.only), sizes_of(arguments)
    others = peers_file.read(arguments.peers) if arguments.peers else None
    directory = arguments.out or (QUICK_DIRECTORY if arguments.quick else ROOT / "docs")
    with arguments.lock.open("a") as lock, PostgresServer(fsync=True, settings=SETTINGS) as server:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = Report(directory, about(server), quick=arguments.quick)
        if others:
            figures, measured = others
            report.add(PEERS, {**noted(list(shown(figures)), 0, 0), **measured})
        failed = run_all(Stage(server, sizes), names, report)
    if not plots.is_possible():
        print("\nno plots: matplotlib is missing, it comes with the extra `bench`")
    for path in report.write([*MEASURES, PEERS]):
        print(f"written: {path}")
    if failed:
        raise SystemExit(f"failed, and left as they were: {', '.join(failed)}")


if __name__ == "__main__":
    main()
