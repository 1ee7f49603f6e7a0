"""Notes of what the lanes of an event loop are about to run; see `presence`.

A note takes the server a moment, in which the other lanes go on: nothing waits for the answer but
the lane itself. What comes up while one note is under way travels together, and is committed once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any

from pgtask_sa.engines import EARS
from pgtask_sa.notes import Note
from pgtask_sa.presence import Presence
from pgtask_sa.settle import Claimed

PATIENCE = 0.002  # seconds that the loop may stand still while a thread works with the connection


class Scribe:
    """Writes the notes for all lanes of an event loop, on which all but `_landed` is called.

    Args:
        presence: the worker's entry.
    """

    def __init__(self, presence: Presence) -> None:
        self.presence = presence
        self._loop = asyncio.get_running_loop()
        self._due: list[tuple[Note, asyncio.Future[bool]]] = []  # for the next message
        self._sent: list[asyncio.Future[bool]] | None = None  # who waits for the one under way
        self._pgconn: Any = None  # where it is under way, or the one before was
        self._ear: int | None = None  # its socket, with a number of our own

    def note(self, lane: int, batch: Sequence[Claimed]) -> Awaitable[bool]:
        """Begin to commit what a lane is about to run, or that it runs nothing.

        Returns:
            To be awaited: whether it is committed; if not, a thread is to do it and will see why.
        """
        note = self.presence.draft(lane, batch)
        is_written = self._loop.create_future()
        self._due.append((note, is_written))
        if len(self._due) == 1 and self._sent is None:
            self._loop.call_soon(self._send)
        return is_written

    def close(self) -> None:
        """Listen no more; call it before the loop ends."""
        if self._ear is not None:
            self._loop.remove_reader(self._ear)
            EARS.discard(self._ear)
            os.close(self._ear)
        self._pgconn = self._ear = None

    def _send(self) -> None:
        """Send what is due, but for lanes that have been cut off."""
        due = [each for each in self._due if not each[1].done()]
        self._due = []
        if not due:
            return
        notes = [note for note, _ in due]
        self._sent = [is_written for _, is_written in due]
        if not self.presence.send(notes, self._landed, self._listen, PATIENCE):
            self._tell([False] * len(due))

    # A thread that finds the connection dead may close it, and what is opened next, also by a
    # handler on this loop, is given the same number. So the loop listens at one of its own.

    def _listen(self, pgconn: Any) -> None:
        if pgconn is not self._pgconn:
            self.close()
            self._ear = os.dup(pgconn.socket)
            EARS.add(self._ear)
            self._pgconn = pgconn
            self._loop.add_reader(self._ear, self._see)

    def _see(self) -> None:
        if self._sent is None:  # it is for a thread, or the connection is closed
            self.close()
            return
        written = self.presence.see(self._landed)
        if written is not None:
            self._tell(written)

    def _landed(self, written: list[bool]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._tell, written)

    def _tell(self, written: list[bool]) -> None:
        """Tell the lanes which notes were written, and send what has come up meanwhile."""
        waiting, self._sent = self._sent or [], None
        for is_written, done in zip(waiting, written, strict=True):
            if not is_written.done():
                is_written.set_result(done)
        self._send()
