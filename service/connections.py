"""HTTP connections, all of them in one thread: who is silent or slow holds up nobody else.

That thread accepts, shakes hands (TLS), reads until the head of a request is whole, and writes the
answer as fast as the other end takes it. Workers see whole requests only, and never a socket. Each
of these steps has a time for all of it. Connections are bounded in number: beyond it, the address
that has most of them gives up those that have waited longest, and what sends its request at once
never waits long.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal

log = logging.getLogger(__name__)

HEAD_BYTES = 16_384  # of a request; nothing here reads a body
BACKLOG = 128
ACCEPT_AT_ONCE = 64
WRITES_AT_ONCE = 16
WRITE_BYTES = 65_536
ANSWER_TIMES = 3  # as long as for a request
ANSWERS_BYTES = 128 << 20  # that wait to be taken; of thousands of ranks a page has tens of MB
LINGER_SECONDS = 2.0  # for the other end to read the last answer
LOOK_SECONDS = 0.5  # between two looks at who is overdue
GIVE_UP_SHARE = 8  # an address gives up so big a part of its connections at a time

# Why a connection was closed before it had its answer: keys of `refused`.
CAUSES = ("silent", "slow", "slow_reader", "oversized", "crowded", "certificate")

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@dataclass(frozen=True)
class Request:
    head: bytes  # from the request line to the empty line
    address: str  # of the other end
    port: int
    tls: ssl.SSLSocket | None  # for its certificate


@dataclass(frozen=True)
class Answer:
    parts: Sequence[bytes]
    keep: bool = False  # the connection, for another request


_TOO_LARGE = Answer(
    [
        b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
        b"Content-Length: 0\r\nConnection: close\r\n\r\n"
    ]
)
_FAILED = Answer(
    [b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"]
)


@dataclass(eq=False, slots=True)
class _Connection:
    sock: socket.socket
    address: str
    port: int
    state: Literal["handshake", "read", "busy", "write", "end"]
    due: float
    since: float  # it waits
    events: int = 0  # what the selector looks for
    heard: bool = False  # anything
    fresh: bool = True  # had no answer yet
    keep: bool = False
    received: bytearray = field(default_factory=bytearray)
    out: deque[memoryview] = field(default_factory=deque)


class Connections:
    """start(); stop(). Takes the listening socket over."""

    def __init__(
        self,
        listener: socket.socket,
        answer: Callable[[Request], Answer],
        *,
        refused: Counter[str],
        context: Callable[[], ssl.SSLContext | None],
        threads: int,
        seconds: float,
        most: int,
    ) -> None:
        """answer: called in one of so many threads. refused: counts by CAUSES. context: for a new
        connection, None for plain text. seconds: for a whole request. most: connections."""
        self._listener, self._answer, self._context = listener, answer, context
        self._refused, self._seconds, self._most = refused, seconds, most
        self._open: dict[_Connection, None] = {}
        self._peers: Counter[str] = Counter()
        self._asked: SimpleQueue[_Connection | None] = SimpleQueue()
        self._answered: deque[tuple[_Connection, Answer]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, _READ, listener)
        self._selector.register(self._wake, _READ)
        self._stop_at: float | None = None
        self._look_at = 0.0
        self._workers = [
            threading.Thread(target=self._work, name=f"http-{n}", daemon=True)
            for n in range(threads)
        ]
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def start(self) -> None:
        for thread in (*self._workers, self._thread):
            thread.start()

    def stop(self, seconds: float) -> None:
        """Answers what was asked, within so many seconds, then closes all. Idempotent."""
        if self._stop_at is not None:
            return
        self._stop_at = time.monotonic() + seconds
        if not self._thread.ident:
            self._close_all()
            os.close(self._wake)
            return
        os.eventfd_write(self._wake, 1)
        self._thread.join(seconds + 1)
        for worker in self._workers:
            worker.join(0.1)
        if not any(thread.is_alive() for thread in (*self._workers, self._thread)):
            os.close(self._wake)  # not before: its number would be somebody else's

    # ---- workers

    def _work(self) -> None:
        while (conn := self._asked.get()) is not None:
            tls = conn.sock if isinstance(conn.sock, ssl.SSLSocket) else None
            request = Request(bytes(conn.received), conn.address, conn.port, tls)
            try:
                answer = self._answer(request)
            except Exception:
                log.exception("http: a request failed")
                answer = _FAILED
            self._answered.append((conn, answer))
            os.eventfd_write(self._wake, 1)

    # ---- the one thread

    def _run(self) -> None:
        try:
            while not self._ended():
                try:
                    self._turn()
                except Exception:  # of one connection, or a certificate: the others go on
                    log.exception("http: a turn failed")
                    time.sleep(LOOK_SECONDS / 10)
        finally:
            self._close_all()

    def _turn(self) -> None:
        for key, _ in self._selector.select(LOOK_SECONDS if self._open else None):
            if key.data is self._listener:
                self._accept()
            elif key.data is None:
                os.eventfd_read(self._wake)
            elif key.data in self._open:  # not closed in this turn
                key.data.heard = True
                self._advance(key.data)
        while self._answered:
            self._hand_out(*self._answered.popleft())
        self._end_overdue()

    def _ended(self) -> bool:
        if self._stop_at is None:
            return False
        busy = any(conn.state in ("busy", "write") for conn in self._open)
        return not busy or time.monotonic() >= self._stop_at

    def _accept(self) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            try:
                sock, (address, port, *_) = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                log.warning("http: cannot accept", extra={"reason": str(error)})
                if not self._make_room():  # it may want for descriptors
                    time.sleep(LOOK_SECONDS / 10)
                return
            if len(self._open) < self._most or self._make_room():
                self._take(sock, address, port)
            else:  # all others are being answered
                self._refused["crowded"] += 1
                sock.close()

    def _take(self, sock: socket.socket, address: str, port: int) -> None:
        state: Literal["handshake", "read"] = "read"
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if (context := self._context()) is not None:
                sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
                state = "handshake"
        except OSError:  # gone again
            sock.close()
            return
        now = time.monotonic()
        conn = _Connection(sock, address, port, state, due=now + self._seconds, since=now)
        self._open[conn] = None
        self._peers[address] += 1
        self._watch(conn, _READ)

    def _make_room(self) -> bool:
        """Of the address that has most; False where all are being answered."""
        waiting = [conn for conn in self._open if conn.state != "busy"]
        if not waiting:
            return False
        address = max(waiting, key=lambda conn: self._peers[conn.address]).address
        of_it = sorted((c for c in waiting if c.address == address), key=lambda c: c.since)
        for conn in of_it[: max(1, len(of_it) // GIVE_UP_SHARE)]:
            self._refused["crowded"] += 1
            self._close(conn)
        return True

    def _advance(self, conn: _Connection) -> None:
        """As far as it goes without waiting."""
        try:
            if conn.state == "handshake":
                conn.sock.do_handshake()  # type: ignore[attr-defined]
                conn.state = "read"
            if conn.state == "read":
                self._read(conn)
            elif conn.state == "write":
                self._write(conn)
            elif conn.state == "end" and not socket.socket.recv(conn.sock, WRITE_BYTES):
                self._close(conn)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wants:
            self._watch(conn, _READ if isinstance(wants, ssl.SSLWantReadError) else _WRITE)
        except BlockingIOError:
            self._watch(conn, _WRITE if conn.state == "write" else _READ)
        except OSError as error:
            if conn.state == "handshake" and not isinstance(error, ssl.SSLEOFError):
                self._shaken_off(conn, error)
            self._close(conn)
        except Exception:
            log.exception("http: a connection failed")
            self._close(conn)

    def _shaken_off(self, conn: _Connection, error: OSError) -> None:
        if isinstance(error, ssl.SSLError):
            self._refused["certificate"] += 1
            log.warning(
                "http: TLS handshake failed",
                extra={"peer": conn.address, "reason": str(error)[:200]},
            )

    def _read(self, conn: _Connection) -> None:
        while data := conn.sock.recv(HEAD_BYTES):
            before = len(conn.received)
            conn.received += data
            end = conn.received.find(b"\r\n\r\n", max(0, before - 3)) + 4
            if end < 4 and len(conn.received) <= HEAD_BYTES:
                continue
            self._watch(conn, 0)
            if end < 4 or end > HEAD_BYTES:
                self._refused["oversized"] += 1
                self._hand_out(conn, _TOO_LARGE)
                return
            # More than a head: a body, or a request before the last one's answer.
            conn.keep = len(conn.received) == end
            del conn.received[end:]
            conn.state = "busy"
            self._asked.put(conn)
            return
        self._close(conn)

    def _hand_out(self, conn: _Connection, answer: Answer) -> None:
        if conn not in self._open:
            return
        conn.out.extend(memoryview(part) for part in answer.parts if part)
        conn.keep = conn.keep and answer.keep
        conn.state, conn.since = "write", time.monotonic()
        conn.due = conn.since + ANSWER_TIMES * self._seconds
        self._advance(conn)
        self._bound_answers()

    def _bound_answers(self) -> None:
        """Those that have waited longest are given up; the newest never is."""
        writing = sorted((c for c in self._open if c.state == "write"), key=lambda c: c.since)
        total = sum(len(part) for conn in writing for part in conn.out)
        for conn in writing[:-1]:
            if total <= ANSWERS_BYTES:
                return
            total -= sum(map(len, conn.out))
            self._refused["slow_reader"] += 1
            self._close(conn)

    def _write(self, conn: _Connection) -> None:
        for _ in range(WRITES_AT_ONCE):
            if not conn.out:
                self._answered_all(conn)
                return
            sent = conn.sock.send(conn.out[0][:WRITE_BYTES])
            if sent == len(conn.out[0]):
                conn.out.popleft()
            else:
                conn.out[0] = conn.out[0][sent:]
        self._watch(conn, _WRITE)  # others first

    def _answered_all(self, conn: _Connection) -> None:
        now = conn.since = time.monotonic()
        conn.fresh = False
        conn.received.clear()
        if conn.keep and self._stop_at is None:
            conn.state, conn.due = "read", now + self._seconds
            self._advance(conn)  # something may be here: TLS reads by the record
            return
        # Closed at once, what comes in late would make the kernel throw the answer away.
        conn.state, conn.due = "end", now + LINGER_SECONDS
        if isinstance(conn.sock, ssl.SSLSocket):
            with contextlib.suppress(OSError, ValueError):
                conn.sock.unwrap()
        socket.socket.shutdown(conn.sock, socket.SHUT_WR)
        self._watch(conn, _READ)

    def _end_overdue(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_SECONDS
        for conn in [c for c in self._open if c.state != "busy" and c.due <= now]:
            if conn.state == "write":
                self._refused["slow_reader"] += 1
            elif conn.state != "end" and (conn.fresh or conn.received):
                self._refused["slow" if conn.heard else "silent"] += 1
            self._close(conn)

    def _watch(self, conn: _Connection, events: int) -> None:
        if events == conn.events:
            return
        if not events:
            self._selector.unregister(conn.sock)
        elif conn.events:
            self._selector.modify(conn.sock, events, conn)
        else:
            self._selector.register(conn.sock, events, conn)
        conn.events = events

    def _close(self, conn: _Connection) -> None:
        if conn not in self._open:
            return
        del self._open[conn]
        self._peers[conn.address] -= 1
        if self._peers[conn.address] <= 0:
            del self._peers[conn.address]
        self._watch(conn, 0)
        conn.sock.close()

    def _close_all(self) -> None:
        for conn in list(self._open):
            self._close(conn)
        for _ in self._workers:
            self._asked.put(None)
        self._listener.close()
        self._selector.close()
