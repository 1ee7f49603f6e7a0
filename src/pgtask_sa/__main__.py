"""``python -m pgtask_sa``."""

import sys

from pgtask_sa.cli import main

sys.exit(main())
