"""What the worker does: a function for each type of task.

DATABASE_URL=postgresql+psycopg://.. python -m pgtask_sa.worker signup.handlers:tasks
"""

from __future__ import annotations

import os
import smtplib
from dataclasses import dataclass
from datetime import timedelta
from email.message import EmailMessage
from email.utils import make_msgid
from urllib.parse import urlsplit

from pgtask_sa import Backoff, Discard, TaskRegistry, TaskSession
from sqlalchemy import func
from sqlalchemy.dialects.postgresql import insert

from signup.models import Task, Usr, WelcomeCount

SMTP_URL = os.environ.get("SMTP_URL", "smtp://127.0.0.1:8025")

tasks = TaskRegistry(task_class=Task)


@dataclass(frozen=True)
class Welcome:
    usr_id: int


# Half a second, one, two, four, .. and never more than a minute: a mail server that is away for
# a day is not the user's fault, so there are attempts enough for three days.
@tasks.handler(
    "SEND_EMAIL_WELCOME",
    max_attempts=5000,
    backoff=Backoff(base=0.5, maximum=timedelta(minutes=1)),
    timeout=timedelta(seconds=30),
)
def send_email_welcome(session: TaskSession, params: Welcome) -> None:
    """Welcome a new user. All of it is one transaction, the one in which the task is deleted."""
    usr = session.get(Usr, params.usr_id)
    if usr is None:
        raise Discard("the account was deleted in the meantime")
    usr.welcomed_at = func.now()
    session.enqueue(count_welcome, {})
    session.flush()
    # The irreversible step is the last one. Had anything above failed, no mail would be out. If
    # this fails, all of the above is undone, and the task is tried again. Only when the worker
    # dies after this line and before the commit is the mail sent a second time.
    send_mail(usr.email, "Welcome!", f"You are user number {usr.usr_id}.")


@tasks.handler("COUNT_WELCOME")
def count_welcome(session: TaskSession, params: dict) -> None:
    """Count a welcome. Adding one is no repeatable thing, and need not be: it happens once."""
    one = insert(WelcomeCount).values(day=func.current_date(), welcomed=1)
    session.execute(
        one.on_conflict_do_update(
            index_elements=["day"], set_={"welcomed": WelcomeCount.welcomed + 1}
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
    with smtplib.SMTP(server.hostname or "127.0.0.1", server.port or 25, timeout=10) as smtp:
        smtp.send_message(message)
