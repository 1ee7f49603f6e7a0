"""A worker that is killed in the middle of enforcing a deadline."""

from __future__ import annotations

import os
import signal
import time

from sqlalchemy import text

from pgtask_sa import TaskRegistry
from pgtask_sa.enforcement import Enforcer

tasks = TaskRegistry()


def _die(*_: object) -> bool:
    os.kill(os.getpid(), signal.SIGKILL)
    return False


Enforcer._take = _die  # type: ignore[method-assign]


@tasks.handler("STUCK", max_attempts=5, timeout=0.3)
def stuck(session, params):
    session.execute(text("insert into done (i) values (-1)"))
    time.sleep(60)
