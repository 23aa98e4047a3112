"""GPU times joined to the calls that launched the operations; synthetic records of the plugin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from agent_arrays import BASE_NS, exchange, record, records, slots, table

from lanterne.agent import events
from lanterne.agent.device import REPLAYS_FROM
from lanterne.agent.events import DEVICE, ENQUEUE, ORDER, Records, Rules
from lanterne.agent.groups import Groups
from lanterne.agent.roles import COMBINE, DISPATCH
from lanterne.agent.windows import WindowColumns, Windows
from lanterne.probes import layout
from lanterne.probes.layout import Flag, Func
from lanterne.probes.nccl_profiler.usdt import OpFlag

MS = 1_000_000
S = 1_000_000_000


def told(**fields: Any) -> Records:
    """One record of the plugin: an all-reduce of 8 floats that took 1 ms."""
    row = np.zeros(1, layout.DEVICE)
    values = {"tgid": 10, "comm_hash": 7, "rank": 1, "n_ranks": 4, "func": Func.ALL_REDUCE,
              "bytes": 32, "enqueue_ns": BASE_NS + 1000, "start_ns": BASE_NS + 10 * MS,
              "peer": -1, "tasks": 1, "version": 1}  # fmt: skip
    for name, value in (values | fields).items():
        row[name] = value
    if "stop_ns" not in fields:
        row["stop_ns"] = row["start_ns"] + 1 * MS
    return row


def group(seq: int, sent: int, received: int, at: int, **fields: Any) -> Records:
    return told(func=Func.P2P_GROUP, seq=seq, bytes=sent, bytes_received=received, tasks=8,
                enqueue_ns=at + 1000, start_ns=at + 10 * MS, **fields)  # fmt: skip


class Scene:
    """Windows of one second; slot 0 unless said otherwise."""

    def __init__(self, **known: Any) -> None:
        self.windows = Windows(8, BASE_NS)
        self.table = table(**known)
        self.now = BASE_NS
        self.sent: list[WindowColumns] = []

    @property
    def device(self) -> Any:
        return self.windows.device

    def calls(self, rows: Records, slot: int = 0) -> None:
        grouped = events.point_to_point(rows)
        alone, pairs = rows[~grouped], rows[grouped]
        self.windows.add(events.collectives(alone, slots(len(alone), slot), Rules()))
        assembled = Groups(Rules()).add(pairs, slots(len(pairs), slot), BASE_NS, close=True)
        self.windows.add(*assembled)

    def gpu(self, rows: Records, slot: int = 0, *, trusted: bool = True) -> None:
        self.windows.device.add(rows, slots(len(rows), slot), np.full(len(rows), trusted))

    def close(self, *, final: bool = False) -> WindowColumns:
        self.now += S
        window = self.windows.close(self.now, 1, self.table, final=final)
        self.sent.append(window)
        return window

    def rows(self) -> list[tuple[int, ...]]:
        """(lane, seq, op, role, evidence, arrival, duration) of all instances so far."""
        found = []
        for window in self.sent:
            o = window.instances.operations
            found += list(
                zip(o.lane.tolist(), o.seq.tolist(), o.op.tolist(),
                    window.instances.role.tolist(), o.evidence.tolist(), o.arrival_ns.tolist(),
                    o.duration_ns.tolist(), strict=True)
            )  # fmt: skip
        return found

    def total(self, column: str, evidence: int) -> int:
        return sum(
            int(getattr(w.summaries, column)[w.summaries.evidence == evidence].sum())
            for w in self.sent
        )


def test_a_call_is_sent_once_with_the_times_of_the_gpu() -> None:
    scene = Scene()
    scene.calls(records(*(record(seq=i, enter_ns=BASE_NS + i * MS) for i in range(4))))
    for i in range(4):
        scene.gpu(
            told(seq=90 + i, enqueue_ns=BASE_NS + i * MS + 500, start_ns=BASE_NS + 100 * MS * i)
        )
    scene.close()
    scene.close(final=True)
    assert [(r[1], r[4], r[5], r[6]) for r in scene.rows()] == [
        (i, DEVICE, BASE_NS + 100 * MS * i, MS) for i in range(4)
    ]
    # Calls are counted as calls, once; the GPU's times only add durations.
    assert scene.total("count", ORDER) == 4
    assert scene.total("count", DEVICE) == 0
    assert scene.total("bytes", ORDER) == 4 * 32
    assert scene.total("bytes", DEVICE) == 0
    assert scene.total("duration_sum_ns", DEVICE) == 4 * MS
    assert scene.total("histogram", DEVICE) == 4
    assert scene.device.unmatched == 0


def test_without_a_plugin_nothing_changes() -> None:
    scene = Scene()
    fresh = Flag.SYNCED
    scene.calls(records(record(seq=0), record(seq=1, flags=fresh)))
    scene.close()
    assert [(r[1], r[4]) for r in scene.rows()] == [(0, ORDER), (1, ENQUEUE)]


def test_an_operation_never_takes_the_call_before_its_own() -> None:
    """The record of the second call was lost: its operation has no call."""
    scene = Scene()
    scene.calls(records(*(record(seq=i, enter_ns=BASE_NS + i * MS) for i in (0, 2, 3))))
    for i in range(4):
        scene.gpu(told(seq=i, enqueue_ns=BASE_NS + i * MS + 500, start_ns=BASE_NS + (10 + i) * MS))
    scene.close()
    scene.close(final=True)
    assert [(r[1], r[5]) for r in scene.rows()] == [(i, BASE_NS + (10 + i) * MS) for i in (0, 2, 3)]
    assert scene.device.unmatched == 1


def test_sizes_that_differ_are_not_joined() -> None:
    scene = Scene()
    scene.calls(exchange([8, 16, 8, 8], [8, 8, 8, 8], group=1))
    scene.gpu(group(0, 41, 32, BASE_NS))
    scene.close(final=True)
    assert scene.rows() == []
    assert scene.device.unmatched == 1


def test_the_last_call_known_waits_for_the_next_one() -> None:
    """Its record may be the last one before the operation's own, which is not read yet."""
    scene = Scene()
    scene.calls(records(record(seq=0)))
    scene.gpu(told())
    scene.close()
    assert scene.rows() == []
    scene.calls(records(record(seq=1, enter_ns=BASE_NS + S)))
    scene.close()
    assert [(r[1], r[4]) for r in scene.rows()] == [(0, DEVICE)]


def test_collectives_launched_together_by_number() -> None:
    scene = Scene()
    flags = Flag.GROUP
    scene.calls(
        records(*(record(seq=i, enter_ns=BASE_NS + i, flags=flags, group=5) for i in range(3)))
    )
    for i in (2, 0, 1):
        scene.gpu(told(seq=40 + i, enqueue_ns=BASE_NS + 900, start_ns=BASE_NS + (10 + i) * MS))
    scene.close(final=True)
    assert [(r[1], r[5]) for r in sorted(scene.rows())] == [
        (i, BASE_NS + (10 + i) * MS) for i in range(3)
    ]


def test_parts_are_one_operation_and_a_missing_stop_is_no_duration() -> None:
    scene = Scene()
    scene.calls(
        records(
            exchange([8, 16, 8, 8], [8, 8, 8, 8], group=1),
            exchange([8, 16, 8, 8], [8, 8, 8, 8], group=2, seq=1, enter_ns=BASE_NS + MS),
        )
    )
    scene.gpu(group(0, 16, 16, BASE_NS, part=0, stop_ns=BASE_NS + 15 * MS))
    scene.gpu(group(0, 24, 16, BASE_NS, part=1, stop_ns=BASE_NS + 20 * MS))
    scene.gpu(group(1, 40, 32, BASE_NS + MS, stop_ns=0, flags=OpFlag.NO_STOP))
    scene.close(final=True)
    assert [(r[0], r[1], r[4], r[6]) for r in scene.rows()] == [
        (1, 0, DEVICE, 10 * MS), (1, 1, ORDER, 0),
    ]  # fmt: skip


def test_roles_of_the_calls_go_with_the_times() -> None:
    scene = Scene()
    out, back = [10, 20, 30, 40], [40, 10, 20, 5]
    for i in range(3):
        at = BASE_NS + i * 100 * MS
        scene.calls(exchange(out, back, group=2 * i + 1, seq=2 * i, enter_ns=at))
        scene.calls(exchange(back, out, group=2 * i + 2, seq=2 * i + 1, enter_ns=at + 50 * MS))
        scene.gpu(group(2 * i, 100, 75, at))
        scene.gpu(group(2 * i + 1, 75, 100, at + 50 * MS))
        out = [x + 1 for x in out][::-1]
        back = [x + 3 for x in back]
        out_sum, back_sum = sum(out), sum(back)
        assert (out_sum, back_sum) != (100, 75)
        break
    scene.close()
    scene.close(final=True)
    assert [(r[1], r[2], r[3], r[4]) for r in scene.rows()] == [
        (0, Func.ALL_TO_ALL_V, DISPATCH, DEVICE), (1, Func.ALL_TO_ALL_V, COMBINE, DEVICE),
    ]  # fmt: skip


# -- replays of graphs ---------------------------------------------------------------------


def replay(seq: int, at: int, sent: int = 100, received: int = 75, **fields: Any) -> Records:
    return group(seq, sent, received, at, flags=OpFlag.GRAPH | OpFlag.SEQ_LOCAL, **fields)


def test_replays_are_operations_of_their_own() -> None:
    scene = Scene()
    for i in range(4):
        sizes = (100, 75) if i % 2 == 0 else (75, 100)
        scene.gpu(replay(i, BASE_NS + i * 20 * MS, *sizes))
        scene.gpu(told(seq=i, flags=OpFlag.GRAPH, start_ns=BASE_NS + i * 20 * MS + 15 * MS))
    scene.close()
    scene.close(final=True)
    rows = sorted(scene.rows())
    assert [r[1] - REPLAYS_FROM for r in rows if r[0] == 0] == [0, 1, 2, 3]
    assert [r[1:4] for r in rows if r[0] == 1] == [
        (REPLAYS_FROM + i, Func.ALL_TO_ALL_V, DISPATCH if i % 2 == 0 else COMBINE) for i in range(4)
    ]
    assert scene.total("count", DEVICE) == 8
    assert scene.total("bytes", DEVICE) == 2 * 100 + 2 * 75 + 4 * 32


def test_a_lost_replay_leaves_a_gap() -> None:
    scene = Scene()
    for i in (0, 1, 3):
        scene.gpu(replay(i, BASE_NS + i * 20 * MS))
        scene.gpu(told(seq=9 + i, flags=OpFlag.GRAPH, start_ns=BASE_NS + i * 20 * MS + 15 * MS))
    scene.close(final=True)
    found = sorted((r[0], r[1] - REPLAYS_FROM) for r in scene.rows())
    assert found == [(0, 0), (0, 1), (0, 3), (1, 0), (1, 1), (1, 3)]


def test_replays_that_were_not_seen_from_the_beginning_are_left_out() -> None:
    scene = Scene()
    scene.gpu(records_of(replay(4, BASE_NS), told()), trusted=False)
    scene.calls(records(record(seq=0)))
    scene.close(final=True)
    assert [(r[0], r[1], r[4]) for r in scene.rows()] == [(0, 0, DEVICE)]
    assert scene.device.unplaced == 1


def records_of(*rows: Records) -> Records:
    return np.concatenate(rows)


@pytest.mark.parametrize("cuts", [(), (1,), (2,), (1, 2, 3), (4,)])
def test_calls_and_replays_in_turns_count_on(cuts: tuple[int, ...]) -> None:
    """Numbers do not depend on which window what was read in."""
    scene = Scene()
    eager = 0
    for i in range(6):
        at = BASE_NS + i * 300 * MS
        if i % 3 == 0:
            scene.calls(exchange([8, 16, 8, 8], [8, 8, 8, 8], group=i + 1, seq=eager, enter_ns=at))
            scene.gpu(group(eager, 40, 32, at))
            eager += 1
        else:
            scene.gpu(replay(i - eager, at))
        if i in cuts:
            scene.close()
    for _ in range(4):
        scene.close()
    scene.close(final=True)
    assert sorted((r[1], r[5]) for r in scene.rows()) == [
        (i + (REPLAYS_FROM if i else 0), BASE_NS + i * 300 * MS + 10 * MS) for i in range(6)
    ]


def test_slots_used_anew_know_nothing() -> None:
    scene = Scene()
    scene.gpu(replay(0, BASE_NS))
    scene.close()
    scene.windows.forget(np.array([0], np.uint16))
    scene.gpu(replay(0, BASE_NS + S))
    scene.close(final=True)
    assert [r[1] for r in scene.rows()] == [REPLAYS_FROM, REPLAYS_FROM]


# -- what may be stuck ---------------------------------------------------------------------


def test_a_communicator_is_quiet_when_nothing_was_told_for_some_windows() -> None:
    scene = Scene()
    assert scene.device.quiet().tolist() == []  # nothing was ever told
    scene.calls(records(*(record(seq=i, enter_ns=BASE_NS + i * MS) for i in range(4))))
    for i in range(4):
        scene.gpu(told(seq=90 + i, enqueue_ns=BASE_NS + i * MS + 500, start_ns=BASE_NS + i * MS))
    quiet = [scene.close() and scene.device.quiet().tolist() for _ in range(4)]
    assert quiet == [[], [0], [0], [0]]
    assert scene.device.last_told[0].tolist() == [3, -1]
    scene.gpu(told(seq=94, enqueue_ns=scene.now, start_ns=scene.now))
    assert scene.device.quiet().tolist() == []
    scene.windows.forget(np.array([0], np.uint16))
    assert scene.device.last_told[0].tolist() == [-1, -1]
    assert scene.device.quiet().tolist() == []


def test_the_number_told_last_counts_replays_of_graphs_too() -> None:
    scene = Scene()
    for i in range(3):
        scene.gpu(replay(i, BASE_NS + i * 20 * MS))
    scene.close()
    scene.close(final=True)
    last = max(row[1] for row in scene.rows() if row[0] == 1)
    assert scene.device.last_told[0].tolist() == [-1, last]
