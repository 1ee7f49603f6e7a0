"""Expected texts of SQL statements, kept in files that a person can read and compare.

``PGTASK_WRITE_GOLDEN=1 pytest tests/test_golden.py`` writes them anew; read the diff then.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.dialects.postgresql.psycopg import dialect

if TYPE_CHECKING:
    from sqlalchemy import Executable

GOLDEN = Path(__file__).resolve().parents[1] / "golden"

# Where a statement is broken into lines.
_BREAKS = r"(?<! ON CONFLICT DO) \b(FROM|WHERE|UNION ALL|LIMIT|ORDER BY|RETURNING|SELECT|SET)\b"


def sql_text(statement: Executable) -> str:
    """Return the text of a statement as psycopg gets it, broken into lines."""
    one_line = " ".join(str(statement.compile(dialect=dialect())).split())
    return re.sub(_BREAKS, r"\n\1", one_line).strip() + "\n"


def expected_text(name: str, actual: str) -> str:
    """Return what is in the golden file; written first where that was asked for."""
    path = GOLDEN / f"{name}.sql"
    if os.environ.get("PGTASK_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(actual)
    return path.read_text() if path.exists() else ""


def normalised(text: str) -> str:
    """Leave out what means nothing: white space, and what SQLAlchemy 2.0 and 2.1 differ in."""
    text = re.sub(r"\s+", " ", text)
    return re.sub(r"\s*([(),])\s*", r"\1", text).strip()
