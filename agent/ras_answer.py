"""What NCCL's RAS service says of communicators, and how it is asked.

RAS (NCCL 2.24 and later, on unless NCCL_RAS_ENABLE=0) listens in every process of a job, by default
on localhost:28028. It takes lines and answers each with a line; to a status command it sends the
report and closes the connection. As JSON only since 2.29. Facts: NCCL's src/ras, release 2.30.

Whoever listens there may be anybody: time, size, depth and numbers are bounded.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from lanterne.agent.errors import RasError

DEFAULT_ADDRESS = "localhost:28028"
# A rank takes some 560 bytes of the report, in each communicator that it is in.
MAX_ANSWER_BYTES = 16 << 20
MAX_LINE_BYTES = 256
ASK_SECONDS = 10.0
GATHER_SECONDS = 3  # for which RAS may wait for the job's other processes
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Member:
    """One rank of one communicator. ``host``: numeric address of its process's RAS socket;
    ``pid`` as that process sees itself, -1: not known."""

    comm_hash: int
    n_ranks: int
    rank: int
    host: str
    pid: int


class _Status(msgspec.Struct):
    destroy_flag: bool = False
    abort_flag: bool = False


class _Rank(msgspec.Struct):
    rank: Annotated[int, Meta(ge=0, lt=1 << 20)]
    host: Annotated[str, Meta(max_length=256)]
    pid: Annotated[int, Meta(ge=-1, lt=1 << 31)]
    status: _Status = msgspec.field(default_factory=_Status)


class _Communicator(msgspec.Struct):
    hash: Annotated[str, Meta(pattern="^0x[0-9a-fA-F]{1,16}$")]
    size: Annotated[int, Meta(ge=1, le=1 << 20)]
    ranks: list[_Rank]


class _Report(msgspec.Struct):
    communicators: list[_Communicator]


_DECODER = msgspec.json.Decoder(_Report)


def parse(report: bytes) -> tuple[Member, ...]:
    """Ranks that are in use, of a report in JSON. Raises RasError."""
    try:
        found = _DECODER.decode(report)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise RasError(f"its report is not what NCCL writes: {error}") from error
    return tuple(
        Member(int(one.hash, 16), one.size, rank.rank, rank.host.partition("%")[0], rank.pid)
        for one in found.communicators
        for rank in one.ranks
        if rank.rank < one.size
        and int(one.hash, 16)
        and not (rank.status.destroy_flag or rank.status.abort_flag)
    )


def ask(connection: socket.socket, *, seconds: float = ASK_SECONDS) -> bytes:
    """The report that a connected service gives within so many seconds. Raises RasError and
    OSError, TimeoutError among them."""
    line = _Lines(connection, time.monotonic() + seconds)
    if not (said := line.ask("CLIENT PROTOCOL 2")).upper().startswith("SERVER PROTOCOL "):
        raise RasError(f"whoever listens there is no RAS: it said {said!r}")
    if line.ask("SET FORMAT json") != "OK":
        raise RasError("this NCCL is older than 2.29, its RAS tells no JSON")
    if (said := line.ask(f"TIMEOUT {GATHER_SECONDS}")) != "OK":
        raise RasError(f"it refused a timeout: {said!r}")
    line.send("VERBOSE STATUS")
    return line.rest()


class _Lines:
    """A conversation in lines, with one deadline for all of it."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection = connection
        self._deadline = deadline
        self._left = b""

    def send(self, text: str) -> None:
        self._wait()
        self._connection.sendall(text.encode() + b"\n")

    def ask(self, text: str) -> str:
        self.send(text)
        while b"\n" not in self._left:
            if len(self._left) > MAX_LINE_BYTES:
                raise RasError("whoever listens there is no RAS: it sent no line")
            part = self._read(MAX_LINE_BYTES)
            if not part:
                raise RasError("it hung up")
            self._left += part
        line, _, self._left = self._left.partition(b"\n")
        return line[:MAX_LINE_BYTES].decode("ascii", "replace").strip()

    def rest(self) -> bytes:
        parts, size = [self._left], len(self._left)
        while part := self._read(_CHUNK):
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                raise RasError(f"its report is larger than {MAX_ANSWER_BYTES >> 20} MiB")
        return b"".join(parts)

    def _read(self, size: int) -> bytes:
        self._wait()
        return self._connection.recv(size)

    def _wait(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no whole answer in time")
        self._connection.settimeout(left)
