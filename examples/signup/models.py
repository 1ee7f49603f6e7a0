"""The tables of the application; the task table is one of them."""

from __future__ import annotations

from datetime import date, datetime

from sqlalchemy import BigInteger, DateTime, Identity, MetaData, func
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgtask_sa import DeadTaskMixin, TaskMixin


class Base(DeclarativeBase):
    metadata = MetaData(
        # Constraints with a name can be told apart in errors, and dropped in migrations.
        naming_convention={
            "ix": "%(table_name)s_%(column_0_N_name)s_idx",
            "uq": "%(table_name)s_%(column_0_N_name)s_key",
            "fk": "%(table_name)s_%(column_0_N_name)s_fkey",
            "pk": "%(table_name)s_pkey",
        }
    )


class Usr(Base):
    """Somebody who signed up. (Not "user": that is a reserved word in SQL.)"""

    __tablename__ = "usr"

    usr_id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    email: Mapped[str] = mapped_column(unique=True)
    password_hash: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=func.now())
    welcomed_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))


class WelcomeCount(Base):
    """How many people were welcomed on each day."""

    __tablename__ = "welcome_count"

    day: Mapped[date] = mapped_column(primary_key=True)
    welcomed: Mapped[int]


class Task(TaskMixin, Base):
    """What is still to be done."""

    __tablename__ = "task"


class DeadTask(DeadTaskMixin, Base):
    """What could not be done: tasks that used up their attempts."""

    __tablename__ = "dead_task"
