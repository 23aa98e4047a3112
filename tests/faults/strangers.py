"""Connections of those who are no agents and no Prometheus: many, silent, slow or nonsense."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
from collections.abc import Iterator, Mapping

GREETINGS = (
    b"",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" + b"\xff" * 64,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64,  # the beginning of a TLS hello
    b"\0" * 512,
)


def allow_descriptors(number: int) -> int:
    """Raises this process's limit as far as it may -> how many connections it can hold."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(number + 512, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return wanted - 512


@contextlib.contextmanager
def connections(numbers: Mapping[int, int]) -> Iterator[list[socket.socket]]:
    """So many of each port open at the same time, each with one of the greetings; those that were
    taken."""
    rng = random.Random(7)
    held: list[socket.socket] = []
    try:
        for port in (port for port, number in numbers.items() for _ in range(number)):
            one = socket.socket()
            one.settimeout(1)
            try:
                one.connect(("127.0.0.1", port))
                one.sendall(rng.choice(GREETINGS))
            except OSError:
                one.close()
            else:
                held.append(one)
        yield held
    finally:
        for one in held:
            one.close()


@contextlib.contextmanager
def slow_readers(port: int, path: str, number: int) -> Iterator[list[socket.socket]]:
    """They ask for a page, take hardly any of it, and stay."""
    held = []
    try:
        for _ in range(number):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            one.settimeout(5)
            one.connect(("127.0.0.1", port))
            one.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            held.append(one)
        yield held
    finally:
        for one in held:
            one.close()
