"""The handlers of test_progress.py."""

from pgtask_sa import TaskRegistry

tasks = TaskRegistry()


@tasks.handler("NOTHING")
def nothing(session, params):
    pass
