"""Clean up after a process that may be killed before it can clean up after itself.

A `finally`, an `atexit` and a signal handler all miss SIGKILL and `os._exit`, and a database server
or a worker that outlives its test run keeps a port, memory and connections. A guardian is a small
shell that waits at the end of a pipe: the kernel closes the pipe when the process dies, whatever it
died of.
"""

from __future__ import annotations

import subprocess


class Guardian:
    """Runs a shell script once this process is gone, unless dismissed before.

    The script sees `arguments` as `$1`, `$2`, ..
    """

    def __init__(self, script: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            # `read` is a builtin, so that the shell itself holds the pipe and nothing is left
            # behind.
            ["/bin/sh", "-c", f"read -r _\n{script}", "guardian", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            # A Ctrl-C at the terminal goes to the whole foreground group and must not end the
            # guardian.
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Send the guardian away: its charge has ended in good order."""
        # Kill first: closing the pipe is the signal to run the script.
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
