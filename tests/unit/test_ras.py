"""NCCL's RAS service as the last source: its text, its port, and whom its answer names."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lanterne.agent import identity, ras, structure
from lanterne.agent.errors import RasError
from lanterne.agent.process import Processes
from lanterne.agent.ras import Ras, address_of, local_addresses
from lanterne.agent.ras_answer import Member, ask, parse
from tests.rig.ras import RasServer, report

HASHES = (0x1234_5678_9ABC_DEF0, 0xFEDC_BA98_7654_3210, 0x0F0F_0F0F_0F0F_0F0F)


def entry(comm_hash: int, size: int, *ranks: tuple[int, str, int]) -> dict[str, object]:
    rows = [{"rank": rank, "host": host, "pid": pid} for rank, host, pid in ranks]
    return {"hash": comm_hash, "size": size, "ranks": rows}


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 5)


def test_a_report_as_nccl_writes_it() -> None:
    text = report([entry(HASHES[0], 2, (0, "10.0.0.1", 7), (1, "fe80::1%eth0", -1))])
    assert parse(text.encode()) == (
        Member(HASHES[0], 2, 0, "10.0.0.1", 7),
        Member(HASHES[0], 2, 1, "fe80::1", -1),
    )


def test_ended_communicators_are_left_out() -> None:
    one = entry(HASHES[0], 3, (0, "h", 1), (1, "h", 2), (2, "h", 3))
    one["ranks"][0]["destroyed"] = True  # type: ignore[index]
    one["ranks"][1]["aborted"] = True  # type: ignore[index]
    assert [member.rank for member in parse(report([one]).encode())] == [2]


@pytest.mark.parametrize("text", [
    b"", b"{", b"[]", b'{"communicators": 3}', b"\xff\xfe", b"[" * 200_000,
    b'{"x":' * 200_000,
    report([entry(1, 1, (0, "h", 1))]).replace('"0x1"', '"0xzz"').encode(),
    report([entry(1, 1, (0, "h", 1))]).replace('"size": 1', '"size": 1e400').encode(),
    report([entry(1, 1, (0, "h", 1))]).replace('"pid": 1', '"pid": 99999999999').encode(),
    report([entry(1, 1, (0, "h", 1))]).replace('"rank": 0', '"rank": -1').encode(),
    report([entry(1, 1, (0, "h" * 300, 1))]).encode(),
])  # fmt: skip
def test_what_is_no_report_is_refused(text: bytes) -> None:
    with pytest.raises(RasError, match="report"):
        parse(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4)
    | st.dictionaries(
        st.sampled_from(["communicators", "hash", "size", "ranks", "rank", "host", "pid", "status",
                         "destroy_flag"]),
        inner, max_size=6,
    ),
    max_leaves=40,
)  # fmt: skip


@given(st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_answer_is_members_or_an_error(text: bytes) -> None:
    try:
        members = parse(text)
    except RasError:
        return
    assert all(0 <= one.rank < one.n_ranks and one.comm_hash < 1 << 64 for one in members)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_damaged_report_is_members_or_an_error(changes: list[tuple[int, int]]) -> None:
    text = bytearray(report([entry(HASHES[0], 1, (0, "10.0.0.1", 7))]).encode())
    for at, value in changes:
        text[at] = value
    with suppress(RasError):
        assert all(0 <= one.rank < one.n_ranks for one in parse(bytes(text)))


def test_the_conversation() -> None:
    text = report([entry(HASHES[0], 1, (0, "127.0.0.1", 7))])
    with RasServer(lambda: text) as server, connect(server.address) as connection:
        assert ask(connection) == text.encode()


def test_an_older_nccl_has_no_json() -> None:
    with RasServer(lambda: "", json=False) as server, connect(server.address) as connection:
        with pytest.raises(RasError, match=r"older than 2\.29"):
            ask(connection)


@contextmanager
def talker(script: bytes, *, endless: bool = False) -> Iterator[socket.socket]:
    """A connection to somebody who says `script` and nothing that he is asked for."""
    ours, theirs = socket.socketpair()
    stop = threading.Event()

    def talk() -> None:
        try:
            theirs.sendall(script)
            while endless and not stop.is_set():
                theirs.sendall(bytes(1 << 18))
        except OSError:
            pass
        if not endless:
            theirs.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        yield ours
    finally:
        stop.set()
        ours.close()
        thread.join(10)
        theirs.close()


@pytest.mark.parametrize(("script", "why"), [
    (b"HTTP/1.1 400 Bad Request\r\n", "no RAS"),
    (b"x" * 4000, "no line"),
    (b"", "hung up"),
    (b"SERVER PROTOCOL 2\nOK\nERROR: no\n", "timeout"),
])  # fmt: skip
def test_whoever_is_no_ras_is_told_from_it(script: bytes, why: str) -> None:
    with talker(script) as connection, pytest.raises(RasError, match=why):
        ask(connection)


def test_an_endless_report_is_refused() -> None:
    with talker(b"SERVER PROTOCOL 2\nOK\nOK\n", endless=True) as connection:
        with pytest.raises(RasError, match="larger than"):
            ask(connection)


def test_silence_ends_in_time() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TimeoutError):
        ask(ours, seconds=0.05)


@pytest.mark.parametrize(("text", "expected"), [
    ("", ("127.0.0.1", 28028)),
    ("localhost:4000", ("127.0.0.1", 4000)),
    ("0.0.0.0:4000", ("127.0.0.1", 4000)),
    ("10.1.2.3:4000", ("10.1.2.3", 4000)),
    ("[::]:4000", ("::1", 4000)),
    ("[fd00::5]:4000", ("fd00::5", 4000)),
])  # fmt: skip
def test_address(text: str, expected: tuple[str, int]) -> None:
    assert address_of({"NCCL_RAS_ADDR": text}) == expected


@pytest.mark.parametrize(
    "text", ["example.com:80", "1.2.3.4", "1.2.3.4:0", "1.2.3.4:99999", ":", "x"]
)
def test_an_address_that_is_none(text: str) -> None:
    with pytest.raises(RasError, match="NCCL_RAS_ADDR"):
        address_of({"NCCL_RAS_ADDR": text})


def test_local_addresses_are_those_of_this_host() -> None:
    assert "127.0.0.1" in local_addresses(Path("/proc"), os.getpid())
    assert "192.0.2.1" not in local_addresses(Path("/proc"), os.getpid())


# -- the service ----------------------------------------------------------------------------


@contextmanager
def process(*prefix: str, **environ: str) -> Iterator[int]:
    """Something with an environment that the service can be asked about."""
    with subprocess.Popen(
        [*prefix, sys.executable, "-S", "-c", "print(1, flush=True); input()"],
        env=os.environ | environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as child:  # fmt: skip
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child.pid
        finally:
            child.kill()


def answer_of(service: Ras, pid: int, after: int = 0) -> ras.Answer:
    end = time.monotonic() + 30
    while (answer := service.answer(pid)) is None or answer.number <= after:
        assert time.monotonic() < end
        time.sleep(0.02)
    return answer


def test_the_ranks_of_a_process() -> None:
    """Other hosts have processes of the same number; other processes of this host are others."""
    pids: list[int] = []

    def text() -> str:
        (pid,) = pids
        ranks = [(0, "127.0.0.1", pid), (1, "192.0.2.1", pid), (2, "127.0.0.1", pid + 1)]
        return report([entry(HASHES[0], 3, *ranks)])

    with RasServer(text) as server, process(NCCL_RAS_ADDR=server.address) as pid:
        pids.append(pid)
        service = Ras()
        answer = answer_of(service, pid)
        assert [(one.comm_hash, one.rank) for one in answer.members] == [(HASHES[0], 0)]
        assert answer.reason == ""
        assert service.success is True
        assert server.queries == 1


def test_another_job_answers_and_pauses_grow() -> None:
    with RasServer(lambda: report([])) as server, process(NCCL_RAS_ADDR=server.address) as pid:
        service = Ras(first_pause=0.01)
        first = answer_of(service, pid)
        assert "does not know this process" in first.reason
        assert server.queries == ras.CONNECTIONS
        answer_of(service, pid, after=first.number)
        assert server.queries == 2 * ras.CONNECTIONS


@pytest.mark.parametrize(("environ", "why"), [
    ({"NCCL_RAS_ENABLE": "0"}, "NCCL_RAS_ENABLE=0"),
    ({"NCCL_RAS_ADDR": "192.0.2.1:80"}, "not of this host"),
    ({"NCCL_RAS_ADDR": "localhost:1"}, "refused"),
])  # fmt: skip
def test_why_there_is_no_answer(environ: dict[str, str], why: str) -> None:
    with process(**environ) as pid:
        answer = answer_of(Ras(), pid)
        assert answer.members == ()
        assert why in answer.reason


@pytest.mark.skipif(os.geteuid() != 0, reason="namespaces need root")
def test_a_network_of_its_own_is_entered() -> None:
    """The service listens on the loopback of the process's namespace, and only there."""
    script = (
        "import os, sys; sys.path.insert(0, os.getcwd())\n"
        "from tests.rig.ras import RasServer, report\n"
        "os.system('ip link set lo up')\n"
        "rank = {'rank': 1, 'host': '127.0.0.1', 'pid': os.getpid()}\n"
        f"text = report([{{'hash': {HASHES[0]}, 'size': 2, 'ranks': [rank]}}])\n"
        "with RasServer(lambda: text, port=28028) as server:\n"
        "    print(1, flush=True); input()\n"
    )
    with subprocess.Popen(
        ["unshare", "--net", sys.executable, "-c", script],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as child:  # fmt: skip
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"1\n"
            answer = answer_of(Ras(), child.pid)
            assert [one.rank for one in answer.members] == [1], answer.reason
        finally:
            child.kill()


# -- whom it names --------------------------------------------------------------------------


def memory_of(folder: Path, **at: bytes) -> Processes:
    """Process 10; keys are addresses in hexadecimal after an x."""
    (folder / "10").mkdir()
    with (folder / "10" / "mem").open("wb") as file:
        for address, data in at.items():
            file.seek(int(address[1:], 16))
            file.write(data)
        file.truncate(4 << 20)
    return Processes(folder)


def identity_at(offset: int, comm_hash: int, rank: int, size: int, bus: int = 0x3B000) -> bytes:
    head = struct.pack("<Q", structure.MAGIC).ljust(offset, b"\0")
    return head + struct.pack("<Qiiii16xq", comm_hash, rank, size, 0, 0, bus)


def test_the_communicator_is_found_in_its_memory(tmp_path: Path) -> None:
    processes = memory_of(tmp_path, x10010=identity_at(1_066_184, HASHES[1], 3, 8))
    told = [Member(number, 8, 3, "", 10) for number in HASHES]
    comm = identity.Communicator(0, 10, 0x10010, 1)
    identity.from_ras(comm, processes, told)
    assert (comm.comm_hash, comm.rank, comm.n_ranks) == (HASHES[1], 3, 8)
    assert comm.bus_id == "0000:3b:00.0"
    assert comm.identity == identity.RAS


@pytest.mark.parametrize("content", [
    identity_at(4096, HASHES[0], 3, 8)[8:],  # no magic
    identity_at(4096, HASHES[0], 2, 8),  # another rank
    identity_at(4096, HASHES[0], 3, 16),  # another size
    identity_at(2 << 20, HASHES[0], 3, 8),  # too far behind
    struct.pack("<Q", structure.MAGIC).ljust(512, b"\0") + identity_at(512, HASHES[0], 3, 8),
    identity_at(4096, HASHES[0], 3, 8) + struct.pack("<Qii", HASHES[1], 3, 8),  # two fit
    b"",
])  # fmt: skip
def test_what_is_not_there_for_certain_has_no_name(tmp_path: Path, content: bytes) -> None:
    processes = memory_of(tmp_path, x10010=content)
    comm = identity.Communicator(0, 10, 0x10010, 1)
    identity.from_ras(comm, processes, [Member(number, 8, 3, "", 10) for number in HASHES])
    assert not comm.resolved
    assert "memory" in comm.reason
