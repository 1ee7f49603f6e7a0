"""A TCP proxy between a client and the server, which fails in the ways in which networks fail."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import Counter
from typing import TYPE_CHECKING, Literal

from sqlalchemy import make_url

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

Direction = Literal["up", "down"]
"""`up` is from the client to the server, `down` is from the server to the client."""

# SO_LINGER with a time of zero: close() sends a reset, as a crashed peer or a firewall does.
_RESET = struct.pack("ii", 1, 0)


class _Connection:
    """One client's connection and the one opened for it to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.closed = False
        # Half-closed: each side is left alone with what it believes.
        self.torn = False

    def ends(self, direction: Direction) -> tuple[socket.socket, socket.socket]:
        """Return where the bytes of this direction come from and where they go."""
        return (self.client, self.server) if direction == "up" else (self.server, self.client)

    def close(self, *, reset: bool) -> None:
        """Close both sides, and wake the threads that read from them."""
        self.closed = True
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                if reset:
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                else:
                    end.shutdown(socket.SHUT_RDWR)
            # A close() alone leaves a recv() of another thread asleep, and the reset unsent until
            # then.
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RD)
            end.close()


class TcpProxy:
    """Forwards connections to `host:port` from a free port of 127.0.0.1, until told otherwise.

    Counters: `accepted` (connections ever taken), `refused`, `open` (connections now), and
    `bytes["up"]`, `bytes["down"]` (what was passed on).
    """

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self.accepted = 0
        self.refused = 0
        self.bytes: Counter[Direction] = Counter()
        self._connections: list[_Connection] = []
        self._stalled: set[Direction] = set()
        self._refusing = False
        self._closed = False
        # Guards all of the above, and wakes the threads that a stall holds.
        self._change = threading.Condition()

    @classmethod
    def before(cls, url: str) -> Self:
        """Return a proxy in front of the server that a SQLAlchemy URL names."""
        parsed = make_url(url)
        return cls(parsed.host or "127.0.0.1", parsed.port or 5432)

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._spawn(self._accept)
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._change:
            self._closed = True
        # Wakes the accept() of the other thread, which a close() alone does not do on Linux.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.drop_all()

    def url(self, url: str) -> str:
        """Return the same SQLAlchemy URL, leading through this proxy."""
        through = make_url(url).set(host="127.0.0.1", port=self.port)
        return through.render_as_string(hide_password=False)

    @property
    def open(self) -> int:
        """The number of connections that are open now."""
        with self._change:
            return len(self._connections)

    def stall(self, direction: Direction | Literal["both"] = "both") -> None:
        """Pass nothing on from now on; connections stay open, as when a cable is pulled.

        Stalled `down`, what the client sends still reaches the server, and the answer is lost: the
        way to a commit whose outcome the client does not learn.
        """
        with self._change:
            self._stalled |= {"up", "down"} if direction == "both" else {direction}

    def resume(self) -> None:
        """End the stall; what was held back arrives now."""
        with self._change:
            self._stalled.clear()
            self._change.notify_all()

    def refuse(self, refusing: bool = True) -> None:
        """Reset each new connection at once (or no longer); the open ones are left alone."""
        with self._change:
            self._refusing = refusing

    def drop_all(self, *, reset: bool = True) -> None:
        """Close every open connection on both sides, by a reset or in good order."""
        with self._change:
            dropped, self._connections = self._connections, []
            for connection in dropped:
                connection.close(reset=reset)
            self._change.notify_all()

    def half_close(self, side: Literal["client", "server"] = "client") -> None:
        """Tell one side of each connection that the other has ended, while the other knows nothing.

        With `client` the client finds its connection gone, and the server keeps a session that
        nobody will ever use again; with `server` it is the other way round.
        """
        with self._change:
            for connection in self._connections:
                connection.torn = True
                end = connection.client if side == "client" else connection.server
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_WR)

    def _spawn(self, target: Callable[..., None], *args: object) -> None:
        name = f"proxy {self.port}"
        threading.Thread(target=target, args=args, name=name, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._admit(client)

    def _admit(self, client: socket.socket) -> None:
        with self._change:
            refuse = self._refusing or self._closed
        server = None if refuse else self._connect()
        if server is None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            client.close()
            self.refused += 1
            return
        connection = _Connection(client, server)
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._change:
            if self._closed:
                connection.close(reset=True)
                return
            self.accepted += 1
            self._connections.append(connection)
        self._spawn(self._pump, connection, "up")
        self._spawn(self._pump, connection, "down")

    def _connect(self) -> socket.socket | None:
        try:
            server = socket.create_connection(self.target, timeout=5)
        except OSError:
            return None
        # The time limit was for connecting; a quiet connection is none that failed.
        server.settimeout(None)
        return server

    def _pump(self, connection: _Connection, direction: Direction) -> None:
        source, sink = connection.ends(direction)
        with contextlib.suppress(OSError):
            while data := self._receive(connection, direction, source):
                sink.sendall(data)
                with self._change:
                    self.bytes[direction] += len(data)
        self._end(connection)

    def _receive(
        self, connection: _Connection, direction: Direction, source: socket.socket
    ) -> bytes:
        data = source.recv(65536)
        # Only after recv(): a stall that begins while we wait there must hold what comes next, and
        # the end of the connection as well.
        with self._change:
            self._change.wait_for(lambda: connection.closed or direction not in self._stalled)
        return b"" if connection.closed else data

    def _end(self, connection: _Connection) -> None:
        with self._change:
            if connection in self._connections and not connection.torn:
                self._connections.remove(connection)
                connection.close(reset=False)
                self._change.notify_all()
