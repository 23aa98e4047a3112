"""The socket pair between the analysis and its ingest process.

On the wire, both ways: u32 length, u8 kind, body. The kinds are below.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time

_FRAME = struct.Struct("<IB")
ITEMS, STATS, PORT, PROBLEM, CROWDED = range(5)  # from the child
STRIDE, START, STOP, LOG, ORIGINS = range(5)  # to the child
START_SECONDS = 30.0  # until the other end must have answered the first message


class Link:
    """One end of the socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._buffer = bytearray()

    def send(self, kind: int, body: bytes = b"") -> None:
        """Blocks while the other end does not read. Raises OSError once it has ended."""
        with self._lock:
            self._sock.sendall(_FRAME.pack(len(body), kind) + body)

    def receive(self, timeout: float | None) -> tuple[int, bytes] | None:
        """The next message; None after `timeout` seconds. Raises EOFError at the end."""
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            if len(self._buffer) >= _FRAME.size:
                size, kind = _FRAME.unpack_from(self._buffer)
                if len(self._buffer) >= _FRAME.size + size:
                    body = bytes(memoryview(self._buffer)[_FRAME.size : _FRAME.size + size])
                    del self._buffer[: _FRAME.size + size]
                    return kind, body
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._sock], [], [], left)[0]:
                return None
            data = self._sock.recv(1 << 20)
            if not data:
                raise EOFError
            self._buffer += data

    def close(self) -> None:
        self._sock.close()
