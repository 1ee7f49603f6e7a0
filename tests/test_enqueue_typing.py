"""What type checkers say about enqueue(): tests/typing/ holds the code that they look at."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

mypy = pytest.importorskip("mypy.api")

TYPING = Path(__file__).parent / "typing"


def errors_by_line(name: str, cache: Path) -> dict[int, str]:
    """Return the first complaint about each line of a file, mypy being strict."""
    output, trouble, _ = mypy.run(
        ["--strict", "--no-error-summary", "--hide-error-context", "--no-pretty",
         "--config-file=", f"--cache-dir={cache}", str(TYPING / name)]
    )  # fmt: skip
    assert trouble == ""
    found: dict[int, str] = {}
    for line in output.splitlines():
        match = re.match(r".*?([^/]+\.py):(\d+): error: (.*)", line)
        assert match is not None or ": note: " in line, line
        if match is not None:
            assert match[1] == name, line
            found.setdefault(int(match[2]), match[3])
    return found


def test_good_code_is_accepted(tmp_path: Path) -> None:
    """No complaint, and assert_type() agrees about what is returned."""
    assert errors_by_line("passes.py", tmp_path) == {}


def test_bad_code_is_refused_line_by_line(tmp_path: Path) -> None:
    """Each marked line is an error, and no other is."""
    lines = (TYPING / "fails.py").read_text().splitlines()
    expected = {n for n, line in enumerate(lines, start=1) if line.endswith("# expect-error")}

    assert len(expected) > 20
    assert set(errors_by_line("fails.py", tmp_path)) == expected
