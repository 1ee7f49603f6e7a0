"""The whole walk: people sign up over HTTP, and a worker sends their welcome e-mails.

python examples/signup/demo.py [--people N]

Starts a PostgreSQL server of its own, migrates it, and starts the web application, a worker and a
mail server. Then it makes trouble. What came of it is counted at the end, and checked.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import httpx
from smtp_sink import SmtpSink
from sqlalchemy import Engine, create_engine, text
from stage import DemoError, Program, WorkerProgram, wait_for
from story import Check, Story

from postgres_server import PostgresServer  # isort: skip - stage.py made it importable

P = TypeVar("P", bound=Program)

AT_ONCE = 4
UNKNOWN = "SEND_EMAIL_GOODBYE"
RUNNING = "select application_name from pg_stat_activity where application_name like 'pgtask %'"


@dataclass(frozen=True)
class Answer:
    """What the web application answered to a signup."""

    email: str
    status: int
    cookie: str | None
    seconds: float
    at: float  # as time.monotonic() has it


class Demo:
    """Everything on the stage, and the chapters of the play."""

    def __init__(self, story: Story, people: int) -> None:
        self.story = story
        self.stack = ExitStack()
        self.programs: list[Program] = []
        self.people = people
        self.answers: list[Answer] = []
        self.checks: list[Check] = []

    # -- the stage -------------------------------------------------------------------------------

    def set_up(self) -> None:
        self.story.chapter("Setting up")
        server = self.stack.enter_context(PostgresServer())
        self.story.tell("postgres", f"PostgreSQL {server.version} on port {server.port}")
        self.sink = SmtpSink()
        self.stack.callback(self.sink.close)
        self.sink.switch_on()
        self.story.tell("mail", f"a mail server that keeps what it gets: {self.sink.url}")
        self.env = {"DATABASE_URL": server.url(), "SMTP_URL": self.sink.url}
        self.engine = self._engine(server.url())
        self._migrate()
        self._start_web()
        self.worker = self._start_worker()

    def _engine(self, url: str) -> Engine:
        engine = create_engine(url, isolation_level="AUTOCOMMIT")
        self.stack.callback(engine.dispose)
        return engine

    def _watch(self, program: P) -> P:
        self.programs.append(program)
        self.stack.callback(program.close)
        return program

    def last_words(self) -> str:
        """What our programs printed last, to find out why something did not happen."""
        ends = [[f"-- {p.name}:", *p.lines[-10:]] for p in self.programs]
        return "\n".join(line for end in ends for line in end)

    def _run(self, *arguments: str) -> list[str]:
        """Run a command to its end, which must be a good one; return what it printed."""
        program = self._watch(Program(*arguments, env=self.env))
        if program.wait() != 0:
            raise DemoError(f"{program.name} failed")
        return program.lines

    def _migrate(self) -> None:
        self._run("alembic", "-c", "signup/alembic.ini", "upgrade", "head")
        self.story.tell("alembic", "upgrade head: usr, welcome_count, task and dead_task are there")

    def _start_web(self) -> None:
        self.web = self._watch(
            Program("uvicorn", "signup.app:app", "--port", "0", "--no-access-log", env=self.env)
        )
        url = self.web.find(r"running on (http://\S+)")[1]
        # No proxy: somebody's HTTP_PROXY is not meant for this.
        self.http = httpx.Client(base_url=url, trust_env=False, timeout=20)
        self.stack.callback(self.http.close)
        self.story.tell("web", f"the application serves {url}")

    def _start_worker(self) -> WorkerProgram:
        worker = self._watch(WorkerProgram(self.story.hear, self.env))
        worker.find("worker started")
        self.story.tell("worker", f"a worker is up, process {worker.process.pid}")
        return worker

    # -- what people do --------------------------------------------------------------------------

    def sign_up(self, number: int) -> Answer:
        email = f"user{number}@example.org"
        start = time.monotonic()
        # The password is the same for all, for what matters here is how long hashing one takes.
        got = self.http.post("/signup", json={"email": email, "password": "correct horse"})
        now = time.monotonic()
        answer = Answer(email, got.status_code, got.cookies.get("usr_id"), now - start, now)
        self.answers.append(answer)
        return answer

    def sign_up_and_tell(self, number: int) -> Answer:
        answer = self.sign_up(number)
        self.story.tell(
            "web", f"{answer.email} signed up: {answer.status} in {answer.seconds * 1000:.0f} ms"
        )
        return answer

    def sql(self, statement: str, **values: Any) -> Any:
        """Run a statement; return the first value of the first row, if there is one."""
        with self.engine.connect() as connection:
            result = connection.execute(text(statement), values)
            return result.scalar() if result.returns_rows else None

    def mails_to(self, email: str) -> int:
        return sum(mail.recipient == email for mail in list(self.sink.mails))

    def check(self, what: str, expected: object, actual: object) -> None:
        self.checks.append(Check(what, expected, actual))

    def wait_until_welcomed(self, count: int) -> None:
        wait_for(
            lambda: self.sql("select sum(welcomed) from welcome_count") == count,
            f"{count} welcomes counted",
        )

    # -- the chapters ----------------------------------------------------------------------------

    def rush(self) -> None:
        self.story.chapter(f"{self.people} people sign up, {AT_ONCE} at a time")
        with ThreadPoolExecutor(AT_ONCE) as crowd:
            answers = list(crowd.map(self.sign_up, range(1, self.people + 1)))
        self._tell_times(answers)
        wait_for(lambda: len(self.sink.mails) >= self.people, f"{self.people} e-mails")
        self.wait_until_welcomed(self.people)
        received = {mail.recipient: mail.received_at for mail in self.sink.mails}
        waits = [max(0.0, received[answer.email] - answer.at) for answer in answers]
        self.story.tell(
            "mail",
            f"{len(self.sink.mails)} e-mails received; after the answer it took {_times(waits)}",
        )

    def _tell_times(self, answers: list[Answer]) -> None:
        statuses = ", ".join(f"{n} x {s}" for s, n in Counter(a.status for a in answers).items())
        times = _times([answer.seconds for answer in answers])
        self.story.tell("web", f"answered {statuses} in {times}; that includes the hashing")

    def mail_server_down(self) -> None:
        self.story.chapter("Somebody signs up while the mail server is down")
        self.story.tell_done = True
        self.sink.switch_off()
        self.story.tell("mail", "the mail server is switched off", "yellow")
        answer = self.sign_up_and_tell(self.people + 1)
        wait_for(lambda: self.worker.count("task.retry") >= 2, "two attempts that fail")
        marked = "select count(*) from usr where email = :email and welcomed_at is not null"
        self.check("marks of attempts that failed", 0, self.sql(marked, email=answer.email))
        follow_ups = "select count(*) from task where task_type = 'COUNT_WELCOME'"
        self.check("follow-up tasks of attempts that failed", 0, self.sql(follow_ups))
        self.sink.switch_on()
        self.story.tell("mail", "the mail server is back")
        self._wait_for_mail(answer.email)
        self.wait_until_welcomed(self.people + 1)

    def _wait_for_mail(self, email: str, count: int = 1) -> None:
        wait_for(lambda: self.mails_to(email) >= count, f"mail to {email}")
        self.story.tell("mail", f"e-mail to {email} received")

    def duplicate(self) -> None:
        self.story.chapter("Somebody signs up a second time")
        answer = self.sign_up_and_tell(1)
        self.check("answer to the duplicate", 409, answer.status)
        self.check("tasks of the duplicate", 0, self.sql("select count(*) from task"))
        self.story.tell("web", "no new row in usr, and so none in task")

    def kill_the_worker(self) -> None:
        self.story.chapter("The worker is killed in the middle of a handler")
        self.sink.hold_next()
        self.story.tell("mail", "the mail server will take the next e-mail in, and not confirm it")
        answer = self.sign_up_and_tell(self.people + 2)
        self._wait_for_mail(answer.email)
        running = (
            "select application_name from pg_stat_activity where application_name ~ '^pgtask '"
        )
        wait_for(lambda: self.sql(running), "the task shows in pg_stat_activity")
        self.story.tell("postgres", f"pg_stat_activity shows what runs: {self.sql(running)}")
        self.worker.kill()
        killed = time.monotonic()
        self.story.tell("worker", "killed with SIGKILL, the transaction still open", "yellow")
        wait_for(lambda: self.sql("select 1 from task for update skip locked"), "the task is free")
        free = time.monotonic() - killed
        self.story.tell("postgres", f"the task is free again {free * 1000:.0f} ms after the kill")
        self.worker = self._start_worker()
        self._wait_for_mail(answer.email, 2)
        self.wait_until_welcomed(self.people + 2)
        again = "sent again: the first worker died before it could commit"
        self.story.tell("mail", f"{again}. In the database it happened once")

    def unknown_type(self) -> None:
        self.story.chapter("A task arrives that nobody has written a handler for")
        insert = f"insert into task (task_type, params) values ('{UNKNOWN}', '{{\"usr_id\": 1}}')"
        self.sql(insert)
        self.story.tell("psql", insert)
        wait_for(lambda: self.worker.count("task.unhandled"), "the worker reports the type")
        todo = self._run("pgtask_sa", "todo", "signup.handlers:tasks")
        self.check("types on the todo list", 1, sum(UNKNOWN in line for line in todo))
        for line in ["python -m pgtask_sa todo signup.handlers:tasks", *todo]:
            self.story.tell("shell", line)

    def close_down(self) -> None:
        self.story.chapter("Closing down")
        self.check("exit code of the worker after SIGTERM", 0, self.worker.stop())
        self.story.tell("worker", "SIGTERM: finished what it had, and ended")
        self.web.stop()

    # -- the end ---------------------------------------------------------------------------------

    def count_up(self) -> None:
        people = self.people + 2
        statuses = Counter(answer.status for answer in self.answers)
        cookies = {int(answer.cookie) for answer in self.answers if answer.cookie}
        self.check("answers to signups", {204: people, 409: 1}, dict(statuses))
        self.check("users", people, self.sql("select count(*) from usr"))
        self.check("usr_id cookies that name a user", people, self._count_users(cookies))
        self._count_mails(f"user{people}@example.org")
        self._count_tables(people)

    def _count_mails(self, killed: str) -> None:
        """Exactly one for each user, but two where the worker died between mail and commit."""
        mails = Counter(mail.recipient for mail in self.sink.mails)
        odd = {email: count for email, count in mails.items() if count != 1}
        self.check("people who got an e-mail", self.people + 2, len(mails))
        self.check("people who did not get exactly one", {killed: 2}, odd)

    def _count_users(self, ids: set[int]) -> int:
        return int(self.sql("select count(*) from usr where usr_id = any(:ids)", ids=list(ids)))

    def _count_tables(self, people: int) -> None:
        welcomed = "select count(*) from usr where welcomed_at is not null"
        self.check("users marked as welcomed", people, self.sql(welcomed))
        counted = self.sql("select sum(welcomed) from welcome_count")
        self.check("welcomes counted, each exactly once", people, counted)
        left = "select string_agg(task_type, ', ') from task"
        self.check("tasks left", UNKNOWN, self.sql(left))
        self.check("dead tasks", 0, self.sql("select count(*) from dead_task"))

    def play(self) -> None:
        self.set_up()
        self.rush()
        self.mail_server_down()
        self.duplicate()
        self.kill_the_worker()
        self.unknown_type()
        self.close_down()
        self.count_up()


def _times(seconds: list[float]) -> str:
    return f"{median(seconds) * 1000:.0f} ms (median), {max(seconds) * 1000:.0f} ms (at most)"


def verdict(story: Story, checks: list[Check]) -> int:
    story.show(checks)
    wrong = [check for check in checks if not check.holds]
    for check in wrong:
        print(f"WRONG: {check.what}: expected {check.expected}, counted {check.actual}")
    if not wrong:
        print(f"All {len(checks)} checks hold.")
    return 1 if wrong else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--people", type=int, default=20, metavar="N", help="in the rush (20)")
    people = parser.parse_args(argv).people
    # A shell starts its background jobs with SIGINT ignored; `kill -INT` shall work there too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    demo = Demo(Story(), people)
    try:
        with demo.stack:
            demo.play()
    except DemoError as error:
        print(f"FAILED: {error}", demo.last_words(), sep="\n")
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; everything is cleaned up")
        return 130
    return verdict(demo.story, demo.checks)


if __name__ == "__main__":
    sys.exit(main())
