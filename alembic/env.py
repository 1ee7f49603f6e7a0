"""The environment of our own migrations, for the ``alembic`` command and `pgtask_sa.migrations`."""

import logging

from alembic import context
from alembic.util import CommandError

from pgtask_sa import migrations
from pgtask_sa.errors import TaskError

_at_a_terminal = context.config.cmd_opts is not None

if _at_a_terminal:
    logging.basicConfig(format="%(levelname)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.INFO)

try:
    migrations.run_environment(context)
except TaskError as error:
    if not _at_a_terminal:
        raise
    # alembic prints its own kind of error in one line, any other with a traceback
    raise CommandError(str(error)) from error
