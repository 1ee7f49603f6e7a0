"""The Python in Markdown files, to be run by tests.

The convention:

* Blocks fenced as ```python run in order and share one module, as if they were one program.
* A block after the comment ``<!-- not run -->`` is only compiled.
* A block of ``>>>`` lines is a doctest: what it prints is compared.
* The database is in the environment variable DATABASE_URL, and empty: the blocks make the tables
  that they need. The URL written out, ``PLACEHOLDER`` below, stands for
  it as well.
* ``await`` outside of a function is allowed.
"""

from __future__ import annotations

import ast
import asyncio
import doctest
import inspect
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLACEHOLDER = "postgresql+psycopg://localhost/app"

_BLOCK = re.compile(
    r"(?P<skip><!-- not run -->\s*\n)?(?P<indent>^[ ]*)```python[^\n]*\n(?P<code>.*?)^[ ]*```",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """One fenced block: its code, the line it starts on, and whether it is to be run."""

    code: str
    line: int
    run: bool


def blocks(path: Path) -> list[Block]:
    """Read the Python blocks of a file, in order."""
    source = path.read_text(encoding="utf-8")
    return [
        Block(
            code=re.sub(f"(?m)^{found['indent']}", "", found["code"]),
            line=source.count("\n", 0, found.start("code")),
            run=found["skip"] is None,
        )
        for found in _BLOCK.finditer(source)
    ]


def run_blocks(path: Path, url: str) -> int:
    """Run the blocks of a file as one program on a database; return how many there were."""
    found = blocks(path)
    with _module(re.sub(r"\W", "_", path.stem)) as module:
        for block in found:
            _run(block, path, module, url)
    return len(found)


def _run(block: Block, path: Path, module: ModuleType, url: str) -> None:
    code = block.code.replace(PLACEHOLDER, url)
    if code.lstrip().startswith(">>>"):
        _doctest(code, path, block, module)
        return
    # empty lines in front: a traceback then shows the line of the file
    compiled = compile(
        "\n" * block.line + code, str(path), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True
    )
    if block.run:
        result = eval(compiled, module.__dict__)
        if inspect.iscoroutine(result):
            asyncio.run(result)


def _doctest(code: str, path: Path, block: Block, module: ModuleType) -> None:
    parser, runner = doctest.DocTestParser(), doctest.DebugRunner(optionflags=doctest.ELLIPSIS)
    test = parser.get_doctest(code, module.__dict__, path.name, str(path), block.line)
    if block.run:
        runner.run(test, clear_globs=False)


@contextmanager
def _module(name: str) -> Iterator[ModuleType]:
    """Give a module that can be found by its name, as dataclasses and annotations need it."""
    module = ModuleType(f"markdown_{name}")
    sys.modules[module.__name__] = module
    try:
        yield module
    finally:
        del sys.modules[module.__name__]
