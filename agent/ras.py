"""Asks NCCL's RAS service who a process is in its communicators, where nothing else could tell.

Every query makes the processes of the job talk to each other, so it is the last resort: asked for
the processes that are wanted, in a thread of its own, with growing pauses. Jobs of one host share
the port (SO_REUSEPORT), and the kernel chooses who answers: another connection may reach another
job. A process with a network of its own is reached by entering its namespace, this thread only;
the kernel asks for CAP_SYS_ADMIN, which the agent gives up where it can (probes.drop_privileges).
"""

from __future__ import annotations

import ctypes
import ipaddress
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lanterne.agent import ras_answer
from lanterne.agent.errors import RasError
from lanterne.agent.process import Processes, printable
from lanterne.agent.ras_answer import Member

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0  # seconds between two queries for one process
CONNECTIONS = 4  # in a row, where another job answers
_GATHER = 0.5  # seconds: ranks of a host are met together, and one report tells of all
_MAX_FILE = 4 << 20
_CLONE_NEWNET = 0x40000000
_LOCAL_V4 = re.compile(rb"\|-- (\S+)\n\s+/32 host LOCAL")


@dataclass(frozen=True)
class Answer:
    """``number`` is another one for every answer; ``reason`` says why there are no members."""

    number: int
    members: tuple[Member, ...]
    reason: str


@dataclass(slots=True)
class _Wanted:
    asked: int = 0
    due: float = 0.0  # CLOCK_MONOTONIC
    wanted: bool = False
    answer: Answer | None = None


@dataclass(frozen=True)
class _Place:
    """Where the service of a process listens."""

    host: str
    port: int
    namespace: int  # inode of the network namespace


class Ras:
    """`answer` may be called as often as one likes. ``first_pause``: seconds, for tests."""

    def __init__(self, proc: Path = Path("/proc"), *, first_pause: float = FIRST_PAUSE) -> None:
        self._proc = proc
        self._processes = Processes(proc)
        self._first_pause = first_pause
        self._lock = threading.Lock()
        self._pids: dict[int, _Wanted] = {}
        self._thread: threading.Thread | None = None
        self._answers = 0
        self.success: bool | None = None  # of the last query; None: none was needed

    def answer(self, pid: int) -> Answer | None:
        """What is known of a process by now, None before the first answer. Returns at once."""
        with self._lock:
            entry = self._pids.setdefault(pid, _Wanted())
            entry.wanted = True
            if entry.due <= time.monotonic() and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ras", daemon=True)
                self._thread.start()
            return entry.answer

    def forget(self, pids: Iterable[int]) -> None:
        with self._lock:
            for pid in pids:
                self._pids.pop(pid, None)

    def _run(self) -> None:
        try:
            time.sleep(_GATHER)
            places: dict[_Place, list[int]] = {}
            for pid in self._take_due():
                try:
                    places.setdefault(self._place(pid), []).append(pid)
                except (RasError, OSError, ValueError) as error:
                    self._put(pid, (), str(error))
            for place, pids in places.items():
                self._ask(place, pids)
        except Exception:  # whatever it is, the next wish starts another thread
            log.exception("RAS query failed")
        finally:
            with self._lock:
                self._thread = None

    def _take_due(self) -> list[int]:
        now = time.monotonic()
        with self._lock:
            due = [pid for pid, one in self._pids.items() if one.wanted and one.due <= now]
            for pid in due:
                one = self._pids[pid]
                one.due = now + min(self._first_pause * 2 ** min(one.asked, 10), LONGEST_PAUSE)
                one.asked, one.wanted = one.asked + 1, False
        return due

    def _ask(self, place: _Place, pids: list[int]) -> None:
        found: dict[int, tuple[Member, ...]] = {}
        reason = "the job that answers does not know this process"
        try:
            local = local_addresses(self._proc, pids[0])
            for _ in range(CONNECTIONS):
                with self._connect(place, pids[0]) as connection:
                    members = ras_answer.parse(ras_answer.ask(connection))
                for pid in set(pids) - set(found):
                    mine = _of_process(members, inner_pid(self._proc, pid), local)
                    found |= {pid: mine} if mine else {}
                if len(found) == len(pids):
                    break
            self.success = True
        except (RasError, OSError) as error:
            reason, self.success = str(error) or type(error).__name__, False
        for pid in pids:
            mine = found.get(pid, ())
            self._put(pid, mine, "" if mine else f"at {place.host}:{place.port}: {reason}")

    def _put(self, pid: int, members: tuple[Member, ...], reason: str) -> None:
        with self._lock:
            self._answers += 1
            if pid in self._pids:
                text = printable(f"not told by NCCL RAS: {reason}", 200) if reason else ""
                self._pids[pid].answer = Answer(self._answers, members, text)

    def _place(self, pid: int) -> _Place:
        environ = self._processes.environ(pid)
        if environ.get("NCCL_RAS_ENABLE", "1").strip() == "0":
            raise RasError("switched off with NCCL_RAS_ENABLE=0")
        namespace = (self._proc / str(pid) / "ns/net").stat().st_ino
        host, port = address_of(environ)
        if not ipaddress.ip_address(host).is_loopback and (
            host not in local_addresses(self._proc, pid)
        ):
            # The job chose it: nobody is to be asked on its behalf elsewhere.
            raise RasError(f"NCCL_RAS_ADDR names {host}, which is not of this host")
        return _Place(host, port, namespace)

    def _connect(self, place: _Place, pid: int) -> socket.socket:
        connection = self._socket(place, pid)
        try:
            connection.settimeout(2.0)
            connection.connect((place.host, place.port))
        except BaseException:
            connection.close()
            raise
        return connection

    def _socket(self, place: _Place, pid: int) -> socket.socket:
        family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        own = os.open(self._proc / "thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(own).st_ino == place.namespace:
                return socket.socket(family)
            other = os.open(self._proc / str(pid) / "ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                _enter(other)
            finally:
                os.close(other)
            try:
                return socket.socket(family)  # stays in the namespace where it was made
            finally:
                _enter(own)
        finally:
            os.close(own)


def _enter(namespace: int) -> None:
    """Only the calling thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET):
        number = ctypes.get_errno()
        if number == 1:
            raise RasError(
                "its network is its own, which the agent may not enter without CAP_SYS_ADMIN"
            )
        raise OSError(number, os.strerror(number))


def address_of(environ: Mapping[str, str]) -> tuple[str, int]:
    """(numeric host, port) by NCCL_RAS_ADDR, as HOST:PORT or [V6]:PORT; names but localhost are
    not looked up. Raises RasError."""
    text = environ.get("NCCL_RAS_ADDR", "").strip() or ras_answer.DEFAULT_ADDRESS
    host, _, port = text.rpartition(":")
    host = host.strip("[]").partition("%")[0]
    host = "127.0.0.1" if host.lower() == "localhost" else host
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
        if port.isascii() and port.isdigit() and 0 < int(port) < 65_536:
            if address.is_unspecified:
                return ("::1" if address.version == 6 else "127.0.0.1"), int(port)
            return str(address), int(port)
    raise RasError(f"NCCL_RAS_ADDR is {text!r}, not an address with a port")


def local_addresses(proc: Path, pid: int) -> frozenset[str]:
    """Numeric addresses of the network namespace of a process."""
    found = {"127.0.0.1", "::1"}
    with suppress(OSError), (proc / str(pid) / "net/fib_trie").open("rb") as file:
        found |= {one.decode("ascii", "replace") for one in _LOCAL_V4.findall(file.read(_MAX_FILE))}
    with suppress(OSError), (proc / str(pid) / "net/if_inet6").open("rb") as file:
        for line in file.read(_MAX_FILE).splitlines():
            with suppress(ValueError):
                found.add(str(ipaddress.IPv6Address(int(line.split(None, 1)[0], 16))))
    return frozenset(found)


def inner_pid(proc: Path, pid: int) -> int:
    """A process's number as it sees it itself, the same as ours outside of containers."""
    with suppress(OSError, ValueError, IndexError):
        for line in (proc / str(pid) / "status").read_text(errors="replace").splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    return pid


def _of_process(members: Iterable[Member], inner: int, local: frozenset[str]) -> tuple[Member, ...]:
    """Other hosts, and other containers, have processes of this number, too."""
    return tuple(one for one in members if one.pid == inner and one.host in local)
