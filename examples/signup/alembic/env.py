"""Alembic's environment, as `alembic init` makes it, made shorter.

There is nothing about tasks in it: Alembic finds the library's plugin for autogenerate by itself.
"""

from __future__ import annotations

import logging
import os

from alembic import context
from sqlalchemy import NullPool, create_engine

from signup.models import Base

logging.basicConfig(format="%(levelname)s %(message)s")
logging.getLogger("alembic").setLevel(logging.INFO)


def run_offline() -> None:
    """Write the migrations as SQL: `alembic upgrade head --sql`."""
    context.configure(dialect_name="postgresql", target_metadata=Base.metadata, literal_binds=True)
    with context.begin_transaction():
        context.run_migrations()


def run_online() -> None:
    engine = create_engine(os.environ["DATABASE_URL"], poolclass=NullPool)
    with engine.connect() as connection:
        context.configure(connection=connection, target_metadata=Base.metadata)
        with context.begin_transaction():
            context.run_migrations()


if context.is_offline_mode():
    run_offline()
else:
    run_online()
