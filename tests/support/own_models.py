"""Task classes on a Base of one's own, one for each thing that a user may change."""

from __future__ import annotations

import enum
from typing import Any

from sqlalchemy import Enum, Index, MetaData, UniqueConstraint, text
from sqlalchemy.dialects.postgresql import HSTORE
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from pgtask_sa import TaskMixin


class Base(DeclarativeBase):
    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class Usr(Base):
    __tablename__ = "usr"

    usr_id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(default="")


class Kind(enum.Enum):
    WELCOME = "welcome-mail"
    BYE = "bye-mail"


class PlainJob(TaskMixin, Base):
    """Our columns and two more, one of them with another name in the database."""

    __tablename__ = "plain_job"

    tenant_id: Mapped[int | None] = mapped_column("tenant")
    note: Mapped[str | None]


class EnumJob(TaskMixin, Base):
    """A native enum, in a schema of its own; the labels are the values."""

    __tablename__ = "enum_job"
    __table_args__ = {"schema": "jobs"}

    task_type: Mapped[Kind] = mapped_column(  # type: ignore[assignment]
        Enum(Kind, name="kind", schema="jobs", values_callable=lambda e: [m.value for m in e]),
        nullable=False,
    )


class HstoreJob(TaskMixin, Base):
    __tablename__ = "hstore_job"

    params: Mapped[dict[str, Any]] = mapped_column(
        HSTORE, nullable=False, server_default=text("''")
    )


class UniqueJob(TaskMixin, Base):
    __tablename__ = "unique_job"
    __table_args__ = (UniqueConstraint("task_type", "params"),)


class DigestJob(TaskMixin, Base):
    """Unique over a digest: params of any size fit."""

    __tablename__ = "digest_job"
    __table_args__ = (Index("digest_job_uq", "task_type", text("md5(params::text)"), unique=True),)


def create_all(engine: Any) -> None:
    """Create every table here, and the schema and extension that they need."""
    with engine.begin() as connection:
        connection.execute(text("create schema if not exists jobs"))
        connection.execute(text("create extension if not exists hstore"))
        Base.metadata.create_all(connection)
