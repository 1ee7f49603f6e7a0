"""Follow-up tasks: a handler enqueues the next step in its own transaction.

    python examples/follow_up.py

An order leads to an invoice, and the invoice to an e-mail. Each step is a task, and each handler
enqueues the next one through the session that it was given. So one commit says all at once: this
task is done, this is what it wrote, and this comes next. When a step fails, none of it has
happened, its follow-up task included; when it succeeds, the follow-up cannot be missing.

Here the step in the middle fails in its first attempt, and at the worst moment: when it has
written everything already.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import BigInteger, ForeignKey, Identity, create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from pgtask_sa import DeadTaskMixin, TaskMixin, TaskRegistry, TaskSession, TaskView, Worker
from pgtask_sa.events import Event


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "example_order"

    order_id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    email: Mapped[str]


class Invoice(Base):
    __tablename__ = "example_invoice"

    invoice_id: Mapped[int] = mapped_column(BigInteger, Identity(always=True), primary_key=True)
    order_id: Mapped[int] = mapped_column(ForeignKey(Order.order_id))


class Step(TaskMixin, Base):
    __tablename__ = "example_step"


class DeadStep(DeadTaskMixin, Base):
    __tablename__ = "example_dead_step"


@dataclass(frozen=True)
class OrderParams:
    order_id: int


@dataclass(frozen=True)
class InvoiceParams:
    invoice_id: int


tasks = TaskRegistry(task_class=Step)


# `backoff=0`: try again at once. The default waits a little longer after each failure.
@tasks.handler("WRITE_INVOICE", backoff=0)
def write_invoice(session: TaskSession, params: OrderParams, task: TaskView) -> None:
    invoice = Invoice(order_id=params.order_id)
    session.add(invoice)
    # A callable is asked for the params when the session is flushed: then the invoice has its id.
    session.enqueue(send_invoice, lambda: InvoiceParams(invoice_id=invoice.invoice_id))
    session.flush()
    tell(session, f"attempt {task.attempt} has written the invoice")
    if task.attempt == 1:
        raise RuntimeError("the printer is on fire")


@tasks.handler("SEND_INVOICE")
def send_invoice(session: TaskSession, params: InvoiceParams) -> None:
    invoice = session.get_one(Invoice, params.invoice_id)
    order = session.get_one(Order, invoice.order_id)
    print(f"e-mail to {order.email}: your order is invoiced")


def tell(session: Session, what: str) -> None:
    """Print how many invoices and e-mail tasks there are, as this session sees it."""
    invoices = session.scalar(select(func.count()).select_from(Invoice))
    mails = session.scalar(
        select(func.count()).select_from(Step).where(Step.task_type == "SEND_INVOICE")
    )
    print(f"{what}: invoices {invoices}, e-mails to send {mails}")


def main(database_url: str) -> None:
    engine = create_engine(database_url)
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    make_session = sessionmaker(engine, class_=TaskSession, task_class=Step)

    with make_session.begin() as session:
        order = Order(email="user1@example.org")
        session.add(order)
        session.enqueue(write_invoice, lambda: OrderParams(order_id=order.order_id))

    def after_failure(event: Event) -> None:
        if event.name == "task.retry":
            with make_session() as session:
                tell(session, f"it failed ({event.fields['error']}), and nothing is left of it")

    # One task at a time, so that what is printed stays in order.
    Worker(tasks, engine, concurrency=1, drain=True, listeners=[after_failure]).run()

    with make_session() as session:
        tell(session, "in the end")
    engine.dispose()


if __name__ == "__main__":
    from database import database

    with database() as url:
        main(url)
