"""What type checkers say about enqueue(): tests/typing/ holds the code that they look at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

mypy = pytest.importorskip("mypy.api")

TYPING = Path(__file__).parent / "typing"


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """Give the first complaint about each line of each file, mypy being strict."""
    files = sorted(TYPING.glob("*.py"))
    output, trouble, _ = mypy.run(
        ["--strict", "--no-error-summary", "--hide-error-context", "--no-pretty",
         "--config-file=", f"--cache-dir={tmp_path_factory.mktemp('mypy')}", *map(str, files)]
    )  # fmt: skip
    assert trouble == ""
    found: dict[str, dict[int, str]] = {file.name: {} for file in files}
    for line in output.splitlines():
        match = re.match(r".*?([^/]+\.py):(\d+): error: (.*)", line)
        assert match is not None or ": note: " in line, line
        if match is not None:
            found[match[1]].setdefault(int(match[2]), match[3])  # of no other file
    return found


def test_good_code_is_accepted(complaints: dict[str, dict[int, str]]) -> None:
    """No complaint, and assert_type() agrees about what is returned."""
    assert complaints["passes.py"] == {}


def test_bad_code_is_refused_line_by_line(complaints: dict[str, dict[int, str]]) -> None:
    """Each marked line is an error, and no other is."""
    lines = (TYPING / "fails.py").read_text().splitlines()
    expected = {n for n, line in enumerate(lines, start=1) if line.endswith("# expect-error")}

    assert len(expected) > 20
    assert set(complaints["fails.py"]) == expected
