"""Which calls of a framework are dispatch and combine: tables of calls in the order of one rank.

Each file has `communicators` (n_ranks, rank; complete: seen from its creation; name), `calls`
([communicator, function, count, type, more]) and `expected` ([operation, role] of each operation
in the order of its communicator). Roles must be exactly those, however windows fall.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_arrays import BASE_NS, comm_event, record, records

from lanterne.agent.comms import Registry
from lanterne.agent.encode import Context, Head
from lanterne.agent.events import Records, Rules
from lanterne.agent.pipeline import Pipeline
from lanterne.agent.process import Processes
from lanterne.probes.layout import CommFlag, CommKind, Flag, Func
from lanterne.proto import telemetry_pb2 as pb

FOLDER = Path(__file__).resolve().parents[1] / "fixtures" / "sequences"
FILES = sorted(FOLDER.glob("*.json"))
DTYPES = {"uint8": 1, "float32": 7, "bfloat16": 9, "bytes": 255}
ROLES = ("unknown", "dispatch", "combine")
STEP_NS = 10_000
P2P = (Func.SEND, Func.RECV)
EMPTY = records()


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


class Player:
    """One rank's agent: a registry that knows the communicators, and a pipeline."""

    def __init__(self, table: dict[str, Any]) -> None:
        self.pointer = {
            name: 0x7000_0000_1000 + 4096 * i for i, name in enumerate(table["communicators"])
        }
        self.registry = Registry(libraries=lambda _: (), processes=Processes(Path("/nonexistent")))
        head = Head("node", 1, "0", "boot")
        self.pipeline = Pipeline(self.registry, Rules(), head, BASE_NS, grace_ns=100_000_000)
        events = [self._created(name, **c) for name, c in table["communicators"].items()]
        self.pipeline.feed(EMPTY, np.concatenate(events), BASE_NS)
        for name, c in table["communicators"].items():
            if not c.get("complete", True):
                comm = self.registry._by_key[10, self.pointer[name]]
                comm.complete = False
                self.registry._complete[comm.slot] = False
        self.found: dict[str, list[tuple[int, int, str, str]]] = {n: [] for n in self.pointer}
        self.windows = 0

    def _created(self, label: str, n_ranks: int, rank: int, *, name: str = "", complete: bool = True
                 ) -> Any:  # fmt: skip
        flags = CommFlag.ID | CommFlag.RANK | (CommFlag.NAME if name else CommFlag(0))
        return comm_event(
            CommKind.INIT, comm=self.pointer[label], n_ranks=n_ranks, rank=rank, flags=flags,
            name=name.encode(), id=label.encode().ljust(128, b"\1"),
        )  # fmt: skip

    def records(self, table: dict[str, Any]) -> list[Records]:
        """The calls as kernel records, numbered as the programs number them."""
        now, rows = BASE_NS, []
        numbers: dict[tuple[str, bool], int] = {}
        groups: dict[tuple[str, int], int] = {}
        for comm, function, count, dtype, more in table["calls"]:
            func = Func[function.upper()]
            lane, group = func in P2P, more.get("group", 0)
            now += int(more.get("after_us", 0)) * 1000 + STEP_NS
            known = groups.get((comm, group)) if lane and group else None
            seq = numbers.get((comm, lane), 0) if known is None else known
            if known is None:
                numbers[comm, lane] = seq + 1
                groups[comm, group] = seq
            flags = (Flag.P2P if lane else 0) | (Flag.GROUP if group else 0)
            wait = int(more.get("wait_us", 0)) * 1000
            flags |= Flag.PAIR | Flag.BLOCKING if wait else 0
            flags |= Flag.BYTES if dtype == "bytes" else 0
            rows.append(
                record(
                    enter_ns=now, comm=self.pointer[comm], func=func, count=count,
                    dtype=DTYPES[dtype], group=group, peer=more.get("peer", more.get("root", -1)),
                    seq=seq, flags=flags, duration_ns=wait,
                )
            )  # fmt: skip
        return rows

    def feed(self, rows: list[Records]) -> None:
        if rows:
            self.pipeline.feed(records(*rows), comm_event(CommKind.INIT)[:0], BASE_NS)

    def close(self, *, final: bool = False) -> None:
        self.windows += 1
        # The window's end is well behind every call: no group is still open.
        end = BASE_NS + self.windows * 60 * 10**9
        for _, data in self.pipeline.close(end, 1, Context, final=final):
            batch = pb.Batch.FromString(data)
            names = {self._hash(n): n for n in self.pointer}
            comms = [names[c.comm_hash] for c in batch.communicators]
            i = batch.instances
            columns = (
                np.frombuffer(i.communicator, "<u4"), np.frombuffer(i.lane, "u1"),
                np.frombuffer(i.seq, "<u4"), np.frombuffer(i.op, "u1"),
                np.frombuffer(i.role, "u1"),
            )  # fmt: skip
            for comm, lane, seq, op, role in zip(*(c.tolist() for c in columns), strict=True):
                row = lane, seq, Func(op).name.lower(), ROLES[role]
                self.found[comms[comm]].append(row)

    def _hash(self, name: str) -> int:
        return self.registry._by_key[10, self.pointer[name]].comm_hash

    def result(self) -> dict[str, list[list[str]]]:
        return {
            name: [[op, role] for _, _, op, role in sorted(rows)]
            for name, rows in self.found.items()
        }


def play(table: dict[str, Any], *, cuts: tuple[int, ...] = ()) -> dict[str, list[list[str]]]:
    player = Player(table)
    rows = player.records(table)
    for begin, end in zip((0, *cuts), (*cuts, len(rows)), strict=True):
        player.feed(rows[begin:end])
        player.close(final=end == len(rows))
    return player.result()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_roles(path: Path) -> None:
    table = load(path)
    assert play(table) == table["expected"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_window_makes_a_role_wrong(path: Path) -> None:
    """Wherever a window ends between two operations, roles are the same or unknown, never others,
    and no operation is lost or told twice."""
    table = load(path)
    calls = table["calls"]
    groups = [(c[0], c[4].get("group")) for c in calls]
    cuts = [i for i in range(1, len(calls)) if groups[i][1] is None or groups[i] != groups[i - 1]]
    for cut in cuts:
        found = play(table, cuts=(cut,))
        for name, expected in table["expected"].items():
            assert [op for op, _ in found[name]] == [op for op, _ in expected], cut
            for number, ((_, role), (_, right)) in enumerate(
                zip(found[name], expected, strict=True)
            ):
                assert role in (right, "unknown"), (cut, number)


def test_every_pattern_has_a_table() -> None:
    roles = {path.stem: {r for rows in load(path)["expected"].values() for _, r in rows}
             for path in FILES}  # fmt: skip
    told = {stem for stem, found in roles.items() if found - {"unknown"}}
    assert {"vllm_unequal", "vllm_equal", "megatron_all_gather", "one_all_to_all",
            "grouped_send_recv", "deepep", "nccl_ep"} <= told  # fmt: skip
    assert {"tensor_parallel", "pipeline_plain", "pipeline_two_stages", "pipeline_interleaved",
            "data_parallel", "sharded_data_parallel"} <= set(roles) - told  # fmt: skip


@pytest.mark.parametrize(
    ("stem", "since"),
    [("vllm_unequal", 0), ("vllm_equal", 6), ("megatron_all_gather", 8), ("named_expert_group", 0),
     ("grouped_send_recv", 0), ("deepep", 0)],
)  # fmt: skip
def test_a_pattern_that_is_known_survives_every_window(stem: str, since: int) -> None:
    """From the call `since` on the pattern has been seen; then a window's end costs no role."""
    table = load(FOLDER / f"{stem}.json")
    calls = table["calls"]
    for cut in range(since + 1, len(calls)):
        group = calls[cut][4].get("group")
        if group is None or group != calls[cut - 1][4].get("group"):
            assert play(table, cuts=(cut,)) == table["expected"], cut
