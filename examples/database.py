"""A database for the examples: the one that DATABASE_URL names, or an embedded server's.

Run by itself it serves an embedded database until Ctrl-C, for trying things by hand.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "support"))

from postgres_server import PostgresServer


@contextmanager
def database() -> Iterator[str]:
    """Yield the URL of a database; an embedded one is gone after the block."""
    if url := os.environ.get("DATABASE_URL"):
        yield url
        return
    with PostgresServer() as server:
        yield server.url()


def serve() -> None:
    with PostgresServer() as server:
        print("Ctrl-C ends this server and removes its data. In another terminal:")
        print(f"export DATABASE_URL={server.url()}", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    serve()
