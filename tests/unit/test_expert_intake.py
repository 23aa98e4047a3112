"""The agent's intake for expert load: real sockets, what is taken and what is refused."""

from __future__ import annotations

import base64
import http.client
import io
import json
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lanterne.agent.errors import IntakeError
from lanterne.agent.expert_counts import MAX_PENDING, ExpertCounts, load
from lanterne.agent.expert_formats import chosen_counts, from_json, from_routed, routed_counts
from lanterne.agent.expert_wire import PART_BYTES, Reading, parts
from lanterne.agent.intake import CONNECTIONS, Intake, Limiter
from lanterne.agent.numpy_file import npy, npz


def npy_bytes(values: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(values))
    return file.getvalue()


class Unix(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=20)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(20)
        self.sock.connect(self._path)


@pytest.fixture
def counts() -> ExpertCounts:
    return ExpertCounts()


@pytest.fixture
def intake(tmp_path: Path, counts: ExpertCounts) -> Iterator[Intake]:
    made = Intake(
        counts, path=tmp_path / "i.sock", listen="127.0.0.1:0", max_body_bytes=10_000,
        max_per_second=100.0,
    )  # fmt: skip
    yield made
    made.close()


def post(
    at: Path | int, body: bytes, path: str = "/v1/experts", kind: str = "application/json",
    **headers: str,
) -> tuple[int, dict[str, str]]:  # fmt: skip
    connection = Unix(at) if isinstance(at, Path) else http.client.HTTPConnection(
        "127.0.0.1", at, timeout=20
    )  # fmt: skip
    try:
        connection.request("POST", path, body, {"Content-Type": kind} | headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def test_json_over_both_sockets(tmp_path: Path, intake: Intake, counts: ExpertCounts) -> None:
    body = json.dumps({
        "workload": "chat", "engine": "own", "model": "m", "layers": [3, 5],
        "counts": [[1, 2.5], [3, 4]], "tokens": [2, 4], "rank_of_expert": [0, 1], "source_rank": 1,
    }).encode()  # fmt: skip
    assert post(tmp_path / "i.sock", body) == (200, {"status": "accepted"})
    assert post(intake.port, body)[0] == 200
    (told,) = counts.take()
    assert told.counts.tolist() == [[2, 5], [6, 8]]
    assert told.tokens is not None
    assert told.tokens.tolist() == [4, 8]
    assert (told.layer, told.source, told.source_rank) == ((3, 5), "intake", 1)
    assert counts.take() == []


def test_npy_body(tmp_path: Path, intake: Intake, counts: ExpertCounts) -> None:
    query = "?workload=chat&unit=physical&ranks=2&layers=1,2"
    body = npy_bytes(np.arange(8, dtype=np.int32).reshape(2, 4))
    status = post(tmp_path / "i.sock", body, f"/v1/experts{query}", "application/x-npy")[0]
    assert status == 200
    (told,) = counts.take()
    assert (told.workload, told.unit, told.layer) == ("chat", "physical", (1, 2))
    assert told.rank_of_expert is not None
    assert told.rank_of_expert.tolist() == [0, 0, 1, 1]


def routed(values: Any) -> str:
    return base64.b64encode(npy_bytes(values)).decode()


def test_routed_experts_of_a_completion(
    tmp_path: Path, intake: Intake, counts: ExpertCounts
) -> None:
    chosen = np.array([[[0, 1], [2, 3]], [[0, 2], [3, 1]], [[0, 3], [3, 2]]], np.uint8)
    body = {"model": "m", "choices": [{"text": "x", "routed_experts": routed(chosen)}], "id": "1"}
    status = post(tmp_path / "i.sock", json.dumps(body).encode(), "/v1/routed?experts=4")[0]
    assert status == 200
    (told,) = counts.take()
    assert told.counts.tolist() == [[3, 1, 1, 1], [0, 1, 2, 3]]
    assert told.tokens is not None
    assert told.tokens.tolist() == [3, 3]
    assert (told.model, told.engine, told.source) == ("m", "vllm", "routed_experts")


def test_padding_of_routed_experts() -> None:
    ids = np.array([[[0, 255]]], np.uint8)  # of one token and layer
    assert routed_counts(routed(ids), 8)[0].tolist() == [[1, 0, 0, 0, 0, 0, 0, 0]]
    assert routed_counts(routed(ids), 256)[0][0, 255] == 1  # there it is an expert
    assert chosen_counts(np.array([[[2, -1]]]), 3).tolist() == [[0, 0, 1]]
    with pytest.raises(ValueError, match="experts 0 to 9 were chosen; there are 8"):
        routed_counts(routed(np.array([[[0, 9]]], np.uint8)), 8)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"{", "body"),
        (b"[1]", "Expected `object`"),
        (b'{"counts": [[1]], "Counts": 2}', "unknown field `Counts`"),
        (b'{"counts": [["a"]]}', "Expected `float`, got `str`"),
        (b'{"counts": [[1], [1, 2]]}', "equally long rows"),
        (b'{"counts": [[-1]]}', "0 to 2"),
        (b'{"counts": [[1e300]]}', "0 to 2"),
        (b'{"counts": []}', "shape"),
        (b'{"counts": [[1]], "unit": "gpu"}', "logical, physical, rank"),
        (b'{"counts": [[1]], "layers": [1, 2]}', "1 ascending numbers"),
        (b'{"counts": [[1]], "tokens": [1, 2]}', r"it must be \[1\]"),
        (b'{"counts": [[1]], "rank_of_expert": [0, 1]}', "one an expert"),
        (b'{"counts": [[1, 2]], "rank_of_expert": [[0], [1, 2]]}', "different lengths"),
        (b'{"counts": [[1]], "rank_of_expert": ["a"]}', "whole numbers"),
        (b'{"counts": [[1]], "rank_of_expert": [-1]}', "0 to 65535"),
        (b'{"counts": [[1]], "unit": "rank", "rank_of_expert": [0]}', "no meaning"),
        (b'{"counts": [[1]], "logical_of_physical": [0]}', "only where unit is physical"),
        (b'{"counts": [[1]], "source_rank": -2}', "source_rank"),
        (b'{"counts": [[1]], "workload": "a\\nb"}', "printable"),
        (b"[" * 5000, "body"),
    ],
)
def test_bad_json_is_refused_in_words(body: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        from_json(body)


@pytest.mark.parametrize(
    ("body", "query", "words"),
    [
        (b"{}", {}, "experts=256"),
        (b"{}", {"experts": "8"}, "no routed_experts"),
        (b'{"routed_experts": "%%"}', {"experts": "8"}, "base64"),
        (b'{"routed_experts": "aGk="}', {"experts": "8"}, "no .npy"),
        (b"{}", {"experts": "x"}, "no whole number"),
        (json.dumps({"routed_experts": routed([[1]])}).encode(), {"experts": "8"}, "tokens, lay"),
        (
            json.dumps({"routed_experts": [routed([[[1]]]), routed([[[1], [1]]])]}).encode(),
            {"experts": "8"},
            "different numbers of layers",
        ),
    ],
)
def test_bad_routed_experts_are_refused_in_words(
    body: bytes, query: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        from_routed(body, query)


def test_answers_to_what_is_refused(tmp_path: Path, intake: Intake) -> None:
    path = tmp_path / "i.sock"
    assert post(path, b"{}", "/elsewhere")[0] == 404
    status, said = post(path, b'{"counts": [[-1]]}')
    assert (status, "2^47" in said["error"]) == (400, True)
    assert post(path, b"x", **{"Content-Length": "10001"})[0] == 413
    assert post(path, b"", **{"Content-Length": "-5"})[0] == 411
    assert post(path, b"", **{"Content-Length": "9" * 4000})[0] == 413
    assert post(path, b"", **{"Transfer-Encoding": "chunked"})[0] == 411
    query = "&".join(f"a{n}=1" for n in range(40))
    assert post(path, npy_bytes([[1.0]]), f"/v1/experts?{query}", "application/x-npy")[0] == 400
    assert intake.refused == {"path": 1, "content": 2, "size": 2, "length": 2}


def test_the_rate_is_bounded(tmp_path: Path, counts: ExpertCounts) -> None:
    intake = Intake(counts, path=tmp_path / "r.sock", max_per_second=1e-6 + 2)
    try:
        answers = [post(tmp_path / "r.sock", b'{"counts": [[1]]}')[0] for _ in range(12)]
    finally:
        intake.close()
    assert answers[0] == 200
    assert 429 in answers
    assert intake.refused["rate"] == answers.count(429)


def test_limiter_fills_up_again() -> None:
    now = [0.0]
    limiter = Limiter(2.0, clock=lambda: now[0])
    assert [limiter.take() for _ in range(3)] == [True, True, False]
    now[0] = 0.5
    assert [limiter.take(), limiter.take()] == [True, False]


def test_connections_are_bounded(tmp_path: Path, intake: Intake) -> None:
    held = []
    try:
        for _ in range(CONNECTIONS):
            one = socket.socket(socket.AF_UNIX)
            one.connect(str(tmp_path / "i.sock"))
            one.sendall(b"POST /v1/experts HTTP/1.0\r\n")
            held.append(one)
        beyond = socket.socket(socket.AF_UNIX)
        held.append(beyond)
        beyond.settimeout(20)
        beyond.connect(str(tmp_path / "i.sock"))
        assert beyond.recv(1) == b""  # closed at once
    finally:
        for one in held:
            one.close()
    assert intake.refused["connections"] == 1


def test_a_client_that_stops_halfway_counts_nothing(
    tmp_path: Path, intake: Intake, counts: ExpertCounts
) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(str(tmp_path / "i.sock"))
        one.sendall(b'POST /v1/experts HTTP/1.0\r\nContent-Length: 100\r\n\r\n{"counts"')
        one.shutdown(socket.SHUT_WR)
        while one.recv(4096):
            pass
    assert post(tmp_path / "i.sock", b'{"counts": [[1]]}')[0] == 200
    assert intake.refused["broken"] == 1
    assert len(counts.take()) == 1


def test_the_socket_is_for_owner_and_group_and_vanishes(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    before = os.umask(0o022)
    os.umask(before)
    intake = Intake(ExpertCounts(), path=path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert os.umask(before) == before  # left as it was
    with pytest.raises(IntakeError, match="another agent listens"):
        Intake(ExpertCounts(), path=path)
    intake.close()
    assert not path.exists()


def test_a_socket_left_behind_is_replaced_and_a_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    Intake(ExpertCounts(), path=path).close()
    path.write_text("mine")
    with pytest.raises(IntakeError, match="is no socket"):
        Intake(ExpertCounts(), path=path)
    assert path.read_text() == "mine"


def test_an_address_that_is_taken_leaves_nothing_open(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(IntakeError, match="cannot listen at 127"):
            Intake(ExpertCounts(), path=tmp_path / "s.sock", listen=listen)
    assert not (tmp_path / "s.sock").exists()


# -- Gathering -----------------------------------------------------------------------------------


def test_totals_are_differenced_and_restarts_seen() -> None:
    counts = ExpertCounts()

    def tell(*values: float) -> list[list[list[float]]]:
        counts.add(load([values], source="x"), cumulative=True)
        return [told.counts.tolist() for told in counts.take()]

    assert tell(100, 100) == []  # nobody knows when these were
    assert tell(101, 103) == [[[1, 3]]]
    assert tell(2, 300) == [[[2, 300]]]  # one fell: the engine began anew


def test_loads_of_threads_add_up() -> None:
    counts = ExpertCounts()
    one = load([[1.0, 2.0]], source="x")
    threads = [
        threading.Thread(target=lambda: [counts.add(one) for _ in range(200)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (told,) = counts.take()
    assert told.counts.tolist() == [[800, 1600]]


def test_different_loads_are_bounded() -> None:
    counts = ExpertCounts()
    for n in range(MAX_PENDING + 3):
        counts.add(load([[1.0]], source="x", model=str(n)))
    assert len(counts.take()) == MAX_PENDING
    assert counts.dropped == {"too_many": 3}


def test_large_loads_are_cut_into_small_batches() -> None:
    told = load(np.ones((512, 1024)), source="x", rank_of_expert=np.zeros(1024, int))
    reading = Reading("w", "vllm", "a:1", {"ttft_p50": 1.0})
    found = parts([told], [reading])
    assert len(found) > 3
    assert all(part.size <= PART_BYTES for part in found)
    assert len(found[0].readings) == 1
    layers: list[int] = []
    for part in found:
        for message in part.loads:
            layers += np.frombuffer(message.layer, "<u4").tolist()
    assert layers == list(range(512))
    assert parts([], []) == []


# -- numpy files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [np.arange(6).reshape(2, 3), np.ones((3, 2), np.float32, order="F"), np.zeros((0, 4)),
     np.array([True, False]), np.arange(3, dtype=">i4")],
)  # fmt: skip
def test_npy_reads_what_numpy_writes(values: npt.NDArray[Any]) -> None:
    np.testing.assert_array_equal(npy(npy_bytes(values)), values)


def test_npy_refuses_objects_and_false_headers() -> None:
    file = io.BytesIO()
    np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="only numbers"):
        npy(file.getvalue())
    good = npy_bytes(np.zeros(4))
    with pytest.raises(ValueError, match=r"but 24 bytes"):
        npy(good[:-8])
    lie = good.replace(b"(4,)", b"(999999999999,)"[:4].ljust(4))
    with pytest.raises(ValueError):
        npy(lie)
    with pytest.raises(ValueError, match=r"no \.npy"):
        npy(b"\x93NUMPY\x01\x00\x10\x00{'descr': __imp}")


def test_npz_is_bounded_when_unpacked() -> None:
    file = io.BytesIO()
    np.savez_compressed(file, counts=np.zeros((100, 1000)))
    assert len(file.getvalue()) < 10_000
    assert npz(file.getvalue(), limit=1 << 20)["counts"].shape == (100, 1000)
    with pytest.raises(ValueError, match="unpacks to more than 100000"):
        npz(file.getvalue(), limit=100_000)
    with pytest.raises(ValueError, match=r"no \.npz"):
        npz(b"PK\x03\x04 something", limit=10)
