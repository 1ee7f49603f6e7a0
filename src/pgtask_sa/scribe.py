"""Notes of what the lanes of an event loop are about to run; see `presence`.

A note takes the server a moment, in which the other lanes go on: nothing waits for the answer but
the lane itself. What several lanes have to note in one turn of the loop travels together, and is
committed once.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress

from pgtask_sa.notes import Note
from pgtask_sa.presence import Presence
from pgtask_sa.settle import Claimed

PATIENCE = 0.002  # seconds that the loop may stand still while a thread works with the connection


class Scribe:
    """Writes the notes for all lanes of an event loop. All but `_landed` is called on that loop.

    Args:
        presence: the worker's entry.
    """

    def __init__(self, presence: Presence) -> None:
        self.presence = presence
        self._loop = asyncio.get_running_loop()
        self._due: list[tuple[Note, asyncio.Future[bool]]] = []  # for the next message
        self._sent: list[asyncio.Future[bool]] | None = None  # who waits for the one under way
        self._ear: int | None = None

    async def note(self, lane: int, batch: Sequence[Claimed]) -> None:
        """Commit what a lane is about to run, or that it runs nothing.

        Raises:
            psycopg.Error: it could not be committed; nothing of it may be run.
        """
        if not self.presence.is_noting:
            return
        note = self.presence.draft(lane, batch)
        is_written = self._loop.create_future()
        self._due.append((note, is_written))
        if len(self._due) == 1 and self._sent is None:
            self._loop.call_soon(self._send)
        if not await is_written:
            await asyncio.to_thread(self.presence.write, note)

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

    def _listen(self, socket: int) -> None:
        # With a number of our own: a thread that finds the connection dead may close it, and what
        # is opened next, also by a handler on this loop, is given the same number.
        self._ear = os.dup(socket)
        self._loop.add_reader(self._ear, self._see)

    def _see(self) -> None:
        written = self.presence.see()
        if written is not None:
            self._tell(written)

    def _landed(self, written: list[bool]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._tell, written)

    def _tell(self, written: list[bool]) -> None:
        """Tell the lanes which notes were written, and send what has come up meanwhile."""
        if self._ear is not None:
            self._loop.remove_reader(self._ear)
            os.close(self._ear)
            self._ear = None
        waiting, self._sent = self._sent or [], None
        for is_written, done in zip(waiting, written, strict=True):
            if not is_written.done():
                is_written.set_result(done)
        self._send()
