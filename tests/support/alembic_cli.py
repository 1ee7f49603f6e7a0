"""The real `alembic` command, for our own migrations and in the project of a user."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import pgtask_sa

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[2]
_SOURCE = Path(pgtask_sa.__file__).resolve().parents[1]

# Several command lines in one process: starting Python costs more than most of them.
_ALEMBIC = """
import sys
from alembic.config import main
for line in sys.argv[1:]:
    main(line.split(), prog="alembic")
"""


# How a user completes the env.py that `alembic init` made, with the strictest comparison.
_ENV = {
    "target_metadata = None": "from models import Base\ntarget_metadata = Base.metadata",
    "connection=connection,": (
        "connection=connection, include_schemas=True, compare_server_default=True,"
    ),
}


def run_alembic(
    *command_lines: str, cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `alembic` with each of the command lines in the directory `cwd`, up to the first error.

    Standard output and standard error come together in `stdout`.
    """
    return _run_python("-c", _ALEMBIC, *command_lines, cwd=cwd, env=env or {})


def _run_python(
    *arguments: str, cwd: Path, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(_python_path()), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )


def _python_path() -> list[str]:
    path = [str(_SOURCE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return [entry for entry in path if entry]


def has_entry_point() -> bool:
    """Tell whether the library is installed, so that Alembic finds its plugin."""
    return bool(metadata.entry_points(group="alembic.plugins", name=plugin_entry()[0]))


def plugin_entry() -> tuple[str, str]:
    """Return name and object of the entry point that pyproject.toml promises to Alembic."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'"alembic\.plugins"\]\n"([^"]+)" = "([^"]+)"', pyproject)
    assert found is not None
    return found[1], found[2]


class UserProject:
    """A project made by `alembic init`, with models that are given as source text.

    Args:
        directory: an empty one, for the project.
        database_url: the database that its alembic.ini names.
        models: the source of its `models.py`, which defines `Base`.
    """

    def __init__(self, directory: Path, database_url: str, models: str) -> None:
        self.directory = directory
        self.alembic("init migrations")
        self.write_models(models)
        self._write_url(database_url)
        env = directory / "migrations" / "env.py"
        source = env.read_text()
        for standard, ours in _ENV.items():
            assert standard in source
            source = source.replace(standard, ours)
        env.write_text(source)

    def copy(self, directory: Path, database_url: str, models: str | None = None) -> UserProject:
        """Copy the project for another database; with other models it begins without migrations."""
        shutil.copytree(self.directory, directory)
        project = object.__new__(UserProject)
        project.directory = directory
        project._write_url(database_url)
        if models is not None:
            project.write_models(models)
            for path in project.versions.glob("*.py"):
                path.unlink()
        return project

    def _write_url(self, url: str) -> None:
        ini = self.directory / "alembic.ini"
        line = f"sqlalchemy.url = {url.replace('%', '%%')}"
        content = re.sub(r"(?m)^sqlalchemy\.url = .*$", lambda _: line, ini.read_text())
        ini.write_text(content)

    def write_models(self, models: str) -> None:
        """Replace the project's models."""
        (self.directory / "models.py").write_text(models)

    def alembic(self, *command_lines: str) -> str:
        """Run `alembic`, which must succeed, and return what it printed."""
        done = self.try_alembic(*command_lines)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def try_alembic(self, *command_lines: str) -> subprocess.CompletedProcess[str]:
        """Run `alembic`, whatever comes of it."""
        return run_alembic(*command_lines, cwd=self.directory, env=self._plugin())

    def run_python(self, *arguments: str) -> str:
        """Run Python in the project and return what it printed."""
        done = _run_python(*arguments, cwd=self.directory, env=self._plugin())
        assert done.returncode == 0, done.stdout
        return done.stdout

    def _plugin(self) -> dict[str, str]:
        """Where the library is only on the path and not installed: lay its entry point beside."""
        if has_entry_point():
            return {}
        name, value = plugin_entry()
        info = self.directory / "site" / "pgtask_sa-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pgtask_sa\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[alembic.plugins]\n{name} = {value}\n")
        return {"PYTHONPATH": os.pathsep.join([str(info.parent), *_python_path()])}

    @property
    def versions(self) -> Path:
        """The directory of the project's migrations."""
        return self.directory / "migrations" / "versions"

    @property
    def migrations(self) -> list[str]:
        """The sources of the project's migrations."""
        paths = sorted(self.versions.glob("*.py"), key=os.path.getmtime)
        return [path.read_text() for path in paths]
