"""The task table on a Base of your own: enum task types, a tenant column, a schema, other names.

    python examples/own_base.py

`TaskMixin` brings the columns that the library needs, and the rest is yours:

* Types that are a native enum keep misspelt types out, whoever inserts them.
* A column that you add is set by `enqueue(.., tenant_id=7)`, kept through retries, carried to the
  error queue where that has it too, and shown to the handler as `task.columns["tenant_id"]`.
* `sessionmaker(.., task_class=Job)` says into which table the tasks of a session go.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from sqlalchemy import BigInteger, Enum, Identity, MetaData, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker
from sqlalchemy.schema import CreateSchema

from pgtask_sa import DeadTaskMixin, TaskMixin, TaskRegistry, TaskSession, TaskView, Worker

SCHEMA = "example_billing"


class Base(DeclarativeBase):
    metadata = MetaData(schema=SCHEMA)


class JobType(enum.Enum):
    WRITE_INVOICE = "WRITE_INVOICE"
    SEND_REMINDER = "SEND_REMINDER"


# One type for both tables, and in the same schema.
job_type = Enum(JobType, name="job_type", schema=SCHEMA, metadata=Base.metadata)


class Job(TaskMixin, Base):
    __tablename__ = "job"

    task_type: Mapped[JobType] = mapped_column(job_type, sort_order=-9)
    tenant_id: Mapped[int] = mapped_column(BigInteger)


class FailedJob(DeadTaskMixin, Base):
    __tablename__ = "failed_job"

    task_type: Mapped[JobType] = mapped_column(job_type, sort_order=-9)
    tenant_id: Mapped[int] = mapped_column(BigInteger)


class Invoice(Base):
    __tablename__ = "invoice"

    invoice_id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    tenant_id: Mapped[int] = mapped_column(BigInteger)
    amount: Mapped[int]


@dataclass(frozen=True)
class Amount:
    amount: int


tasks = TaskRegistry(task_class=Job)


@tasks.handler(JobType.WRITE_INVOICE)
def write_invoice(session: TaskSession, params: Amount, task: TaskView) -> None:
    """Write the invoice for the tenant whose task it is; params need not repeat the tenant."""
    session.add(Invoice(tenant_id=task.columns["tenant_id"], amount=params.amount))


def main(database_url: str) -> None:
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(CreateSchema(SCHEMA, if_not_exists=True))
        Base.metadata.drop_all(connection)
        Base.metadata.create_all(connection)

    make_session = sessionmaker(engine, class_=TaskSession, task_class=Job)
    with make_session.begin() as session:
        # The function is as good as its type, and lets type checkers check the params.
        session.enqueue(write_invoice, Amount(amount=120), tenant_id=7)
        session.enqueue(JobType.WRITE_INVOICE, {"amount": 80}, tenant_id=8)

    Worker(tasks, engine, concurrency=1, drain=True).run()

    with make_session() as session:
        for invoice in session.scalars(select(Invoice).order_by(Invoice.tenant_id)):
            print(f"tenant {invoice.tenant_id}: invoice over {invoice.amount}")
    engine.dispose()


if __name__ == "__main__":
    from database import database

    with database() as url:
        main(url)
