"""A peer file for the side-by-side benchmark of Postgres task queues: this library.

Copy it into that harness as `peers/pgtask.py`, and add two lines to its `venvs.json`: the peer
`"pgtask": "pgtask"`, and the venv `"pgtask": ["-e", "<this repository>", "uvloop"]`.
It runs tasks one by one, a commit each, as a worker does by default; `BENCH_TUNE=100 run_all.py ..`
drains in batches of 100. `bench.py --peers results.jsonl` makes lines of our table of its results:
of the best batches, and of one by one.
"""

import benchlib as b
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker

from pgtask_sa import Task, TaskRegistry, TaskSession, Worker

BATCH = b.tune(1)
# Single tasks wait for their commits, and other lanes work meanwhile. Batches are bound by Python:
# a second lane claims while the first one works, a third would only be in the way.
LANES = 4 if BATCH == 1 else 2
META = {
    "name": "pgtask_sa",
    "dists": ["pgtask_sa", "sqlalchemy", "psycopg"],
    "services": ["postgres"],
    "atomic": "yes",
    "unfinished": "select exists (select from task)",
    "n_drain": 20_000 if BATCH == 1 else 100_000,
    "config": f"batch_size {BATCH}, concurrency {LANES}, order fair, sync handlers in threads",
}

tasks = TaskRegistry()
INSERT_ROW = text(b.SQL_ROW.replace("%s", ":i"))


@tasks.handler("noop")
def noop(session, params):
    b.hit()


@tasks.handler("stamp")
def stamp(session, params):
    b.stamp(params["i"])


@tasks.handler("row")
def row(session, params):
    session.execute(INSERT_ROW, params)
    b.hit()


def reset():
    engine = create_engine(b.sa_dsn())
    Task.metadata.create_all(engine)
    engine.dispose()


def producer():
    engine = create_engine(b.sa_dsn())
    session_class = sessionmaker(engine, class_=TaskSession)

    def send(task, i):
        with session_class.begin() as session:
            session.enqueue(task, {"i": i})

    yield send
    engine.dispose()


session_producer = producer


def bulk(n, task):
    engine = create_engine(b.sa_dsn())
    with sessionmaker(engine, class_=TaskSession).begin() as session:
        session.enqueue_many(task, ({"i": i} for i in range(n)))
    engine.dispose()


def preload(n, task):
    b.sql(
        "insert into task (task_type, params) select %s, jsonb_build_object('i', g)"
        " from generate_series(0, %s) g",
        task,
        n - 1,
    )


def worker():
    Worker(tasks, b.sa_dsn(), concurrency=LANES, batch_size=BATCH).run()
