"""What an application does without a queue: one plain row, in a SQLAlchemy session."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ours import engine_of
from sqlalchemy import BigInteger, DateTime, Identity, Text, func, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DATABASE = "plain"
INSERT = text("insert into plain (kind, params) values (:kind, cast(:params as jsonb))")


class Base(DeclarativeBase):
    """Apart from everything else."""


class Plain(Base):
    """A row with the columns that a task has at least."""

    __tablename__ = "plain"
    id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    kind: Mapped[str] = mapped_column(Text)
    params: Mapped[Any] = mapped_column(JSONB)
    created_at: Mapped[Any] = mapped_column(DateTime(timezone=True), server_default=func.now())


def reset(url: str) -> None:
    """Make an empty table."""
    engine = engine_of(url)
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    engine.dispose()


@contextmanager
def by_orm(url: str) -> Iterator[Callable[[str, int], None]]:
    """Give a function that adds an object to a session and commits."""
    engine = engine_of(url)
    session_class = sessionmaker(engine)

    def send(kind: str, number: int) -> None:
        with session_class.begin() as session:
            session.add(Plain(kind=kind, params={"i": number}))

    yield send
    engine.dispose()


@contextmanager
def by_text(url: str) -> Iterator[Callable[[str, int], None]]:
    """Give a function that executes the text of an INSERT in a session and commits."""
    engine = engine_of(url)

    def send(kind: str, number: int) -> None:
        with Session(engine) as session, session.begin():
            session.execute(INSERT, {"kind": kind, "params": json.dumps({"i": number})})

    yield send
    engine.dispose()
