"""Split sizes of PyTorch's all-to-alls over NCCL, with a stand-in libtorch_cuda.so."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lanterne.agent.comms import Registry
from lanterne.agent.encode import Context, Head
from lanterne.agent.events import Rules
from lanterne.agent.pipeline import Pipeline
from lanterne.agent.process import Processes
from lanterne.probes import catalog, splits
from lanterne.probes.layout import Flag, Func
from lanterne.proto import telemetry_pb2 as pb
from tests.kernel.stub import Caller, compile_stub

pytestmark = pytest.mark.kernel

NAMES = splits.symbols(catalog.Library.TORCH)
COMM = 0x7F1200345670
ROW_BYTES = 24 * 4
# What a call does below: with the sizes of std::vector<int64_t>, receives first, then sends. Like
# an intrusive_ptr, the result is returned in memory whose address the caller passes: by the
# compiler's own ABI, in the first register before `this` (x86-64) or in x8 (aarch64).
SOURCE = """
#include <stdint.h>
#define EXPORT __attribute__((visibility("default"), noinline))
typedef struct { int64_t *begin, *end, *limit; } vector;
typedef struct { long values[3]; } work;
int pncclGroupStart(void); int pncclGroupEnd(void); int ncclGroupEnd(void);
int pncclSend(const void *, uint64_t, int, int, void *, void *);
int pncclRecv(void *, uint64_t, int, int, void *, void *);
EXPORT void *comm = (void *)%#x;
EXPORT uint64_t elements = 24; /* of a row */
static long exchange(vector *receives, vector *sends)
{
  pncclGroupStart();
  for (int64_t *one = sends->begin; one < sends->end; one++)
    if (*one) pncclSend(0, *one * elements, 7, one - sends->begin, comm, 0);
  for (int64_t *one = receives->begin; one < receives->end; one++)
    if (*one) pncclRecv(0, *one * elements, 7, one - receives->begin, comm, 0);
  return pncclGroupEnd();
}
EXPORT int caller(void) { return ncclGroupEnd(); }
"""
METHOD = """
EXPORT work f{i}(void *self, void *out, void *in, vector *receives, vector *sends)
__asm__("{name}");
work f{i}(void *self, void *out, void *in, vector *receives, vector *sends)
{{ return (work){{{{exchange(receives, sends)}}}}; }}
EXPORT long call{i}(void *self, void *out, void *in, vector *receives, vector *sends)
{{ return f{i}(self, out, in, receives, sends).values[0]; }}
"""


def compiled(target: Path, text: Path, *more: Path) -> Path:
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-Wl,--build-id"]
    command += ["-o", str(target), str(text), *map(str, more)]
    subprocess.run(command, check=True, timeout=60)
    return target


@dataclass
class Torch:
    """A process whose libtorch_cuda.so calls its libnccl."""

    loaded: Any
    caller: Caller
    library: Any  # what the agent has found of it

    def records(self) -> np.ndarray:
        found: np.ndarray = self.loaded.records(self.caller.pid)
        return found

    def vector(self, *sizes: int) -> int:
        begin = self.caller.memory(struct.pack(f"<{len(sizes)}q", *sizes))
        return self.caller.memory(struct.pack("<QQQ", begin, begin + 8 * len(sizes), 0))

    def all_to_all(self, name: str, receives: list[int], sends: list[int]) -> int:
        """-> address of its `this`."""
        this = self.caller.memory(bytes(64))
        vectors = self.vector(*receives), self.vector(*sends)
        self.caller.call(f"call{NAMES.index(name)}", this, 0x2222, 0x3333, *vectors)
        return this


@contextmanager
def running(loaded: Any, folder: Path, *numbers: int) -> Iterator[Torch]:
    """With the methods of these numbers in NAMES."""
    compile_stub(folder, "nccl", enqueue=False)
    text = folder / "nccl.c"
    text.write_text(text.read_text() + "EXPORT int ncclGroupEnd(void) { return 0; }\n")
    nccl = compiled(folder / "libnccl.so.2", text)
    text = folder / "torch.c"
    methods = [METHOD.format(i=i, name=NAMES[i]) for i in numbers]
    text.write_text(SOURCE % COMM + "".join(methods))
    torch = compiled(folder / "libtorch_cuda.so", text, nccl)
    with Caller(nccl, torch) as caller, loaded.attacher(folder) as attacher:
        scan = attacher.scan()
        assert not scan.failed
        found = {one.kind: one for one in scan.new_libraries}
        assert set(found) == {"nccl", "torch"}
        loaded.records(caller.pid)
        yield Torch(loaded, caller, found["torch"])


@pytest.fixture
def torch(loaded: Any, tmp_path: Path) -> Iterator[Torch]:
    with running(loaded, tmp_path, 0, 3) as one:
        yield one


@pytest.mark.parametrize("loaded", ["multi", "perf"], indirect=True)
def test_both_process_groups(torch: Torch) -> None:
    """Rows out and in, then the sends of the same thread."""
    assert [site.symbol for site in torch.library.sites] == [NAMES[0], NAMES[3]]
    for name in (NAMES[0], NAMES[3]):
        this = torch.all_to_all(name, [7, 0, 1, 2], [3, 4, 0, 5])
        records = torch.records()
        call, parts = records[0], records[1:]
        assert call["func"] == Func.SPLITS
        assert (call["count"], call["stream"]) == (12, 10)
        assert (call["comm"], call["peer"], call["seq"]) == (this, -1, 4)
        assert not call["flags"]
        assert set(records["tid"].tolist()) == {torch.caller.pid}
        assert parts["peer"].tolist() == [0, 1, 3, 0, 2, 3]
        assert (parts["flags"] & Flag.P2P != 0).all()
        assert set(parts["comm"].tolist()) == {COMM}
        assert len(set(parts["group"].tolist())) == 1


def test_calls_that_tell_nothing(torch: Torch) -> None:
    before = torch.loaded.programs.counters()["lost_read"]
    for sizes in ([], [0, 0]):  # equal parts; nothing is exchanged
        torch.all_to_all(NAMES[0], sizes, sizes)
    assert not (torch.records()["func"] == Func.SPLITS).any()
    assert torch.loaded.programs.counters()["lost_read"] == before
    torch.all_to_all(NAMES[0], [1, 2, 3], [1, 2])  # no process group has such sizes
    torch.all_to_all(NAMES[0], [1, 2], [])  # equal parts out: how many rows is not said
    assert not (torch.records()["func"] == Func.SPLITS).any()
    assert torch.loaded.programs.counters()["lost_read"] == before + 2


def test_one_of_two_names_is_probed(either: Any, tmp_path: Path) -> None:
    """Where both are there, one calls the other."""
    with running(either, tmp_path, 0, 1) as torch:
        assert [site.symbol for site in torch.library.sites] == [NAMES[0]]


def test_bytes_of_a_token(torch: Torch, tmp_path: Path) -> None:
    """The whole way: every call joins its own group, whatever its sizes."""
    registry = Registry(libraries=lambda _: (), processes=Processes(Path("/proc")))
    pipeline = Pipeline(registry, Rules(), Head("host", 7, "1", "boot"), 0, grace_ns=1)
    torch.caller.set("stub_comm", COMM)
    slot = torch.caller.memory(bytes(8))
    torch.caller.call("pncclCommInitRank", slot, 4, bytes(range(128)).hex(), 1)
    for sends in ([3, 4, 0, 5], [1, 1, 1, 1], [0, 0, 6, 0]):
        torch.all_to_all(NAMES[0], [2, 0, 1, 2], sends)
    records, events = torch.records(), torch.loaded.events(torch.caller.pid)
    now = int(records["enter_ns"].max()) + 1
    pipeline.feed(records, events, now)
    ((_, data),) = pipeline.close(now, 1, Context, final=True)
    told = pb.Batch.FromString(data).summaries
    every = (np.frombuffer(one, kind) for one, kind in (
        (told.op, "u1"), (told.token_bytes, "<u4"), (told.count, "<u8"), (told.payload_bytes, "<u8")
    ))  # fmt: skip
    rows = [(op, token, count, size) for op, token, count, size in zip(*every, strict=True)]
    assert {(op, token) for op, token, _, _ in rows} == {(Func.ALL_TO_ALL_V, ROW_BYTES)}
    assert sum(count for _, _, count, _ in rows) == 3
    assert sum(size for _, _, _, size in rows) == (12 + 4 + 6) * ROW_BYTES
    assert pipeline.windows.splits.unmatched == 0
