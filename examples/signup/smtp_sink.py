"""A mail server that keeps what it gets; it can be switched off, or made to hang."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from aiosmtpd.smtp import SMTP, Envelope

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Mail:
    recipient: str
    received_at: float  # as time.monotonic() has it


class SmtpSink:
    """Listens on one port for all its life, on an event loop in a thread."""

    def __init__(self) -> None:
        self.mails: list[Mail] = []
        self._hold_next = False
        self._socket = _bound_socket(0)
        self.port: int = self._socket.getsockname()[1]
        self._server: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="smtp sink", daemon=True).start()

    @property
    def url(self) -> str:
        return f"smtp://{HOST}:{self.port}"

    def switch_on(self) -> None:
        self._run(self._listen())

    def switch_off(self) -> None:
        """Refuse connections, and keep the port all the same: nobody else may answer there."""
        self._run(self._stop_listening())

    def hold_next(self) -> None:
        """Take one more mail in, and then never say so."""
        self._hold_next = True

    def close(self) -> None:
        self._run(self._stop_listening())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._socket.close()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=5)

    async def _listen(self) -> None:
        self._server = await self._loop.create_server(self._protocol, sock=self._socket)

    async def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
            self._socket = _bound_socket(self.port)

    def _protocol(self) -> SMTP:
        return SMTP(self, hostname="mail.example.org", loop=self._loop)

    # Called by aiosmtpd when a mail has arrived, which is why it has this name.
    async def handle_DATA(self, _server: SMTP, _session: object, envelope: Envelope) -> str:  # noqa: N802
        now = time.monotonic()
        self.mails += [Mail(recipient, now) for recipient in envelope.rcpt_tos]
        if self._hold_next:
            self._hold_next = False
            await asyncio.Event().wait()  # until the client goes away
        return "250 it is kept"


def _bound_socket(port: int) -> socket.socket:
    """Return a socket that has its port but does not listen yet: connections are refused."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((HOST, port))
    return bound
