"""One rank of the data tests: `python -m tests.rig.peer ROOT RANKS RANK FOLDER`.

Runs every collective on numpy arrays, compares with numpy, and prints {check: true or a reason}.
"""

from __future__ import annotations

import ctypes as c
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.rig.api import AVG, MAX, MIN, PROD, SUM, Array, Rank, ramp

COUNT = 1000
BIG = 300_000  # several chunks of slot and channel

NUMPY_OPS: dict[int, Callable[[list[Array]], Array]] = {
    SUM: lambda parts: np.sum(parts, axis=0, dtype=parts[0].dtype),
    PROD: lambda parts: np.prod(parts, axis=0, dtype=parts[0].dtype),
    MAX: lambda parts: np.max(parts, axis=0),
    MIN: lambda parts: np.min(parts, axis=0),
}


class Checks:
    def __init__(self, me: Rank, ranks: int, rank: int) -> None:
        self.me, self.ranks, self.rank = me, ranks, rank

    def parts(self, count: int, dtype: str) -> list[Array]:
        return [ramp(rank, count, dtype) for rank in range(self.ranks)]

    def all_reduce(self) -> None:
        for dtype in ("float32", "float64", "int32", "int64", "uint8", "float16"):
            for op, reduce in NUMPY_OPS.items():
                parts = self.parts(COUNT, dtype)
                out = np.zeros_like(parts[0])
                self.me.call("ncclAllReduce", parts[self.rank], out, COUNT, op)
                self.me.sync()
                assert np.array_equal(out, reduce(parts)), (dtype, op)

    def all_reduce_big(self) -> None:
        parts = self.parts(BIG, "float64")
        mine = parts[self.rank].copy()
        self.me.call("ncclAllReduce", mine, mine, BIG, SUM)
        self.me.sync()
        assert np.array_equal(mine, NUMPY_OPS[SUM](parts))

    def average(self) -> None:
        parts = self.parts(COUNT, "float64")
        out = np.zeros(COUNT)
        self.me.call("ncclAllReduce", parts[self.rank], out, COUNT, AVG)
        self.me.sync()
        assert np.allclose(out, np.mean(parts, axis=0))

    def premultiplied(self) -> None:
        parts, out = self.parts(COUNT, "float32"), np.zeros(COUNT, "float32")
        op, scalar = c.c_int(), c.c_float(0.5)
        self.me.nccl("ncclRedOpCreatePreMulSum", c.byref(op), c.byref(scalar), 7, 1, self.me.comm)
        self.me.call("ncclAllReduce", parts[self.rank], out, COUNT, op.value)
        self.me.sync()
        self.me.nccl("ncclRedOpDestroy", op.value, self.me.comm)
        assert np.array_equal(out, NUMPY_OPS[SUM](parts) * np.float32(0.5))

    def broadcast(self) -> None:
        for root in range(self.ranks):
            for count in (COUNT, BIG):
                parts = self.parts(count, "int32")
                out = np.zeros(count, "int32")
                self.me.call("ncclBroadcast", parts[self.rank], out, count, root)
                self.me.sync()
                assert np.array_equal(out, parts[root])

    def bcast_in_place(self) -> None:
        parts = self.parts(COUNT, "int64")
        mine = parts[self.rank].copy()
        self.me.call("ncclBcast", mine, None, COUNT, 1)
        self.me.sync()
        assert np.array_equal(mine, parts[1])

    def reduce(self) -> None:
        for count in (COUNT, BIG):
            parts = self.parts(count, "int32")
            out = np.zeros(count, "int32")
            self.me.call("ncclReduce", parts[self.rank], out, count, SUM, 1)
            self.me.sync()
            want = NUMPY_OPS[SUM](parts) if self.rank == 1 else np.zeros(count, "int32")
            assert np.array_equal(out, want)

    def all_gather(self) -> None:
        for count in (COUNT, BIG):
            parts = self.parts(count, "float32")
            out = np.zeros(count * self.ranks, "float32")
            self.me.call("ncclAllGather", parts[self.rank], out, count)
            self.me.sync()
            assert np.array_equal(out, np.concatenate(parts))

    def reduce_scatter(self) -> None:
        for count in (COUNT, BIG):
            parts = self.parts(count * self.ranks, "int32")
            out = np.zeros(count, "int32")
            self.me.call("ncclReduceScatter", parts[self.rank], out, count, SUM)
            self.me.sync()
            mine = slice(self.rank * count, (self.rank + 1) * count)
            assert np.array_equal(out, NUMPY_OPS[SUM](parts)[mine])

    def all_to_all(self) -> None:
        for count in (COUNT, BIG):
            parts = self.parts(count * self.ranks, "uint8")
            out = np.zeros(count * self.ranks, "uint8")
            self.me.call("ncclAlltoAll", parts[self.rank], out, count)
            self.me.sync()
            mine = slice(self.rank * count, (self.rank + 1) * count)
            assert np.array_equal(out, np.concatenate([part[mine] for part in parts]))

    def gather_scatter(self) -> None:
        parts = self.parts(COUNT, "float32")
        whole = np.zeros(COUNT * self.ranks, "float32")
        self.me.call("ncclGather", parts[self.rank], whole, COUNT, 0)
        self.me.sync()
        if self.rank == 0:
            assert np.array_equal(whole, np.concatenate(parts))
        out = np.zeros(COUNT, "float32")
        self.me.call("ncclScatter", whole, out, COUNT, 0)
        self.me.sync()
        assert np.array_equal(out, parts[self.rank])

    def ring(self) -> None:
        """Sends larger than any buffer, all at once: only a group keeps this from deadlock."""
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        parts, out = self.parts(BIG, "float64"), np.zeros(BIG)
        with self.me.group():
            self.me.call("ncclSend", parts[self.rank], None, BIG, after)
            with self.me.group():
                self.me.call("ncclRecv", out, None, BIG, before)
        self.me.sync()
        assert np.array_equal(out, parts[before])

    def ordered_pairs(self) -> None:
        """Several messages to one peer in one group keep their order; a collective fits between."""
        after, before = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        out = [np.zeros(n, "int32") for n in (3, 50_000, 7)]
        send = [np.full_like(array, 10 * self.rank + i) for i, array in enumerate(out)]
        ones, total = np.ones(4), np.zeros(4)
        with self.me.group():
            for mine, array in zip(send, out, strict=True):
                self.me.call("ncclSend", mine, None, mine.size, after)
                self.me.call("ncclRecv", array, None, array.size, before)
            self.me.call("ncclAllReduce", ones, total, 4, SUM)
        self.me.sync()
        assert total.tolist() == [self.ranks] * 4
        assert all((a == 10 * before + i).all() for i, a in enumerate(out))

    def split(self) -> None:
        child = self.me.split(self.rank % 2, -self.rank)
        members = [r for r in range(self.ranks) if r % 2 == self.rank % 2][::-1]
        assert self.me.number("ncclCommCount", child) == len(members)
        assert self.me.number("ncclCommUserRank", child) == members.index(self.rank)
        mine, out = np.array([self.rank], "int32"), np.zeros(1, "int32")
        self.me.call("ncclAllReduce", mine, out, 1, SUM, comm=child)
        self.me.sync()
        assert out[0] == sum(members)
        self.me.nccl("ncclCommDestroy", child)
        none = self.me.split(-1 if self.rank == 0 else 5, 0)
        assert bool(none.value) == (self.rank != 0)
        if none.value:
            self.me.nccl("ncclCommDestroy", none)

    def shrink_and_grow(self) -> None:
        last, small, big = self.ranks - 1, c.c_void_p(), c.c_void_p()
        if self.rank != last:
            self.me.nccl("ncclCommShrink", self.me.comm, c.byref(c.c_int(last)), 1, c.byref(small),
                         None, 0)  # fmt: skip
            assert self.me.number("ncclCommCount", small) == last
        uid = self.exchange(small)
        if self.rank == last:
            self.me.nccl("ncclCommGrow", None, self.ranks, uid, last, c.byref(big), None)
        else:
            self.me.nccl("ncclCommGrow", small, self.ranks, uid if self.rank == 0 else None, -1,
                         c.byref(big), None)  # fmt: skip
        own, out = np.array([self.rank], "int32"), np.zeros(1, "int32")
        self.me.call("ncclAllReduce", own, out, 1, SUM, comm=big)
        self.me.sync()
        assert out[0] == sum(range(self.ranks))
        hashes = np.zeros(self.ranks, "uint64")
        mine = np.array([self.me.comm_hash(big)], "uint64")
        self.me.call("ncclAllGather", mine, hashes, 1)
        self.me.sync()
        assert len(set(hashes.tolist())) == 1
        for comm in (small, big):
            self.me.nccl("ncclCommDestroy", comm)

    def exchange(self, small: c.c_void_p) -> c.Array[c.c_ubyte]:
        """The id that rank 0 makes for growing, to everybody."""
        uid = np.zeros(128, "uint8")
        if self.rank == 0:
            self.me.nccl("ncclCommGetUniqueId", small, c.c_void_p(uid.ctypes.data))
        self.me.call("ncclBcast", uid, None, 128, 0)
        self.me.sync()
        return (c.c_ubyte * 128)(*uid.tolist())

    def returns_at_enqueue(self) -> None:
        """Rank 0 comes late by 100 ms: the others' calls return long before, their syncs do not."""
        send, out = np.ones(1), np.zeros(1)
        self.me.call("ncclAllReduce", send, out, 1, SUM)
        self.me.sync()
        if self.rank == 0:
            time.sleep(0.1)
        begin = time.monotonic()
        self.me.call("ncclAllReduce", send, out, 1, SUM)
        enqueued = time.monotonic() - begin
        unready = self.me.cuda.code("cuStreamQuery", self.me.stream)
        self.me.sync()
        waited = time.monotonic() - begin
        if self.rank:
            assert unready == 600
            assert enqueued < 0.05 < waited, (enqueued, waited)


def main(root: Path, ranks: int, rank: int, folder: Path) -> None:
    me = Rank(root)
    uid_file = folder / "uid"
    if rank == 0:
        (folder / "uid.tmp").write_bytes(me.unique_id())
        (folder / "uid.tmp").rename(uid_file)
    while not uid_file.exists():
        time.sleep(0.005)
    me.init(ranks, rank, uid_file.read_bytes())
    checks = Checks(me, ranks, rank)
    results: dict[str, str | bool] = {}
    for name, check in vars(Checks).items():
        if name.startswith("_") or name in ("parts", "exchange"):
            continue
        try:
            check(checks)
            results[name] = True
        except Exception as error:
            results[name] = repr(error)
            break  # the ranks are no longer in step
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
