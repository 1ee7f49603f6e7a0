"""Every example runs: the doctests of the modules, and the Python in the Markdown files."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
from markdown_blocks import PLACEHOLDER, blocks, run_blocks

import pgtask_sa

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(pgtask_sa.__path__, "pgtask_sa.")
    if not found.name.endswith("__main__")
)
FILES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")})


@pytest.mark.parametrize("name", ["pgtask_sa", *MODULES])
def test_doctests(name: str) -> None:
    """The examples in the module's docstrings give what they show."""
    module = importlib.import_module(name)
    options = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL
    assert 0 == doctest.testmod(module, optionflags=options).failed


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_markdown(path: Path, empty_db_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python blocks of the file run in order on an empty database."""
    monkeypatch.setenv("DATABASE_URL", empty_db_url)
    monkeypatch.chdir(ROOT)
    assert run_blocks(path, empty_db_url) == len(blocks(path))


EXAMPLE = f"""
```python
import os
from dataclasses import dataclass
url = "{PLACEHOLDER}"
```

* in a list, and a dataclass looks for its module

  ```python
  @dataclass
  class Point:
      x: int
  ```

<!-- not run -->
```python
raise SystemExit
```

```sh
not python at all
```

```python
>>> Point(1), url == os.environ["DATABASE_URL"]
(Point(x=1), True)
```

```python
import asyncio
await asyncio.sleep(0)
FAIL = 0
```
"""


def test_the_convention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks share a module, skipped ones are compiled only, doctests compare, await is allowed."""
    monkeypatch.setenv("DATABASE_URL", "postgresql+psycopg://elsewhere/db")
    path = tmp_path / "README.md"
    path.write_text(EXAMPLE)
    assert 5 == run_blocks(path, "postgresql+psycopg://elsewhere/db")


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("FAIL = 0", "FAIL = 1 / 0", ZeroDivisionError),
        ("raise SystemExit", "raise SystemExit(", SyntaxError),
        ("(Point(x=1), True)", "(Point(x=2), True)", doctest.DocTestFailure),
    ],
)
def test_a_broken_example_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, error: type[Exception]
) -> None:
    """An example that fails, does not compile, or prints something else is found out."""
    monkeypatch.setenv("DATABASE_URL", "postgresql+psycopg://elsewhere/db")
    path = tmp_path / "README.md"
    path.write_text(EXAMPLE.replace(old, new))
    with pytest.raises(error):
        run_blocks(path, "postgresql+psycopg://elsewhere/db")
