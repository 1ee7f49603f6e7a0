"""The benchmark in miniature: its table, its plots, and how a figure is judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).with_name("benchmarks")))

import peers_file
import plots
from figures import Curve, Figure, figure_from, in_turns, percentile
from report import Report, cells

BENCHMARK = Path(__file__).with_name("benchmarks") / "bench.py"
FACTS = {
    "cpu": "a CPU",
    "cores": 2,
    "memory_gb": 8,
    "system": "Linux",
    "python": "3.13",
    "postgresql": "18",
    "pgtask_sa": "0",
    "sqlalchemy": "2",
    "psycopg": "3",
    "settings": {"fsync": "on"},
    "lanes": {"batch 1": 4},
}


def judged(own: list[float], other: list[float] = (), **how: object) -> bool | None:
    return Figure("speed", "tasks/s", own, "the other", other, **how).met


def test_how_a_figure_is_judged() -> None:
    """By the ratio of the medians, or by its own median; from below or from above."""
    assert judged([80, 95, 90], [100, 99, 200], limit=0.9) is True
    assert judged([80, 85, 90], [100, 99, 200], limit=0.9) is False
    assert judged([1.4], [1.0], limit=1.5, most=True) is True
    assert judged([1.6], [1.0], limit=1.5, most=True) is False
    assert judged([1.6], [0.1], limit=2.0, absolute=True, most=True) is True
    assert judged([1.6], [0.1]) is None
    assert judged([1.6], [0.0], limit=2.0) is None


def test_figures_of_rounds() -> None:
    """The spread is half of the distance of the rounds, of the side that has more of it."""
    figure = Figure("speed", "tasks/s", [90, 100, 120], "the other", [50, 50, 51], 0.9)
    assert figure.spread == 0.15
    assert cells(figure)[1:] == [
        *("at least 0.9 x", "100 tasks/s", "the other", "50.0", "2.00", "± 15%", "yes"),
    ]
    assert figure_from(json.loads(json.dumps(figure.as_dict()))).as_dict() == figure.as_dict()
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile(range(1, 101), 0.99) == 99
    seen: list[str] = []
    in_turns(2, lambda: seen.append("ours"), lambda: seen.append("other"))
    assert seen == ["ours", "other"] * 2


def some_measure() -> dict[str, object]:
    figure = Figure("speed", "tasks/s", [1.0], "the other", [2.0], 0.9, note="A note")
    curve = Curve("claim_by_depth", "fair", [(1000, 0.3), (10_000, 0.4)])
    measured = {"at": "today", "seconds": 1.0, "load": 0.1}
    return {**measured, "figures": [figure.as_dict()], "curves": [curve.as_dict()]}


def test_what_was_measured_before_stays(tmp_path: Path) -> None:
    """Unless machine, versions or settings are other ones: then the figures are no company."""
    Report(tmp_path, FACTS, quick=False).add("a", some_measure())
    Report(tmp_path, FACTS, quick=False).add("b", some_measure())
    assert list(Report(tmp_path, FACTS, quick=False).content["measures"]) == ["a", "b"]
    assert Report(tmp_path, FACTS, quick=True).content["measures"] == {}
    assert Report(tmp_path, {**FACTS, "cores": 4}, quick=False).content["measures"] == {}


def test_without_matplotlib_there_are_no_plots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the table is written all the same."""
    monkeypatch.setattr(plots, "find_spec", lambda _name: None)
    report = Report(tmp_path, FACTS, quick=False)
    report.add("a", some_measure())
    assert [path.name for path in report.write(["a"])] == ["benchmarks.json", "benchmarks.md"]
    page = (tmp_path / "benchmarks.md").read_text()
    assert "| a | speed | at least 0.9 x | 1 tasks/s | the other | 2 | 0.50 |  | **no** |" in page
    assert "* speed. A note." in page


def result(peer: str, measure: str, value: float, config: str = "", **more: object) -> str:
    detail = more.pop("detail", {})
    versions = {"python": "3.13", peer: "1.2"}
    known = {"peer": peer, "measure": measure, "value": value, "config": {"peer": config}}
    return json.dumps({**known, "detail": detail, "versions": versions, **more}) + "\n"


def test_comparison_with_others(tmp_path: Path) -> None:
    """Ours counts in its best batches, several runs are rounds, and what failed is left out."""
    path = tmp_path / "results.jsonl"
    path.write_text(
        result("pgtask", "c1", 2.0, "batch_size 1, ..", repeats=[1.9, 2.0, 2.1])
        + result("pgtask", "c1", 30.0, "batch_size 100, ..", repeats=[29, 30, 31])
        + result("pgqueuer", "c1", 10.0, repeats=[10, 10, 10])
        + result("limit_one", "c1", 4.0)
        + result("awa", "c1", 5.0, error="it broke")
        + result("oban", "c1", 9.0, detail={"verified": False})
        + result("pgtask", "e", 0.8, "batch_size 1, ..", detail={"p50": 0.8, "p99": 2.5})
        + result("limit", "e", 0.5, detail={"p50": 0.5, "p99": 0.7})
    )
    found = {(f.what, f.beside): (f.value, f.base, f.met) for f in peers_file.read(path)[0]}
    assert found == {
        ("drain of no-ops, 1 process, batch 100", "pgqueuer 1.2"): (30, 10, True),
        ("drain of no-ops, 1 process, batch 1", "bare psycopg, one by one"): (2.0, 4.0, False),
        ("pickup by an idle worker, p50", "bare psycopg, LISTEN and one claim"): (0.8, 0.5, True),
        ("pickup by an idle worker, p99", "bare psycopg, LISTEN and one claim"): (2.5, 0.7, False),
    }


MINIATURE = ("--quick", "--only", "bulk,weights,depth", "--size", "bulk=500")
MINIATURE += ("--size", "deepest=1000", "--size", "claims=100", "--size", "claim_seconds=0.05")


@pytest.mark.slow
def test_benchmark_in_miniature(tmp_path: Path) -> None:
    """One command measures and writes all figures, the table and the plots."""
    command = [sys.executable, BENCHMARK, *MINIATURE]
    command += ["--out", tmp_path, "--lock", tmp_path / "lock"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=110, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "benchmarks.json").read_text())
    assert list(content["measures"]) == ["bulk", "weights", "depth"]
    assert content["machine"]["settings"]["fsync"] == "on"
    page = (tmp_path / "benchmarks.md").read_text()
    for what in (
        "bulk | enqueue 500 in bulk",
        "weights | weights 1:2:3:4",
        "depth | one claim in order tablesample, 1,000",
    ):
        assert f"\n| {what}" in page
    if plots.is_possible():
        assert "<svg" in (tmp_path / "plots" / "claim_by_depth.svg").read_text()
        assert "](plots/claim_by_depth.svg)" in page
    else:
        assert "no plots: matplotlib is missing" in done.stdout


def test_unknown_measure() -> None:
    """A name that is none is refused before anything is started, with the names that are."""
    command = [sys.executable, BENCHMARK, "--only", "speed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "no measure speed; there are drains, deep, deepest, enqueue" in done.stderr
