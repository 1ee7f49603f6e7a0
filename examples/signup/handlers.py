"""What the worker does: a function for each type of task.

DATABASE_URL=postgresql+psycopg://.. python -m pgtask_sa.worker signup.handlers:tasks
"""

from __future__ import annotations

import os
import smtplib
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from email.message import EmailMessage
from email.utils import make_msgid
from urllib.parse import urlsplit

from sqlalchemy.dialects.postgresql import insert

from pgtask_sa import Backoff, Discard, TaskRegistry, TaskSession
from signup.models import Task, Usr, WelcomeCount

SMTP_URL = os.environ.get("SMTP_URL", "smtp://127.0.0.1:8025")

tasks = TaskRegistry(task_class=Task)


@dataclass(frozen=True)
class Welcome:
    usr_id: int


@dataclass(frozen=True)
class Welcomed:
    day: date


# After half a second, one, two, .. and never more than a minute. A mail server that is away for a
# day is not the user's fault, so there are attempts enough for three days.
@tasks.handler(
    "SEND_EMAIL_WELCOME",
    max_attempts=5000,
    backoff=Backoff(base=0.5, maximum=timedelta(minutes=1)),
    timeout=timedelta(seconds=30),
)
def send_email_welcome(session: TaskSession, params: Welcome) -> None:
    """Welcome a new user: all of it in the one transaction in which the task is deleted."""
    usr = session.get(Usr, params.usr_id)
    if usr is None:
        raise Discard("the account was deleted in the meantime")
    usr.welcomed_at = datetime.now(timezone.utc)
    session.enqueue(count_welcome, Welcomed(day=usr.welcomed_at.date()))
    session.flush()
    # The irreversible step comes last. If anything above fails, no mail is out. If this fails,
    # all of the above is undone, and the task is tried again. Only a worker that dies after this
    # line and before the commit makes the mail go out a second time.
    send_mail(usr.email, "Welcome!", f"You are user number {usr.usr_id}.")


@tasks.handler("COUNT_WELCOME")
def count_welcome(session: TaskSession, params: Welcomed) -> None:
    """Add one. Twice would be wrong, and there is no guard against it: it happens once."""
    first = insert(WelcomeCount).values(day=params.day, welcomed=1)
    session.execute(
        first.on_conflict_do_update(
            index_elements=[WelcomeCount.day], set_={"welcomed": WelcomeCount.welcomed + 1}
        )
    )


def send_mail(recipient: str, subject: str, text: str) -> None:
    message = EmailMessage()
    message["From"] = "hello@example.org"
    message["To"] = recipient
    message["Subject"] = subject
    message["Message-ID"] = make_msgid(domain="example.org")
    message.set_content(text)
    server = urlsplit(SMTP_URL)
    # Without a name of our own to say hello with, smtplib would ask the DNS for one.
    with smtplib.SMTP(server.hostname, server.port, "app.example.org", timeout=10) as smtp:
        smtp.send_message(message)
